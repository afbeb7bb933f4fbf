"""Workloads as JSON files: measurements of a model, written by `dear-plan calibrate`."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_dear.planning import CodecCost, CodecCosts, Linear, ModelTimes, TensorSpec
from lightning_dear.simulator.workload import Workload

FORMAT_VERSION = 3
"""Version of the format that `save_workload` writes."""

_PLAIN = ("name", "compressor", "fixed_step_s", "copies_s", "sharding_s", "shard_unit_mb")
"""Fields of a workload that JSON can hold as they are."""


def save_workload(workload: Workload, path: str | Path) -> None:
    """Write `workload` as JSON, for `load_workload`."""
    codecs = asdict(workload.codecs)
    content = {
        "version": FORMAT_VERSION,
        **{name: getattr(workload, name) for name in _PLAIN},
        "times": asdict(workload.times),
        "codecs": {kind: codecs[kind] for kind in ("compressed", "uncompressed")},
        "may_mix": codecs["may_mix"],
        "tensors": [list(asdict(one).values()) for one in workload.tensors],
    }
    Path(path).write_text(json.dumps(content))


def load_workload(path: str | Path) -> Workload:
    """Read a workload that `save_workload` wrote.

    Raises:
        ValueError: If the content is not such a workload, or of another version.
        FileNotFoundError: If there is no such file.
    """
    try:
        content = json.loads(Path(path).read_text())
        if content["version"] != FORMAT_VERSION:
            raise ValueError(f"its version is {content['version']}, not {FORMAT_VERSION}")
        codecs: Any = {kind: _codec(cost) for kind, cost in content["codecs"].items()}
        return Workload(
            tensors=[TensorSpec(*fields) for fields in content["tensors"]],
            times=_times(content["times"]),
            codecs=CodecCosts(**codecs, may_mix=content["may_mix"]),
            **{name: content[name] for name in _PLAIN},
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{path} holds no measured model: {error}. Write it again with dear-plan calibrate."
        ) from error


def _times(fields: Mapping[str, Any]) -> ModelTimes:
    # Earlier versions also wrote whether buckets might be gathered in backward.
    known = {key: value for key, value in fields.items() if key != "allows_early"}
    # Keys of JSON objects are text: tensor indices become integers again.
    for key in ("first_use_s", "ready_s"):
        known[key] = {int(index): seconds for index, seconds in known[key].items()}
    return ModelTimes(**known)


def _codec(fields: dict[str, Any]) -> CodecCost:
    lines = {key: Linear(**value) for key, value in fields.items() if isinstance(value, dict)}
    return CodecCost(**fields | lines)
