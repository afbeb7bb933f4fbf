"""What cannot work is refused on every rank, with the message that the row says."""

from __future__ import annotations

import re

import pytest

from lightning_dear import DearStrategy
from tests.distributed.calls import Raised
from tests.distributed.harness import observe_ranks
from tests.lightning.matrix.table import REFUSED

TIMEOUT_S = 25


def _run(name: str) -> None:
    REFUSED[name].run()


@pytest.mark.parametrize("name", REFUSED)
def test_row(name: str) -> None:
    """No rank is left waiting for one that has refused."""
    row = REFUSED[name]
    for rank, outcome in enumerate(observe_ranks(_run, 2, name, timeout_s=TIMEOUT_S)):
        assert isinstance(outcome, Raised), f"rank {rank}: {outcome}"
        assert re.match(rf"{row.error}\(", outcome.message), outcome.message
        assert row.message in outcome.message.replace('\\"', '"').replace("\\'", "'")


def test_a_refusal_names_all_options_and_the_remedy() -> None:
    with pytest.raises(ValueError, match="static_graph.*ddp_comm_hook.*strategy='ddp'"):
        DearStrategy(static_graph=True, ddp_comm_hook=print)
