"""A rank that is asked to stop stops all of them after the same step."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

from lightning_dear.collectives.streams import Streams
from lightning_dear.collectives.work import Collectives
from lightning_dear.strategy import base
from tests.distributed.harness import distributed, run_ranks
from tests.lightning.fitting import dear, fit, new_trainer
from tests.lightning.nets import Net, data
from tests.training.three_ways import new_native

asks = pytest.mark.skipif(
    not hasattr(_TrainingEpochLoop, "_broadcast_sigterm_tensor"),
    reason="this Lightning does not ask before every batch",
)


class _Kills(Callback):
    """Sends a signal to its own process, on some ranks, in the third batch or its validation."""

    def __init__(self, number: int, ranks: list[int], hook: str) -> None:
        self.number, self.ranks = number, ranks
        setattr(self, hook, self._strike)

    def _strike(self, trainer: Trainer, *_: Any) -> None:
        is_due = trainer.global_step == 3 and trainer.global_rank in self.ranks
        if is_due and not trainer.sanity_checking:
            os.kill(os.getpid(), self.number)


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("lightning_dear").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _fit(
    folder: Path, number: int, ranks: list[int], hook: str, options: dict[str, Any]
) -> tuple[str, object, int, list[str]]:
    """How it ended, with which exit code, at which step, and what was said."""
    torch.manual_seed(0)
    # The harness ignores it, and so would its ranks.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    lines = _Lines()
    callbacks = _Kills(number, ranks, hook), OnExceptionCheckpoint(folder)
    trainer = new_trainer(dear(), *callbacks, **{"enable_checkpointing": True, **options})
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    try:
        trainer.fit(Net("mlp"), data("mlp", 96), data("mlp", 96))
    except SystemExit as end:
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
        return type(end).__name__, end.code, trainer.global_step, lines.lines
    return "nothing", None, trainer.global_step, lines.lines


def stopped(
    folder: Path, world_size: int, number: int, ranks: list[int], hook: str, **options: Any
) -> list[tuple[str, object, int, list[str]]]:
    seen = run_ranks(
        _fit, world_size, folder, number, ranks, hook, options, init_process_group=False
    )
    assert torch.load(folder / "on_exception.ckpt", weights_only=True)["global_step"] == seen[0][2]
    return seen


@pytest.mark.parametrize(
    ("world_size", "number", "ranks", "words"),
    [
        (2, signal.SIGTERM, [1], "Rank 1 was asked to stop (SIGTERM)"),
        (2, signal.SIGTERM, [0, 1], "Rank 1 was asked to stop (SIGTERM)"),
        (3, signal.SIGTERM, [0], "Rank 0 was asked to stop (SIGTERM)"),
        (2, signal.SIGINT, [1], "Rank 1 was asked to stop (Ctrl-C)"),
        (3, signal.SIGINT, [0, 1, 2], "Rank 2 was asked to stop (Ctrl-C)"),
    ],
)
def test_all_stop_after_the_same_step(
    world_size: int, number: int, ranks: list[int], words: str, tmp_path: Path
) -> None:
    seen = stopped(tmp_path, world_size, number, ranks, "on_train_batch_start")
    code = 1 if number == signal.SIGINT else None
    for name, ended_with, step, lines in seen:
        assert (name, ended_with, step) == ("SIGTERMException", code, 4)
        assert any(words in line for line in lines), lines
        # Nobody has failed.
        assert not any("failed" in line for line in lines), lines


@pytest.mark.parametrize("rank", [0, 1])
def test_batches_without_a_step(rank: int, tmp_path: Path) -> None:
    seen = stopped(
        tmp_path, 2, signal.SIGTERM, [rank], "on_train_batch_start", accumulate_grad_batches=4
    )
    assert [one[:3] for one in seen] == [("SIGTERMException", None, 3)] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_in_validation_the_board_tells(rank: int, tmp_path: Path) -> None:
    slow = {"val_check_interval": 3, "limit_val_batches": 8}
    seen = run_ranks(_fit_with_slow_validation, 2, tmp_path, rank, slow, init_process_group=False)
    assert [one[:3] for one in seen] == [("SIGTERMException", None, 3)] * 2
    assert torch.load(tmp_path / "on_exception.ckpt", weights_only=True)["global_step"] == 3


class _SlowNet(Net):
    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        time.sleep(0.4)


def _fit_with_slow_validation(folder: Path, rank: int, options: dict[str, Any]) -> Any:
    with mock.patch(f"{__name__}.Net", _SlowNet):
        return _fit(folder, signal.SIGTERM, [rank], "on_validation_start", options)


def _fit_under_slurm(folder: Path, ranks: list[int]) -> Any:
    rank = os.environ["RANK"]
    place = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": "0"}
    job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2"}
    os.environ.update({**place, **job, "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1"})
    options = {"plugins": [SLURMEnvironment(auto_requeue=True)], "default_root_dir": folder}
    with mock.patch(f"{_SignalConnector.__module__}.call", return_value=0) as call:
        ended = _fit(folder, signal.SIGUSR1, ranks, "on_train_batch_start", options)
    return ended[:3], [one.args[0] for one in call.call_args_list]


@pytest.mark.parametrize("ranks", [[1], [0, 1]])
def test_slurm_starts_again_from_the_step_after_which_all_stopped(
    ranks: list[int], tmp_path: Path
) -> None:
    seen = run_ranks(_fit_under_slurm, 2, tmp_path, ranks, init_process_group=False)
    assert [one[0] for one in seen] == [("SIGTERMException", None, 4)] * 2
    assert [one[1] for one in seen] == [[["scontrol", "requeue", "4711"]], []]
    saved = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=True)
    assert saved["global_step"] == 4


class _Hears(Callback):
    """Rank 1 says in the third batch that it was asked."""

    num_steps = 0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.num_steps = trainer.global_step

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 2 and dist.get_rank() == 1:
            trainer.strategy._pipeline.training.signal.ask = lambda: 2


@asks
@distributed(world_sizes=(2,))
def test_only_the_first_batch_asks() -> None:
    tell, told = Collectives.all_gather_object, []

    def noting(collectives: Collectives, value: Any) -> list[Any]:
        told.append(value)
        return tell(collectives, value)

    with (
        mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as broadcast,
        mock.patch.object(Collectives, "all_gather_object", noting),
    ):
        trainer = fit(dear(), Net("mlp"))
    assert trainer.global_step > 3
    # Nothing else looks like a wish to stop and a number of batches ahead.
    assert (broadcast.call_count, told.count((0, 0))) == (0, 1)
    assert "_broadcast_sigterm_tensor" not in vars(trainer.fit_loop.epoch_loop)
    assert "_sigterm_notifier_fn" not in vars(trainer._signal_connector)


@distributed(world_sizes=(2,), keeps_ranks=False)
def test_what_one_rank_says_all_hear_in_that_step() -> None:
    hears = _Hears()
    with pytest.raises(SystemExit) as end:
        fit(dear(), Net("mlp"), hears)
    assert end.value.code is None
    assert hears.num_steps == 3


@distributed(world_sizes=(2,), keeps_ranks=False)
def test_with_nccl_all_hear_it_one_step_later_and_no_host_waits_for_the_number() -> None:
    read, early = Streams.read_later, []

    def once_a_step_is_over(streams: Streams, numbers: torch.Tensor) -> Any:
        later, step = read(streams, numbers), hears.num_steps

        def late() -> list[int]:
            early.append(step >= hears.num_steps)
            return later()

        return late

    hears = _Hears()
    with (
        mock.patch.object(base, "new_collectives", new_native),
        mock.patch.object(Streams, "read_later", once_a_step_is_over),
        pytest.raises(SystemExit) as end,
    ):
        fit(dear(), Net("mlp"), hears)
    assert end.value.code is None
    assert hears.num_steps == 4
    assert True not in early
