"""The table of all compressors: the formula in each one's docstring, and how it is tested."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

from hypothesis import strategies as st
from torch import Tensor
from typing_extensions import override

from lightning_dear.compression import (
    DGC,
    QSGD,
    Bf16,
    Compressor,
    EFSignSGD,
    Fp16,
    Fp32,
    Gaussiank,
    GTopk,
    Int4,
    Int8,
    LoCo,
    Natural,
    OkTopk,
    OneBit,
    PowerSGD,
    RandomK,
    SignSGD,
    Signum,
    TernGrad,
    TopK,
    TopkA,
    TopkDSA,
)
from tests.compression import formulas
from tests.compression.battery import SMALLEST, Again, check_all, check_losses
from tests.compression.formulas import UNIT
from tests.compression.inputs import rows
from tests.compression.low_rank import is_a_projection, matrices
from tests.compression.sparse_sums import sums_up

DENSITIES = (0.001, 0.01, 0.07, 0.1, 0.25, 1.0)
SELECTORS = ("exact", "sampled")
INTEGER_BLOCKS = (8, 24, 64, 128, 256)
SIGN_BLOCKS = (8, 120, 1024, 2048)


@dataclass(frozen=True, kw_only=True)
class Properties:
    """How a compressor is tested.

    Attributes:
        formula: What stands in its docstring, and what `law` holds it to (for every draw; means of
            draws are tested elsewhere).
        instances: With which options.
        law: Takes an instance and an input; raises AssertionError.
        inputs: What is sent.
    """

    formula: str
    instances: tuple[Compressor, ...]
    law: Callable[[Any, Tensor], None]
    inputs: st.SearchStrategy[Tensor]

    def check(self, compressor: Any, some: Tensor) -> None:
        """Holds an instance to all that is said of it."""
        self.law(compressor, some)


def smallest_of(compressor: Compressor) -> float:
    """Rows without a larger number may be lost."""
    return 2.0**-24 if compressor.name == "fp16" else SMALLEST


@dataclass(frozen=True, kw_only=True)
class OfRows(Properties):
    """How a codec is tested, besides by what is true of all of them.

    Attributes:
        sent_again: What becomes of what came back if it is sent once more, and why.
        again: An instance -> how near to itself it comes back; None where it does not, or where
            that depends on what is drawn.
    """

    sent_again: str
    again: Callable[[Any], Again] | None = None
    inputs: st.SearchStrategy[Tensor] = rows()

    @override
    def check(self, compressor: Any, some: Tensor) -> None:
        again = None if self.again is None else self.again(compressor)
        check_all(compressor, some, again)
        if compressor.kind == "contractive":
            check_losses(compressor, some, smallest_of(compressor))
        super().check(compressor, some)


def _exactly(_: Compressor) -> Again:
    return Again()


def _same_integers(_: Compressor) -> Again:
    return Again(relative=4 * UNIT)


_REPRESENTABLE = "Exact: a number of the narrower format is rounded to itself."
_INTEGERS = (
    "q is the same, and q s within two units in the last place: the largest |q| of a block is L,"
    " so that s' is L s / L, rounded twice, which is s or its neighbour; x / s' is far from half"
    " integers; and q s' is rounded once more. Where s is held at 2^-126, it is s again."
)
_MEANS = (
    "The mean of n times the same number is that number, but for what rounding n products and"
    " n - 1 sums may do: bits are the same, and scales within the bound of any order of summation."
)
_SELECTED = (
    "Exact: at most k numbers are not 0, and each selector takes all of these. The k-th of a sample"
    " is then either 0, the threshold that takes all, or what it was; a fitted threshold begins at"
    " 0 and rises only where more than k are above."
)

PROPERTIES: dict[str, Properties] = {
    "fp32": OfRows(
        formula="C(x) = x.",
        instances=(Fp32(),),
        law=formulas.loses_nothing,
        sent_again="Exact.",
        again=_exactly,
    ),
    "fp16": OfRows(
        formula="C(x) = x (1 + e), |e| <= 2^-11",
        instances=(Fp16(),),
        law=formulas.is_a_narrower_float,
        sent_again=_REPRESENTABLE,
        again=_exactly,
    ),
    "bf16": OfRows(
        formula="C(x) = x (1 + e), |e| <= 2^-8",
        instances=(Bf16(),),
        law=formulas.is_a_narrower_float,
        sent_again=_REPRESENTABLE,
        again=_exactly,
    ),
    "int8": OfRows(
        formula="q = round(x / s) is sent, with s = max|x| / 127",
        instances=tuple(Int8(block_size=size) for size in INTEGER_BLOCKS),
        law=formulas.is_within_half_a_scale,
        sent_again=_INTEGERS,
        again=_same_integers,
    ),
    "int4": OfRows(
        formula="q = round(x / s) is sent, with s = max|x| / 7",
        instances=tuple(Int4(block_size=size) for size in INTEGER_BLOCKS),
        law=formulas.is_within_half_a_scale,
        sent_again=_INTEGERS,
        again=_same_integers,
    ),
    "loco": OfRows(
        formula="e becomes (1 - b) e + b (x - C(x))",
        instances=(LoCo(), LoCo(block_size=24), LoCo(rate=1.0), LoCo(rate=0.7, block_size=8)),
        law=formulas.is_int4_whose_loss_is_averaged,
        sent_again=_INTEGERS,
        again=_same_integers,
    ),
    "onebit": OfRows(
        formula="two means for each block: of the elements below 0, and of all other elements",
        instances=tuple(OneBit(block_size=size) for size in SIGN_BLOCKS),
        law=formulas.has_two_means,
        sent_again=_MEANS,
        again=formulas.rounding_of_means,
    ),
    "efsignsgd": OfRows(
        formula="mean magnitude of each block: C(x) = mean|x| sign(x)",
        instances=tuple(EFSignSGD(block_size=size) for size in SIGN_BLOCKS),
        law=formulas.has_one_mean,
        sent_again=_MEANS,
        again=formulas.rounding_of_means,
    ),
    "signsgd": OfRows(
        formula="C(x) = -1 if x < 0, and otherwise +1",
        instances=(SignSGD(),),
        law=formulas.votes,
        sent_again="Exact: a vote votes for itself.",
        again=_exactly,
    ),
    "signum": OfRows(
        formula="m = momentum m + (1 - momentum) g",
        instances=(Signum(), Signum(momentum=0.5), Signum(momentum=0.0)),
        law=formulas.votes_by_a_running_mean,
        sent_again="Exact: a vote votes for itself.",
        again=_exactly,
    ),
    "qsgd": OfRows(
        formula="step = |x|_2 / s",
        instances=(QSGD(), QSGD(num_levels=127, block_size=8), QSGD(num_levels=1, block_size=64)),
        law=formulas.is_a_level_beside,
        sent_again="Not: rounding changes the norm, and with it the levels, and draws again.",
    ),
    "terngrad": OfRows(
        formula="s sign(x) with probability |x| / s",
        instances=(TernGrad(), TernGrad(block_size=8)),
        law=formulas.is_ternary,
        sent_again="Exact, whatever is drawn, by the law: the largest of a block is always sent.",
    ),
    "natural": OfRows(
        formula="|x| becomes 2^(e + 1) with probability |x| / 2^e - 1",
        instances=(Natural(),),
        law=formulas.is_a_power_beside,
        sent_again="Exact, whatever is drawn, by the law: a power of two has no other beside it.",
    ),
    "topk": OfRows(
        formula='|C(x) - x|^2 <= (1 - d) |x|^2, with d = k / numel if `selector` is "exact"',
        instances=tuple(
            TopK(density=density, selector=selector)
            for density, selector in product(DENSITIES, SELECTORS)
        ),
        law=formulas.sends_the_largest,
        sent_again=_SELECTED,
        again=_exactly,
    ),
    "randomk": OfRows(
        formula="E|C(x) - x|^2 <= (1 - d) |x|^2",
        instances=tuple(RandomK(density=density) for density in DENSITIES),
        law=formulas.sends_places_that_all_draw,
        sent_again="Not: other places are drawn.",
    ),
    "dgc": OfRows(
        formula="u = momentum u + g and v = v + u",
        instances=(
            *(DGC(density=0.05, selector=selector) for selector in SELECTORS),
            DGC(density=0.3, momentum=0.0),
        ),
        law=formulas.sends_what_velocity_has_gathered,
        sent_again=_SELECTED,
        again=_exactly,
    ),
    "powersgd": Properties(
        formula="|C(M) - M| <= |M|",
        instances=tuple(PowerSGD(rank=rank, min_saving=1.0) for rank in (1, 2, 4)),
        law=is_a_projection,
        inputs=matrices(),
    ),
    "oktopk": Properties(
        formula="sum of acc = u + sum of residuals",
        instances=(
            OkTopk(density=0.1),
            OkTopk(density=0.5, tau_prime=2),
            OkTopk(density=0.02, message_cap=1.0, owner_cap=1.0, tau_prime=1),
            OkTopk(density=1.0, message_cap=math.inf),
        ),
        law=sums_up,
        inputs=rows(),
    ),
    **{
        kind.name: Properties(
            formula="sum of acc = u + sum of residuals",
            instances=tuple(kind(density=density) for density in (0.02, 0.1, 0.5, 1.0)),
            law=sums_up,
            inputs=rows(),
        )
        for kind in (TopkA, TopkDSA, GTopk, Gaussiank)
    },
}
"""Name -> how it is tested, by `test_properties.py` with inputs of all kinds."""
