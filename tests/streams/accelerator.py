"""Steps on a device of which there are shapes alone: `test_accelerator.py` says how it is started.

Its tensors are fake ones: they know shape, type of numbers and device, and hold nothing. So what is
done on devices other than a CPU runs. Whoever asks for a number, for which the host would have to
wait, is refused, and copies between host and device for which it waits are noted. Prints what was
found in which case, as JSON.

In a process of its own, since torch can be given one such device, and only once.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

import lightning_dear
from lightning_dear.collectives.gloo import PairwiseCollectives
from lightning_dear.collectives.nccl import NativeCollectives
from lightning_dear.collectives.streams import Streams
from lightning_dear.collectives.two_hops import NativeTwoHopCollectives
from lightning_dear.collectives.work import Collectives
from lightning_dear.collectives.world import World
from lightning_dear.compression import CODECS, Compressor, OkTopk, resolve_compressor
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.optimizers import tensorwise
from lightning_dear.planning import ThresholdFusion
from lightning_dear.telemetry.clock import HostClock
from lightning_dear.torch_modes import Onlooker
from tests.distributed.strict import Strict

NAME = "fakecuda"
WORLD_SIZE = 2
NUM_STEPS = 2
_FOUND = {
    torch.ops.aten.allclose.default: True,
    torch.ops.aten.equal.default: False,
    torch.ops.aten._local_scalar_dense.default: 0,
}
"""What is found where optimizers are tried: right results, and that a step changes something."""
_SET_UP = ("_find_padding", "start_anew")
"""Functions that copy from the host where a plan begins."""
IS_POSSIBLE = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
"""Whether torch takes a device that is written in Python; since 2.13."""


class FakeDevice(Onlooker, FakeTensorMode):
    """A context in which tensors on the device are fake, and those on the CPU are real.

    Attributes:
        is_tried: Whether the host may look at tensors: before the training, when optimizers are
            tried.
        is_steady: Whether nothing is set up any more.
        copies: Who has made the host wait for a copy in the training, innermost first; without
            what sets up.
    """

    is_tried = True
    is_steady = False

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.copies: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        values = [*tree_leaves(args), *tree_leaves(kwargs)]
        if not any(map(_is_there, values)):
            return func(*args, **kwargs)
        if self.is_tried and func in _FOUND:
            return _FOUND[func]
        if _waits_for_copy(func, args, kwargs):
            if func is torch.ops.aten.copy_.default and not _is_there(args[0]):
                raise DataDependentOutputException("a copy to the host")
            if not self.is_tried:
                self._note_copy(_frames(traceback.extract_stack()))
        if any(map(_is_real, values)):
            args, kwargs = tree_map(self._from_host, (args, kwargs))
        return self.dispatch(func, types, args, kwargs)

    def _note_copy(self, frames: str) -> None:
        if self.is_steady or not any(f":{name}:" in frames for name in _SET_UP):
            self.copies.append(frames)

    def _from_host(self, value: Any) -> Any:
        return self.from_tensor(value) if _is_real(value) else value


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, FakeTensor)


def _waits_for_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether it copies between host and device, and the host waits: CUDA drains the stream."""
    if func is torch.ops.aten.copy_.default:
        other, goes_on = args[1], (*args, False)[2]
    elif func is torch.ops.aten._to_copy.default:
        other, goes_on = kwargs.get("device"), False
    else:
        return False
    is_across = other is not None and _is_there(args[0]) != _is_there(other)
    return is_across and not kwargs.get("non_blocking", goes_on)


def _frames(stack: traceback.StackSummary) -> str:
    """The package's three innermost."""
    package = str(Path(lightning_dear.__file__).parent)
    ours = [frame for frame in reversed(stack) if frame.filename.startswith(package)]
    return " < ".join(
        f"{frame.filename.removeprefix(package)[1:]}:{frame.name}:{frame.lineno}"
        for frame in ours[:3]
    )


def _is_there(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == NAME
    return isinstance(value, FakeTensor)


def address_of(tensor: FakeTensor) -> int:
    """Stands for `data_ptr`: another one for each place in each memory."""
    start = tensor.untyped_storage()._cdata << 32
    return start + tensor.storage_offset() * tensor.element_size()


class OnDevice(TorchFunctionMode):
    """A context in which what is made of Python's numbers may be the device's."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if func is torch.tensor and device is not None and torch.device(device).type == NAME:
            return func(*args, **{**kwargs, "device": "cpu"}).to(device)
        return func(*args, **kwargs)


class Module(backend_registration._DummyBackendModule):
    """What stands for torch.cuda."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Which autocast may use."""
        return [torch.float16, torch.bfloat16]


class Calls:
    """Torch's own, over a process group that sends nothing; all ranks say what this one says."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_gather_object(self, object_list: list[Any], obj: Any, *, group: Any) -> None:
        """See torch.distributed."""
        object_list[:] = [obj] * len(object_list)

    @contextmanager
    def _coalescing_manager(self, group: Any, async_ops: bool) -> Iterator[Any]:
        """Launches each collective by itself: torch's fake tensors know no other launch."""
        yield SimpleNamespace(wait=lambda: None)


class LaterStreams(Streams):
    """Where numbers are read once they are there, which here are none."""

    def read_later(self, numbers: Tensor) -> Callable[[], list[int]]:
        """See `Streams`."""
        return lambda: [0] * numbers.numel()


@dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
        codec: What encodes.
        gather: What is gathered.
        decouple: Whether there is anything to gather.
        optimizer: Name of its class.
        dtype: Of the parameters.
        clips: Whether gradients are clipped.
        has_unused: Whether a layer is not used.
        is_alone: Whether there is one rank.
        has_hosts: Whether there are two hosts of two, which exchange in two hops.
    """

    codec: Compressor | None = None
    gather: str = "gradients"
    decouple: bool = True
    optimizer: str = "SGD"
    dtype: torch.dtype = torch.float32
    clips: bool = False
    has_unused: bool = False
    is_alone: bool = False
    has_hosts: bool = False

    def collectives(self) -> Collectives:
        """What sends."""
        if self.is_alone:
            return PairwiseCollectives(None, None, None, streams=LaterStreams(torch.device(NAME)))
        common = Strict(Calls()), LaterStreams(torch.device(NAME))
        within, across = (dist.new_group(ranks) for ranks in ([0, 1], [0, 2]))
        if not self.has_hosts:
            return NativeCollectives(within, within, within, World(0, WORLD_SIZE), *common)
        groups = [within, across] * 2 + [dist.group.WORLD] * 3
        world = World(0, 2 * WORLD_SIZE, (0, 0, 2, 2))
        return NativeTwoHopCollectives(*groups, world, *common)

    def run(self, device: FakeDevice) -> None:
        """Some steps. Raises where anybody asks for a number that is on `device`."""
        layers = [nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 8)]
        model = nn.Sequential(*layers, *([nn.Linear(8, 8)] if self.has_unused else []))
        model.to(NAME, self.dtype)
        kinds: Any = {"foreach": True} if self.optimizer == "AdamW" else {}
        optimizer: Any = getattr(torch.optim, self.optimizer)(model.parameters(), lr=0.1, **kinds)
        options = ExchangeOptions(self.gather, decouple=self.decouple, compressor=self.codec)
        fusion = ThresholdFusion(bucket_cap_mb=0.04, first_bucket_cap_mb=0.005)
        pipeline = Pipeline(
            model, [optimizer], self.collectives(), fusion, options=options, clock=HostClock()
        )
        device.is_tried = False
        for step in range(NUM_STEPS):
            device.is_steady = step > 0
            with pipeline.forward():
                output: Tensor = torch.empty(16, 64, device=NAME, dtype=self.dtype)
                for layer in model[:3]:
                    output = layer(output)
                loss = output.float().sum()
            optimizer.zero_grad()
            with pipeline.backward():
                loss.backward()
            if self.clips:
                pipeline.parts[0].mean.clip_by_norm(1.0)
            optimizer.step()
        # What ends a training may wait.
        device.is_tried = True
        pipeline.detach()


def coded(name: str, **options: Any) -> Case:
    """With a compressor."""
    codec = OkTopk(mode="static", density=0.05) if name == "oktopk" else resolve_compressor(name)
    return Case(codec, **options)


# Mostly with gathered gradients: for parameters an optimizer is tried first, which takes seconds.
CASES = {
    "dense": Case(gather="parameters"),
    "16_bits": Case(gather="parameters", dtype=torch.bfloat16, optimizer="AdamW", clips=True),
    "gathered_int8": coded("int8", gather="parameters"),
    "gradients": Case(),
    "clipping": Case(clips=True),
    "all_reduced": Case(decouple=False),
    "unused": Case(has_unused=True),
    "hosts": Case(gather="parameters", has_hosts=True),
    "hosts_int8": coded("int8", has_hosts=True),
    "one_rank": Case(is_alone=True),
    "one_rank_int8": coded("int8", is_alone=True),
    **{name: coded(name) for name in (*CODECS, "powersgd", "oktopk")},
}


def waits(case: Case) -> list[str]:
    """Who has made the host wait by copies, and who was refused a number, innermost first."""
    device = FakeDevice()
    try:
        with OnDevice(), device:
            case.run(device)
    except Exception as error:
        frames = _frames(traceback.extract_tb(error.__traceback__))
        first = str(error).splitlines()[0] if str(error) else ""
        return [*device.copies, f"{frames}: {type(error).__name__}: {first[:200]}"]
    return device.copies


def main() -> None:
    """Runs all cases."""
    backend: Any = backend_registration
    backend._setup_privateuseone_for_python_backend(NAME, Module())
    FakeTensor.data_ptr = address_of  # type: ignore[method-assign]
    # Parameters without memory are no class of their own.
    tensorwise.UninitializedParameter = FakeTensor  # type: ignore[attr-defined]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2 * WORLD_SIZE)
    names = sys.argv[1:] or CASES
    json.dump({name: waits(CASES[name]) for name in names}, sys.stdout)
