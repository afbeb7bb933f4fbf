"""`OuterHalf`: exchanges what replicas have learned, and puts the anchor into the module."""

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from itertools import chain
from operator import or_, truediv
from typing import Any

import torch
from torch import Tensor, optim

from lightning_dear.checkpoint.files import CHECKPOINT_KEY, LOCAL_KEY
from lightning_dear.checkpoint.optimizer_state import CLASS, ShardedState, check_class
from lightning_dear.collectives.work import Collectives, reusable_groups, uncounted
from lightning_dear.engine import module_tree, notes, trained_parameters
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.local_steps import local_state, rounds, schedule
from lightning_dear.local_steps.fragment import Fragment, OuterOptions, Value, norm_of
from lightning_dear.planning import FusionPlanner

log = logging.getLogger(__name__)

_OUTER = "outer_optimizer"
"""Key, under `CHECKPOINT_KEY`, of a dict: name of a parameter -> state of the outer optimizer; and
under `CLASS` the name of its class."""


class OuterHalf:
    """Exchanges what replicas have learned: the outer half of a training with local steps.

    The inner half is a `Pipeline` on one rank. The caller calls `after_step` after each call of an
    optimizer's step, also one that a GradScaler skips, and `show_replica` before anything trains.
    Made without arguments it does nothing: there are no local steps.

    Args:
        parts: One for each optimizer.

    Attributes:
        signal: Carries each rank's wish to stop, which travels with each exchange. None without
            local steps.
        shows_anchor: Whether the module holds the anchor at present, and not the replica.
    """

    def __init__(self, parts: Sequence[rounds.OptimizerRounds] = ()) -> None:
        self._parts, self.shows_anchor = parts, False
        self.signal = parts[0].shared.signal if parts else None
        # Sum of the bits of the anchor that the module holds. None means that it is not known.
        self._shown: int | None = None
        # Whether ranks have different parameters that no optimizer holds. None means not compared.
        self._differs: bool | None = None

    @classmethod
    def of(
        cls,
        pipeline: Pipeline,
        steps: schedule.LocalSteps,
        collectives: Collectives,
        options: ExchangeOptions,
        fusion: FusionPlanner,
        *,
        averages_buffers: bool = True,
    ) -> "OuterHalf":
        """Makes the outer half of a pipeline. Collective. Blocks.

        Args:
            pipeline: The inner half. Its parameters are equal on all ranks, and become the anchor.
            steps: Options of local steps.
            collectives: Collectives over all ranks.
            options: Compressor of the messages.
            fusion: Planner of the fragments' buckets.
            averages_buffers: Whether the anchor has the mean over ranks of floating-point buffers
                that `state_dict` has (BatchNorm), exchanged once a round. Replicas keep their own.
                False means that the module keeps this rank's buffers everywhere.
        """
        # A later training must not use these process groups: messages may still be under way.
        reusable_groups.clear()
        seed, training = _agreed_seed(steps, collectives), pipeline.training
        instruments, tree = training.instruments, training.tree
        instruments.follow(collectives)
        how = collectives, options, fusion, notes.Signal(), seed
        shared, watch = OuterOptions(training, steps, *how), rounds.ExchangeWatch(instruments)
        # Fragments have numbers of their own, see `Fragment`.
        parts, number = list[rounds.OptimizerRounds](), pipeline.parts[0].plans.number
        for part in pipeline.parts:
            parts.append(rounds.OptimizerRounds(part, shared, number, watch))
            number += len(parts[-1].groups)
        saved = training.module.state_dict().keys()
        buffers = {name: one for name, one in _buffers_of(tree).items() if name in saved}
        if averages_buffers and buffers:
            mean = replace(steps, outer=partial(optim.SGD, lr=1.0))
            plain = replace(shared, exchange=ExchangeOptions(), steps=mean)
            replica = lambda: {name: [Value(one)] for name, one in _buffers_of(tree).items()}  # noqa: E731
            parts[0].groups[-1].append(Fragment(replica, buffers, plain, number, keeps_own=True))
        schedules = [one.schedule for one in parts]
        instruments.exchange_steps = max(one.interval + one.delay for one in schedules)
        return cls(parts)

    @property
    def is_on(self) -> bool:
        """Whether there are local steps at present."""
        return bool(self._parts)

    def remarks(self, num_steps: float) -> Iterator[tuple[str, str]]:
        """Sentences for the user when a fit begins: for each optimizer one, and a warning or "".

        Args:
            num_steps: Number of steps of the fit. `inf` or -1 means that it is not known.
        """
        for part in self._parts:
            yield part.remark, part.warning(num_steps)

    @property
    def fragments(self) -> Iterator[Fragment]:
        """All fragments of all optimizers."""
        return chain.from_iterable(part.fragments for part in self._parts)

    def after_step(self, optimizer: optim.Optimizer) -> None:
        """Counts a step of `optimizer`, and sends and merges what is due. Collective.

        Blocks only where a fragment is merged whose messages have not arrived. All ranks must call
        it equally often for each optimizer.
        """
        for part in self._parts:
            if part.optimizer is optimizer and not part.after_step():
                self._recover()
        if self._differs is None and self._parts and self._parts[0].watch.num_merged:
            self._compare_unheld()

    def _compare_unheld(self) -> None:
        """Warns of parameters that are not exchanged, if ranks differ in them. Collective. Blocks.

        Those are the module's parameters that no optimizer holds.
        """
        training = self._parts[0].shared.training
        unheld = trained_parameters.unheld_parameters(training.module, training.optimizers)
        own = {name: _sum_of_bits(one) for name, one in unheld}
        collectives = self._parts[0].collectives
        with uncounted(collectives):
            said = collectives.all_gather_object(own)
        names = [name for name in own if any(one.get(name) != own[name] for one in said)]
        self._differs = bool(names)
        if names:
            warnings.warn(
                f"Ranks have different values of '{names[0]}' ({len(names)} such parameters), which"
                " no optimizer of the training holds. Local steps do not exchange them, and files"
                " have rank 0's values. Return their optimizer from configure_optimizers; or make"
                " them buffers, as a moving average may be: the anchor has the mean of buffers.",
                stacklevel=2,
            )

    @torch.no_grad()
    def figures(self, *, on_all_ranks: bool = False, with_drift: bool = True) -> dict[str, float]:
        """Returns figures of the last exchange, by name. Local. Empty without local steps.

        All but "drift" are left out before the first merge. On a CUDA device, blocks until the
        device has reached the last wait, and with drift until it has reached this call.

        - "exchanges": number of fragments merged so far, by all optimizers.
        - "exchange_exposed_s": seconds that training has waited for messages, from the merge before
          the last one to the last one. On a CUDA device they are timed as in
          `Instruments.statistics`.
        - "exchange_wire_bytes": bytes of payload that this rank has sent in the same time.
        - "pseudo_gradient_norm": 2-norm of the mean pseudo-gradient g of an exchange that was
          merged before the last one: its norms travel with a later exchange.
        - "agreement": of the same, |g| / mean over ranks of |g_r|, where g_r is the rank's own.
          That is the mean cosine between g and g_r, each weighted by |g_r|. It is 1 if all
          replicas have moved alike, and 1 / sqrt(world size) if they have nothing in common.
        - "drift": 2-norm of replica - anchor over that of the anchor, now, on this rank.
        - With a compressor, "compression_ratio" and "residual_norm", see
          `ActivePlan.encoding_figures`.

        Args:
            on_all_ranks: Whether all ranks ask, after the same step. From the first such call on
                norms are measured, and travel with the flags of exchanges: 16 bytes for each rank.
                Without, "pseudo_gradient_norm" and "agreement" are left out.
            with_drift: Whether "drift" is wanted, which reads all parameters, and figures of the
                compressor, which read all residuals.
        """
        if not self._parts:
            return {}
        watch = self._parts[0].watch
        watch.sums_norms |= on_all_ranks
        now = {"drift": self._drift(), **self._encoding()} if with_drift else {}
        return {**watch.figures(), **now}

    def _drift(self) -> float:
        pairs = [pair for one in self.fragments if not one.keeps_own for pair in one.values]
        moved = norm_of(anchor - value for anchor, value in pairs)
        # While the module holds the anchor, the two have changed places.
        return moved / (norm_of(pair[self.shows_anchor] for pair in pairs) or 1.0)

    def _encoding(self) -> dict[str, float]:
        sent = [one for one in self.fragments if one.round.exchange.coded]
        if not sent:
            return {}
        numels = [sum(map(Tensor.numel, one.anchor.values())) for one in sent]
        coded = [one.round.exchange for one in sent]
        ratios = [one.compression_ratio for one in coded]
        found = {"compression_ratio": sum(numels) / sum(map(truediv, numels, ratios))}
        norms = [norm for one in coded for state in one.coded for norm in state.residual_norms]
        return {**found, "residual_norm": norm_of(norms)} if norms else found

    def _recover(self) -> None:
        """Overwrites this rank's replica with the anchor, and forgets the inner state. Local."""
        log.warning(
            "Weights of this rank are not finite. It goes on from the anchor, with new optimizer"
            " states. All ranks leave this exchange out."
        )
        self.restore()
        for part in self._parts:
            part.forget_inner()

    def finish(self) -> None:
        """Ends local steps: ranks exchange all that is left, and hold the anchor. Collective.

        Blocks. What is under way is merged first. Then each fragment is sent and merged once more,
        unless it was merged just now without delay. Does nothing if nothing was trained since.
        """
        if all(part.is_finished for part in self._parts):
            return
        self.show_replica()
        for part in self._parts:
            part.flush()
            part.is_finished = True
        if self._parts and not self._differs:
            self._compare_unheld()
        self.restore()

    def restore(self) -> None:
        """Overwrites the replica with the anchor of the last merges. Local. Idempotent."""
        self._shown = None
        self.show_replica()
        for part in self._parts:
            for fragment in part.fragments:
                fragment.write_replica(fragment.anchor)
            part.publish()

    def abandon(self) -> None:
        """After an exception: puts the anchor of the last merges into the module. Local.

        The process groups may not be used again.
        """
        for part in self._parts:
            part.collectives.discard()
            part.is_finished = True
        self.restore()

    # Lightning may save under inference mode (NCCL), and tensors made there refuse later updates.
    @torch.inference_mode(False)
    def save(
        self, checkpoint: dict[str, Any], model: str = "", of_rank: Mapping[str, Any] | None = None
    ) -> str:
        """Puts the outer optimizers' state of the last merges into a checkpoint dict. Mutates it.

        Collective. Blocks. Only on rank 0 the state has data. For a folder each rank has a part.
        The module then holds the anchor afterwards.

        Args:
            checkpoint: The dict, which has an entry of `stamp`.
            model: Name of the model, if the checkpoint has several.
            of_rank: For a folder: what else this rank has of its own. None means a file.

        Returns:
            Sentence for the user, or "".
        """
        if not self._parts:
            return ""
        own, kind = checkpoint[CHECKPOINT_KEY], {CLASS: type(self._outer).__name__}
        if of_rank is None:
            states = [fragment.state() for fragment in self.fragments if not fragment.keeps_own]
            own[_OUTER + model] = reduce(or_, states) | kind
            return ""
        self.show_anchor()
        # Outer optimizers step in the order of the sends, on all ranks.
        in_order = sorted(self.fragments, key=lambda fragment: fragment.sent_at or 0)
        spread_of = {fragment: fragment.spread() for fragment in in_order}
        spread = [spread_of[fragment] for fragment in self.fragments]
        last = {name: its for state, _ in spread for name, its in state.items()} | kind
        chunks = chain.from_iterable(state.chunks for state, _ in spread)
        own[_OUTER + model] = ShardedState(last, chunks, ())
        world = self._parts[0].collectives.world
        inner = local_state.keep_ranks_apart(checkpoint, world.rank)
        if not inner or not self._parts[0].shared.steps.local_state:
            return ""
        what = self._parts, [state for _, state in spread], inner, self._buffers, of_rank
        own[LOCAL_KEY], nbytes = local_state.gathered_state(*what)
        return (
            f"The folder has {nbytes / 2**20:.3g} MiB of state that each of {world.size} ranks has"
            " of its own. LocalSteps(local_state=False) leaves it out."
        )

    @staticmethod
    def is_in(saved: Mapping[str, Any], model: str) -> bool:
        """Whether this package's part of a checkpoint has what `save` has put there."""
        return _OUTER + model in saved

    def load(self, saved: Mapping[str, Any], model: str = "") -> tuple[str, Mapping[str, Any]]:
        """Takes over what a checkpoint has of local steps. Collective. Blocks.

        The module must hold its weights, and inner optimizers its states. If it has local state
        that fits, each rank goes on from its own replica, and from the exchanges that were under
        way. If not, all ranks begin at the anchor, with the outer optimizers' state. That is found
        by names of parameters, so that fragments may be others. What is missing stays as it is.

        Args:
            saved: What the checkpoint has under `CHECKPOINT_KEY`.
            model: Name of the model, if the checkpoint has several.

        Returns:
            Sentence for the user, or "", and what `save` got as `of_rank`, or nothing.

        Raises:
            ValueError: If the saved outer optimizer is of another class, see `check_class`.
        """
        for part in self._parts:
            for fragment in part.fragments if part.take_masters() else ():
                fragment.take_replica()
        if not self._parts or not self.is_in(saved, model):
            return "", {}
        check_class(self._outer, saved[_OUTER + model], ", the outer optimizer")
        for fragment in self.fragments:
            fragment.load(saved[_OUTER + model])
        local = saved.get(LOCAL_KEY)
        own = None if local is None else local_state.resume(local, self._parts, self._buffers)
        if own is not None:
            return "", own
        why = "no local state for as many ranks" if local is None else "other fragments or weights"
        return f"All ranks go on from the anchor, not bit for bit: the checkpoint has {why}.", {}

    @property
    def _buffers(self) -> Mapping[str, Tensor]:
        return dict(self._parts[0].shared.training.tree.named_buffers())

    @property
    def _outer(self) -> optim.Optimizer:
        """The outer optimizer of the first fragment: all have the same class and options."""
        return next(one for one in self.fragments if not one.keeps_own).stepper.optimizer

    def settle(self) -> None:
        """Merges what is under way, before other weights are loaded. Collective. Blocks."""
        self.show_replica()
        for part in self._parts:
            part.settle()

    @torch.no_grad()
    def restart(self) -> None:
        """Copies the module's values into the anchor, and counts steps from 0. Local.

        All ranks must have equal values: nothing is sent.
        """
        for part in self._parts:
            part.begin()
            part.is_finished = True

    def show_anchor(self) -> None:
        """Puts the anchor into the module, in place, until `show_replica`. Local. Idempotent."""
        if not self.shows_anchor:
            self._swap()
            self._shown = self._bits()

    def show_replica(self) -> None:
        """Puts the replica's values back into the module, bit by bit. Local. Idempotent.

        Raises:
            RuntimeError: If weights were written meanwhile. Only once.
        """
        if not self.shows_anchor:
            return
        shown, self._shown = self._shown, None
        if shown not in (None, self._bits()):
            raise RuntimeError(
                "Weights were written while the module had the anchor of local steps, in a hook of"
                " validation or between an evaluation and the next forward in training. They would"
                " be lost. Write in on_train_batch_start, or load them on all ranks through"
                " strategy.load_model_state_dict or fabric.load."
            )
        self._swap()

    def _bits(self) -> int:
        held = chain.from_iterable(part.part.parameters for part in self._parts)
        return sum(map(_sum_of_bits, held))

    def _swap(self) -> None:
        self.shows_anchor = not self.shows_anchor
        for part in self._parts:
            part.part.prepare_state("local steps")
            for fragment in part.fragments:
                fragment.swap()
            part.publish()

    def detach(self) -> None:
        """Ends the training. Local. Messages under way are not waited for.

        If the replica has trained since `finish`, warns, and puts the anchor of the last merges
        into the module. Otherwise the module stays as it is, also if it was written to since.
        """
        if not all(part.is_finished for part in self._parts):
            self.restore()
            self.warn_of_lost_steps()
        for part in self._parts:
            part.detach()
        self._parts, self.shows_anchor = (), False

    def warn_of_lost_steps(self) -> None:
        """Warns if the replica has trained since `finish`. Local."""
        if not all(part.is_finished for part in self._parts):
            warnings.warn(
                "Local steps end without an exchange: what this rank has trained since its last one"
                " is lost. Call strategy.finish_local_steps() on all ranks at the end.",
                stacklevel=2,
            )


def _agreed_seed(steps: schedule.LocalSteps, collectives: Collectives) -> int:
    """Compares the options between ranks, and returns rank 0's seed. Collective. Blocks.

    Raises:
        ValueError: If ranks have different options of local steps.
    """
    # Options of the outer optimizer are compared in each exchange.
    said = collectives.all_gather_object((repr(replace(steps, outer=None)), torch.initial_seed()))
    for rank, (options, _) in enumerate(said):
        if options != said[0][0]:
            raise ValueError(
                f"Ranks have different local steps: {said[0][0]} on rank 0 and {options} on rank"
                f" {rank}. Set the same on all ranks: they exchange after the same steps."
            )
    return said[0][1]


def _sum_of_bits(tensor: Tensor) -> int:
    """Returns a number that nearly always differs for other values. Blocks until it is known.

    A hash would copy the tensor to the CPU.
    """
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.itemsize, torch.uint8)
    return int(tensor.detach().reshape(-1).view(whole).sum(dtype=torch.int64))


def _buffers_of(tree: module_tree.ModuleTree) -> dict[str, Tensor]:
    """Returns the module's floating-point buffers, by name."""
    return {name: one for name, one in tree.named_buffers() if one.is_floating_point()}
