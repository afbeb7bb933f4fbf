"""A bucket's role: the table at `Role`, row by row."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_dear.bucket import LOW_PRECISION, Bucket, Role, allocate
from lightning_dear.compression import Int8, OkTopk, PowerSGD
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.planning import BucketPlan, NoFusion, TensorSpec

WORLD_SIZE, NUMEL = 2, 300
OPTIONS = {
    "parameters": ExchangeOptions(),
    "gradients": ExchangeOptions("gradients"),
    "all-reduced": ExchangeOptions("gradients", decouple=False),
    "int8": ExchangeOptions(compressor=Int8()),
    "int8, gradients": ExchangeOptions("gradients", compressor=Int8()),
    "powersgd": ExchangeOptions("gradients", compressor=PowerSGD()),
    "oktopk": ExchangeOptions("gradients", compressor=OkTopk()),
}
PLANS = {"plain": {}, "all_reduced": {"all_reduced": (0,)}}
DTYPES = (torch.float32, torch.float64, *LOW_PRECISION)


def cases() -> Iterator[tuple[str, str, torch.dtype]]:
    """What may come together: others are refused, or the plan loses what is not done."""
    for what, plan, dtype in product(OPTIONS, PLANS, DTYPES):
        if plan != "plain" and what != "parameters":
            continue
        if dtype in LOW_PRECISION and OPTIONS[what].is_of_gradients:
            continue
        yield what, plan, dtype


def plan_of(kind: str, world_size: int = WORLD_SIZE) -> BucketPlan:
    tensor = TensorSpec(0, "p", NUMEL, 4, "f", 0, 0)
    return replace(NoFusion().plan([tensor], world_size), **PLANS[kind])


def made(what: str, kind: str, dtype: torch.dtype, world_size: int = WORLD_SIZE) -> Bucket:
    plan = plan_of(kind, world_size)
    role_of = partial(OPTIONS[what].role_of, plan)
    parameters = [Parameter(torch.randn(NUMEL).to(dtype))]
    flat = allocate(plan, parameters, role_of, 0, lambda n: n // 2, keeps_gradients=True)
    return flat.buckets[0]


def is_view(part: Tensor, whole: Tensor) -> bool:
    return part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


EXPECTED = {
    ("parameters", "plain"): (Role.SHARDED, Role.SHARDED_MASTERS),
    ("parameters", "all_reduced"): (Role.REPLICATED, Role.REPLICATED_MASTERS),
    ("int8", "plain"): (Role.LAGGING, Role.LAGGING_MASTERS),
    ("gradients", "plain"): (Role.SHARDED, None),
    ("int8, gradients", "plain"): (Role.SHARDED, None),
    ("all-reduced", "plain"): (Role.REPLICATED, None),
    ("powersgd", "plain"): (Role.REPLICATED, None),
    ("oktopk", "plain"): (Role.SCATTERED, None),
}


@pytest.mark.parametrize(("what", "plan", "dtype"), [*cases()])
def test_each_combination_has_the_role_of_the_table(
    what: str, plan: str, dtype: torch.dtype
) -> None:
    role = OPTIONS[what].role_of(plan_of(plan), 0, dtype)
    assert role is EXPECTED[what, plan][dtype in LOW_PRECISION]


def test_every_role_has_a_combination() -> None:
    assert {one for pair in EXPECTED.values() for one in pair if one} == {*Role}


@pytest.mark.parametrize(("what", "plan", "dtype"), [*cases()])
def test_buffers_hold_what_the_table_says(what: str, plan: str, dtype: torch.dtype) -> None:
    bucket = made(what, plan, dtype)
    role, is_narrow = bucket.role, dtype in LOW_PRECISION
    is_whole = role in (Role.REPLICATED, Role.REPLICATED_MASTERS, Role.SCATTERED)
    padded = bucket.parameters.numel()
    assert bucket.shard.numel() == padded // (1 if is_whole else WORLD_SIZE)
    assert bucket.is_stepped_whole is role.is_whole is is_whole
    is_copy = is_narrow or role.name.startswith("LAGGING")
    assert is_view(bucket.shard, bucket.parameters) is not is_copy
    assert bucket.shard.dtype == (torch.float32 if is_narrow else dtype)
    assert bucket.mean.dtype == bucket.shard.dtype
    assert is_view(bucket.mean, bucket.gradients) is not is_narrow
    assert bool(bucket.published.numel()) is role.name.startswith("LAGGING")
    assert role.has_master is (is_narrow or role.name.startswith("LAGGING"))
    assert torch.equal(bucket.shard, bucket.replica.to(bucket.shard.dtype))


@pytest.mark.parametrize("what", OPTIONS)
def test_on_one_rank_a_bucket_is_stepped_whole_in_any_role(what: str) -> None:
    bucket = made(what, "plain", torch.float32, world_size=1)
    assert bucket.is_stepped_whole
    assert bucket.own == slice(0, bucket.parameters.numel())


def test_the_table_names_the_roles_there_are() -> None:
    named = re.findall(r"^ {8}([A-Z_]{5,}) ", Role.__doc__ or "", re.MULTILINE)
    assert named == [role.name for role in Role]
