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


def _run(folder: Path, *, asks: str, launcher: str = "popen", **script: str) -> str:
    (folder / "installed").mkdir()
    path = folder / "train.py"
    path.write_text(SCRIPT.format(**{"package": "lightning.pytorch", "strategy": "ddp", **script}))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LIGHTNING_DEAR")}
    environment |= {"PYTHONPATH": _installed(folder / "installed"), "OMP_NUM_THREADS": "1"}
    if asks:
        environment["LIGHTNING_DEAR_DOCTOR"] = asks
    command = [sys.executable, str(path)]
    if launcher == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(path)]
    ended = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("launcher", "script"),
    [
        ("popen", {}),
        pytest.param("torchrun", {}, marks=pytest.mark.slow),
        pytest.param("popen", {"strategy": "ddp_spawn"}, marks=pytest.mark.slow),
        pytest.param("popen", {"package": "pytorch_lightning"}, marks=pytest.mark.slow),
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
