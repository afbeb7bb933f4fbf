"""Refused rows are refused on every rank, with their message; differences are as they say."""

from __future__ import annotations

import re

import pytest

from lightning_dear import DearStrategy
from tests.distributed.calls import Raised
from tests.distributed.harness import observe_ranks, run_ranks
from tests.lightning.matrix.table import DIFFERENT, REFUSED

TIMEOUT_S = 25


def _run(name: str) -> None:
    REFUSED[name].run()


@pytest.mark.parametrize("name", REFUSED)
def test_row(name: str) -> None:
    """No rank is left waiting for one that has refused."""
    row = REFUSED[name]
    if not row.needs:
        pytest.skip(f"the installed versions lack {name}")
    # Without a group of the harness: a rank that refuses at once would close it under the other.
    options = {"timeout_s": TIMEOUT_S, "init_process_group": False}
    for rank, outcome in enumerate(observe_ranks(_run, 2, name, **options)):
        assert isinstance(outcome, Raised), f"rank {rank}: {outcome}"
        assert re.match(rf"{row.error}\(", outcome.message), outcome.message
        assert row.message in outcome.message.replace('\\"', '"').replace("\\'", "'")


def _run_different(number: int) -> None:
    DIFFERENT[number].run()


@pytest.mark.parametrize("number", range(len(DIFFERENT)), ids=lambda at: DIFFERENT[at].name)
def test_difference(number: int) -> None:
    run_ranks(_run_different, 2, number)


def test_a_refusal_names_all_options_and_the_remedy() -> None:
    with pytest.raises(ValueError, match="static_graph.*strategy='ddp'.*comm_hook.*compressor="):
        DearStrategy(static_graph=True, ddp_comm_hook=print)
