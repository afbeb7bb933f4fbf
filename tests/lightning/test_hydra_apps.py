"""Users' applications under Hydra: every job trains, on ranks of its own in a sweep."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.test_plugin import ROOT, run_application

TRAINER = """
import os, sys
import hydra, torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.demos.boring_classes import BoringModel

class Net(BoringModel):
    def on_train_batch_start(self, batch, number):
        if config.get("fails") == "in" and config.x == 1 and number == 1:
            raise ValueError("in the fit")

def train():
    trainer = Trainer(
        strategy=config.get("kind", "dear"), devices=config.get("devices", 2),
        accelerator="cpu", max_steps=2, limit_val_batches=0, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    net = Net()
    trainer.fit(net)
    return trainer.global_rank, trainer.world_size, float(net.layer.weight.detach().sum())
"""

FABRIC = """
import os, sys
import hydra, torch
from lightning.fabric import Fabric, seed_everything

def train():
    import lightning_dear
    fabric = Fabric(strategy=config.get("kind", "dear"), accelerator="cpu", devices=2)
    fabric.launch()
    net = torch.nn.Linear(4, 1)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    for _ in range(2):
        fabric.backward(model(torch.full((2, 4), 1.0 + fabric.global_rank)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return fabric.global_rank, fabric.world_size, float(net.weight.detach().sum())
"""

MAIN = """
config = None

@hydra.main(version_base="1.3", config_path=None)
def main(given):
    global config
    config = given
    for _ in range(config.get("fits", 1)):
        seed_everything(1, verbose=False)
        rank, world_size, weights = train()
        said = config.x, config.get("y"), f"{rank}/{world_size}", round(weights, 5)
        place = os.path.basename(os.getcwd()), os.path.basename(
            hydra.core.hydra_config.HydraConfig.get().runtime.output_dir
        )
        with open(os.environ["SAID"], "a") as file:
            print((*said, *place), file=file)
    if config.get("fails") == "after" and config.x == 1:
        raise ValueError("after the fit")
    if config.get("fails") == "others" and config.x == 1 and rank:
        sys.exit(3)

main()
"""


def _run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, source: str, *overrides: str
) -> tuple[subprocess.CompletedProcess[str], list[tuple]]:
    """Runs the application; returns what each rank wrote after each fit: x, y, rank, weights,
    the folder it stood in, that of the job."""
    said = folder / "said"
    monkeypatch.setenv("SAID", str(said))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    done = run_application(folder, source + MAIN, *overrides)
    return done, sorted(map(eval, said.read_text().splitlines())) if said.exists() else []


def _fits(said: list[tuple]) -> list[tuple]:
    return [(x, rank) for x, _, rank, *_ in said]


@pytest.mark.slow
def test_the_documented_application_trains(tmp_path: Path) -> None:
    """Without `config_name`; the command is the documented one, too."""
    text = (ROOT / "docs/hydra.md").read_text()
    (source,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (overrides,) = re.findall(r"python my_app.py (.*)\n", text)
    done = run_application(tmp_path, source, *overrides.split())
    assert done.returncode == 0, done.stderr
    assert "DearStrategy on 2 ranks" in done.stdout


@pytest.mark.slow
def test_every_job_of_a_sweep_has_ranks_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever strategy the jobs have, and although the others know nothing of sweeps."""
    done, said = _run(tmp_path, monkeypatch, TRAINER, "-m", "+kind=dear,ddp,dear", "+x=1")
    assert done.returncode == 0, done.stderr
    assert _fits(said) == [(1, "0/2")] * 3 + [(1, "1/2")] * 3
    assert len({weights for _, _, _, weights, *_ in said}) == 1
    # Each job's two ranks have its folder.
    assert sorted(folder for *_, folder in said) == ["0", "0", "1", "1", "2", "2"]


@pytest.mark.slow
def test_jobs_on_other_numbers_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done, said = _run(tmp_path, monkeypatch, TRAINER, "-m", "+devices=1,3,2", "+x=1")
    assert done.returncode == 0, done.stderr
    assert [rank for _, _, rank, *_ in said] == ["0/1", "0/2", "0/3", "1/2", "1/3", "2/3"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fails", "fitted", "message"),
    [
        ("in", [], "ValueError: in the fit"),
        ("after", [(1, "0/2"), (1, "1/2")], "ValueError: after the fit"),
        (
            "others",
            [(1, "0/2"), (1, "1/2")],
            "Rank 0 was done, but local rank 1 exited with code 3",
        ),
    ],
)
def test_a_job_that_fails_does_not_take_the_next_with_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fails: str,
    fitted: list[tuple[int, str]],
    message: str,
) -> None:
    done, said = _run(tmp_path, monkeypatch, TRAINER, "-m", "+x=1,2", f"+fails={fails}")
    assert done.returncode == 1
    # Errors of ranks are logged, and Hydra's logging writes to stdout.
    assert message in done.stdout + done.stderr
    assert _fits(said) == [*fitted, (2, "0/2"), (2, "1/2")]


@pytest.mark.slow
def test_a_child_has_its_jobs_overrides_and_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those with quotes and with references, a folder by a relative name, and two fits."""
    text = "a b, \"c\" 'd'"
    done, said = _run(
        tmp_path,
        monkeypatch,
        TRAINER,
        "hydra.run.dir=out/its own",
        "hydra.job.chdir=true",
        "+x=${z}",
        "+z=3",
        "+fits=2",
        "+y='a b, \"c\" \\'d\\''",
    )
    assert done.returncode == 0, done.stderr
    assert [one[:3] for one in said] == [(3, text, "0/2")] * 2 + [(3, text, "1/2")] * 2
    assert {one[4:] for one in said} == {("its own", "its own")}


@pytest.mark.slow
def test_a_sweep_under_fabric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done, said = _run(tmp_path, monkeypatch, FABRIC, "-m", "+x=1,2")
    assert done.returncode == 0, done.stderr
    assert _fits(said) == [(1, "0/2"), (1, "1/2"), (2, "0/2"), (2, "1/2")]
    assert len({weights for _, _, _, weights, *_ in said}) == 1
