"""Trainings over simulated NCCL: in order, without waits of the host, with the right numbers."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor

from lightning_dear.compression import CODECS, OkTopk, resolve_compressor
from lightning_dear.exchange.options import ExchangeOptions, default_gather
from tests.streams.ranks import Found
from tests.streams.trainings import Training, reference, run
from tests.training.models import distance
from tests.training.odd_models import ODD_MODELS

MODELS = ("mlp", "conv", "gpt")
SIZES = (2, 3)

VARIANTS = {
    "dense": Training(),
    "gradients": Training(options=ExchangeOptions("gradients")),
    "all_reduced": Training(options=ExchangeOptions("gradients", decouple=False)),
    "accumulation": Training(num_batches=2),
    "clipping": Training(optimizer="sgd", max_norm=0.1),
    "16_bits": Training(dtype=torch.bfloat16),
    "loss_scale": Training(is_scaled=True),
    "unused_on_one_rank": Training(lacks=True),
    "two_optimizers": Training(optimizer="two"),
    "apart": Training(optimizer="apart"),
    "hooked": Training(is_hooked=True),
    "weighed": Training(num_batches=2, weighs="other"),
    "weighed_none": Training(weighs="none"),
    "weighed_twice": Training(optimizer="two", weighs="other"),
    "replan": Training(between="replan"),
    "checkpoint": Training(between="checkpoint"),
    "validation": Training(between="validation"),
    "timeline": Training(has_timeline=True),
}

ROUNDED = {"clipping": 1e-6, "apart": 1e-6}
"""How far apart numbers may be, where sums are made in another order; else not by a bit."""

CODED = (*CODECS, "powersgd", "oktopk")

FLAGS = "engine/bucket_round.py:_hear"

WAITS = {
    # What other ranks say of a parameter that has no gradient here, and of votes.
    "unused_on_one_rank": (FLAGS,),
    "weighed_none": (FLAGS,),
    "signsgd": (FLAGS,),
    "signum": (FLAGS,),
    # Torch's own, in `GradScaler.step`.
    "loss_scale": ("_local_scalar_dense at streams/trainings.py:step",),
    # What codecs do on a CPU alone; `test_accelerator.py` runs what they do elsewhere.
    "fp16": ("compression/floats.py:encode",),
    "bf16": ("compression/floats.py:encode",),
    "dgc": ("compression/selectors.py:first_above", "compression/selectors.py:all_above"),
}
"""Where the host waits in every step; nowhere else but in `LONG_PAST`."""

LONG_PAST = "engine/notes.py:hear"
"""Where it reads what was sent to it in the step before."""


def check(
    found: Found[list[Tensor]],
    waits: tuple[str, ...] = (),
    *,
    always: tuple[str, ...] = (LONG_PAST,),
) -> None:
    """All is in order, the host waits there and nowhere else, and ranks agree, buffers included."""
    found.check()
    known = *waits, *always
    for one in known:
        assert any(one in told for told in found.syncs), f"Nobody waits in {one}: {found.syncs}"
    others = [told for told in found.syncs if not any(one in told for one in known)]
    assert not others, others
    first, *rest = found.results
    for other in rest:
        assert all(map(torch.equal, first, other))


@pytest.mark.parametrize(("variant", "model", "size"), [*product(VARIANTS, MODELS, SIZES)])
def test_numbers_are_those_of_one_process(variant: str, model: str, size: int) -> None:
    training = replace(VARIANTS[variant], model=model)
    found = run(training, size)
    check(found, WAITS.get(variant, ()))
    expected = reference(training, size)
    check_weights(variant, found.results[0], expected)


def check_weights(variant: str, found: list[Tensor], expected: Sequence[Tensor]) -> None:
    """The first of `found` are as expected, by the bit unless sums are made in another order."""
    weights = found[: len(expected)]
    if variant in ROUNDED:
        assert distance(weights, expected) < ROUNDED[variant]
    else:
        assert all(map(torch.equal, weights, expected))


@pytest.mark.parametrize(("model", "size"), [*product([*ODD_MODELS, "spectral"], SIZES)])
def test_odd_models(model: str, size: int) -> None:
    training = Training(model=model)
    found = run(training, size)
    check(found)
    assert distance(found.results[0], reference(training, size)) < 1e-6


@cache
def coded(name: str, model: str) -> Training:
    """With a codec, and an optimizer without momentum: some bring their own."""
    codec = OkTopk(mode="static", density=0.05) if name == "oktopk" else resolve_compressor(name)
    options = ExchangeOptions(default_gather(codec), compressor=codec)
    return Training(model=model, optimizer="plain", options=options)


LONG = ("conv", "gpt")
"""Models that three ranks take long to train."""


@pytest.mark.parametrize(
    ("name", "model", "size"),
    [
        pytest.param(*one, marks=pytest.mark.slow if one[1] in LONG and one[2] > 2 else ())
        for one in product(CODED, MODELS, SIZES)
    ],
)
def test_encoded_numbers_are_those_of_collectives_that_are_over_at_once(
    name: str, model: str, size: int
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = run(coded(name, model), size)
        at_once = run(coded(name, model), size, is_checked=False, is_late=False)
    check(found, WAITS.get(name, ()))
    assert all(map(torch.equal, found.results[0], at_once.results[0]))
    assert all(one.isfinite().all() for one in found.results[0])


# --- hosts of several ranks, in two hops ----------------------------------------------------------

HOSTS = [
    pytest.param(4, 2, id="2x2"),
    pytest.param(6, 3, id="2x3", marks=pytest.mark.slow),
    pytest.param(6, 2, id="3x2", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("size", "ranks_a_host"), HOSTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_in_two_hops_numbers_are_those_of_one_process(
    variant: str, size: int, ranks_a_host: int
) -> None:
    training = VARIANTS[variant]
    found = run(training, size, ranks_a_host=ranks_a_host)
    check(found, WAITS.get(variant, ()))
    # The backend's own all-reduce knows nothing of hosts.
    is_flat = training.options is not None and not training.options.decouple
    expected = reference(training, size, 0 if is_flat else ranks_a_host)
    check_weights(variant, found.results[0], expected)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["conv", "gpt", *ODD_MODELS])
def test_in_two_hops_other_models_have_the_numbers_of_one_process(model: str) -> None:
    training = Training(model=model)
    found = run(training, 4, ranks_a_host=2)
    check(found)
    check_weights(model, found.results[0], reference(training, 4, 2))


@pytest.mark.parametrize(("size", "ranks_a_host"), HOSTS)
@pytest.mark.parametrize("name", CODED)
def test_in_two_hops_encoded_numbers_are_those_of_collectives_that_are_over_at_once(
    name: str, size: int, ranks_a_host: int
) -> None:
    training = replace(coded(name, "mlp"), has_timeline=name == "int8")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = run(training, size, ranks_a_host=ranks_a_host)
        late: dict[str, bool] = {"is_checked": False, "is_late": False}
        at_once = run(training, size, ranks_a_host=ranks_a_host, **late)
    check(found, WAITS.get(name, ()))
    assert all(map(torch.equal, found.results[0], at_once.results[0]))
    assert all(one.isfinite().all() for one in found.results[0])
