"""Every way to start ranks and every entry point of a Trainer, as a user would start them.

Whoever starts the ranks, they train the same weights: those of DDP, started by Lightning.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dear.emulation import EmulatedCluster
from tests.lightning.fitting import assert_differ, assert_same
from tests.lightning.nets import Net, copies

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).with_name("entry_points")
TIMEOUT_S = 240
CLI_TRAINER = (
    "--trainer.accelerator=cpu",
    "--trainer.devices=2",
    "--trainer.max_epochs=1",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_checkpointing=false",
    "--trainer.logger=false",
)


def run(folder: Path, *commands: Sequence[object], environments: Sequence[Mapping[str, str]] = ()):
    """Run commands at the same time in `folder`; all must end well."""
    processes = [
        subprocess.Popen(
            [str(part) for part in command],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command, environment in zip(commands, environments or [{}] * len(commands), strict=True)
    ]
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
    return outputs


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def trained(folder: Path) -> list[Tensor]:
    """The weights that both ranks left in `folder`, which must be the same."""
    ranks = [list(torch.load(folder / f"rank-{rank}.pt").values()) for rank in range(2)]
    assert_same(ranks[1], ranks[0], "weights of rank 1")
    return ranks[0]


def starters(folder: Path) -> set[str]:
    return {path.read_text() for path in folder.glob("environment-*")}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[Tensor]:
    """What DDP trains when Lightning starts the ranks."""
    folder = tmp_path_factory.mktemp("ddp")
    run(folder, [sys.executable, SCRIPTS / "train.py", "ddp", 1, 2, folder])
    weights = trained(folder)
    assert_differ(copies(Net("mlp", "adamw")), weights)
    return weights


# --- who starts the ranks -----------------------------------------------------------------------


def torchrun(*options: object) -> list[object]:
    return [sys.executable, "-m", "torch.distributed.run", *options, SCRIPTS / "train.py", "dear"]


def agents(endpoint: str, num_agents: int = 2) -> Iterator[list[object]]:
    options = ("--nnodes", num_agents, "--nproc-per-node", 1, "--rdzv-backend", "c10d")
    for _ in range(num_agents):
        yield torchrun(*options, "--rdzv-endpoint", endpoint, "--rdzv-id", "dear")


@pytest.mark.slow
def test_torchrun_on_one_host(expected: list[Tensor], tmp_path: Path) -> None:
    command = torchrun("--nproc-per-node", 2, "--master-port", free_port())
    run(tmp_path, [*command, 1, 2, tmp_path])
    assert_same(trained(tmp_path), expected, "weights")
    assert starters(tmp_path) == {"TorchElasticEnvironment"}


@pytest.mark.slow
def test_two_torchrun_agents(expected: list[Tensor], tmp_path: Path) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    run(tmp_path, *[[*agent, 2, 1, tmp_path] for agent in agents(endpoint)])
    assert_same(trained(tmp_path), expected, "weights")


@pytest.mark.netns
@pytest.mark.slow
def test_torchrun_on_two_emulated_hosts(expected: list[Tensor], tmp_path: Path) -> None:
    with EmulatedCluster(num_hosts=2, rate_mbit=1000) as cluster:
        master = ("--master-addr", cluster.hosts[0].address, "--master-port", 29500)
        commands = []
        for host in cluster.hosts:
            options = ("--nnodes", 2, "--nproc-per-node", 1, "--node-rank", host.index, *master)
            agent = [str(part) for part in [*torchrun(*options), 2, 1, tmp_path]]
            commands.append(host.command(agent))
        environments = [{"GLOO_SOCKET_IFNAME": host.interface} for host in cluster.hosts]
        run(tmp_path, *commands, environments=environments)
        sent = [host.wire_bytes()[0] for host in cluster.hosts]
    assert_same(trained(tmp_path), expected, "weights")
    # Six steps, and in each of them half of all gradients and half of all weights.
    assert min(sent) > 6 * sum(weight.nbytes for weight in expected)


def slurm(rank: int, port: int) -> dict[str, str]:
    """What srun sets for one of two tasks on one host."""
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1",
        "SLURM_NODELIST": "127.0.0.1",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "MASTER_PORT": str(port),
    }


@pytest.mark.slow
def test_slurm(expected: list[Tensor], tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, SCRIPTS / "train.py", "dear", 1, 2, tmp_path]
    run(tmp_path, command, command, environments=[slurm(rank, port) for rank in range(2)])
    assert_same(trained(tmp_path), expected, "weights")
    assert starters(tmp_path) == {"SLURMEnvironment"}


# --- LightningCLI -------------------------------------------------------------------------------


def fit_by_cli(folder: Path, *options: object) -> list[Tensor]:
    pytest.importorskip("jsonargparse")
    model = f"--model.folder={folder}"
    run(folder, [sys.executable, SCRIPTS / "cli.py", "fit", *CLI_TRAINER, model, *options])
    return trained(folder)


@pytest.mark.slow
def test_cli_by_name(expected: list[Tensor], tmp_path: Path) -> None:
    assert_same(fit_by_cli(tmp_path, "--trainer.strategy", "dear"), expected, "weights")


@pytest.mark.slow
def test_cli_by_class_path(expected: list[Tensor], tmp_path: Path) -> None:
    """Options in YAML, among them one that a command line would have to quote."""
    (tmp_path / "strategy.yaml").write_text(
        "trainer:\n"
        "  strategy:\n"
        "    class_path: lightning_dear.DearStrategy\n"
        "    init_args:\n"
        "      fusion: threshold\n"
        "      bucket_cap_mb: 0.02\n"
        "      broadcast_buffers: false\n"
    )
    weights = fit_by_cli(tmp_path, "--config", tmp_path / "strategy.yaml")
    assert_same(weights, expected, "weights")


@pytest.mark.slow
def test_cli_lists_the_options(tmp_path: Path) -> None:
    pytest.importorskip("jsonargparse")
    script = SCRIPTS / "cli.py"
    option = "--trainer.strategy.help=lightning_dear.DearStrategy"
    (output,) = run(tmp_path, [sys.executable, script, "fit", option])
    for name in ("compressor", "fusion", "bucket_cap_mb", "timeout", "start_method"):
        assert f"strategy.{name}" in output


# --- all stages of a Trainer ----------------------------------------------------------------------


def run_stages(strategy: str, folder: Path) -> dict[str, Any]:
    """What each file of a run of `stages.py` holds."""
    folder.mkdir()
    run(folder, [sys.executable, SCRIPTS / "stages.py", strategy, folder])
    return {path.name: torch.load(path) for path in sorted(folder.glob("*.pt"))}


@pytest.fixture(scope="module")
def ddp_stages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_stages("ddp", tmp_path_factory.mktemp("stages") / "ddp")


def check(ours: Any, theirs: Any, what: str) -> None:
    assert ours["weights"], what
    assert_same(ours["weights"], theirs["weights"], f"{what}: weights")
    assert ours.get("metrics") == theirs.get("metrics"), what
    assert_same(ours.get("losses", []), theirs.get("losses", []), f"{what}: losses")


@pytest.mark.slow
def test_all_stages_as_under_ddp(ddp_stages: dict[str, Any], tmp_path: Path) -> None:
    """Fit, validate, test, predict, fit on, a fit that fails, and a fit after it."""
    found = run_stages("dear", tmp_path / "dear")
    assert found.keys() == ddp_stages.keys()
    # Three fits that end, on two ranks; predictions and the end, once on each.
    assert len(found) == 3 * 2 + 2 + 2
    for name, ours in found.items():
        if name.startswith("predicted"):
            assert_same(ours, ddp_stages[name], name)
        else:
            check(ours, ddp_stages[name], name)
    (validated,), (tested,) = found["all-0.pt"]["metrics"]
    assert validated["val_loss"] == pytest.approx(tested["test_loss"])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["dear_fork", "dear_spawn"])
def test_stages_in_new_processes_each(
    strategy: str, ddp_stages: dict[str, Any], tmp_path: Path
) -> None:
    """Each call starts its own ranks; the weights come back to the caller in between."""
    found = run_stages(strategy, tmp_path / strategy)
    for name in ("predicted-0.pt", "predicted-1.pt"):
        assert_same(found[name], ddp_stages[name], name)
    for name in ("fit-first-0.pt", "fit-first-1.pt"):
        check(found[name], ddp_stages[name], name)
    assert found["all-0.pt"]["metrics"] == ddp_stages["all-0.pt"]["metrics"]
    # The last fit went on from the first one's weights, and its own came back too.
    assert_differ(found["all-0.pt"]["weights"], found["fit-first-0.pt"]["weights"])
    assert_same(found["all-0.pt"]["weights"], found["fit-last-0.pt"]["weights"], "weights")


# --- the notebook ---------------------------------------------------------------------------------

NOTEBOOK = ROOT / "docs" / "dear_notebook.ipynb"


def outputs_of(notebook: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [output for cell in notebook["cells"] for output in cell.get("outputs", [])]


def check_outputs(outputs: Sequence[Mapping[str, Any]]) -> None:
    """It learned, drew two pictures and complained of nothing."""
    printed = "".join("".join(output.get("text", "")) for output in outputs)
    found = re.search(r"test accuracy (\d\.\d+)", printed)
    assert found, printed
    assert float(found[1]) > 0.9
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert {output["output_type"] for output in outputs} <= {
        "stream",
        "display_data",
        "execute_result",
    }


def test_the_notebook_is_kept_with_its_outputs() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    check_outputs(outputs_of(notebook))
    assert all(output.get("name") != "stderr" for output in outputs_of(notebook))
    source = "".join("".join(cell["source"]) for cell in notebook["cells"])
    assert '"dear_notebook"' in source


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("nbclient", "ipykernel"):
        pytest.importorskip(module, reason="the extra [notebook] is not installed")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    script = runpy.run_path(str(ROOT / "docs" / "run_notebook.py"))
    notebook = script["executed"](NOTEBOOK, str(tmp_path))
    check_outputs(outputs_of(notebook))
    assert script["paths_in_outputs"](notebook) == []
    # The check itself sees a path.
    notebook.cells[1]["outputs"] = [{"text": "at /home/somebody/file.py:3"}]
    assert script["paths_in_outputs"](notebook) == ["/home/somebody/file.py"]
