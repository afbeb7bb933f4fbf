"""A plan at work (its buffers, exchange, round and gatherer), and the recording it is made from."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim

from lightning_dear.bucket import FlatBuffers, Piece
from lightning_dear.collectives.launch_log import NORM_TAG
from lightning_dear.collectives.work import Collectives
from lightning_dear.compression import Codec
from lightning_dear.engine import gradient_collector, parameter_gatherer, read_order
from lightning_dear.engine.bucket_round import BucketRound, of_any_rank
from lightning_dear.engine.trained_parameters import TrainedParameters
from lightning_dear.exchange import Exchange
from lightning_dear.exchange.compressed_bucket import figures_of
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.optimizers.pieces import SteppedPieces
from lightning_dear.planning import BucketPlan, TensorSpec
from lightning_dear.planning.plan import MAX_BUCKETS, check_plan


@dataclass(frozen=True, eq=False)
class ActivePlan:
    """Everything that one plan of one optimizer needs, until the next plan or the end.

    `PlanLifecycle` makes it. A step uses `collector`, `round`, `expose_gradients` (if the user asks
    for mean gradients) and `gatherer`, in this order.

    Attributes:
        plan: The plan, equal on all ranks.
        flat: Buffers of its buckets. The parameters are views of them.
        collector: Copies gradients into buckets.
        round: Reduces full buckets to the means of their owners' shards.
        gatherer: Gathers stepped parameters (or mean gradients), and makes reads of parameters
            wait.
        exchange: Launches the messages of buckets in the reduce half and in the gather half.
    """

    plan: BucketPlan
    flat: FlatBuffers
    collector: gradient_collector.GradientCollector
    round: BucketRound
    gatherer: parameter_gatherer.ParameterGatherer
    exchange: Exchange

    def encoding_figures(self) -> dict[str, Tensor | float]:
        """Figures of the compressor, by name. Empty without a compressor.

        Local. Does not block, except for the device if `OkTopk(mode="static")` has counts there.

        - "compression_ratio": bytes of both halves without a compressor, over bytes with it. A
          sparse all-reduce sends another number of bytes in each step; its ratio is the usual one.
        - "residual_norm": 2-norm of what this rank's encoding has left out so far. With error
          feedback at a rate, residuals are divided by that rate. In sparse all-reduces values that
          were sent do not count, although their owners may return some. Missing if the compressor
          keeps no residuals.
        - "lag": 2-norm of the difference between this rank's shards and their replicas, over the
          2-norm of the shards. Only buckets that are not being gathered count. Missing if replicas
          equal their shards, since the compressor encodes no differences of parameters.
        - Sparse all-reduces: also the figures of their last step, see `figures_of`.
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
        """Norm of the whole mean gradient, to which each rank adds its pieces. Collective, blocks.

        Equal on all ranks bit by bit, since every rank adds in rank order. It is the norm that
        `torch.nn.utils.clip_grad_norm_` computes, except for the order of summation.

        Args:
            pieces: This rank's pieces, with mean gradients in `.grad` of their `parameter`.
            norm_type: p of the p-norm. `inf` means the largest absolute value.

        Returns:
            A scalar. 0 if no rank has a gradient.

        Raises:
            ValueError: If `norm_type` is 0 or -inf, which are no norms.
        """
        if norm_type in (0, -math.inf):
            raise ValueError(f"norm_type must not be 0 or -inf, got {norm_type}. Use 2, 1 or inf.")
        collectives, like = self.exchange.collectives, self.flat.buckets[0].shard
        num_ranks, rank = collectives.world.size, collectives.world.rank
        # All ranks have the pieces of all-reduced buckets. Each piece is counted by one rank only.
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
        collectives.launch_all_gather(parts, NORM_TAG).wait()
        total = parts.max() if math.isinf(norm_type) else parts.sum().pow(1.0 / norm_type)
        return total.to(like.dtype.to_real())

    def expose_gradients(self) -> None:
        """Puts the whole mean gradient of each parameter into its `.grad`. Collective, blocks.

        `.grad` becomes None if no rank had a gradient for the parameter. Afterwards changes to
        `.grad` count: the next `conceal_gradients` reads it, or the next round after another
        backward.
        """
        buckets = self.flat.buckets
        for bucket in buckets:
            if bucket.role.has_master:
                bucket.gradients[bucket.own].copy_(bucket.mean)
        works = [self.exchange.launch_gather_gradients(bucket) for bucket in buckets]
        with self.round.waiting("whole gradients"):
            for work in works:
                work.wait()
        self.show_gradients()

    def show_gradients(self) -> None:
        """Puts views of `Bucket.gradients` into `.grad`, whose values it does not change. Local.

        To be called while these buffers hold the whole mean, such as after `expose_gradients`. Does
        nothing for parameters without a gradient buffer (world size 1 without a compressor).
        """
        self.round.has_means = False
        for used, placement in zip(self.round.used, self.flat.placements, strict=True):
            if placement.gradient is not None:
                placement.parameter.grad = placement.gradient.detach() if used else None

    @torch.no_grad()
    def conceal_gradients(self) -> None:
        """Takes exposed gradients back from `.grad`, with the user's changes. Collective, blocks.

        Afterwards `.grad` is None. A parameter counts as used if any rank had a `.grad` for it. If
        some ranks had none, those ranks keep the mean that was exposed.
        """
        self.round.has_means = True
        collectives, placements = self.exchange.collectives, self.flat.placements
        # A maximum over ranks, since a hook may have cleared a `.grad` on some ranks only.
        used = of_any_rank([one.parameter.grad is not None for one in placements], collectives)
        for index, placement in enumerate(placements):
            gradient, home = placement.parameter.grad, placement.gradient
            is_used = bool(used[index]) and (home is not None or gradient is not None)
            self.round.used[index] = is_used
            if home is None:
                continue
            if gradient is not None and gradient.data_ptr() != home.data_ptr():
                home.copy_(gradient)
            placement.parameter.grad = None
        for bucket in self.flat.buckets:
            bucket.adopt_gradients()
        self.exchange.look_again()
        self.exchange.note_used(self.round.used, keeps=False)

    @torch.no_grad()
    def sync_replicas(self) -> None:
        """Makes lagging replicas equal to their owners' shards. Collective, blocks.

        Replicas lag behind if the compressor encodes differences of parameters (`Role.lags`). Does
        nothing for other buckets. No bucket may be pending.
        """
        for bucket in self.flat.buckets:
            self.exchange.sync(bucket)

    def unscale(self, unscale: Callable[[optim.Optimizer], None], shards: SteppedPieces) -> None:
        """Calls a GradScaler's `unscale_` on this rank's pieces. Collective, blocks.

        If any rank has inf or nan in its pieces, the scalers of all ranks find inf, so that all
        ranks skip the step.

        Args:
            unscale: Divides the gradients of an optimizer by the loss scale, and looks for inf and
                nan in them.
            shards: This rank's pieces, whose gradients are mutated.
        """
        like = self.flat.buckets[0].shard
        overflow = torch.zeros(1, dtype=torch.uint8, device=like.device)
        if gradients := shards.gradients:
            overflow.copy_(~torch.isfinite(_norms(gradients, math.inf)).all())
        self.exchange.collectives.launch_max(overflow).wait()
        # A scaler reads nothing but gradients, and raises without any. The gradient of this extra
        # tensor is inf if any rank has found inf or nan.
        vote = torch.zeros(1, dtype=like.dtype.to_real(), device=like.device)
        vote.grad = torch.where(overflow.bool(), math.inf, 0.0).to(vote.dtype)
        with shards.on_shards(vote):
            unscale(shards.optimizer)

    def release(self) -> Sequence[tuple[nn.Parameter, Tensor | None]]:
        """Removes forward pre-hooks and gates, and ends the round's thread. Local.

        Returns:
            The parameters that are still views of `flat`, each with its `Placement.former`. The
            user has replaced the `data` of the others.
        """
        self.gatherer.detach()
        self.round.release()
        return [(p.parameter, p.former) for p in self.flat.placements if not p.was_replaced()]


def _norms(gradients: Sequence[Tensor], norm_type: float) -> Tensor:
    return torch.stack(torch._foreach_norm(list(gradients), norm_type)).double()


def spec_of(
    index: int,
    name: str,
    tensor: Tensor,
    codec: Codec | None,
    first_use: int | None,
    ready: int | None,
) -> TensorSpec:
    """Returns a tensor as planners get it; see `TensorSpec`. Codec and dtype make its family."""
    family = f"{tensor.dtype}/{tensor.device.type}/{codec}"
    return TensorSpec(index, name, tensor.numel(), tensor.element_size(), family, first_use, ready)


@dataclass(frozen=True)
class Recording:
    """Results of the recorded step: from rank 0 and equal on all ranks, except `ungated`.

    Attributes:
        tensors: Each parameter as a planner sees it, with its place in the order of first reads and
            in the order of gradients.
        expected: For each parameter how often its gradient hook is called in one backward. 1 for a
            parameter without a gradient in the recorded step.
        ungated: This rank's own `ForwardRecorder.ungated`.
        codecs: For each parameter its codec. None means no codec. Tensors with different codecs
            never share a bucket.
        seed: Rank 0's `torch.initial_seed()`, for compressors that draw random numbers.
    """

    tensors: list[TensorSpec]
    expected: list[int]
    ungated: read_order.Ungated
    codecs: list[Codec | None]
    seed: int

    @classmethod
    def agreed(
        cls, trained: TrainedParameters, collectives: Collectives, options: ExchangeOptions
    ) -> "Recording":
        """Makes a recording with rank 0's order of reads and gradients, and rank 0's seed.

        Collective, blocks. Other ranks' orders are not used, except for `ungated`.
        """
        names, parameters, recorder = trained.names, trained.parameters, trained.recorder
        own = recorder.first_use, recorder.gradients, torch.initial_seed()
        first_use, gradients, seed = collectives.all_gather_object(own)[0]
        named = list(zip(names, parameters, strict=True))
        codecs = [options.codec_of(name, parameter.ndim) for name, parameter in named]
        # If the step had no gradient, backward is assumed to go through parameters in reverse.
        order = list(gradients) or range(len(parameters) - 1, -1, -1)
        ready = {index: turn for turn, index in enumerate(order)}
        specs = [
            spec_of(index, *one, codecs[index], first_use.get(index), ready.get(index))
            for index, one in enumerate(named)
        ]
        expected = [gradients.get(index, 1) for index in range(len(parameters))]
        return cls(specs, expected, recorder.ungated, codecs, seed)

    def check(self, plan: BucketPlan, collectives: Collectives) -> None:
        """Refuses a plan that differs between ranks or does not fit the model. Collective, blocks.

        Raises:
            ValueError: If ranks have different plans, or the plan is for another model or number of
                ranks, or has more than `MAX_BUCKETS` buckets, or leaves buckets uncompressed
                although the compressor votes.
        """
        if any(other != plan for other in collectives.all_gather_object(plan)):
            raise ValueError(
                f"Ranks have different plans: one is '{plan.name}'. Set one fusion= for all ranks."
            )
        if plan.world_size != collectives.world.size:
            raise ValueError(
                f"The plan '{plan.name}' is for {plan.world_size} ranks, and there are"
                f" {collectives.world.size}. Give fusion= or replan() a plan for as many ranks."
            )
        if len(plan.buckets) > MAX_BUCKETS:
            raise ValueError(
                f"The plan '{plan.name}' has {len(plan.buckets)} buckets, and at most {MAX_BUCKETS}"
                " are possible. Fuse more, such as with fusion='threshold'."
            )
        try:
            check_plan(plan, self.tensors)
        except (KeyError, ValueError) as error:
            raise ValueError(
                f"The plan '{plan.name}' is wrong or for another model. Give fusion= or replan() a"
                f" plan of this model, or use fusion='threshold'. {error}"
            ) from None
        for number in plan.uncompressed:
            compressor = self.codecs[plan.buckets[number].slices[0].tensor]
            if compressor is not None and compressor.votes:
                raise ValueError(
                    f"The plan '{plan.name}' leaves buckets uncompressed, and {compressor.name}"
                    " sends votes in others. Use another plan, such as of fusion='threshold'. Votes"
                    " would be stepped with the same learning rate as gradients."
                )


def audit(trained: TrainedParameters, active: ActivePlan) -> read_order.ReadMode:
    """A context in which reading a parameter that is still being gathered raises.

    It also sees reads that no gate sees, under `no_grad` and through `.data`. Without this context
    such reads return old values. Only `ParameterGatherer.check_was_complete` finds them then, and
    only if they take part in backward. Slow, since it checks the arguments of every torch function.

    Raises:
        RuntimeError: When such a parameter is read. Also when a parameter of `trained` is read on a
            CUDA stream that does not wait for gathers: no recorded forward has read parameters on
            it, and no step has run on it.
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
                " value. Use the streams of the first forward in every forward, or call"
                " strategy.complete_parameters() before the fork."
            )
        if any(number in active.gatherer.pending for number in buckets):
            raise RuntimeError(
                f"'{trained.names[index]}' was read while its new value was still being gathered."
                " Read it as an attribute of its module, or call strategy.complete_parameters()"
                " before. It was read through a reference that strategy='dear' cannot see."
            )

    return read_order.ReadMode(check)
