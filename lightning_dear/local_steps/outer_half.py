"""`OuterHalf`: counts the steps of each optimizer, and sends and merges its fragments."""

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Optimizer
from typing_extensions import override

from lightning_dear.checkpoint.files import CHECKPOINT_KEY
from lightning_dear.collectives.launch_log import hash_of
from lightning_dear.collectives.work import Collectives, reusable_groups, under_way
from lightning_dear.engine.module_tree import ModuleTree
from lightning_dear.engine.notes import Digest, OptionValues, check_options, options_of
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.engine.step import OptimizerPipeline
from lightning_dear.engine.training import Training
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.local_steps.fragment import Fragment, OuterOptions, Value, cut, num_modules
from lightning_dear.local_steps.schedule import LocalSteps, Schedule
from lightning_dear.optimizers.pieces import parameters_of
from lightning_dear.planning import FusionPlanner

log = logging.getLogger(__name__)

_OUTER = "outer_optimizer"
"""Key, under `CHECKPOINT_KEY`, of a dict: name of a parameter -> state of the outer optimizer."""


class OuterHalf:
    """Exchanges what replicas have learned: the outer half of a training with local steps.

    The inner half is a `Pipeline` on one rank. The caller calls `after_step` after each call of an
    optimizer's step, also one that a GradScaler skips, and `show_replica` before anything trains.
    Without parts there are no local steps, and no method does anything.

    Args:
        parts: One for each optimizer.

    Attributes:
        shows_anchor: Whether the module holds the anchor at present, and not the replica.
    """

    def __init__(self, parts: "Sequence[OptimizerRounds]" = ()) -> None:
        self._parts, self.shows_anchor = parts, False

    @classmethod
    def of(
        cls,
        pipeline: Pipeline,
        steps: LocalSteps,
        collectives: Collectives,
        options: ExchangeOptions,
        fusion: FusionPlanner,
        *,
        first_number: int = 0,
        averages_buffers: bool = True,
    ) -> "OuterHalf":
        """Makes the outer half of a pipeline. Collective. Blocks.

        Args:
            pipeline: The inner half. Its parameters are equal on all ranks, and become the anchor.
            steps: Options of local steps.
            collectives: Collectives over all ranks.
            options: Compressor of the messages.
            fusion: Planner of the fragments' buckets.
            first_number: Number of the first fragment, see `Fragment`.
            averages_buffers: Whether the anchor has the mean over ranks of the module's
                floating-point buffers (BatchNorm), exchanged once a round. Replicas keep their own.
                False means that the module keeps this rank's buffers everywhere.
        """
        # A later training must not use these process groups: messages may still be under way.
        reusable_groups.clear()
        seed = collectives.all_gather_object(torch.initial_seed())[0]
        waiting = pipeline.training.instruments.waiting
        shared = OuterOptions(collectives, options, fusion, steps.new_outer, waiting, seed)
        parts, number = list[OptimizerRounds](), first_number
        for part in pipeline.parts:
            parts.append(OptimizerRounds(pipeline.training, part, steps, shared, number))
            number += len(parts[-1].groups)
        tree = pipeline.training.tree
        if averages_buffers and _buffers_of(tree):
            plain = replace(shared, exchange=ExchangeOptions(), new_outer=partial(SGD, lr=1.0))
            replica = lambda: {name: [Value(one)] for name, one in _buffers_of(tree).items()}  # noqa: E731
            buffers = Fragment(replica, _buffers_of(tree), plain, number, keeps_own=True)
            parts[0].groups[-1].append(buffers)
        return cls(parts)

    @property
    def fragments(self) -> Iterator[Fragment]:
        """All fragments of all optimizers."""
        return chain.from_iterable(part.fragments for part in self._parts)

    def after_step(self, optimizer: Optimizer) -> None:
        """Counts a step of `optimizer`, and sends and merges what is due. Collective.

        Blocks only where a fragment is merged whose messages have not arrived. All ranks must call
        it equally often for each optimizer.
        """
        for part in self._parts:
            if part.optimizer is optimizer and not part.after_step():
                self._recover()

    def _recover(self) -> None:
        """Overwrites this rank's replica with the anchor, and forgets the inner state. Local."""
        log.warning(
            "Weights of this rank are not finite. It goes on from the anchor, with new optimizer"
            " states. All ranks leave this exchange out."
        )
        for part in self._parts:
            part.recover()

    def finish(self) -> None:
        """Ends local steps: ranks exchange all that is left, and hold the anchor. Collective.

        Blocks. What is under way is merged first. Then each fragment is sent and merged once more,
        unless it was merged just now without delay.
        """
        self.show_replica()
        for part in self._parts:
            part.flush()
        self.restore()
        for part in self._parts:
            part.finished_at = part.count

    def restore(self) -> None:
        """Overwrites the replica with the anchor of the last merges. Local. Idempotent."""
        self.show_replica()
        for part in self._parts:
            for fragment in part.fragments:
                fragment.restore()
            part.publish()

    def abandon(self) -> None:
        """After an exception: puts the anchor of the last merges into the module. Local.

        The process groups may not be used again.
        """
        for part in self._parts:
            part.collectives.discard()
            part.finished_at = part.count
        self.restore()

    def save(self, checkpoint: dict[str, Any], model: str = "") -> None:
        """Puts the outer optimizers' state of the last merges into a checkpoint dict. Mutates it.

        Collective. Blocks. Only on rank 0 the state has data.

        Args:
            checkpoint: The dict, which has an entry of `stamp`.
            model: Name of the model, if the checkpoint has several.
        """
        states = [fragment.state() for fragment in self.fragments if not fragment.keeps_own]
        if states:
            of_all = {name: own for state in states for name, own in state.items()}
            checkpoint[CHECKPOINT_KEY][_OUTER + model] = of_all

    def load(self, checkpoint: Mapping[str, Any], model: str = "") -> None:
        """Takes over the outer optimizers' state that a checkpoint dict has. Local.

        Names of parameters count, so that fragments may be others. What is missing stays as it is.
        """
        state = checkpoint.get(CHECKPOINT_KEY, {}).get(_OUTER + model, {})
        for fragment in self.fragments:
            fragment.load(state)

    def settle(self) -> None:
        """Merges what is under way, before other weights are loaded. Collective. Blocks."""
        self.show_replica()
        for part in self._parts:
            part.settle()

    @torch.no_grad()
    def restart(self) -> None:
        """Makes the module's values the anchor, equal on all ranks, and counts anew. Local."""
        for part in self._parts:
            part.part.prepare_state("local steps")
            part.count = 0
        for fragment in self.fragments:
            fragment.take_replica()

    def show_anchor(self) -> None:
        """Puts the anchor into the module, in place, until `show_replica`. Local. Idempotent."""
        if not self.shows_anchor:
            self._swap()

    def show_replica(self) -> None:
        """Puts the replica's values back into the module, bit by bit. Local. Idempotent."""
        if self.shows_anchor:
            self._swap()

    def _swap(self) -> None:
        self.shows_anchor = not self.shows_anchor
        for part in self._parts:
            part.part.prepare_state("local steps")
            for fragment in part.fragments:
                fragment.swap()
            part.publish()

    def detach(self) -> None:
        """Ends the training: puts the anchor of the last merges into the module. Local.

        Messages under way are not waited for. Warns if the replica has trained since `finish`.
        """
        self.restore()
        if any(part.count != part.finished_at for part in self._parts):
            warnings.warn(
                "Local steps end without an exchange: what this rank has trained since its last one"
                " is lost. Call strategy.finish_local_steps() on all ranks at the end.",
                stacklevel=2,
            )
        for part in self._parts:
            part.detach()
        self._parts = ()


def _buffers_of(tree: ModuleTree) -> dict[str, Tensor]:
    """Returns the module's floating-point buffers, by name."""
    return {name: one for name, one in tree.named_buffers() if one.is_floating_point()}


class OptimizerRounds:
    """Counts the steps of one optimizer, and sends and merges its fragments.

    Args:
        training: What all optimizers of the inner half share. Its signal hears of wishes to stop.
        part: The optimizer's part of the inner half.
        steps: Options of local steps.
        shared: What all fragments share.
        number: Number of the first fragment.

    Attributes:
        part: Same as the argument.
        optimizer: The user's optimizer.
        schedule: Which fragment is sent and merged after which step.
        groups: Fragments, by the number that the schedule gives them. Those of one number are sent
            and merged together. Empty where the optimizer has no parameter in a fragment.
        collectives: Collectives over all ranks.
        count: Steps since replicas were equal.
        finished_at: `count` when `OuterHalf.finish` was called last; to be assigned to.
    """

    def __init__(
        self,
        training: Training,
        part: OptimizerPipeline,
        steps: LocalSteps,
        shared: OuterOptions,
        number: int,
    ) -> None:
        self.part, self.optimizer, self.count, self.finished_at = part, part.optimizer, 0, 0
        self.collectives, self._signal = shared.collectives, training.signal
        module, held = training.module, parameters_of(part.optimizer)
        self.schedule: Schedule = steps.schedule(num_modules(module, held))
        fragments = steps.fragments if isinstance(steps.fragments, Sequence) else None
        self._seen: object = None
        self._values: Mapping[Parameter, Sequence[Value]] = {}
        notes = lambda outer: [RoundDigest(shared.collectives, self, outer)]  # noqa: E731
        self.groups: list[list[Fragment]] = [
            [Fragment(partial(self._replica, named), named, shared, number + turn, notes)]
            if named
            else []
            for turn, named in enumerate(cut(module, held, fragments or self.schedule.fragments))
        ]

    def _replica(self, named: Mapping[str, Parameter]) -> Mapping[str, Sequence[Value]]:
        """Returns the replica's values of the parameters `named`, by name; see `Replica`.

        Trained parameters lie in the buckets of the inner half. 16-bit ones have masters there.
        """
        active, stepper = self.part.plans.active, self.part.stepper
        if active is not self._seen:
            self._seen = active
            values: dict[Parameter, list[Value]] = {}
            for piece in () if active is None else stepper.pieces:
                parameter = stepper.shards.parameters[piece.tensor_index]
                values.setdefault(parameter, []).append(Value(piece.parameter, piece.start))
            self._values = values
        return {name: self._values.get(one) or [Value(one.data)] for name, one in named.items()}

    def publish(self) -> None:
        """Rounds masters to 16-bit parameters, and tells autograd that parameters changed."""
        active = self.part.plans.active
        for bucket in () if active is None else active.flat.buckets:
            bucket.publish()
        torch.autograd.graph.increment_version(parameters_of(self.optimizer))

    @property
    def fragments(self) -> Sequence[Fragment]:
        """All fragments of the optimizer."""
        return [*chain.from_iterable(self.groups)]

    @property
    def _under_way(self) -> list[Fragment]:
        """Fragments that were sent and are not merged, in the order of their sends."""
        sent = [(one.sent_at, one) for one in self.fragments if one.sent_at is not None]
        return [one for _, one in sorted(sent, key=lambda pair: pair[0])]

    def after_step(self) -> bool:
        """See `OuterHalf.after_step`. Returns whether this rank's values are finite, if sent."""
        self.count += 1
        is_finite, sent = True, self.schedule.sent_after(self.count)
        if sent is not None:
            for one in self.groups[sent]:
                one.stop.ask = self._signal.ask
                is_finite &= one.send(self.count)
        for one in self._under_way:
            self._advance(one)
        merged = self.schedule.merged_after(self.count)
        if merged is not None:
            for one in self.groups[merged]:
                self._merge(one, self.schedule.mix)
            self.publish()
        return is_finite

    def _advance(self, fragment: Fragment) -> None:
        """Lets the outer optimizer step, if that is due. On NCCL it is at fixed steps.

        NCCL matches messages by their order, which must be the same on all ranks.
        """
        assert fragment.sent_at is not None
        if self.collectives.matches_by_tag:
            fragment.advance()
        elif self.count - fragment.sent_at >= (self.schedule.delay + 1) // 2:
            fragment.step()

    def _merge(self, fragment: Fragment, mix: float) -> None:
        rank = fragment.merge(mix)
        if fragment.stop.heard:
            self._signal.hear([fragment.stop.heard])
        if rank is not None:
            log.warning(
                "An exchange is left out, since weights of rank %d were not finite: of '%s' and"
                " %d more parameters, step %d.",
                rank,
                fragment.names[0],
                len(fragment.names) - 1,
                self.count,
            )

    def detach(self) -> None:
        """Ends the threads of all fragments that are not under way."""
        if under_way_now := self._under_way:
            # gloo could receive no later message if the memory of these were freed.
            under_way.append((self.collectives, under_way_now))
        for fragment in self.fragments:
            if fragment.sent_at is None:
                fragment.release()

    def recover(self) -> None:
        """Overwrites the replica with the anchor, and forgets the inner optimizer's state."""
        for fragment in self.fragments:
            fragment.restore()
        self.publish()
        self.part.stepper.shards.state.clear()

    def settle(self) -> None:
        """Merges what is under way, in the order in which it was sent. Blocks."""
        for fragment in self._under_way:
            self._merge(fragment, self.schedule.mix)

    def flush(self) -> None:
        """Merges what is under way, then exchanges the other fragments once more. Blocks."""
        merged = self.schedule.merged_after(self.count) if self.schedule.delay == 0 else None
        self.settle()
        groups = (group for number, group in enumerate(self.groups) if number != merged)
        rest = [*chain.from_iterable(groups)]
        for fragment in rest:
            fragment.send(self.count)
        for fragment in rest:
            self._merge(fragment, 0.0)


class RoundDigest(Digest):
    """Compares between ranks how many steps they have made, and the options of both optimizers.

    Args:
        collectives: Collectives over all ranks.
        rounds: Counts the steps.
        outer: The outer optimizer.
    """

    def __init__(self, collectives: Collectives, rounds: OptimizerRounds, outer: Optimizer) -> None:
        super().__init__(lambda: collectives)
        self._rounds, self._outer = rounds, outer
        self._said: tuple[int, OptionValues, OptionValues] = (0, {}, {})

    @override
    def value(self) -> int:
        self._said = self._rounds.count, options_of(self._rounds.optimizer), options_of(self._outer)
        return hash_of(repr((self._said[0], *(sorted(one.items()) for one in self._said[1:]))))

    @override
    def explain(self, *, is_of_round_before: bool) -> None:
        reports = self._collectives().all_gather_object(self._said)
        counts = [count for count, *_ in reports]
        if len({*counts}) > 1:
            raise RuntimeError(
                f"Ranks have made different numbers of local steps: {counts}, by rank. Give all"
                " ranks equally many batches, and call each optimizer's step equally often."
            )
        name = type(self._rounds.optimizer).__name__
        check_options(f"step with different options: {name}", [inner for _, inner, _ in reports])
        check_options("have different outer optimizers", [outer for *_, outer in reports])
