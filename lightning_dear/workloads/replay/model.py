"""A model that takes the time a profile says, with the profile's parameters, and computes nothing.

What is real: parameters, gradients, hooks, optimizer, buckets, sockets. What is not: arithmetic,
which is replaced by waiting, as the host of an accelerator waits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

from lightning_dear.telemetry.device_work import charge_device_work
from lightning_dear.workloads.replay.profile import LayerProfile, ModelProfile, load_profile
from lightning_dear.workloads.replay.sharding import shard_layers
from lightning_dear.workloads.replay.waiter import Waiter
from lightning_dear.workloads.schedules import OptimizerFactory, SchedulerFactory
from lightning_dear.workloads.task import Task

_MIB = 1024 * 1024
_NUM_BEGINNINGS = 1 << 20
_DEFAULT_OPTIMIZER = partial(SGD, lr=0.01)


class Noise:
    """Random numbers that are as good as new for every tensor, and cost no more than a copy.

    All are parts of the same ones, beginning elsewhere.

    Args:
        seed: What they depend on.
        longest: Most numbers that are asked for at once.
    """

    def __init__(self, seed: int, longest: int) -> None:
        self._seed = seed
        self._numel = longest + _NUM_BEGINNINGS
        self._drawn: Tensor | None = None

    def draw(self, batch: int, layer: int, parameters: Sequence[Tensor]) -> list[Tensor]:
        """New tensors like `parameters`, of standard normal numbers: the same for the same names.

        Args:
            batch: The batch's number.
            layer: The layer's number.
            parameters: What they are to be like.
        """
        if self._drawn is None:
            generator = torch.Generator().manual_seed(self._seed)
            self._drawn = torch.randn(self._numel, generator=generator)
        generator = torch.Generator().manual_seed(hash((self._seed, batch, layer)) % 2**63)
        begins = torch.randint(_NUM_BEGINNINGS, (len(parameters),), generator=generator).tolist()
        return [
            self._drawn[begin : begin + one.numel()].view(one.shape).to(one, copy=True)
            for begin, one in zip(begins, parameters, strict=True)
        ]


class Gradients:
    """Makes the gradients of a layer's parameters without arithmetic.

    Zeros: no sum, mean, clipping or scaling changes them, so that they can be handed out again and
    again from the same memory. Each parameter has memory of its own, since autograd takes over a
    gradient that nobody else holds, and engines then write to it as `parameter.grad`.

    Args:
        noise: None for zeros; else where gradients come from, which are copied.
    """

    def __init__(self, noise: Noise | None = None) -> None:
        self._noise = noise
        self._zeros: list[Tensor] = []
        self.batch = 0

    def make(self, layer: int, parameters: Sequence[Tensor]) -> list[Tensor]:
        """One gradient for each of `parameters`, on their device and in their dtype.

        Args:
            layer: The layer's number.
            parameters: Leaves that autograd will accumulate the gradients into.
        """
        if self._noise is not None:
            return self._noise.draw(self.batch, layer, parameters)
        if not all(map(_is_like, self._zeros, parameters)) or not self._zeros:
            self._zeros = [torch.zeros_like(p, requires_grad=False) for p in parameters]
        # Accumulating would add the memory behind `.grad` to itself; an expanded zero is only read.
        return [
            zeros.detach() if parameter.grad is None else zeros.new_zeros(()).expand_as(zeros)
            for zeros, parameter in zip(self._zeros, parameters, strict=True)
        ]


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


class ReplayNet(nn.Module):
    """The layers of a profile, one after the other.

    Args:
        profile: What to replay.
        gradient_seed: See `ReplayModel`.
        encoding_scale: See `ReplayModel`.
        quick_batches: See `ReplayModel`.
    """

    def __init__(
        self,
        profile: ModelProfile,
        gradient_seed: int | None = None,
        encoding_scale: float = 1.0,
        quick_batches: int = 0,
    ) -> None:
        super().__init__()
        self.waiter = Waiter(charge=encoding_scale - 1, num_quick=quick_batches)
        longest = max(math.prod(shape) for layer in profile.layers for shape in layer.shapes)
        noise = None if gradient_seed is None else Noise(gradient_seed, longest)
        self._gradients = [Gradients(noise) for _ in profile.layers]
        self.layers = nn.ModuleList(
            ReplayLayer(number, layer, self.waiter, gradients)
            for number, (layer, gradients) in enumerate(
                zip(profile.layers, self._gradients, strict=True)
            )
        )

    def forward(self, number: int = 0) -> Tensor:
        """Return a scalar loss of zero after the forward's time; blocks for it.

        Args:
            number: The batch's; seeded gradients differ from number to number.
        """
        for gradients in self._gradients:
            gradients.batch = number
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
        net = ReplayNet(profile, gradient_seed, encoding_scale, quick_batches)
        super().__init__(net, optimizer or _DEFAULT_OPTIMIZER, scheduler)
        self._waiter = net.waiter
        self.profile = profile
        self.shard_unit_mb = shard_unit_mb / scale

    @property
    def late_s(self) -> float:
        """Seconds so far by which steps' last layers ended late; see `Waiter`.

        They are part of the measured step times; where they are many, the machine is too small.
        """
        return self._waiter.late_s

    @override
    def configure_model(self) -> None:
        """Shard units of layers, then the whole, where the strategy provides a device mesh."""
        if self.device_mesh is not None:
            mesh = self.device_mesh["data_parallel"]
            layers = list(self.net.get_submodule("layers").children())
            shard_layers(self.net, layers, self.shard_unit_mb * _MIB, mesh)

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

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Wait for the time of the forward and return a loss whose backward waits as well."""
        loss: Tensor = self.net(_number_of(batch))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Wait for the time of the forward."""
        self.net(_number_of(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Wait for the time of the forward."""
        self.net(_number_of(batch))


def _number_of(batch: Any) -> int:
    """The batch's number where it is one of `ReplayData`; any other data counts as 0."""
    is_number = isinstance(batch, Tensor) and batch.dtype == torch.int64
    return int(batch.flatten()[0]) if is_number else 0


def _is_like(zeros: Tensor, parameter: Tensor) -> bool:
    return (
        zeros.shape == parameter.shape
        and zeros.dtype == parameter.dtype
        and zeros.device == parameter.device
    )
