"""Scaling factors that MergeComp's authors have published, per cent.

Digitised from the scaling-factor figures: figure files of the authors' public repository, and of
their paper (arXiv 2103.15195); each may be off by 1. What their code does was read in commit
82bc96c of that repository, of 2021-02-04. One server of 8 V100. A pair is layer by layer, then
scheduled by MergeComp.
"""

from __future__ import annotations

from collections.abc import Mapping

Pair = tuple[float, float | None]

FP32 = "fp32"
"""Uncompressed: nothing is scheduled."""

LARGEST_GAIN = 3.83
"""Scheduled over layer by layer, of one compressor, at most, by the paper's abstract."""

LARGEST_SCALING = 99.0
"""Per cent, at most, by the paper's abstract."""

PCIE, NVLINK = "pcie_8gpu", "nvlink_8gpu"
"""Our clusters that stand for their server, without NVLink and with it."""

_NINE = "fp16", "dgc", "topk", "randomk", "qsgd", "efsignsgd", "signsgd", "onebit", "signum"


def _figure(fp32: float, *pairs: Pair) -> Mapping[str, Pair]:
    return {FP32: (fp32, None), **dict(zip(_NINE, pairs, strict=True))}


def _fp16(layerwise: float, scheduled: float, fp32: float) -> Mapping[str, Pair]:
    return {"fp16": (layerwise, scheduled), FP32: (fp32, None)}


_PCIE_8: Mapping[str, Mapping[str, Pair]] = {
    "resnet50": _figure(
        24, (37, 52), (18, 70), (15, 19), (22, 57), (16, 18), (21, 55), (22, 59), (17, 56), (24, 63)
    ),
    "resnet101": _figure(
        53, (65, 69), (36, 89), (33, 38), (44, 79), (38, 41), (42, 78), (45, 83), (35, 79), (46, 83)
    ),
    "mask_rcnn": _figure(
        21, (30, 31), (30, 49), (14, 15), (32, 43), (15, 16), (33, 45), (33, 46), (29, 46), (32, 49)
    ),
}

_FIGURES: Mapping[tuple[str, int], Mapping[str, Mapping[str, Pair]]] = {
    (PCIE, 2): {"resnet50": {"dgc": (30, 90), FP32: (48, None)}},
    (PCIE, 4): {
        "resnet50": {
            "dgc": (27, 87),
            "onebit": (25, 73),
            "efsignsgd": (36, 74),
            FP32: (38, None),
        }
    },
    (PCIE, 8): _PCIE_8,
    (NVLINK, 2): {
        "resnet50": _fp16(90, 99, 91),
        "resnet101": _fp16(96, 99, 96),
        "mask_rcnn": _fp16(83, 95, 85),
    },
    (NVLINK, 4): {
        "resnet50": _fp16(88, 98, 89),
        "resnet101": _fp16(94, 99, 94),
        "mask_rcnn": _fp16(78, 89, 78),
    },
    (NVLINK, 8): {
        "resnet50": _fp16(75, 92, 76),
        "resnet101": _fp16(91, 95, 91),
        "mask_rcnn": _fp16(63, 74, 66),
    },
}
"""Cluster and GPUs -> model -> compressor -> scaling factors."""


def published(cluster: str | None, world_size: int, model: str, compressor: str) -> Pair | None:
    """Return what the figures show, per cent; None where we have no figure.

    Args:
        cluster: `PCIE` or `NVLINK`, as its file has it; anything else has no figures.
        world_size: GPUs.
        model: A profile's name.
        compressor: Ours, by name, or `FP32`.
    """
    if cluster is None:
        return None
    of_models = _FIGURES.get((cluster, world_size), {})
    return of_models.get(model, {}).get(compressor.removesuffix("_then"))


def fp32_sizes(cluster: str, model: str) -> list[int]:
    """Return the numbers of GPUs for which a model's FP32 has a figure."""
    sizes = sorted(size for name, size in _FIGURES if name == cluster)
    return [size for size in sizes if published(cluster, size, model, FP32)]
