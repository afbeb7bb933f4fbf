"""The option `LocalSteps`; when a fragment is sent and merged, and which parameters are in it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import accumulate, pairwise
from math import ceil, log2
from numbers import Real
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import nn, optim

from lightning_dear.optimizers import pieces, tensorwise

_FEW_STEPS = 8
"""Up to this many steps a round the outer optimizer has no momentum: rounds follow so fast that
momentum would look several rounds ahead."""


@dataclass(frozen=True, kw_only=True)
class LocalSteps:
    """Options of local steps: how long ranks train alone, and what they exchange then.

    A round has `every` steps, in which each fragment is sent once and merged once. The interval
    between two merges is I = `every` / number of fragments. `Schedule` says after which step each
    fragment is sent and merged.

    Args:
        every: Steps of a round, H. 1 means that each step exchanges all parameters.
        fragments: Number of fragments, which divides `every`; or for each fragment the names of its
            modules and parameters. None means the largest of 4, 3, 2 and 1 that divides `every`,
            and for which the model has enough modules.
        delay: Steps from sending a fragment to merging it, from 0 to `every` - 1. Messages travel
            meanwhile. None means half of the interval, rounded down.
        mix: A merge sets replica = `mix` * replica + (1 - `mix`) * anchor. From 0 to 1. None means
            `delay` / `every`, at most 0.5: the share of a round that the replica has trained since
            it was sent.
        outer: Function that makes the outer optimizer of a fragment from a list of parameters. The
            optimizer must be element-wise. None means SGD with learning rate 1 and Nesterov
            momentum 0.5, or without momentum if `every` is 8 or less.
        dense_steps: Number of first steps of a training that exchange gradients, as without local
            steps. A Trainer counts its `global_step`, which adds up the steps of all optimizers.
        local_state: Whether checkpoint folders (`save_distributed_checkpoint=True`) also have what
            each rank has of its own: its replica, inner optimizer state, loss scale, buffers, and
            what is under way. Resuming on as many ranks is then bit for bit. False means that all
            ranks go on from the anchor, as from a file.

    Raises:
        ValueError: If a value is out of its range, or if `fragments` does not divide `every`.
        TypeError: If a value has a wrong type.
    """

    every: int = 32
    fragments: int | Sequence[Sequence[str]] | None = None
    delay: int | None = None
    mix: float | None = None
    outer: Callable[[list[Any]], optim.Optimizer] | None = None
    dense_steps: int = 0
    local_state: bool = True

    def __post_init__(self) -> None:
        _check_whole("every", self.every, 1)
        _check_whole("dense_steps", self.dense_steps, 0)
        if self.delay is not None:
            _check_whole("delay", self.delay, 0)
            if self.delay >= self.every:
                raise ValueError(
                    f"LocalSteps(delay={self.delay}) must be less than every={self.every}. Lower"
                    " it: a fragment is sent once in each round, and merged before the next time."
                )
        mix: Any = self.mix
        is_real = isinstance(mix, Real) and not isinstance(mix, bool)
        if mix is not None and not (is_real and 0 <= float(mix) <= 1):
            raise ValueError(f"LocalSteps(mix={mix!r}) must be from 0 to 1. None chooses.")
        if not isinstance(self.local_state, bool):
            raise TypeError(f"LocalSteps(local_state={self.local_state!r}) must be True or False.")
        if self.outer is not None and not callable(self.outer):
            raise self._no_optimizer(self.outer)
        self._check_fragments()

    def _no_optimizer(self, found: object) -> TypeError:
        return TypeError(
            f"LocalSteps(outer=...) must make an optimizer from parameters, such as"
            " partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True), and not be or return"
            f" a {type(found).__name__}."
        )

    def _check_fragments(self) -> None:
        number: Any = self.fragments
        is_list = isinstance(number, Sequence) and not isinstance(number, str)
        lists = [*number] if is_list else []
        are_names = all(
            isinstance(one, Sequence) and not isinstance(one, str) and {*map(type, one)} <= {str}
            for one in lists
        )
        if not (isinstance(number, int | None) or (lists and are_names)):
            raise TypeError(
                f"LocalSteps(fragments={number!r}) must be a number, or for each fragment a list of"
                ' names, such as [["encoder"], ["decoder", "head"]].'
            )
        if isinstance(number, Sequence):
            number = len(number)
        if number is not None:
            _check_whole("fragments", number, 1)
            if self.every % number:
                raise ValueError(
                    f"LocalSteps(fragments={number}) must divide every={self.every}. Change one of"
                    " them: fragments are sent at equal intervals."
                )

    def schedule(self, num_modules: int) -> "Schedule":
        """Returns the schedule for a model with `num_modules` modules that own parameters.

        Raises:
            ValueError: If there are more fragments than modules.
        """
        number = self.fragments
        if isinstance(number, Sequence):
            number = len(number)
        elif number is None:
            fitting = (n for n in (4, 3, 2) if self.every % n == 0 and n <= num_modules)
            number = next(fitting, 1)
        elif number > num_modules:
            raise ValueError(
                f"LocalSteps(fragments={number}) is more than the {num_modules} modules that own"
                " trained parameters. Pass at most that many: a fragment is a run of modules."
            )
        delay = self.every // number // 2 if self.delay is None else self.delay
        mix = min(0.5, delay / self.every) if self.mix is None else float(self.mix)
        return Schedule(self.every, number, delay, mix)

    def new_outer(self, parameters: list[Any]) -> optim.Optimizer:
        """Returns the outer optimizer of a fragment that has these parameters.

        Raises:
            ValueError: If `outer` makes one that is not element-wise.
        """
        is_long = self.every > _FEW_STEPS
        default = partial(optim.SGD, lr=1.0, momentum=0.5 if is_long else 0.0, nesterov=is_long)
        made = (self.outer or default)(parameters)
        if not isinstance(made, optim.Optimizer):
            raise self._no_optimizer(made)
        if tensorwise.why_not_elementwise(made) is not None:
            raise ValueError(
                f"LocalSteps(outer=...) made {type(made).__name__}, which is not element-wise. Use"
                " one that is, such as SGD or Adam: each rank steps parts of tensors."
            )
        return made

    def check(self, module: nn.Module, optimizer: optim.Optimizer) -> None:
        """Raises what the fragments of an optimizer would raise, which dense steps precede. Local.

        Raises:
            ValueError: What `schedule`, `cut` and `new_outer` raise.
        """
        held = pieces.parameters_of(optimizer)
        number = self.schedule(num_modules(module, held)).fragments
        cut(module, held, self.fragments or number)
        self.new_outer([nn.Parameter(torch.zeros(2))])


_SMALL = 0.05
"""Share of a step. With less exposed communication a step hides its messages well enough."""

_MARGIN = 1.25
"""Times of messages are multiplied by this, since they vary from round to round."""

_SHORTEST, _LONGEST = 4, 512
"""Fewest and most steps of a round that `hiding` returns. With fewer than 4, a fragment is merged
before it has gone there and back."""


def hiding(measured: Sequence[tuple[float, float]], num_modules: int) -> LocalSteps | None:
    """Returns the shortest round whose messages take no longer than computing. Pure.

    Its number of steps is a power of two.

    A step that exchanges gradients sends as much as a round does, and its messages take at most the
    whole step. So they hide in a round whose steps, of computing alone on the fastest rank, take
    that long. The messages of one fragment need that time divided by the number of fragments.

    Args:
        measured: For each rank the median seconds of steps that exchange gradients, and how many of
            them this rank has waited.
        num_modules: Number of modules that own parameters.

    Returns:
        The options. None means that such steps hide their messages already.
    """
    if all(waited_s <= _SMALL * step_s for step_s, waited_s in measured):
        return None
    fastest_s = min(step_s - waited_s for step_s, waited_s in measured)
    slowest_s = max(step_s for step_s, _ in measured)
    num_steps = min(_MARGIN * slowest_s / max(fastest_s, slowest_s / _LONGEST), _LONGEST)
    every = 2 ** ceil(log2(max(num_steps, _SHORTEST)))
    fragments = LocalSteps(every=every).schedule(num_modules).fragments
    own = num_steps / fragments
    # The way back begins after the step in which the sums arrive.
    delay = min(ceil(max(own, own / _MARGIN + 1)), every - 1)
    return LocalSteps(every=every, fragments=fragments, delay=delay)


def _check_whole(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"LocalSteps({name}={value!r}) must be a whole number.")
    if value < least:
        raise ValueError(f"LocalSteps({name}={value}) must be {least} or more.")


class Schedule(NamedTuple):
    """Says which fragment is sent and which is merged after which step. Pure.

    Steps are counted from 1, from where all replicas were equal. With the interval
    I = `every` / `fragments`, exchange n = 0, 1, ... is of fragment n mod `fragments`. Its fragment
    is sent after step (n + 1) I - `delay`, and merged after step (n + 1) I. An exchange that would
    be sent before the first step is left out. A fragment is never sent again before it is merged.
    At one step the fragment that is sent and the one that is merged differ, unless `delay` is 0:
    then it is sent first.

    Attributes:
        every: Steps of a round.
        fragments: Number of fragments.
        delay: Steps from sending to merging.
        mix: Share of a replica's own values that it keeps in a merge.
    """

    every: int
    fragments: int
    delay: int
    mix: float

    @property
    def interval(self) -> int:
        """Steps from one merge to the next, I."""
        return self.every // self.fragments

    def sent_after(self, step: int) -> int | None:
        """Returns the number of the fragment to send after `step`. None means no fragment."""
        merged_at = step + self.delay
        if merged_at % self.interval:
            return None
        return (merged_at // self.interval - 1) % self.fragments

    def merged_after(self, step: int) -> int | None:
        """Returns the number of the fragment to merge after `step`. None means no fragment."""
        return self.sent_after(step - self.delay) if step > self.delay else None


# --- which parameters are in which fragment -------------------------------------------------------


def cut(
    module: nn.Module, parameters: Iterable[nn.Parameter], fragments: int | Sequence[Sequence[str]]
) -> list[dict[str, nn.Parameter]]:
    """Cuts parameters into fragments, each as a dict from their names. Pure.

    Args:
        module: Module that owns the parameters.
        parameters: Parameters to cut.
        fragments: Number of fragments: runs of modules in the order of their registration, of about
            equal size. A tied parameter belongs to the first of its modules. Or for each fragment
            names of modules and parameters.

    Raises:
        ValueError: If a name is unknown, if a parameter is in no fragment or in two, or if there
            are fewer modules than fragments.
    """
    held, every = set(parameters), dict(module.named_parameters())
    named = {name: one for name, one in every.items() if one in held}
    if not isinstance(fragments, int):
        return _by_names(named, [*every], fragments)
    runs: dict[str, dict[str, nn.Parameter]] = {}
    for name, parameter in named.items():
        runs.setdefault(name.rpartition(".")[0], {})[name] = parameter
    modules = [*runs.values()]
    ends = [0, *accumulate(sum(one.nbytes for one in its.values()) for its in modules)]
    cuts = [0]
    for turn in range(1, fragments):
        ideal = ends[-1] * turn / fragments
        # At least one module is left for each further fragment.
        places = range(cuts[-1] + 1, len(modules) - (fragments - turn) + 1)
        cuts.append(min(places, key=lambda place: abs(ends[place] - ideal)))
    return [reduce(or_, modules[begin:end], {}) for begin, end in pairwise([*cuts, len(modules)])]


def num_modules(module: nn.Module, parameters: Iterable[nn.Parameter]) -> int:
    """Returns how many modules own any of the parameters. A tied one counts for its first."""
    held = set(parameters)
    return len({name.rpartition(".")[0] for name, one in module.named_parameters() if one in held})


def _by_names(
    named: Mapping[str, nn.Parameter], known: Sequence[str], fragments: Sequence[Sequence[str]]
) -> list[dict[str, nn.Parameter]]:
    def is_in(name: str, owner: str) -> bool:
        return name == owner or name.startswith(f"{owner}.")

    for owner in (owner for owners in fragments for owner in owners):
        if not any(is_in(name, owner) for name in known):
            valid = ", ".join(dict.fromkeys(name.partition(".")[0] for name in known))
            raise ValueError(
                f"LocalSteps(fragments=...) names {owner!r}, and no parameter is there. Write names"
                f" of modules or parameters, such as {valid}."
            )
    made: list[dict[str, nn.Parameter]] = [{} for _ in fragments]
    for name, parameter in named.items():
        homes = [n for n, owners in enumerate(fragments) if any(is_in(name, o) for o in owners)]
        if len(homes) != 1:
            raise ValueError(
                f"The parameter {name!r} is in {len(homes) or 'no'} fragments of"
                " LocalSteps(fragments=...). Name each in one of them, or pass a number: ranks"
                " exchange what is in fragments."
            )
        made[homes[0]][name] = parameter
    return made
