"""`RayDearStrategy`: the strategy for trainings that Ray Train starts. Needs `ray[train]`.

The class is made when its name is first used, so that importing this module does not import Ray.
"""

from functools import cache
from typing import TYPE_CHECKING, Any

from lightning_dear.names import need
from lightning_dear.strategy import DearStrategy

if TYPE_CHECKING:
    RayDearStrategy = DearStrategy


@cache
def _made() -> type[DearStrategy]:
    need("RayDearStrategy", "ray", extra="ray")
    from ray.train.lightning import RayDDPStrategy

    class RayDearStrategy(DearStrategy, RayDDPStrategy):  # type: ignore[misc]
        """`DearStrategy` for Ray Train's workers: Ray's `prepare_trainer` accepts it.

        Ray makes the default process group: `TorchConfig(backend=..., timeout_s=...)` of Ray's
        `TorchTrainer` sets its backend and its timeout. `timeout` here is that of this strategy's
        own groups.

        Args:
            **options: Options of `DearStrategy`.

        Raises:
            ValueError: If an option is given that only Ray can set.
        """

        def __init__(self, **options: Any) -> None:
            if ignored := sorted({"process_group_backend", "start_method"} & options.keys()):
                raise ValueError(
                    f"Ray starts the workers and makes the default process group: leave out"
                    f" {', '.join(ignored)}. TorchConfig(backend=...) of TorchTrainer sets the"
                    " backend."
                )
            super().__init__(**options)

        def _check_start(self, host: Any) -> None:
            """Accepts all: a worker knows one device and one node, and Ray the number of ranks."""

    # As if it stood in the module, so that Ray sends it to workers by its name.
    RayDearStrategy.__qualname__ = "RayDearStrategy"
    return RayDearStrategy


def __getattr__(name: str) -> Any:
    if name == "RayDearStrategy":
        return _made()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
