"""What stands in for torch.distributed is only called as torch's own functions may be."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_dear.collectives.nccl import ALL_GATHER, REDUCE_SCATTER
from tests.distributed.strict import Strict, signature_of, strict

GROUP, PART, WHOLE = object(), torch.zeros(2), torch.zeros(4)
ROWS, SUM = [PART, PART], dist.ReduceOp.SUM


class _Noting:
    """Returns its function's name and what that was given."""

    def __getattr__(self, name: str) -> Any:
        return lambda **given: (name, given)


class _OlderNames:
    """A stand-in that was written before torch 2.13."""

    def reduce_scatter_tensor(self, *, output: Any, input: Any, **_: Any) -> Any:
        return output, input

    def all_gather_into_tensor(self, *, output_tensor: Any, input_tensor: Any, **_: Any) -> Any:
        return output_tensor, input_tensor


CALLS: Any = Strict(_Noting())


def test_what_torch_takes_goes_on_by_the_names_of_its_parameters() -> None:
    given = {"output": PART, "input": WHOLE, "group": GROUP, "async_op": True}
    name, passed = getattr(CALLS, REDUCE_SCATTER)(PART, WHOLE, group=GROUP, async_op=True)
    assert (name, passed) == (REDUCE_SCATTER, given)
    _, passed = CALLS.all_gather_object([None] * 2, 3, GROUP)
    assert passed == {"object_list": [None, None], "obj": 3, "group": GROUP}
    _, passed = CALLS.isend(PART, dst=1, group=GROUP, tag=7)
    assert passed == {"tensor": PART, "dst": 1, "group": GROUP, "tag": 7}


@pytest.mark.parametrize("name", sorted({REDUCE_SCATTER, "reduce_scatter_tensor"}))
def test_a_stand_in_may_have_the_older_name_of_a_reduce_scatter(name: str) -> None:
    calls: Any = Strict(_OlderNames())
    output, input_ = getattr(calls, name)(PART, WHOLE, group=GROUP)
    assert output is PART
    assert input_ is WHOLE


@pytest.mark.parametrize("name", sorted({ALL_GATHER, "all_gather_into_tensor"}))
def test_a_stand_in_may_have_the_older_name_of_an_all_gather(name: str) -> None:
    calls: Any = Strict(_OlderNames())
    output, input_ = getattr(calls, name)(WHOLE, PART, group=GROUP)
    assert output is WHOLE
    assert input_ is PART


@pytest.mark.parametrize("name", ["reduce_scatter_of_all", "send_it", "_isend"])
def test_a_function_that_torch_has_not_is_none_of_a_stand_ins(name: str) -> None:
    with pytest.raises(AttributeError, match=name):
        getattr(CALLS, name)


def test_a_name_that_this_torch_has_not_yet_is_none_of_a_stand_ins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(dist, REDUCE_SCATTER)
    with pytest.raises(AttributeError, match=REDUCE_SCATTER):
        getattr(CALLS, REDUCE_SCATTER)


REFUSED: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], str]] = {
    "a tensor for a list": ("all_to_all", (WHOLE, ROWS), {}, "output_tensor_list"),
    "a list for a tensor": ("all_to_all_single", (ROWS, WHOLE), {}, "`output`"),
    "lists and sizes swapped": ("all_to_all_single", (WHOLE, [2, 2], WHOLE), {}, "`input`"),
    "a reduction for a tensor": ("all_reduce", (SUM, WHOLE), {}, "`tensor`"),
    "a tensor for a reduction": ("all_reduce", (WHOLE, PART), {}, "incompatible"),
    "a number for a tensor": ("broadcast", (0, WHOLE), {}, "`tensor`"),
    "a tensor for a rank": ("isend", (WHOLE, PART), {}, "`dst`"),
    "an object for a list": ("all_gather_object", (3, [None]), {}, "`object_list`"),
    "a group for a flag": ("all_reduce", (WHOLE, SUM), {"async_op": GROUP}, "`async_op`"),
    "no input": (REDUCE_SCATTER, (PART,), {}, "missing a required argument: 'input'"),
    "no object": ("all_gather_object", ([None],), {}, "missing a required argument: 'obj'"),
    "nothing": ("irecv", (), {}, "missing a required argument: 'tensor'"),
    "no rank to send to": ("isend", (WHOLE,), {}, "no rank is named"),
    "no rank to send from": ("broadcast", (WHOLE,), {}, "no rank is named"),
    "an unknown keyword": ("isend", (WHOLE,), {"dest": 1}, "unexpected keyword argument 'dest'"),
    "another function's keyword": ("all_gather_object", ([], 1), {"async_op": True}, "async_op"),
    "a name too many": ("all_reduce", (WHOLE,), {"tensor": WHOLE}, "multiple values"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_torch_would_not_take_is_refused(case: str) -> None:
    name, args, kwargs, told = REFUSED[case]
    with pytest.raises(TypeError, match=told):
        getattr(CALLS, name)(*args, group=GROUP, **kwargs)


def test_a_group_must_be_named() -> None:
    with pytest.raises(TypeError, match="none is named"):
        CALLS.all_reduce(WHOLE)
    CALLS.all_reduce(WHOLE, group=None)
    CALLS.new_group([0, 1])


UNFIT: dict[str, tuple[str, tuple[Any, ...]]] = {
    "a reduce-scatter from its output": (REDUCE_SCATTER, (WHOLE, PART)),
    "an all-gather into its input": (ALL_GATHER, (PART, WHOLE)),
    "parts of no whole": (REDUCE_SCATTER, (PART, torch.zeros(5))),
    "other numbers": (ALL_GATHER, (WHOLE, PART.int())),
    "more rows than are received": ("all_to_all_single", (PART, WHOLE)),
    "other rows than by their sizes": ("all_to_all_single", (PART, WHOLE, [1, 1], [2, 1])),
    "no row for a rank": ("all_to_all", (ROWS, ROWS[:1])),
}


@pytest.mark.parametrize("case", UNFIT)
def test_tensors_that_do_not_fit_together_are_refused(case: str) -> None:
    name, args = UNFIT[case]
    with pytest.raises(ValueError, match="dtypes|elements|rows|receive|each rank"):
        getattr(CALLS, name)(*args, group=GROUP)


TENSORS = {
    REDUCE_SCATTER: ["output", "input"],
    "reduce_scatter_tensor": ["output", "input"],
    ALL_GATHER: ["output_tensor", "input_tensor"],
    "all_gather_into_tensor": ["output_tensor", "input_tensor"],
    "all_to_all_single": ["output", "input"],
    "all_to_all": ["output_tensor_list", "input_tensor_list"],
    "all_reduce": ["tensor"],
    "broadcast": ["tensor", "src"],
}


@pytest.mark.parametrize("name", TENSORS)
def test_the_signature_is_that_of_torchs_own_function(name: str) -> None:
    parameters = signature_of(getattr(dist, name)).parameters
    assert [*parameters][: len(TENSORS[name])] == TENSORS[name]
    assert {"group", "async_op"} <= {*parameters}
    kinds = {one.kind for one in parameters.values()}
    assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def test_what_is_no_function_is_the_stand_ins_own() -> None:
    class Own:
        group = GROUP

    assert Strict(Own()).group is GROUP
    with pytest.raises(AttributeError, match="ReduceOp"):
        _ = Strict(Own()).ReduceOp


def test_one_function_may_be_patched_in_for_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "isend", strict("isend", lambda tensor, **place: place))
    assert dist.isend(PART, 1, GROUP) == {"dst": 1, "group": GROUP}  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unexpected keyword argument 'to'"):
        dist.isend(PART, to=1)  # type: ignore[call-arg]
