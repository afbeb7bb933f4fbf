"""What options of both strategies take: everything else is refused when one is constructed."""

from __future__ import annotations

import re
from datetime import timedelta
from inspect import signature
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.plugins.precision import Precision as FabricPrecision
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.precision import Precision

from lightning_dear import DearStrategy
from lightning_dear.callbacks import CompressionSchedule
from lightning_dear.compression import COMPRESSORS, Int8, NoCompression, resolve_compressor
from lightning_dear.fabric import DearFabricStrategy
from lightning_dear.local_steps import LocalSteps
from lightning_dear.planning import ThresholdFusion

_FLAG: tuple[tuple[Any, ...], tuple[Any, ...], str] = (
    (True, False),
    ("yes", "", None, 2, 1.0, []),
    "{name} must be bool, got {value!r}",
)
_HOST = "{name} must be {type} or None, got {value!r}"

OPTIONS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...], str]] = {
    "accelerator": (
        (None, CPUAccelerator()),
        ("cpu", CPUAccelerator),
        _HOST.replace("{type}", "Accelerator"),
    ),
    "parallel_devices": (
        (None, [torch.device("cpu")] * 2),
        (2, "cpu", [0, 1], ["cpu"], torch.device("cpu")),
        _HOST.replace("{type}", r"list\[device\]"),
    ),
    "cluster_environment": (
        (None, LightningEnvironment()),
        ("slurm", LightningEnvironment),
        _HOST.replace("{type}", "ClusterEnvironment"),
    ),
    "checkpoint_io": (
        (None, TorchCheckpointIO()),
        ("torch", 1),
        _HOST.replace("{type}", "CheckpointIO"),
    ),
    "precision_plugin": (
        (None, Precision()),
        ("16-mixed", 16),
        _HOST.replace("{type}", "Precision"),
    ),
    "precision": (
        (None, FabricPrecision()),
        ("16-mixed", 16),
        _HOST.replace("{type}", "Precision"),
    ),
    "compressor": (
        (None, "none", "int8", Int8(), NoCompression()),
        (5, True, Int8, "int9", ["int8"]),
        "compressor",
    ),
    "compression_schedule": (
        (None,),
        (5, {"dense_steps": 1}, CompressionSchedule),
        _HOST.replace("{type}", "CompressionSchedule"),
    ),
    "fusion": (
        ("none", "single", ThresholdFusion(bucket_cap_mb=2)),
        (None, 5, True, "thresh", ThresholdFusion),
        "fusion",
    ),
    "bucket_cap_mb": (
        (None, 5, 0.5),
        ("5MB", "5", True, [5], 0, -1.0, float("nan")),
        "bucket_cap_mb must be (float or None|> 0 MiB), got {value!r}",
    ),
    "gather": (
        (None, "parameters", "gradients"),
        ("weights", True, 3),
        "Unknown gather {value!r}; valid names: parameters, gradients, or None",
    ),
    "split": (
        (None, "auto", [3, 1], (1, 1, 1)),
        (3, "fast", [1.5, 1], [True, 1], ["3", 1], [], [3, 0], [3, -1]),
        r"split must be 'auto' or whole numbers > 0, such as \[3, 1\], got {value!r}",
    ),
    "hops": (
        (None, 1, 2),
        ("2", 1.0, True, 0, 3),
        "hops must be (int|1, 2) or None, got {value!r}",
    ),
    "weights": (
        (None, "samples"),
        ("tokens", True, 3, [1.0]),
        "Unknown weights {value!r}; valid names: samples, or None",
    ),
    "local_steps": (
        (None, 8, "auto", LocalSteps(every=4, delay=3)),
        ("8", 0, -1),
        "(local_steps must be a number, 'auto', LocalSteps.* got '{value}'|must be 1 or more)",
    ),
    "reduce_dtype": (
        (None, "fp32"),
        ("fp16", "float32", 32, True, torch.float32),
        "Unknown reduce_dtype {value!r}; valid names: fp32, or None",
    ),
    "process_group_backend": (
        (None, "gloo", "nccl"),
        ("glo", 1, True, "mpi"),
        "Unknown process_group_backend {value!r}; valid names: gloo, nccl, or None",
    ),
    "timeout": (
        (None, timedelta(seconds=30)),
        (30, 0.5, "30s", timedelta(0), timedelta(seconds=-1)),
        "timeout must be (timedelta or None|more than 0), got '?{value}",
    ),
    "start_method": (
        ("popen", "spawn", "fork", "forkserver"),
        ("forkk", None, 1),
        "Unknown start_method {value!r}; valid names: popen, spawn, fork, forkserver",
    ),
    **{
        name: _FLAG
        for name in (
            "decouple",
            "broadcast_buffers",
            "gradients_in_hooks",
            "audit",
            "check_digests",
            "elastic",
            "save_distributed_checkpoint",
            "find_unused_parameters",
        )
    },
}
"""Option -> what it takes, what it does not, and what is said of that."""

STRATEGIES = (DearStrategy, DearFabricStrategy)


def _cases(place: int) -> list[Any]:
    return [
        pytest.param(strategy, name, value, id=f"{strategy.__name__}-{name}-{number}")
        for strategy in STRATEGIES
        for name in [*signature(strategy).parameters][:-1]
        for number, value in enumerate(OPTIONS[name][place])
    ]


@pytest.mark.parametrize(("strategy", "name", "value"), _cases(0))
def test_what_an_option_takes(strategy: Any, name: str, value: Any) -> None:
    others = {"gather": "gradients"} if name == "decouple" else {}
    strategy(**{name: value, **others})


@pytest.mark.parametrize(("strategy", "name", "value"), _cases(1))
def test_what_an_option_does_not_take(strategy: Any, name: str, value: Any) -> None:
    said = OPTIONS[name][2].replace("{name}", name)
    with pytest.raises((TypeError, ValueError)) as caught:
        strategy(**{name: value})
    pattern = re.compile(
        said.replace("{value!r}", re.escape(repr(value))).replace("{value}", re.escape(str(value)))
    )
    assert pattern.search(str(caught.value)), str(caught.value)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_misspelt_name_is_guessed(strategy: Any) -> None:
    for name, value, meant in (
        ("process_group_backend", "glo", "gloo"),
        ("start_method", "forkk", "fork"),
        ("gather", "gradient", "gradients"),
    ):
        with pytest.raises(ValueError, match=rf"Is '{meant}' meant\?"):
            strategy(**{name: value})


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_compressor_is_none(strategy: Any) -> None:
    assert strategy(compressor=None)._options.compressor is None


def test_a_cap_is_a_number_for_its_planner_too() -> None:
    with pytest.raises(ValueError, match="bucket_cap_mb must be > 0 MiB, got '5MB'"):
        ThresholdFusion(bucket_cap_mb="5MB")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [DearStrategy, DearFabricStrategy])
def test_no_timeout_is_half_an_hour_on_every_backend(kind: Any) -> None:
    """Torch's own default is 30 minutes on gloo and 10 on NCCL."""
    assert kind(timeout=None)._timeout == timedelta(minutes=30)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compressor": "topk", "ratio": 0.01}, r"write compressor=TopK\(density=0.01\)"),
        ({"compressor": "dgc", "compress_ratio": 0.5}, r"write compressor=DGC\(density=0.5\)"),
        ({"compressor": "dgc", "momentum": 0.8}, r"write compressor=DGC\(momentum=0.8\)"),
        ({"compressor": "topk", "ratio": 100.0}, r"TopK\(...\) takes .*density.*; valid here: acc"),
        ({"compressor": Int8(), "ratio": 0.5}, r"Int8\(...\) takes error_feedback, .*block_size;"),
        ({"rank": 2}, r"write compressor=PowerSGD\(rank=2\)"),
        ({"foo": 1}, r"unknown option; valid here: accelerator, .*, start_method\)"),
        ({"compressor": "mine", "foo": 1}, r"unknown option; valid here: accelerator"),
        ({"compresor": "int8"}, r"unknown option; is compressor meant\?"),
    ],
)
@pytest.mark.parametrize("strategy", [DearStrategy, DearFabricStrategy])
def test_an_unknown_option_names_the_right_form(
    strategy: type[Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        strategy(**options)


@pytest.mark.parametrize("name", [one for one in COMPRESSORS if one != "none"])
def test_every_option_of_a_compressor_is_led_to_its_class(name: str) -> None:
    kind = type(resolve_compressor(name))
    for option, one in signature(kind).parameters.items():
        made = re.escape(f"compressor={kind.__name__}({option}={one.default!r})")
        with pytest.raises(ValueError, match=made):
            DearStrategy(compressor=name, **{option: one.default})


def test_half_a_setting_is_not_said_to_be_set() -> None:
    with pytest.raises(ValueError, match="Pass gather='gradients' with it") as raised:
        DearStrategy(decouple=False)
    assert "gather='parameters'" not in str(raised.value)
    with pytest.raises(TypeError, match=r"timeout must .*, such as timedelta\(minutes=10\)"):
        DearStrategy(timeout=5)  # type: ignore[arg-type]
