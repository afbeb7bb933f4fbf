"""Finds a plan during training, for planners that measure, such as `fusion="auto"`."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_dear.compression import Compressor
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.planning import BucketPlan, FusionPlanner, SearchingPlanner
from lightning_dear.tuning.tuner import Tuning


class FusionTuner(Callback):
    """Lets a planner try plans on the first optimizer steps of a fit, and keeps the best plan.

    Training goes on meanwhile, since the weights do not depend on the plan, with three exceptions.
    With three or more ranks the plan changes the order in which all-reduced buckets are summed. It
    changes the order of summation in the norm for clipping. And the error of a compressor depends
    on which elements share a bucket.

    At the end of the search rank 0 prints in one line which plan was chosen and why. The plan is
    saved in checkpoints. A resumed fit uses it at once if it has the same parameters, the same
    number of ranks, the same planner with the same options and the same compressor.

    With one rank nothing is tried. Under manual optimisation rank 0 warns, and nothing is tried.
    With several optimizers the start of the fit raises ValueError.

    Args:
        planner: Planner that searches.
    """

    def __init__(self, planner: SearchingPlanner) -> None:
        self._planner = planner
        self._option = option_of(planner)
        self._tuning: Tuning | None = None
        self._found: dict[str, Any] | None = None
        self._found_by = description_of(planner)
        self._num_steps = 0

    @property
    def plan(self) -> BucketPlan | None:
        """The plan that this fit has found or taken from a checkpoint. None means none yet."""
        return None if self._tuning is None else self._tuning.plan

    @property
    def reason(self) -> str:
        """The planner's reason for `plan`. Empty unless a search of this fit has ended."""
        return "" if self._tuning is None else self._tuning.reason

    @property
    def is_searching(self) -> bool:
        """Whether the search has begun and not ended. It begins after the first step."""
        return self._tuning is not None and self._tuning.is_searching

    @override
    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self._tuning = None
        pipeline: Pipeline = trainer.strategy.pipeline_of()
        if len(pipeline.parts) > 1:
            raise ValueError(
                f"{self._option} plans for one optimizer, and there are {len(pipeline.parts)}."
                " Use fusion='threshold'."
            )
        if not pl_module.automatic_optimization:
            rank_zero_warn(
                f"{self._option} finds no plan under manual optimisation, and keeps the buckets it"
                " starts with. Use fusion='threshold', with a bucket_cap_mb of your own. In manual"
                " optimisation it cannot tell which gradients are still to be used."
            )
            return
        finder = description_of(self._planner, pipeline.options.compressor)
        if self._found is not None and self._found_by != finder:
            rank_zero_info(
                "The plan found before is not used, another one is searched for: it was found with"
                f" {self._found_by}, and this is {finder}"
            )
            self._found = None
        self._found_by = finder
        self._tuning = Tuning(pipeline, self._planner, rank_zero_info, self._found)

    @override
    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self._num_steps = trainer.global_step
        if self._tuning is not None:
            self._tuning.before_forward()
            self._found = self._tuning.found

    @override
    def on_train_end(self, *_: Any) -> None:
        if self.is_searching:
            rank_zero_warn(
                f"{self._option} was still measuring plans when training ended after"
                f" {self._num_steps} steps. Use fusion='threshold' for trainings as short as this."
            )

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"plan": self._found, "planner": self._found_by}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._found = state_dict["plan"]
        # Earlier versions have saved no planner.
        self._found_by = state_dict.get("planner", description_of(self._planner))


def option_of(planner: FusionPlanner) -> str:
    """Returns the option by which a user asks for `planner`, such as "fusion='auto'"."""
    return f"fusion={getattr(planner, 'name', type(planner).__name__)!r}"


def description_of(planner: SearchingPlanner, codec: Compressor | None = None) -> str:
    """Returns the planner with its options, such as "AutoFusion(num_steps=60) for Int8()".

    Args:
        planner: The planner. Its attributes that are numbers, strings or None are named.
        codec: Compressor that it plans for. None means that none is named.
    """
    kinds = (bool, int, float, str, type(None))
    options = {name: value for name, value in vars(planner).items() if isinstance(value, kinds)}
    planned = f"{type(planner).__name__}({', '.join(f'{k}={v!r}' for k, v in options.items())})"
    return planned if codec is None else f"{planned} for {codec!r}"
