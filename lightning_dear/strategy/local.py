"""The option `local_steps`: what it means, what does not fit it, and what is said about it."""

import time
from collections.abc import Mapping
from itertools import pairwise
from statistics import median
from typing import Any

from lightning.fabric.plugins import Precision
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_dear.callbacks.fusion_tuner import option_of
from lightning_dear.checkpoint.files import CHECKPOINT_KEY
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.local_steps import LocalSteps, OuterHalf, hiding, num_modules
from lightning_dear.planning import FixedPlan, FusionPlanner, SearchingPlanner

_NUM_TIMED = 8
"""Steps that local_steps="auto" measures. The first two, in which plans are made, do not count."""

_FOUND = "local_steps"
"""Key, under `CHECKPOINT_KEY`, of the rounds that local_steps="auto" goes on with."""


class LocalStepsOption:
    """The user's option `local_steps`. "auto" finds a round that hides behind computing.

    For "auto" the first steps exchange gradients, and are timed.

    Args:
        option: The option's value.

    Attributes:
        steps: The options of local steps. None means that each step exchanges gradients.
        resumed: What this package has put into the checkpoint that training goes on from; to be
            assigned to.

    Raises:
        ValueError: If a number is less than 1, or a name is not "auto".
    """

    def __init__(self, option: int | str | LocalSteps | None) -> None:
        self._searches = option == "auto"
        self._has_said = False
        if isinstance(option, int):
            option = LocalSteps(every=option)
        elif self._searches:
            option = LocalSteps(dense_steps=_NUM_TIMED)
        elif option is not None and not isinstance(option, LocalSteps):
            kind = ValueError if isinstance(option, str) else TypeError
            raise kind(
                f"local_steps must be a number, 'auto', LocalSteps(...) or None, got {option!r}."
            )
        self.steps = option
        self.resumed: Mapping[str, Any] = {}
        # Of each timed step: when it ended, and the seconds that this rank waited in it.
        self._timed: list[tuple[float, float]] = []
        self._seen: float = -1

    def is_due(self, dense: Pipeline, num_steps: float) -> bool:
        """Whether steps that exchange gradients are over. To be called between two steps.

        Collective, and blocks, at the end of the steps that "auto" measures.

        Args:
            dense: Pipeline over all ranks.
            num_steps: Number of steps so far. `inf` means that local steps have begun before.
        """
        # Batches whose gradients accumulate make no step.
        if self._searches and num_steps != self._seen:
            self._seen = num_steps
            self._search(dense)
        is_alone = dense.collectives.world.size == 1
        if is_alone or self._searches or self.steps is None:
            return False
        return num_steps >= self.steps.dense_steps

    def _search(self, dense: Pipeline) -> None:
        saved = self.resumed.get(_FOUND)
        statistics = dense.training.instruments.statistics
        self._timed.append((time.monotonic(), 0.0 if statistics is None else statistics.exposed_s))
        if saved is None and len(self._timed) <= _NUM_TIMED:
            return
        self._searches = False
        self.steps = self._found(dense) if saved is None else LocalSteps(**saved)
        rank_zero_info(
            "local_steps='auto': each step exchanges gradients, which hides behind computing."
            if self.steps is None
            else f"local_steps='auto': LocalSteps({', '.join(f'{k}={v}' for k, v in self._how())})."
        )

    def _found(self, dense: Pipeline) -> LocalSteps | None:
        times_s = [end_s - begin_s for (begin_s, _), (end_s, _) in pairwise(self._timed[2:])]
        own = median(times_s), median(waited_s for _, waited_s in self._timed[3:])
        measured = dense.collectives.all_gather_object(own)
        return hiding(measured, num_modules(dense.training.module, dense.training.parameters))

    def _how(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self.steps, name)) for name in ("every", "fragments", "delay")]

    def load(self, outer: OuterHalf, precision: Precision, model: str = "") -> None:
        """Goes on from `resumed` once local steps are on, and forgets it. Collective. Blocks.

        Tells the user on rank 0 if that is not bit for bit.

        Args:
            outer: The outer half. Without local steps nothing is done.
            precision: The precision plug-in. Mutated: gets the loss scale that this rank had.
            model: Name of the model, if the checkpoint has several.
        """
        if not outer.is_on:
            return
        remark, own = outer.load(self.resumed, model)
        if remark:
            rank_zero_info(remark)
        if own.get("precision"):
            precision.load_state_dict(own["precision"])
        self.resumed = {}

    def save(
        self,
        outer: OuterHalf,
        checkpoint: dict[str, Any],
        precision: Precision | None,
        model: str = "",
    ) -> None:
        """Puts the outer half, and what rounds it has, into a checkpoint. Collective. Blocks.

        Args:
            outer: The outer half.
            checkpoint: Lightning's checkpoint dict. Mutated.
            precision: For a folder the precision plug-in, whose loss scale differs by rank. None
                means an ordinary file.
            model: Name of the model, if the checkpoint has several.
        """
        of_rank = None if precision is None else {"precision": precision.state_dict()}
        remark = outer.save(checkpoint, model, of_rank)
        # Once in a fit: folders are alike.
        if remark and not self._has_said:
            rank_zero_info(remark)
        self._has_said |= bool(remark)
        if not self._searches and self.steps is not None:
            checkpoint[CHECKPOINT_KEY][_FOUND] = dict(self._how())


def check_local_steps(
    options: ExchangeOptions, fusion: FusionPlanner, given: Mapping[str, Any]
) -> None:
    """Refuses options that do not fit local steps.

    Args:
        options: The exchange options.
        fusion: Planner of the buckets.
        given: The strategy's options by name.

    Raises:
        ValueError: If one does not fit. The message names it, and says why.
    """
    codec = options.compressor
    why = {
        option_of(fusion): isinstance(fusion, SearchingPlanner | FixedPlan)
        and "it plans steps in which gradients travel. Use fusion='threshold'",
        "gather='gradients'": given["gather"] == "gradients"
        and "the anchor is gathered, and any optimizer steps whole tensors. Leave it out",
        "decouple=False": not options.decouple and "the anchor is reduce-scattered. Leave it out",
        "reduce_dtype": options.reduce_dtype and "messages are in fp32. Leave it out",
        f"compressor={codec and codec.name!r}": (
            codec is not None
            and (options.is_of_gradients or options.all_reduces or codec.votes)
            and "it cannot send differences of weights to their owners. Use 'int8', 'int4' or"
            " TopK(halves='reduce')"
        ),
        "compressor={...}": options.groups and "it encodes all parameters alike. Pass one name",
        "compression_schedule": given.get("compression_schedule") is not None
        and "it counts steps that exchange gradients. Pass compressor= alone",
        "split='auto'": given.get("split") == "auto"
        and "it measures steps in which gradients travel. Pass shares, such as split=[3, 1]",
    }
    for option, reason in why.items():
        if reason:
            raise ValueError(f"local_steps does not work with {option}: {reason}.")


def say_how_local(outer: OuterHalf, steps: LocalSteps | None, trainer: Any) -> None:
    """Tells the user on rank 0 what local steps do, and warns of too few of them in a fit.

    Args:
        outer: Outer half. It is off in dense steps.
        steps: Options of local steps. None means that nothing is said.
        trainer: The trainer, when a fit or its local steps begin.
    """
    if steps is None or trainer.world_size == 1:
        return
    num_steps = trainer.estimated_stepping_batches
    if 0 < num_steps <= steps.dense_steps:
        rank_zero_warn(
            f"This fit has {num_steps} steps, and local steps begin after {steps.dense_steps}: none"
            " is local. Train longer, lower dense_steps, or leave local_steps out."
        )
    for remark, warning in outer.remarks(num_steps):
        rank_zero_info(remark)
        if warning:
            rank_zero_warn(warning)


_BEHIND_STEPS = ("on_train_batch_end", "on_validation_start", "on_train_epoch_end")
"""Hooks that Lightning calls after the last step of a fit, and in which checkpoints are saved."""


def before_hook(outer: OuterHalf, trainer: Any, hook: str) -> None:
    """Puts into the module what a hook of a fit is to see. Collective, blocks, where a fit ends.

    After the last step ranks exchange all that is left, so that the last validation and the last
    checkpoint have the weights of the end. Where a callback ends the fit, they do so only before
    `on_train_end`.

    Args:
        outer: The outer half. Without local steps nothing is done.
        trainer: The trainer.
        hook: Name of the hook, which callbacks are going to be called in.
    """
    if not outer.is_on:
        return
    most, epoch = trainer.max_epochs, trainer.current_epoch
    is_last_batch = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
    is_over = is_last_batch and most not in (None, -1) and most <= epoch + 1
    is_over |= 0 <= trainer.max_steps <= trainer.global_step
    # A resumed fit still has `is_last_batch` of the checkpoint when it begins.
    is_behind = hook in _BEHIND_STEPS and not trainer.sanity_checking
    if hook == "on_train_end" or (is_over and is_behind):
        outer.finish()
    if hook == "on_validation_start":
        outer.show_anchor()
    elif hook != "on_save_checkpoint":
        outer.show_replica()


def check_averaging(steps: LocalSteps | None, trainer: Any) -> None:
    """Refuses callbacks that average weights, which differ between ranks with local steps.

    Raises:
        ValueError: If the trainer has one, and there are local steps.
    """
    kinds = ("StochasticWeightAveraging", "WeightAveraging")
    for callback in () if steps is None else trainer.callbacks:
        if any(kind.__name__ in kinds for kind in type(callback).__mro__):
            raise ValueError(
                f"local_steps does not work with {type(callback).__name__}: it would average each"
                " rank's own weights. Leave it out. The anchor, which validation and checkpoints"
                " have, is an average already."
            )
