"""A plan at work: its buffers and both halves of the exchange, from the recorded step on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_dear.bucket import FlatBuffers, Piece
from lightning_dear.collectives.work import Collectives
from lightning_dear.compression import Codec
from lightning_dear.engine.bucket_round import BucketRound
from lightning_dear.engine.gradient_collector import GradientCollector
from lightning_dear.engine.parameter_gatherer import ParameterGatherer
from lightning_dear.engine.read_order import ReadMode
from lightning_dear.engine.trained_parameters import TrainedParameters
from lightning_dear.engine.whole_gradients import WholeGradients
from lightning_dear.exchange import Exchange
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.exchange.sparse.figures import figures_of
from lightning_dear.optimizers.sharded import SteppedPieces
from lightning_dear.planning import BucketPlan, TensorSpec
from lightning_dear.planning.plan import MAX_BUCKETS, check_plan

_NORM_TAG = 1 << 19


@dataclass(frozen=True, eq=False)
class ActivePlan:
    """What exists between the recorded step and the end, or the next plan.

    Attributes:
        plan: Equal on all ranks.
        flat: Its buffers; the parameters are views of them.
        collector: Fills buckets with gradients.
        round: Brings full buckets to their owners.
        whole_gradients: Shows mean gradients in `.grad`, and takes them back.
        gatherer: Brings new parameters to all ranks.
        exchange: What moves buckets, both ways.
    """

    plan: BucketPlan
    flat: FlatBuffers
    collector: GradientCollector
    round: BucketRound
    whole_gradients: WholeGradients
    gatherer: ParameterGatherer
    exchange: Exchange

    def encoding_figures(self) -> dict[str, Tensor | float]:
        """What encoding saves and what it leaves over; empty without a codec.

        Local; waits only for the device, where counts of `OkTopk` in mode "static" are read.

        "compression_ratio": bytes of both halves without it, over those with it; of sparse
        all-reduces, whose messages differ from step to step, what is usual.
        "residual_norm": 2-norm of what this rank has still to send; with feedback at a rate, its
        residuals over the rate; of sparse all-reduces without what is on its way, of which a part
        may come back. "lag": 2-norm of how far parameters are behind this rank's shards, over that
        of the shards; of buckets that have arrived. Of sparse all-reduces also what `figures_of`
        says of their last step.
        """
        exchange = self.exchange
        if not exchange.coded:
            return {}
        figures: dict[str, Tensor | float] = {"compression_ratio": exchange.compression_ratio}
        if norms := [norm for coded in exchange.coded for norm in coded.residual_norms]:
            figures["residual_norm"] = torch.stack(norms).norm()
        if tallies := [one.tally for one in exchange.coded if one.tally and one.tally.num_wanted]:
            figures.update(figures_of(tallies, self.plan.world_size))
        lagging = [bucket for bucket in self.flat.buckets if bucket.role.lags]
        if arrived := [one for one in lagging if one.number not in self.gatherer.pending]:
            behind = [torch.dist(one.shard.float(), one.replica.float()) for one in arrived]
            whole = [torch.linalg.vector_norm(one.shard.float()) for one in arrived]
            figures["lag"] = torch.stack(behind).norm() / torch.stack(whole).norm()
        return figures

    @torch.no_grad()
    def global_norm(self, pieces: Sequence[Piece], norm_type: float) -> Tensor:
        """Norm of the whole gradient, from every rank's shard: one number from each. Collective.

        Equal on all ranks by the bit, since every rank adds in rank order. Differs from
        `torch.nn.utils.clip_grad_norm_`'s in the order of the summation alone.

        Args:
            pieces: This rank's; of those that several ranks have, one rank counts each.
            norm_type: p of the p-norm; `inf` for the largest absolute value.

        Returns:
            A scalar; 0 if there is no gradient anywhere.
        """
        collectives, like = self.exchange.collectives, self.flat.buckets[0].shard
        num_ranks, rank = collectives.world.size, collectives.world.rank
        # What all ranks have, one of them counts.
        gradients = [
            piece.parameter.grad
            for piece in pieces
            if piece.parameter.grad is not None
            and (not piece.role.is_all_reduced or piece.tensor_index % num_ranks == rank)
        ]
        parts = torch.zeros(num_ranks, dtype=torch.float64, device=like.device)
        if gradients:
            norms = _norms(gradients, norm_type)
            parts[rank] = norms.max() if math.isinf(norm_type) else norms.pow(norm_type).sum()
        collectives.launch_all_gather(parts, _NORM_TAG).wait()
        total = parts.max() if math.isinf(norm_type) else parts.sum().pow(1.0 / norm_type)
        return total.to(like.dtype)

    @torch.no_grad()
    def sync_replicas(self) -> None:
        """Gives all ranks the parameters that their owners step, none of which may be pending.

        Collective, blocks.
        """
        for bucket in self.flat.buckets:
            self.exchange.sync(bucket)

    def unscale(self, unscale: Callable[[Optimizer], None], shards: SteppedPieces) -> None:
        """Calls a GradScaler's `unscale_` on the shards; inf on one rank is inf on all. Collective.

        Args:
            unscale: Divides the optimizer's gradients and looks for inf and NaN in them.
            shards: Their gradients are mutated.
        """
        like = self.flat.buckets[0].shard
        overflow = torch.zeros(1, dtype=torch.uint8, device=like.device)
        if gradients := shards.gradients:
            overflow.copy_(~torch.isfinite(_norms(gradients, math.inf)).all())
        self.exchange.collectives.launch_max(overflow).wait()
        # The scaler looks at gradients only, and at least at one: this one brings it the vote.
        vote = torch.zeros(1, dtype=like.dtype, device=like.device)
        vote.grad = torch.where(overflow.bool(), math.inf, 0.0).to(like.dtype)
        with shards.on_shards(vote):
            unscale(shards.optimizer)

    def release(self) -> Sequence[Parameter]:
        """Removes hooks and gates; returns the parameters that are still views of its buffers."""
        self.gatherer.detach()
        self.round.release()
        return [one.parameter for one in self.flat.placements if not one.was_replaced()]


def _norms(gradients: Sequence[Tensor], norm_type: float) -> Tensor:
    return torch.stack(torch._foreach_norm(list(gradients), norm_type)).double()


@dataclass(frozen=True)
class Recording:
    """What rank 0 saw in the recorded step, the same on every rank, and what this rank saw.

    Attributes:
        tensors: What a planner needs to know.
        expected: How often each parameter's gradient is accumulated in one backward.
        ungated: See `ForwardRecorder`; this rank's own.
        codecs: What encodes each tensor row by row; tensors of several never share a bucket.
        seed: What torch's random numbers were last seeded with.
    """

    tensors: list[TensorSpec]
    expected: list[int]
    ungated: Mapping[int, Module | None]
    codecs: list[Codec | None]
    seed: int

    @classmethod
    def agreed(
        cls, trained: TrainedParameters, collectives: Collectives, options: ExchangeOptions
    ) -> Recording:
        """Takes rank 0's order of reads and gradients, and its seed, for everybody's.

        Collective, blocks.
        """
        names, parameters, recorder = trained.names, trained.parameters, trained.recorder
        own = recorder.first_use, recorder.gradients, torch.initial_seed()
        first_use, gradients, seed = collectives.all_gather_object(own)[0]
        named = list(zip(names, parameters, strict=True))
        codecs = [options.codec_of(name, parameter.ndim) for name, parameter in named]
        # Nothing may have been recorded.
        order = list(gradients) or range(len(parameters) - 1, -1, -1)
        ready = {index: place for place, index in enumerate(order)}
        specs = [
            TensorSpec(
                index=index,
                name=name,
                numel=parameter.numel(),
                itemsize=parameter.element_size(),
                family=f"{parameter.dtype}/{parameter.device.type}/{codecs[index]}",
                first_use=first_use.get(index),
                ready=ready.get(index),
            )
            for index, (name, parameter) in enumerate(named)
        ]
        expected = [gradients.get(index, 1) for index in range(len(parameters))]
        return cls(specs, expected, recorder.ungated, codecs, seed)

    def check(self, plan: BucketPlan, collectives: Collectives) -> None:
        """Refuses a plan that ranks do not share, that is not over what was recorded, or too fine.

        Collective, blocks.

        Raises:
            ValueError: Saying what differs.
        """
        if any(other != plan for other in collectives.all_gather_object(plan)):
            raise ValueError(f"Ranks were given other plans than '{plan.name}'; give all the same.")
        if plan.world_size != collectives.world.size:
            raise ValueError(
                f"The plan '{plan.name}' is for {plan.world_size} ranks, and there are"
                f" {collectives.world.size}; plan anew."
            )
        if len(plan.buckets) > MAX_BUCKETS:
            raise ValueError(
                f"The plan '{plan.name}' has {len(plan.buckets)} buckets, and at most {MAX_BUCKETS}"
                " are possible; fuse more, such as with fusion='threshold'."
            )
        try:
            check_plan(plan, self.tensors)
        except (KeyError, ValueError) as error:
            raise ValueError(
                f"The plan '{plan.name}' is broken, or for another model: {error}"
            ) from None
        for number in plan.uncompressed:
            compressor = self.codecs[plan.buckets[number].slices[0].tensor]
            if compressor is not None and compressor.votes:
                raise ValueError(
                    f"The plan '{plan.name}' leaves buckets uncompressed, and {compressor.name}"
                    " makes votes of the others: signs would be stepped with the same learning rate"
                    " as gradients. Plan anew, such as with fusion='threshold'."
                )


def audit(trained: TrainedParameters, active: ActivePlan) -> ReadMode:
    """A context in which reading a parameter that is still being gathered raises.

    Sees reads through references that no gate sees, also under `no_grad` and through `.data`,
    where the step's own guard (`ParameterGatherer.check_was_complete`) sees only reads that take
    part in backward. Slow: runs in front of every torch function.

    Raises:
        RuntimeError: At the read, naming the parameter.
    """
    index_of = {id(parameter): index for index, parameter in enumerate(trained.parameters)}

    def check(value: Any) -> None:
        index = index_of.get(id(value))
        if index is None:
            return
        buckets = active.flat.placements[index].buckets
        streams = active.exchange.collectives.streams
        if streams.current() not in streams.readers:
            raise RuntimeError(
                f"'{trained.names[index]}' was read on a CUDA stream that does not wait for its new"
                " value, as the first forward read nothing there. Use the same streams in every"
                " forward, or call strategy.complete_parameters() before the fork."
            )
        if any(number in active.gatherer.pending for number in buckets):
            raise RuntimeError(
                f"'{trained.names[index]}' was read while its new value was still being gathered,"
                " through a reference that strategy='dear' cannot see. Read it as an attribute of"
                " its module, or call strategy.complete_parameters() before reading it."
            )

    return ReadMode(check)
