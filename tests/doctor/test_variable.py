"""LIGHTNING_DEAR_DOCTOR adds the doctor to a script that never imports this package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as lightning
import pytest
import pytorch_lightning

from lightning_dear.paths import conf_dir
from tests.test_architecture import tomllib

ROOT = conf_dir().parent

SCRIPT = """
import sys
import torch
from {package} import LightningModule, Trainer

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)
    def training_step(self, batch, index):
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    torch.manual_seed(0)
    loader = torch.utils.data.DataLoader(torch.ones(400, 64), batch_size=2)
    options = dict(accelerator="cpu", logger=False, enable_progress_bar=False, max_steps=24)
    trainer = Trainer(strategy={strategy!r}, devices=2, enable_checkpointing=False, **options)
    trainer.fit(Module(), loader)
    if trainer.is_global_zero:
        print("ours:", "lightning_dear" in sys.modules, "global step:", trainer.global_step)
"""

CLI = """
import torch
from {package}.cli import LightningCLI
from {package}.demos.boring_classes import BoringDataModule, BoringModel

if __name__ == "__main__":
    LightningCLI(BoringModel, BoringDataModule)
"""

FLAGS = (
    "fit --trainer.strategy={strategy} --trainer.devices=2 --trainer.accelerator=cpu"
    " --trainer.logger=false --trainer.max_steps=24 --trainer.limit_val_batches=0"
    " --trainer.enable_checkpointing=false --trainer.enable_progress_bar=false"
)


def _installed(folder: Path) -> str:
    """As if the package were installed: its folders, and what a wheel says of entry points."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / "lightning_dear-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: lightning-dear-as-installed\nVersion: 0\n")
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return os.pathsep.join(map(str, [folder, ROOT, ROOT / "lightning_dear/_plugins"]))


def _slurm(rank: int) -> dict[str, str]:
    """What `srun --ntasks-per-node=2 python train.py` gives a process on one node."""
    return {
        "SLURM_JOB_ID": str(20_000 + os.getpid() % 10_000),
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_NODELIST": "127.0.0.1",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
    }


def _run(
    folder: Path, *, asks: str, launcher: str = "popen", text: str = SCRIPT, **script: str
) -> str:
    (folder / "installed").mkdir()
    path = folder / "train.py"
    named = {"package": "lightning.pytorch", "strategy": "ddp", **script}
    path.write_text(text.format(**named))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LIGHTNING_DEAR")}
    environment |= {"PYTHONPATH": _installed(folder / "installed"), "OMP_NUM_THREADS": "1"}
    if asks:
        environment["LIGHTNING_DEAR_DOCTOR"] = asks
    command = [sys.executable, str(path), *(FLAGS.format(**named).split() if text == CLI else [])]
    if launcher == "torchrun":
        command[1:1] = ["-m", "torch.distributed.run", "--nproc-per-node=2"]
    ranks = (
        [environment | _slurm(rank) for rank in (0, 1)] if launcher == "slurm" else [environment]
    )
    started = [
        subprocess.Popen(
            command, cwd=folder, env=one, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for one in ranks
    ]
    try:
        said = [one.communicate(timeout=120) for one in started]
    finally:
        for one in started:
            one.kill()
    for one, (_, errors) in zip(started, said, strict=True):
        assert one.returncode == 0, errors
    return "".join(out + errors for out, errors in said)


@pytest.mark.parametrize(
    ("launcher", "script"),
    [
        ("popen", {}),
        pytest.param("torchrun", {}, marks=pytest.mark.slow),
        pytest.param("slurm", {}, marks=pytest.mark.slow),
        pytest.param("popen", {"strategy": "ddp_spawn"}, marks=pytest.mark.slow),
        pytest.param("popen", {"package": "pytorch_lightning"}, marks=pytest.mark.slow),
        pytest.param("popen", {"text": CLI}, marks=pytest.mark.slow),
        pytest.param(
            "popen", {"text": CLI, "package": "pytorch_lightning"}, marks=pytest.mark.slow
        ),
    ],
)
def test_the_variable_is_enough(launcher: str, script: dict[str, str], tmp_path: Path) -> None:
    said = _run(tmp_path, asks="1", launcher=launcher, **script)
    assert said.count("NetworkDoctor: a step takes") == 1
    assert "`max_steps=24` reached" in said
    assert (tmp_path / "network_doctor.json").exists()


def test_without_the_variable_nothing_is_imported(tmp_path: Path) -> None:
    said = _run(tmp_path, asks="")
    assert "ours: False global step: 24" in said
    assert "NetworkDoctor" not in said


def test_what_fails_only_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lightning_dear_doctor

    monkeypatch.setenv("LIGHTNING_DEAR_DOCTOR", "1")
    monkeypatch.setitem(sys.modules, "lightning_dear.doctor", None)
    with pytest.warns(UserWarning, match=r"LIGHTNING_DEAR_DOCTOR has no effect: .*doctor"):
        assert lightning_dear_doctor.callbacks() == []
    monkeypatch.setenv("LIGHTNING_DEAR_DOCTOR", "0")
    assert lightning_dear_doctor.callbacks() == []


def test_both_packages_get_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    import lightning_dear_doctor

    monkeypatch.setenv("LIGHTNING_DEAR_DOCTOR", "1")
    (ours,) = lightning_dear_doctor.callbacks()
    (mirrored,) = lightning_dear_doctor.mirrored_callbacks()
    assert isinstance(ours, lightning.Callback)
    assert isinstance(mirrored, pytorch_lightning.Callback)
    assert not isinstance(mirrored, lightning.Callback)
