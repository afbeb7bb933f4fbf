"""Scaling factors of MergeComp's figures, per cent (arXiv 2103.15195).

Digitised from the authors' figures: each may be off by 1. One server of 8 V100. A pair is layer by
layer, then scheduled by MergeComp.
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

_NINE = "fp16", "dgc", "topk", "randomk", "qsgd", "efsignsgd", "signsgd", "onebit", "signum"


def _figure(fp32: float, *pairs: Pair) -> dict[str, Pair]:
    return {FP32: (fp32, None), **dict(zip(_NINE, pairs, strict=True))}


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
_PCIE_FEWER: Mapping[tuple[int, str], Pair] = {
    (4, "dgc"): (27, 87),
    (4, "onebit"): (25, 73),
    (4, "efsignsgd"): (36, 74),
    (4, FP32): (38, None),
    (2, "dgc"): (30, 90),
    (2, FP32): (48, None),
}
"""Of ResNet-50."""

_NVLINK: Mapping[tuple[str, int], tuple[Pair, Pair]] = {
    ("resnet50", 2): ((90, 99), (91, None)),
    ("resnet50", 4): ((88, 98), (89, None)),
    ("resnet50", 8): ((75, 92), (76, None)),
    ("resnet101", 2): ((96, 99), (96, None)),
    ("resnet101", 4): ((94, 99), (94, None)),
    ("resnet101", 8): ((91, 95), (91, None)),
    ("mask_rcnn", 2): ((83, 95), (85, None)),
    ("mask_rcnn", 4): ((78, 89), (78, None)),
    ("mask_rcnn", 8): ((63, 74), (66, None)),
}
"""FP16, and FP32."""


def published(network: str, world_size: int, model: str, compressor: str) -> Pair | None:
    """Return what the figures show, per cent; None where we have no figure.

    Args:
        network: A cluster's name, with `pcie` or `nvlink` in it.
        world_size: GPUs.
        model: A profile's name.
        compressor: Ours, by name, or `FP32`.
    """
    name = compressor.removesuffix("_then")
    if "nvlink" in network:
        pairs = _NVLINK.get((model, world_size))
        return dict(zip(("fp16", FP32), pairs, strict=True)).get(name) if pairs else None
    if "pcie" not in network:
        return None
    if world_size == 8:
        return _PCIE_8.get(model, {}).get(name)
    return _PCIE_FEWER.get((world_size, name)) if model == "resnet50" else None


def fp32_on_pcie(model: str) -> float | None:
    """Return the scaling factor of FP32 on 8 GPUs, per cent; None of a model without a figure."""
    pair = published("pcie", 8, model, FP32)
    return None if pair is None else pair[0]
