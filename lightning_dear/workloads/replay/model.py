"""A model that takes the time a profile says, with the profile's parameters, and computes nothing.

What is real: parameters, gradients, hooks, optimizer, buckets, sockets. What is not: arithmetic,
which is replaced by waiting, as the host of an accelerator waits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

from lightning_dear.planning.fusion import MIB, runs_of
from lightning_dear.telemetry.device_work import charge_device_work
from lightning_dear.workloads.data import SplitDataModule
from lightning_dear.workloads.replay.profile import LayerProfile, ModelProfile, load_profile
from lightning_dear.workloads.replay.waiter import Waiter
from lightning_dear.workloads.schedules import OptimizerFactory, SchedulerFactory
from lightning_dear.workloads.task import Task

_NUM_BEGINNINGS = 1 << 20
_DEFAULT_OPTIMIZER = partial(SGD, lr=0.01)


class Zeros:
    """Gradients that no sum, mean, clipping or scaling changes.

    So they can be handed out again and again from the same memory. Each parameter has memory of its
    own, since autograd takes over a gradient that nobody else holds, and engines then write to it
    as `parameter.grad`.

    Attributes:
        batch: Number of the batch they are of.
    """

    def __init__(self) -> None:
        self.batch = 0
        self._made: dict[Any, list[Tensor]] = {}

    def make(self, layer: int, parameters: Sequence[Tensor]) -> list[Tensor]:
        """One gradient for each of `parameters`, on their device and in their dtype.

        Args:
            layer: The layer's number.
            parameters: Leaves that autograd will accumulate the gradients into.
        """
        key = layer, *((parameter.shape, parameter.dtype) for parameter in parameters)
        if key not in self._made:
            self._made[key] = [torch.zeros_like(p, requires_grad=False) for p in parameters]
        # Accumulating would add the memory behind `.grad` to itself; an expanded zero is only read.
        return [
            zeros.detach() if parameter.grad is None else zeros.new_zeros(()).expand_as(zeros)
            for zeros, parameter in zip(self._made[key], parameters, strict=True)
        ]


class Noise:
    """Gradients of random numbers, as good as new for every tensor, for the price of a copy.

    Standard normal, and the same for the same seed, batch and layer. All are parts of the same
    ones, beginning elsewhere.

    Args:
        seed: What they depend on.
        longest: Most numbers that are asked for at once.

    Attributes:
        batch: Number of the batch they are of.
    """

    def __init__(self, seed: int, longest: int) -> None:
        self.batch = 0
        self._seed = seed
        self._numel = longest + _NUM_BEGINNINGS
        self._drawn: Tensor | None = None

    def make(self, layer: int, parameters: Sequence[Tensor]) -> list[Tensor]:
        """See `Zeros.make`."""
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
        number: Its position in forward.
        profile: What it owns and how long it takes.
        waiter: Shared by all layers of a model.
        gradients: Makes its gradients.
    """

    def __init__(
        self, number: int, profile: LayerProfile, waiter: Waiter, gradients: Gradients
    ) -> None:
        super().__init__()
        self.number = number
        self.profile = profile
        self.waiter = waiter
        self.gradients = gradients
        usual = ("weight", "bias")
        for index, shape in enumerate(profile.shapes):
            name = usual[index] if index < len(usual) else f"parameter_{index}"
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        self._names = list(self._parameters)

    def forward(self, activation: Tensor) -> Tensor:
        """Read the parameters, wait, and pass the activation on; blocks for the layer's time."""
        # Reading blocks until the parameters are complete, and only then may the layer begin.
        parameters = [getattr(self, name) for name in self._names]
        for parameter in parameters:
            # What records the first use of a parameter sees torch's functions, not the one below.
            parameter.detach()
        apply: Any = _Replay.apply
        output: Tensor = apply(activation, self, *parameters)
        return output


class _Replay(torch.autograd.Function):
    """Identity on a small tensor that waits, and gives a layer's parameters gradients."""

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
        profile: What to replay.
        waiter: The pretended device.
        gradients: Makes the gradients of all layers.
    """

    def __init__(self, profile: ModelProfile, waiter: Waiter, gradients: Gradients) -> None:
        super().__init__()
        self.waiter, self.gradients = waiter, gradients
        self.layers = nn.ModuleList(
            ReplayLayer(number, layer, waiter, gradients)
            for number, layer in enumerate(profile.layers)
        )

    def forward(self, number: int = 0) -> Tensor:
        """Return a scalar loss of zero after the forward's time; blocks for it.

        Args:
            number: The batch's; seeded gradients differ from number to number.
        """
        self.gradients.batch = number
        self.waiter.begin()
        activation = torch.zeros(())
        for layer in self.layers:
            activation = layer(activation)
        return activation


class ReplayModel(Task):
    """Replays a profile under any strategy, on the CPU.

    Args:
        profile: One of `PROFILES`, a `.json` file, or a profile.
        scale: Divides the bytes of every tensor; times stay. A link must be slowed down alike.
        compute_s: Seconds of one forward and backward, in the ratio that the profile has; None
            keeps the profile's.
        optimizer: Builds the optimizer from a list of parameters; None is SGD without momentum.
        scheduler: Builds a schedule from the optimizer and `total_steps`, or None.
        shard_unit_mb: Under FSDP2 only: consecutive layers are gathered together once they have
            this many MiB before scaling; 0 gathers each by itself.
        gradient_seed: None for gradients of zero, which cost no time; else random ones, which
            depend on the seed and the batch alone: for tests of an engine, and where the numbers
            themselves say what is sent.
        encoding_scale: How many times as long as here encoding takes on the device, at least 1:
            `scale` for the whole model's on such a core. It is counted in CPU time, as of a core
            that nobody shares, so that waits for one are part of it, and passes before what was
            encoded is sent.
        quick_batches: Batches at first that take no time, and charge for nothing: where what is
            measured begins when residuals have grown.

    Attributes:
        profile: What is replayed, scaled and with the time it takes.
        shard_unit_mb: As given, after scaling.
    """

    shard_options = {"reshard_after_forward": False}

    def __init__(
        self,
        profile: str | ModelProfile,
        *,
        scale: float = 1.0,
        compute_s: float | None = None,
        optimizer: OptimizerFactory | None = None,
        scheduler: SchedulerFactory | None = None,
        shard_unit_mb: float = 25.0,
        gradient_seed: int | None = None,
        encoding_scale: float = 1.0,
        quick_batches: int = 0,
    ) -> None:
        if not isinstance(quick_batches, int) or quick_batches < 0:
            raise ValueError(f"quick_batches must be an integer >= 0, got {quick_batches!r}.")
        if not 1 <= encoding_scale < math.inf:
            raise ValueError(f"encoding_scale must be 1 or more, got {encoding_scale}.")
        if not 0 <= shard_unit_mb < math.inf:
            raise ValueError(f"shard_unit_mb must be 0 or more, got {shard_unit_mb}.")
        if not isinstance(profile, ModelProfile):
            profile = load_profile(profile)
        if compute_s is not None:
            profile = profile.with_compute(compute_s)
        profile = profile.scaled(scale)
        longest = max(math.prod(shape) for layer in profile.layers for shape in layer.shapes)
        gradients = Zeros() if gradient_seed is None else Noise(gradient_seed, longest)
        waiter = Waiter(encoding_scale - 1, quick_batches)
        net = ReplayNet(profile, waiter, gradients)
        super().__init__(net, optimizer or _DEFAULT_OPTIMIZER, scheduler)
        self._waiter = waiter
        self.profile = profile
        self.shard_unit_mb = shard_unit_mb / scale

    @property
    def late_s(self) -> float:
        """Seconds so far by which steps' last layers ended late; see `Waiter`.

        They are part of the measured step times; where they are many, the machine is too small.
        """
        return self._waiter.late_s

    @override
    def units(self) -> list[list[nn.Module]]:
        """Consecutive layers, which stay whole until backward: each is gathered once a step."""
        layers = self.net.get_submodule("layers").children()
        least_bytes = self.shard_unit_mb * MIB
        return runs_of(layers, lambda layer: sum(p.nbytes for p in layer.parameters()), least_bytes)

    @override
    def setup(self, stage: str) -> None:
        """Refuse devices that would not wait when the host does."""
        device = self.trainer.strategy.root_device
        if device.type != "cpu":
            raise ValueError(
                f"A replay waits on the host and cannot run on {device.type}: set"
                " accelerator='cpu'."
            )

    @override
    def teardown(self, stage: str) -> None:
        """Whatever trains next in this process is charged for nothing."""
        charge_device_work(0.0)

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Wait for the time of the forward and return a loss whose backward waits as well."""
        return self.loss(batch)

    @override
    def loss(self, batch: Any) -> Tensor:
        """Wait for the time of the forward; batches that are not of `ReplayData` have number 0."""
        is_number = isinstance(batch, Tensor) and batch.dtype == torch.int64
        loss: Tensor = self.net(int(batch.flatten()[0]) if is_number else 0)
        return loss

    @override
    def evaluate(self, batch: Any, stage: str) -> None:
        """Wait for the time of the forward; nothing is logged."""
        self.loss(batch)


@dataclass(kw_only=True, eq=False, repr=False)
class ReplayData(SplitDataModule):
    """Batches of running numbers; no two ranks get the same one in a step.

    Args:
        num_steps: Training batches for each rank. Validation and test have one each.
        batch_size: Numbers per batch and process: what a batch counts for where samples per second
            are reported. The times of a replay do not depend on it.
    """

    num_steps: int = 1000
    batch_size: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, got {self.num_steps}.")

    @override
    def setup(self, stage: str) -> None:
        """Count the numbers anew, for the trainer's ranks; called on every process."""
        self.train_set, self.val_set, self.test_set = self.load()

    @override
    def load(self) -> Sequence[range]:
        """Return as many numbers as the trainer's ranks read."""
        per_batch = self.batch_size * (self.trainer.world_size if self.trainer is not None else 1)
        return range(self.num_steps * per_batch), range(per_batch), range(per_batch)
