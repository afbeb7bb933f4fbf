"""`OptimizerRounds`: counts the steps of one optimizer, and sends and merges its fragments."""

import logging
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor, autograd, nn, optim
from typing_extensions import override

from lightning_dear.collectives import launch_log, work
from lightning_dear.engine.notes import Digest, OptionValues, check_options, options_of
from lightning_dear.engine.step import OptimizerPipeline
from lightning_dear.local_steps.fragment import Fragment, OuterOptions, Value
from lightning_dear.local_steps.schedule import cut, num_modules
from lightning_dear.optimizers.masters import MASTER_KEY, differs
from lightning_dear.optimizers.pieces import parameters_of
from lightning_dear.telemetry.statistics import Instruments, StepStatistics

log = logging.getLogger(__name__)


@dataclass(eq=False)
class ExchangeWatch:
    """Figures of exchanges, for people who watch a training. All optimizers share one.

    Norms of pseudo-gradients are measured only if that is asked for. Their sums over ranks travel
    with the flags of the next exchange, so that they need no message of their own.

    Attributes:
        instruments: Measures waits and bytes.
        sums_norms: Whether norms are measured; to be assigned to, after the same step on all ranks.
        num_merged: Number of exchanges merged so far.
    """

    instruments: Instruments
    sums_norms: bool = False
    num_merged: int = 0

    def __post_init__(self) -> None:
        # What was counted since the last merge, and what was counted from the merge before to it.
        self._since = self._latest = StepStatistics(self.instruments.clock)
        self._norms: dict[str, float] = {}
        # Marks of a timeline's clock at which fragments that are under way were sent.
        self._began: dict[Fragment, Any] = {}
        # `Fragment.norms` of the last merge, until an exchange takes them along.
        self._untold = 0.0, 0.0

    @contextmanager
    def after_step(self) -> Iterator[None]:
        """Counts what the `with` block costs, which sends and merges after a step."""
        before = self.num_merged
        with self.instruments.after_step() as own:
            yield
        self._since.add(own)
        if self.num_merged > before:
            self._latest, self._since = self._since, StepStatistics(self.instruments.clock)

    def before_send(self, fragment: Fragment) -> None:
        """Lets the next exchange of `fragment` add up the norms of the last merge."""
        if self.instruments.timeline is not None:
            self._began[fragment] = self.instruments.clock.mark()
        if not fragment.keeps_own:
            fragment.sums.own = self._untold if self.sums_norms else ()
            self._untold = 0.0, 0.0

    def after_merge(self, fragment: Fragment) -> None:
        """Takes over what the exchange of `fragment` has measured, and which sums it brought."""
        timeline, began = self.instruments.timeline, self._began.pop(fragment, None)
        if timeline is not None and began is not None:
            name = "buffers" if fragment.keeps_own else f"fragment {fragment.number}"
            timeline.record("exchange", name, began, timeline.clock.mark())
        if not fragment.keeps_own:
            self.num_merged, self._untold = self.num_merged + 1, fragment.norms
            own, of_mean = fragment.sums.heard or (0.0, 0.0)
            if own:
                norm = math.sqrt(of_mean)
                self._norms = {"pseudo_gradient_norm": norm, "agreement": norm / own}

    def figures(self) -> dict[str, float]:
        """Returns the figures of the last exchange; see `OuterHalf.figures`."""
        latest = self._latest
        of_it = {"exchange_exposed_s": latest.exposed_s, "exchange_wire_bytes": latest.wire_bytes}
        return {"exchanges": self.num_merged, **of_it, **self._norms} if self.num_merged else {}


class OptimizerRounds:
    """Counts the steps of one optimizer, and sends and merges its fragments.

    Args:
        part: The optimizer's part of the inner half.
        shared: What all fragments share.
        number: Number of the first fragment.
        watch: Gets figures of the exchanges.

    Attributes:
        part: Same as the argument.
        shared: Same as the argument.
        watch: Same as the argument.
        optimizer: The user's optimizer.
        schedule: Which fragment is sent and merged after which step.
        groups: Fragments, by the number that the schedule gives them. Those of one number are sent
            and merged together. A group is empty if the optimizer has no parameter in its fragment.
        collectives: Collectives over all ranks.
        count: Steps since replicas were equal.
        is_finished: Whether nothing was trained since `OuterHalf.finish` or the start; to be
            assigned to.
    """

    def __init__(
        self, part: OptimizerPipeline, shared: OuterOptions, number: int, watch: ExchangeWatch
    ) -> None:
        self.part, self.optimizer, self.count, self.is_finished = part, part.optimizer, 0, True
        self.shared, self.collectives, self.watch = shared, shared.collectives, watch
        self._module, self._weights = shared.training.module, shared.training.weights
        self._number = number
        # This rank's samples so far: before the last `every` steps, and after each of them. The
        # last minus the first are the samples of a round.
        self._totals = deque([self._weights.total], maxlen=shared.steps.every + 1)
        held = parameters_of(part.optimizer)
        self.schedule = shared.steps.schedule(num_modules(self._module, held))
        self._seen: object = None
        self._values: Mapping[nn.Parameter, Sequence[Value]] = {}
        self._masters: Mapping[nn.Parameter, Tensor] = {}
        self.groups: list[list[Fragment]] = [[] for _ in range(self.schedule.fragments)]
        self._cut({})

    def _cut(self, anchor: Mapping[str, Tensor]) -> None:
        """Makes the fragments of the optimizer's present parameters.

        Args:
            anchor: Name -> value of the anchor, where it is not the parameter's own value.
        """
        self._held = parameters_of(self.optimizer)
        fragments = self.shared.steps.fragments or self.schedule.fragments
        if isinstance(fragments, int):
            # Modules may have gone since the schedule was made. Then the last fragments are empty.
            fragments = min(fragments, num_modules(self._module, self._held))
        notes = lambda outer: [StepsDigest(self), OptionsDigest(self, outer)]  # noqa: E731
        pieces = cut(self._module, self._held, fragments)
        for turn, group in enumerate(self.groups):
            kept = [one for one in group if one.keeps_own]
            if named := pieces[turn] if turn < len(pieces) else {}:
                first = {name: anchor.get(name, value) for name, value in named.items()}
                replica, number = partial(self._replica, named), self._number + turn
                kept.insert(0, Fragment(replica, first, self.shared, number, notes))
            self.groups[turn] = kept

    def _follow(self) -> bool:
        """Makes new fragments if the optimizer has other parameters than before. Blocks.

        What is under way is merged first. The anchor begins with rank 0's values of parameters that
        are new. Parameters that are gone keep the anchor's values.

        Returns:
            Whether it has.
        """
        if [*map(id, self._held)] == [*map(id, parameters_of(self.optimizer))]:
            return False
        self.settle()
        own = [one for one in self.fragments if not one.keeps_own]
        left = [(one, one.left_out()) for one in own]
        anchor = {name: value.clone() for one in own for name, value in one.anchor.items()}
        state = {name: its for one in own for name, its in one.state(on_all_ranks=True).items()}
        held = {*parameters_of(self.optimizer)}
        for name, parameter in self._module.named_parameters():
            if name in anchor and parameter not in held:
                parameter.data.copy_(anchor[name])
            elif name not in anchor and parameter in held:
                anchor[name] = parameter.detach().clone()
                self.collectives.launch_broadcast(anchor[name].view(-1), 0).wait()
        for fragment in own:
            fragment.round.release()
        self._cut(anchor)
        for fragment in self.fragments:
            fragment.load(state)
            fragment.inherit(left)
        return True

    @property
    def remark(self) -> str:
        """Sentence for the user that says what is exchanged when."""
        every, number, delay, mix = self.schedule
        return (
            f"Local steps: each of {number} fragments is exchanged every {every} steps, and merged"
            f" {delay} steps after it was sent (mix {mix:g})."
        )

    def warning(self, num_steps: float) -> str:
        """Sentence for the user if the fit has too few rounds for the outer momentum, or ""."""
        own = (one for one in self.fragments if not one.keeps_own)
        momentum = next(own).stepper.optimizer.param_groups[0].get("momentum", 0.0)
        num_rounds = (num_steps - self.shared.steps.dense_steps) / self.schedule.every
        least = 5 / (1 - momentum) if 0 < momentum < 1 else 0.0
        if not 0 < num_rounds < least:
            return ""
        return (
            f"This fit has {num_rounds:.3g} rounds of {self.schedule.every} local steps, and the"
            f" outer optimizer's momentum={momentum:g} needs {least:.0f} to build up. Lower it,"
            " such as LocalSteps(outer=partial(torch.optim.SGD, lr=1.0)), or exchange more often."
        )

    def _replica(self, named: Mapping[str, nn.Parameter]) -> Mapping[str, Sequence[Value]]:
        """Returns the replica's values of the parameters `named`, by name; see `Replica`.

        Trained parameters lie in the buckets of the inner half. 16-bit ones have masters there.
        """
        active, stepper = self.part.plans.active, self.part.stepper
        if active is not self._seen:
            self._seen = active
            values: dict[nn.Parameter, list[Value]] = {}
            for piece in () if active is None else stepper.pieces:
                parameter = stepper.shards.parameters[piece.tensor_index]
                values.setdefault(parameter, []).append(Value(piece.parameter, piece.start))
            self._values = values
        whole = {one: [Value(self._masters.get(one, one.data))] for one in named.values()}
        return {name: self._values.get(one) or whole[one] for name, one in named.items()}

    def take_masters(self) -> bool:
        """Makes loaded masters of 16-bit parameters the replica's values, until a plan has them.

        Local. The first step of a fit makes the plan. Masters of weights that were changed since
        they were saved do not count.

        Returns:
            Whether there are any.
        """
        state: Mapping[Any, Any] = self.optimizer.state if self.part.plans.active is None else {}
        own = ((one, its[MASTER_KEY]) for one, its in state.items() if MASTER_KEY in its)
        self._masters = {one: its for one, its in own if not differs(its, one, is_rounded=True)}
        return bool(self._masters)

    def load_inner(self, state: dict[str, Any]) -> None:
        """Loads the inner optimizer's state, without masters, which stay as they are. Local."""
        self.optimizer.load_state_dict(state)
        for parameter, master in self._masters.items():
            self.optimizer.state[parameter][MASTER_KEY] = master
        self.part.prepare_state("local steps")

    @property
    def layout(self) -> list[Any]:
        """What must be the same for local state to be loaded: when what is sent and merged."""
        return [*self.schedule[:3], [[list(one.names) for one in group] for group in self.groups]]

    @property
    def progress(self) -> list[float]:
        """`count`, then `_totals`, each minus this rank's samples by now: numbers of at most 0."""
        return [self.count, *(one - self._weights.total for one in self._totals)]

    def begin(self, progress: Sequence[float] = (0, 0)) -> None:
        """Copies the module's values into the anchor, and counts steps anew. Local.

        All ranks must have equal values: nothing is sent.

        Args:
            progress: `progress` from which to count on, perhaps of another training.
        """
        self.part.prepare_state("local steps")
        self.count, since, self.is_finished = int(progress[0]), progress[1:], False
        self._totals.clear()
        self._totals.extend(self._weights.total + one for one in since)
        for fragment in self.fragments:
            fragment.take_replica()

    def publish(self) -> None:
        """Makes the module, autograd and processes that share its memory see written values.

        Masters are rounded to 16-bit parameters.
        """
        if active := self.part.plans.active:
            for bucket in active.flat.buckets:
                bucket.publish()
            active.gatherer.copy_to_shared(range(len(active.flat.buckets)))
        else:
            for parameter, master in self._masters.items():
                parameter.data.copy_(master)
        self.part.stepper.note_written()
        autograd.graph.increment_version(parameters_of(self.optimizer))

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
        """See `OuterHalf.after_step`. False: it has sent values that are not finite."""
        with self.watch.after_step():
            return self._exchange()

    def _exchange(self) -> bool:
        self.count, self.is_finished = self.count + 1, False
        self._totals.append(self._weights.total)
        for one in self._under_way:
            one.launch()
        # Before the next send: what is merged first goes ahead on the link.
        for one in self._under_way:
            # The outer optimizer steps if all sums have arrived. On NCCL it is at fixed steps: NCCL
            # matches messages by their order, which must be the same on all ranks.
            is_due = self.count - (one.sent_at or 0) >= (self.schedule.delay + 1) // 2
            if one.round.is_complete if self.collectives.matches_by_tag else is_due:
                one.step()
            # In the order of the sends, on all ranks: a timeline waits for messages in that order.
            if not one.is_stepped:
                break
        is_finite, sent = True, self.schedule.sent_after(self.count)
        if sent is not None:
            for one in self.groups[sent]:
                one.stop.ask = self.shared.signal.ask
                is_finite &= self._send(one)
        merged = self.schedule.merged_after(self.count)
        if merged is not None:
            # Nothing is under way if it was settled, since the optimizer had other parameters.
            for one in (one for one in self.groups[merged] if one.sent_at is not None):
                self._merge(one, self.schedule.mix)
            self._follow()
            self.publish()
        return is_finite

    def _send(self, fragment: Fragment) -> bool:
        self.watch.before_send(fragment)
        samples = self._totals[-1] - self._totals[0]
        return fragment.send(self.count, samples if self._weights.is_on else None)

    def _merge(self, fragment: Fragment, mix: float) -> None:
        rank = fragment.merge(mix)
        if rank is None:
            self.watch.after_merge(fragment)
        if fragment.stop.heard:
            self.shared.signal.hear([fragment.stop.heard])
        if rank is not None:
            log.warning(
                "An exchange is left out, since weights of rank %d were not finite: of '%s' and %d"
                " more, step %d.",
                rank,
                fragment.names[0],
                len(fragment.names) - 1,
                self.count,
            )

    def detach(self) -> None:
        """Ends the threads of all fragments that are not under way."""
        if under_way_now := self._under_way:
            # gloo could receive no later message if the memory of these were freed.
            work.under_way.append((self.collectives, under_way_now))
        for fragment in self.fragments:
            if fragment.sent_at is None:
                fragment.round.release()

    def forget_inner(self) -> None:
        """Forgets the inner optimizer's state."""
        # Optimizers that need whole tensors have their state in `outside`, and others in shards.
        self.part.stepper.shards.state.clear()
        self.part.stepper.outside.plain.clear()

    def settle(self) -> None:
        """Merges what is under way, in the order in which it was sent. Blocks."""
        for fragment in self._under_way:
            self._merge(fragment, self.schedule.mix)

    def flush(self) -> None:
        """Merges what is under way, then exchanges the other fragments once more. Blocks."""
        is_new = self._follow()
        is_just_merged = self.schedule.delay == 0 and not is_new
        merged = self.schedule.merged_after(self.count) if is_just_merged else None
        self.settle()
        groups = (group for number, group in enumerate(self.groups) if number != merged)
        rest = [*chain.from_iterable(groups)]
        for fragment in rest:
            self._send(fragment)
        for fragment in rest:
            self._merge(fragment, 0.0)


class StepsDigest(Digest):
    """Compares between ranks how many steps they have made.

    Args:
        rounds: Counts the steps.
    """

    def __init__(self, rounds: OptimizerRounds) -> None:
        super().__init__(rounds.collectives)
        self._rounds = rounds

    @override
    def value(self) -> int:
        self._counted = count = self._rounds.count
        return count

    @override
    def explain(self, counted: int) -> None:
        # Without a message: another rank may wait for an exchange that this rank never sends.
        raise RuntimeError(
            "Ranks have made different numbers of local steps. This rank has sent after step"
            f" {counted}. Give all ranks equally many batches, such as by"
            " Trainer(limit_train_batches=...), and call each optimizer's step equally often."
        )


class OptionsDigest(Digest):
    """Compares between ranks the options of both optimizers.

    Args:
        rounds: Has the inner optimizer.
        outer: The outer optimizer.
    """

    def __init__(self, rounds: OptimizerRounds, outer: optim.Optimizer) -> None:
        super().__init__(rounds.collectives)
        self._both = rounds.optimizer, outer

    @override
    def value(self) -> int:
        inner, outer = self._counted = tuple(map(options_of, self._both))
        return launch_log.hash_of(repr((sorted(inner.items()), sorted(outer.items()))))

    @override
    def explain(self, counted: tuple[OptionValues, OptionValues]) -> None:
        inner, outer = zip(*self._collectives.all_gather_object(counted), strict=True)
        check_options(f"step with different options: {type(self._both[0]).__name__}", inner)
        check_options("have different outer optimizers", outer)
