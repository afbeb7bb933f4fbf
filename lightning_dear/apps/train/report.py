"""The table at the end of a run."""

from collections.abc import Mapping

from lightning.pytorch import Trainer

from lightning_dear.callbacks import DearMonitor
from lightning_dear.emulation import emulated_rig

_TITLES = {"test_acc": "test accuracy", "test_bits_per_byte": "test bits per byte"}
_NOT_MEASURED = "not measured"


def summary_of(trainer: Trainer) -> dict[str, float]:
    """Return what the run's monitor measured, or nothing where callbacks hold none."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, DearMonitor):
            return callback.summary()
    return {}


def rows(metrics: Mapping[str, float], summary: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return titles and values: the test metrics, then what a step cost.

    Args:
        metrics: Test metrics by name.
        summary: Medians over the steps: ``step_s``, ``wire_bytes`` and ``exposed_s``.
    """
    table = [(_TITLES.get(name, name), f"{value:.4f}") for name, value in metrics.items()]
    table.append(("step time (median)", _milliseconds(summary.get("step_s"))))
    table.append(("bytes on the wire per step and rank", _bytes(summary.get("wire_bytes"))))
    table.append(
        ("exposed communication per step (median)", _milliseconds(summary.get("exposed_s")))
    )
    return table


def format_table(title: str, table: list[tuple[str, str]]) -> str:
    """Return the rows under a title, in two aligned columns between rules.

    On emulated hosts the first line names them.
    """
    left, right = (max(map(len, column)) for column in zip(*table, strict=True))
    text = "\n".join(f"{name:<{left}}  {value:>{right}}" for name, value in table)
    rule = "-" * max(len(title), *map(len, text.splitlines()))
    return "\n".join([*filter(None, [emulated_rig()]), rule, title, rule, text, rule])


def _milliseconds(seconds: float | None) -> str:
    return _NOT_MEASURED if seconds is None else f"{seconds * 1e3:.2f} ms"


def _bytes(count: float | None) -> str:
    return _NOT_MEASURED if count is None else f"{count:,.0f}"
