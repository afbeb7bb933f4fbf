"""Waits that are seen to be missing on the simulated CUDA device, too, which needs no delays."""

from __future__ import annotations

from dataclasses import replace

from tests.mutations.low_rank import LOW_RANK
from tests.mutations.steps import GUARDS, WAITS

TRAININGS = "tests/streams/test_trainings.py"
NUMBERS = f"{TRAININGS}::test_numbers_are_those_of_one_process"
ODD = f"{TRAININGS}::test_odd_models"
ENCODED = (
    f"{TRAININGS}::test_encoded_numbers_are_those_of_collectives_that_are_over_at_once"
    "[powersgd-mlp-2]"
)

SEEN_BY = {
    "waiting for a gathered bucket": f"{NUMBERS}[dense-mlp-2]",
    "waiting for reduced buckets": f"{NUMBERS}[dense-mlp-2]",
    "closing gates": f"{ODD}[functional-2]",
    "waiting before a module's forward": f"{ODD}[held_list-2]",
    "waiting for module buffers": f"{NUMBERS}[dense-conv-2]",
    "completing parameters before the step": f"{NUMBERS}[unused_on_one_rank-gpt-2]",
    "completing parameters before a new plan": f"{NUMBERS}[replan-mlp-2]",
    "completing parameters at the end": f"{NUMBERS}[dense-mlp-2]",
    "module buffers behind the last reduce-scatters on all ranks": (
        f"{NUMBERS}[unused_on_one_rank-conv-2]"
    ),
    "waiting for the first message": ENCODED,
    "waiting for the second message": ENCODED,
}
"""Name of a mutation -> the training that it is seen in."""

_BY_NAME = {one.name: one for one in (*WAITS, *GUARDS, *LOW_RANK)}

STREAMS = [
    replace(_BY_NAME[name], name=f"{name}, on a simulated device", tests=(test,))
    for name, test in SEEN_BY.items()
]
