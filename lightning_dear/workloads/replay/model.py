"""A model with the parameters and the times of a profile, which waits instead of computing.

Parameters, gradients, hooks, optimizer, buckets and sockets are real. Only the arithmetic of
forward and backward is replaced by waiting, as the host waits for an accelerator.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_dear.planning.fusion import MIB, runs_of
from lightning_dear.telemetry.device_work import charge_device_work
from lightning_dear.workloads import data, schedules, task
from lightning_dear.workloads.replay.profile import LayerProfile, ModelProfile, load_profile
from lightning_dear.workloads.replay.waiter import Waiter

_NUM_BEGINNINGS = 1 << 20


class Zeros:
    """Gradients of zero, which no sum, mean, clipping or scaling changes.

    So the same memory serves every step. Each parameter has its own memory, because autograd may
    use a gradient tensor as `parameter.grad`, and engines then write to it.

    Attributes:
        batch: Number of the present batch. Gradients of zero do not depend on it.
    """

    def __init__(self) -> None:
        self.batch = 0
        self._made: dict[Any, list[Tensor]] = {}

    def make(self, layer: int, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return a gradient for each of `parameters`, on its device and in its dtype.

        Args:
            layer: Number of the layer.
            parameters: Leaves into which autograd will accumulate the gradients.
        """
        key = layer, *((parameter.shape, parameter.dtype) for parameter in parameters)
        if key not in self._made:
            self._made[key] = [torch.zeros_like(p, requires_grad=False) for p in parameters]
        # If `.grad` exists, it is this memory, and autograd would add it to itself. So it gets an
        # expanded scalar zero, which is only read.
        return [
            zeros.detach() if parameter.grad is None else zeros.new_zeros(()).expand_as(zeros)
            for zeros, parameter in zip(self._made[key], parameters, strict=True)
        ]


class Noise:
    """Gradients of standard normal values, for the price of a copy.

    One long tensor is drawn once. Every gradient is a slice of it that begins at a random element,
    which depends on the seed, the batch and the layer only.

    Args:
        seed: Seed of all random values.
        longest: Number of elements of the largest parameter.

    Attributes:
        batch: Number of the present batch.
    """

    def __init__(self, seed: int, longest: int) -> None:
        self.batch = 0
        self._seed = seed
        self._numel = longest + _NUM_BEGINNINGS
        self._drawn: Tensor | None = None

    def make(self, layer: int, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Same as `Zeros.make`, with random values."""
        if self._drawn is None:
            generator = torch.Generator().manual_seed(self._seed)
            self._drawn = torch.randn(self._numel, generator=generator)
        generator = torch.Generator().manual_seed(hash((self._seed, self.batch, layer)) % 2**63)
        begins = torch.randint(_NUM_BEGINNINGS, (len(parameters),), generator=generator).tolist()
        return [
            self._drawn[begin : begin + one.numel()].view(one.shape).to(one, copy=True)
            for begin, one in zip(begins, parameters, strict=True)
        ]


Gradients = Zeros | Noise


class ReplayLayer(nn.Module):
    """One layer of a profile.

    Args:
        number: Position of the layer in forward.
        profile: Shapes of its parameters, and its times.
        waiter: Pretended device, shared by all layers of a model.
        gradients: Makes the gradients of its parameters.
    """

    def __init__(
        self, number: int, profile: LayerProfile, waiter: Waiter, gradients: Gradients
    ) -> None:
        super().__init__()
        self.number = number
        self.profile = profile
        self.waiter = waiter
        self.gradients = gradients
        for index, shape in enumerate(profile.shapes):
            name = {0: "weight", 1: "bias"}.get(index, f"parameter_{index}")
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        self._names = list(self._parameters)

    def forward(self, activation: Tensor) -> Tensor:
        """Read the parameters, and return the activation. Blocks for the layer's time."""
        # Reading blocks at the gate until the parameters have been gathered; then the layer begins.
        parameters = [getattr(self, name) for name in self._names]
        for parameter in parameters:
            # The first use of a parameter is recorded from torch functions. `_Replay.apply` below
            # is not seen as one, so `detach` is called.
            parameter.detach()
        output: Tensor = _Replay.apply(activation, self, *parameters)  # type: ignore[no-untyped-call]
        return output


class _Replay(torch.autograd.Function):
    """Identity of the activation. Both passes wait; backward makes the layer's gradients."""

    @staticmethod
    @override
    def forward(ctx: Any, activation: Tensor, layer: ReplayLayer, *parameters: Tensor) -> Tensor:
        ctx.layer, ctx.parameters = layer, parameters
        layer.waiter.wait(layer.profile.forward_s)
        return activation.clone()

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> Any:
        layer: ReplayLayer = ctx.layer
        gradients = layer.gradients.make(layer.number, ctx.parameters)
        layer.waiter.wait(layer.profile.backward_s)
        return grads[0], None, *gradients


class ReplayNet(nn.Module):
    """The layers of a profile, one after the other.

    Args:
        profile: Profile to replay.
        waiter: Pretended device.
        gradients: Makes the gradients of all layers.
    """

    def __init__(self, profile: ModelProfile, waiter: Waiter, gradients: Gradients) -> None:
        super().__init__()
        self.waiter, self.gradients = waiter, gradients
        layers = (ReplayLayer(at, one, waiter, gradients) for at, one in enumerate(profile.layers))
        self.layers = nn.Sequential(*layers)

    def forward(self, number: int = 0) -> Tensor:
        """Return a scalar loss of zero. Blocks for the time of the forward.

        Args:
            number: Number of the batch, on which random gradients depend.
        """
        self.gradients.batch = number
        self.waiter.begin()
        activation: Tensor = self.layers(torch.zeros(()))
        return activation


class ReplayModel(task.Task):
    """Replays a profile under any strategy, on the CPU.

    Args:
        profile: One of `PROFILES`, a `.json` file, or a profile.
        scale: Divisor of the size of every tensor; times stay. The links must be slowed down by the
            same factor.
        compute_s: Seconds of forward and backward together; their ratio stays the profile's. None
            means the profile's seconds.
        optimizer: Builds the optimizer from a list of parameters. None means SGD without momentum.
        scheduler: Builds a schedule from the optimizer and `total_steps`. None means a constant
            learning rate.
        shard_unit_mb: Used by FSDP2 only: consecutive layers are gathered together until they have
            this many MiB before scaling. 0 means that each layer is gathered by itself.
        gradient_seed: Seed of random gradients, which depend on it and on the batch only. They are
            for tests, and for compressors whose messages depend on values. None means gradients of
            zero, which cost no time.
        encoding_scale: Factor on the CPU time of encoding and decoding, at least 1. If it equals
            `scale`, encoding takes as long as that of the unscaled model would on the same core.
            The extra time is slept before the encoded message is sent.
        quick_batches: Number of first batches that do not wait and whose encoding takes no extra
            time, so that residuals have grown when the measured steps begin.

    Attributes:
        profile: The profile after scaling, with the seconds that it takes.
        shard_unit_mb: The argument divided by `scale`.
    """

    shard_options = {"reshard_after_forward": False}

    def __init__(
        self,
        profile: str | ModelProfile,
        *,
        scale: float = 1.0,
        compute_s: float | None = None,
        optimizer: schedules.OptimizerFactory | None = None,
        scheduler: schedules.SchedulerFactory | None = None,
        shard_unit_mb: float = 25.0,
        gradient_seed: int | None = None,
        encoding_scale: float = 1.0,
        quick_batches: int = 0,
    ) -> None:
        if not isinstance(quick_batches, int) or quick_batches < 0:
            raise ValueError(f"quick_batches={quick_batches!r} is not valid. Give an integer >= 0.")
        if not 1 <= encoding_scale < math.inf:
            raise ValueError(f"encoding_scale={encoding_scale} is not valid. Choose 1 or more.")
        if not 0 <= shard_unit_mb < math.inf:
            raise ValueError(f"shard_unit_mb={shard_unit_mb} is not valid. Choose 0 or more.")
        if not isinstance(profile, ModelProfile):
            profile = load_profile(profile)
        if compute_s is not None:
            profile = profile.with_compute(compute_s)
        profile = profile.scaled(scale)
        longest = max(math.prod(shape) for layer in profile.layers for shape in layer.shapes)
        gradients = Zeros() if gradient_seed is None else Noise(gradient_seed, longest)
        waiter = Waiter(encoding_scale - 1, quick_batches)
        net = ReplayNet(profile, waiter, gradients)
        super().__init__(net, optimizer or partial(torch.optim.SGD, lr=0.01), scheduler)
        self._waiter = waiter
        self.profile = profile
        self.shard_unit_mb = shard_unit_mb / scale

    @property
    def late_s(self) -> float:
        """Seconds so far by which the last layers of steps ended late; see `Waiter.late_s`.

        They are part of the measured step times. If they are many, the machine is too small.
        """
        return self._waiter.late_s

    @override
    def units(self) -> list[list[nn.Module]]:
        """Return the units that FSDP2 gathers together: consecutive layers of `shard_unit_mb`."""
        layers = self.net.get_submodule("layers").children()
        least_bytes = self.shard_unit_mb * MIB
        return runs_of(layers, lambda layer: sum(p.nbytes for p in layer.parameters()), least_bytes)

    @override
    def setup(self, stage: str) -> None:
        """Raise ValueError on a device other than the CPU, which would not wait with the host."""
        if (device := self.trainer.strategy.root_device).type != "cpu":
            raise ValueError(f"A replay runs on CPUs, not on {device.type}. Set accelerator='cpu'.")

    @override
    def teardown(self, stage: str) -> None:
        """Reset the extra time of encoding, so that it does not slow the next training."""
        charge_device_work(0.0)

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Wait for the time of the forward, and return a loss whose backward waits, too."""
        return self.loss(batch)

    @override
    def loss(self, batch: Any) -> Tensor:
        """Wait for the time of the forward. Batches that `ReplayData` did not make count as 0."""
        is_number = isinstance(batch, Tensor) and batch.dtype == torch.int64
        loss: Tensor = self.net(int(batch.flatten()[0]) if is_number else 0)
        return loss

    @override
    def evaluate(self, batch: Any, stage: str) -> None:
        """Wait for the time of the forward; nothing is logged."""
        self.loss(batch)


@dataclass(kw_only=True, eq=False, repr=False)
class ReplayData(data.SplitDataModule):
    """Batches of consecutive integers; in a step no two ranks get the same one.

    Args:
        num_steps: Number of training batches for each rank. Validation and test have one each.
        batch_size: Number of integers in a batch of one rank. It only counts in reported samples
            per second. The times of a replay do not depend on it.
    """

    num_steps: int = 1000
    batch_size: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_steps < 1:
            raise ValueError(f"num_steps={self.num_steps} is not valid. Choose 1 or more.")

    @override
    def setup(self, stage: str) -> None:
        """Make the ranges again for the trainer's number of ranks; called on every rank."""
        self.train_set, self.val_set, self.test_set = self.load()

    @override
    def load(self) -> Sequence[range]:
        """Return ranges with as many integers as all ranks of the trainer read."""
        per_batch = self.batch_size * (self.trainer.world_size if self.trainer is not None else 1)
        return range(self.num_steps * per_batch), range(per_batch), range(per_batch)
