"""Rows: local steps. With rounds of one step they are DDP; others differ from it, or are refused.

A round of one step, merged whole by an outer SGD of rate 1, gives the mean of the ranks' steps.
That is the step of the mean gradient where an optimizer is linear in gradients, as SGD is.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch.optim import SGD, Adafactor

from lightning_dear.callbacks.compression_schedule import CompressionSchedule
from lightning_dear.local_steps import LocalSteps
from tests.lightning.fitting import assert_ranks_agree, dear, fit
from tests.lightning.matrix import models
from tests.lightning.matrix.manual import ManualPlain
from tests.lightning.matrix.nets import RowNet, gpt, mlp
from tests.lightning.matrix.refused_models import UntouchedNet, sgd
from tests.lightning.matrix.rows import (
    SEVERAL,
    Apart,
    Different,
    Feature,
    Refused,
    fit_and_validate,
)
from tests.lightning.nets import Net, copies

EACH_STEP = LocalSteps(every=1, fragments=1, outer=partial(SGD, lr=1.0))
ROUNDING = Apart(
    "ranks exchange differences of weights, not gradients: another rounding", 1e-6, SEVERAL
)
row = partial(
    Feature,
    section="Local steps",
    strategy={"local_steps": EACH_STEP},
    optimizers=("sgd",),
    apart=(ROUNDING,),
)
refused = partial(Refused, section="Local steps")

FEATURES = (
    row(
        name="rounds of one step",
        net=mlp,
        remark="with SGD inside, and `outer=partial(SGD, lr=1.0)`; so are all of this table",
    ),
    row(name="rounds of one step, tied weights", net=gpt, data="gpt"),
    row(
        name="rounds of one step while accumulating",
        net=mlp,
        trainer={"accumulate_grad_batches": 2},
        num_steps=3,
    ),
    row(name="rounds of one step in manual optimisation", net=ManualPlain),
    row(
        name="rounds of one step, frozen parameters",
        net=partial(RowNet, model=models.Frozen),
    ),
    row(name="rounds of one step, and validation", net=mlp, drive=fit_and_validate),
)


def _fit(*callbacks: Callback, **options: Any) -> None:
    fit(dear(**{"local_steps": 8, **options}), UntouchedNet(sgd), *callbacks)


def _option(option: str, value: Any, why: str, instead: str) -> Refused:
    return refused(
        name=f"local_steps with {option}={value!r}",
        run=partial(_fit, **{option: value}),
        message=f"local_steps does not work with {option}",
        why=why,
        instead=instead,
    )


REFUSED = (
    refused(
        name="local_steps='fast'",
        run=partial(_fit, local_steps="fast"),
        message="local_steps must be a number, 'auto', LocalSteps(...) or None",
        why="no round has that length",
        instead="a number of steps",
    ),
    _option(
        "gather", "gradients", "the anchor is gathered", "leave it out: any optimizer may be inside"
    ),
    _option("fusion", "mgwfbp", "it plans steps in which gradients travel", "`fusion='threshold'`"),
    _option("reduce_dtype", "fp32", "messages are in fp32", "leave it out"),
    refused(
        name="local_steps with split='auto'",
        run=partial(_fit, split="auto"),
        message="local_steps does not work with split='auto'",
        why="it measures steps in which gradients travel",
        instead="shares, such as `split=[3, 1]`",
    ),
    refused(
        name="local_steps with a compressor that votes or all-reduces",
        run=partial(_fit, compressor="powersgd"),
        message="local_steps does not work with compressor='powersgd'",
        why="it cannot send differences of weights to their owners",
        instead="`int8`, `int4` or `TopK(halves='reduce')`",
    ),
    refused(
        name="local_steps with a CompressionSchedule",
        run=lambda: _fit(compression_schedule=CompressionSchedule(2), compressor="int8"),
        message="local_steps does not work with compression_schedule",
        why="it counts steps that exchange gradients",
        instead="`compressor=` alone",
    ),
    refused(
        name="local_steps with StochasticWeightAveraging or WeightAveraging",
        run=lambda: _fit(StochasticWeightAveraging(swa_lrs=0.01)),
        message="local_steps does not work with StochasticWeightAveraging",
        why="it would average each rank's own weights",
        instead="the anchor, which is an average already",
    ),
    refused(
        name="more fragments than modules",
        run=partial(_fit, local_steps=LocalSteps(every=8, fragments=8)),
        message="LocalSteps(fragments=8) is more than the 3 modules that own trained parameters",
        why="a fragment is a run of modules",
        instead="at most as many",
    ),
    refused(
        name="fragments that do not divide a round",
        run=lambda: _fit(local_steps=LocalSteps(every=8, fragments=3)),
        message="LocalSteps(fragments=3) must divide every=8",
        why="fragments are sent at equal intervals",
        instead="change one of them",
    ),
    refused(
        name="a parameter in no fragment",
        run=partial(_fit, local_steps=LocalSteps(every=8, fragments=[["net.layers.0"]])),
        message="is in no fragments of LocalSteps(fragments=...)",
        why="it would not be exchanged",
        instead="name each in one fragment, or pass a number",
    ),
    refused(
        name="a delay as long as a round",
        run=lambda: _fit(local_steps=LocalSteps(every=8, delay=8)),
        message="LocalSteps(delay=8) must be less than every=8",
        why="a fragment is merged before it is sent again",
        instead="lower it",
    ),
    refused(
        name="an outer optimizer that is not element-wise",
        run=partial(_fit, local_steps=LocalSteps(outer=partial(Adafactor, lr=0.1))),
        message="made Adafactor, which is not element-wise",
        why="each rank steps parts of tensors",
        instead="SGD or Adam",
    ),
    refused(
        name="ranks with other local steps",
        run=lambda: _fit(local_steps=4 + 4 * int(os.environ["RANK"])),
        message="Ranks have different local steps",
        why="they exchange after the same steps",
        instead="set the same on all ranks",
    ),
)


class _Watching(Callback):
    """Whether ranks agree after each step."""

    def __init__(self) -> None:
        self.seen: list[list[torch.Tensor]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.seen.append(copies(pl_module))


def _train_alone() -> None:
    watching, net = _Watching(), Net("mlp")
    fit(dear(local_steps=LocalSteps(every=4, fragments=1, delay=0)), net, watching)
    is_same = []
    for weights in watching.seen:
        others: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(others, weights)
        is_same.append(all(map(torch.equal, others[0], others[1])))
    # Behind the last step ranks exchange all that is left.
    assert is_same == [False, False, False, True, False, True]
    assert_ranks_agree([copies(net)])


def _train_with_one_apart() -> None:
    class Apart(Net):
        def __init__(self) -> None:
            super().__init__("mlp")
            self.scale = torch.nn.Parameter(torch.ones(()))

        def on_train_batch_end(self, *_: Any) -> None:
            self.scale.data.add_(self.losses[-1])

        def configure_optimizers(self) -> Any:
            return SGD(self.net.parameters(), lr=0.05)

    with pytest.warns(UserWarning, match="different values of 'scale'"):
        fit(dear(local_steps=2), Apart())


DIFFERENT = (
    Different(
        "local_steps=8",
        _train_alone,
        "ranks train alone, and exchange once in a round. Hooks see this rank's weights and"
        " gradients; validation, files and the end of a fit have the anchor, equal on all ranks",
        "[local steps](local_steps.md) says what differs",
    ),
    Different(
        "local_steps, and a parameter that no optimizer of the training holds",
        _train_with_one_apart,
        "ranks do not exchange it; a warning names it if ranks come to have different values",
        "return its optimizer from `configure_optimizers`, or make it a buffer",
    ),
)
