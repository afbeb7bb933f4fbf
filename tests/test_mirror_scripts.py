"""Users' scripts under `lightning`, under `pytorch_lightning`, and with either of them alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pytorch_lightning")

ROOT = Path(__file__).resolve().parents[1]
NAMESPACES = {
    "lightning.pytorch": "lightning_dear",
    "pytorch_lightning": "lightning_dear.pytorch_lightning",
}

QUIET = {
    "accelerator": "cpu",
    "max_epochs": 2,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}

WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
"""

FIT = """
import sys
import torch
import lightning_dear
from {namespace} import LightningModule, Trainer

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 2))
        self.register_buffer("steps", torch.zeros(1))

    def training_step(self, batch, batch_idx):
        self.steps += 1
        return self.layers(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_end(self):
        assert self.trainer.world_size == {devices}
        # Spawned ranks must not count in the same memory.
        assert self.steps == self.trainer.global_step and not self.steps.is_shared()
        module = type(self.trainer.strategy).__module__
        weight = self.layers[0].weight.sum()
        print(f"rank {{self.trainer.global_rank}} {{module}} {{weight:.6f}}\\n", end="", flush=True)

if __name__ == "__main__":
    from {package} import DearStrategy
    from {package}.callbacks import DearMonitor
    trainer = Trainer(strategy="{name}", devices={devices}, callbacks=[DearMonitor()], **{quiet!r})
    assert type(trainer.strategy) is DearStrategy
    trainer.fit(Net(), torch.utils.data.DataLoader(torch.ones(16, 6), batch_size=2))
"""


def run_script(folder: Path, source: str) -> str:
    """What a user's script prints; it finds the package, and nothing imported before."""
    script = folder / "script.py"
    script.write_text(source)
    result = subprocess.run(
        [sys.executable, script],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def fit_script(namespace: str, name: str = "dear", devices: int = 1, package: str = "") -> str:
    package = package or NAMESPACES[namespace]
    return FIT.format(namespace=namespace, name=name, devices=devices, package=package, quiet=QUIET)


def test_our_import_imports_neither_lightning_nor_torch(tmp_path: Path) -> None:
    source = """
import sys
import lightning_dear
print({"torch", "lightning", "pytorch_lightning"} & set(sys.modules))
"""
    assert run_script(tmp_path, source) == "set()\n"


@pytest.mark.parametrize(
    "namespace",
    ["pytorch_lightning", pytest.param("lightning.pytorch", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    "is_first",
    [pytest.param(True, id="before", marks=pytest.mark.slow), pytest.param(False, id="after")],
)
def test_import_before_or_after_lightning(namespace: str, is_first: bool, tmp_path: Path) -> None:
    imports = ["import lightning_dear", f"from {namespace} import Trainer"]
    other = next(other for other in NAMESPACES if other != namespace)
    source = [
        *(imports if is_first else reversed(imports)),
        "import sys",
        "strategy = Trainer(strategy='dear', accelerator='cpu', devices=2, logger=False).strategy",
        "print(type(strategy).__module__)",
        f"print({other!r} in sys.modules)",
        f"from {namespace}.strategies import __loader__, __spec__",
        "print(type(__loader__).__name__, __spec__.loader is __loader__)",
    ]
    told = run_script(tmp_path, "\n".join(source)).splitlines()
    assert told[-3:] == [f"{NAMESPACES[namespace]}.strategy.dear", "False", "SourceFileLoader True"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["dear", *(pytest.param(n, marks=pytest.mark.slow) for n in ("dear_spawn", "dear_fork"))],
)
def test_launchers_of_pytorch_lightning(name: str, tmp_path: Path) -> None:
    told = run_script(tmp_path, fit_script("pytorch_lightning", name, devices=2))
    ranks = sorted(line.split()[1:] for line in told.splitlines() if line.startswith("rank"))
    module = "lightning_dear.pytorch_lightning.strategy.dear"
    assert [rank[:2] for rank in ranks] == [["0", module], ["1", module]]
    assert ranks[0][2] == ranks[1][2]


def test_pytorch_lightning_alone(tmp_path: Path) -> None:
    """Then the package's own names lead to the mirrored classes, so that no name is lost."""
    source = WITHOUT.format(packages=["lightning"]) + fit_script(
        "pytorch_lightning", package="lightning_dear"
    )
    source += """
    import lightning_dear.callbacks.monitor
    import lightning_dear.strategy.dear
    from lightning_dear import pytorch_lightning as mirror
    assert lightning_dear.DearStrategy is mirror.DearStrategy
    assert lightning_dear.strategy.dear.DearStrategy is mirror.DearStrategy
    assert lightning_dear.callbacks.monitor.DearMonitor is mirror.DearMonitor is DearMonitor
    assert "lightning" not in sys.modules
"""
    assert "rank 0 lightning_dear.pytorch_lightning.strategy" in run_script(tmp_path, source)


def test_lightning_alone(tmp_path: Path) -> None:
    missing = ["pytorch_lightning", "lightning_fabric"]
    source = WITHOUT.format(packages=missing) + fit_script("lightning.pytorch")
    source += """
    try:
        import lightning_dear.pytorch_lightning
    except ModuleNotFoundError as error:
        print("missing:", error.name.partition(".")[0])
"""
    told = run_script(tmp_path, source)
    assert "rank 0 lightning_dear.strategy.dear" in told
    assert told.splitlines()[-1].removeprefix("missing: ") in missing


@pytest.mark.slow
def test_types_are_those_that_the_trainer_takes(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    source = """
from lightning_dear.pytorch_lightning import DearMonitor, DearStrategy, TimelineCallback
from pytorch_lightning import Trainer

strategy = DearStrategy({argument}, fusion="none")
Trainer(strategy=strategy, callbacks=[DearMonitor(), TimelineCallback(step=3)])
reveal_type(strategy.plan)
"""
    for argument, code in (("bucket_cap_mb=5.0", 0), ("bucket_cap_mb='5'", 1)):
        script = tmp_path / "typed.py"
        script.write_text(source.format(argument=argument))
        mypy = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", tmp_path, script]
        result = subprocess.run(mypy, cwd=ROOT, capture_output=True, text=True, check=False)
        assert result.returncode == code, result.stdout + result.stderr
        assert 'Revealed type is "lightning_dear.planning.plan.BucketPlan | None"' in result.stdout
