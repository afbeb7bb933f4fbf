"""dear-recipe mergecomp_scaling: what is fitted and simulated, what it shows and refuses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from lightning_dear.apps.bench_config import entries_of, points_of
from lightning_dear.apps.plan_config import compressed
from lightning_dear.apps.recipes.mergecomp_cases import Cell, cells
from lightning_dear.apps.recipes.mergecomp_fit import fitted, workload_of
from lightning_dear.apps.recipes.mergecomp_measured import measured_gains, measured_table
from lightning_dear.apps.recipes.mergecomp_published import FP32, published
from lightning_dear.apps.recipes.mergecomp_scaling import make
from lightning_dear.apps.recipes.mergecomp_schemes import (
    BEST_GROUPS,
    LAYERWISE,
    TWO_GROUPS,
    grouped,
    two_groups,
)
from lightning_dear.apps.recipes.report import Report
from lightning_dear.device_costs import Device
from lightning_dear.paths import conf_dir
from lightning_dear.planning.group_cost import Course
from lightning_dear.simulator import Link, Network, simulate
from lightning_dear.simulator.strategies import Strategy

FEW = (
    "~models.mask_rcnn",
    "~models.resnet101",
    "clusters=[nvlink_8gpu]",
    "world_sizes=[2,8]",
    "compressors=[fp16,topk,topk_then]",
    "kernels_s=[1.0e-5]",
)


def config(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose("recipe/mergecomp_scaling", list(overrides))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    empty = tmp_path_factory.mktemp("mergecomp")
    return make(config(*FEW), empty, empty)


def row_of(report: Report, network: str, compressor: str, world_size: int = 8) -> dict:
    return next(
        dict(row)
        for row in report.data["simulated"]
        if (row["network"], row["compressor"], row["world_size"])
        == (network, compressor, world_size)
    )


def test_only_fp32_is_fitted_and_scales_as_published(report: Report) -> None:
    row = row_of(report, "pcie_as_published", FP32)
    assert row["alone_s"] / row["layerwise_s"] == pytest.approx(0.24, rel=1e-6)
    assert row["alone_s"] == pytest.approx(0.0713)


def test_other_models_may_have_seconds_of_their_own() -> None:
    few = ("~models.mask_rcnn", "clusters=[nvlink_8gpu]")
    fit, plain = (
        fitted(config(*few, *more)) for more in ((), ("as_published.fits_seconds=false",))
    )
    assert fit is not None
    assert plain is not None
    assert set(fit.seconds) == {"resnet101"}
    assert not plain.seconds
    assert fit.beta_s == plain.beta_s
    assert fit.assumed["resnet50"] == pytest.approx(24, rel=1e-6)
    assert fit.assumed["resnet101"] > 53
    assert fit.seconds["resnet101"] < 0.567


def test_the_old_topk_gains_as_little_as_published_and_a_new_one_more(report: Report) -> None:
    old, new = (row_of(report, "pcie_as_published", name) for name in ("topk_then", "topk"))
    assert 1 < old["layerwise_s"] / old["two_groups_s"] < 1.4
    assert new["layerwise_s"] / new["two_groups_s"] > 1.5
    assert old["ours_s"] > new["ours_s"]


def test_every_table_says_where_it_comes_from_and_the_summary_what_came_out(
    report: Report,
) -> None:
    for table in report.tables:
        assert all(len(row) == len(table.titles) for row in table.rows), table.title
    kinds = [table.kind for table in report.tables]
    assert kinds == sorted(kinds, reverse=True)
    said = "\n".join(report.summary)
    assert "3.83x" in said
    assert "not reached by any compressor" in said
    assert "99 % (published: FP16 over NVLink) is reached" in said
    assert "Nothing of compressors is fitted" in said
    assert "NOT RUN" in report.tables[-1].heading
    assert report.figure is not None


def test_on_fewer_gpus_only_what_has_figures_unless_all_is_asked_for() -> None:
    few = ("~models.mask_rcnn", "as_published=null", "clusters=[nvlink_8gpu]", "world_sizes=[2,8]")
    cfg = config(*few, "compressors=[fp16,signsgd]")
    found = [(one.model, one.compressor) for one in cells(cfg, None) if one.world_size == 2]
    assert ("resnet50", "signsgd") in found
    assert ("resnet101", "fp16") in found
    assert ("resnet101", "signsgd") not in found


@pytest.mark.parametrize("compressor", ["fp16", "onebit", "qsgd"])
def test_the_course_of_groups_is_what_is_simulated(compressor: str) -> None:
    network = Network(Link(0.0, 0.0), 4, ranks_per_node=4, within=Link(1e-5, 1e-9))
    workload = compressed(workload_of("resnet50", 0.07), compressor, Device(1e-5, 9e11), 4)
    predicted = []

    def search(course: Course) -> Sequence[int]:
        cuts = two_groups(course)
        predicted.append(course.step_s(cuts))
        return cuts

    strategy = Strategy("groups", "", grouped(search), compresses="whole")
    step = simulate(strategy.program(workload, network), 4)
    assert step.step_s == pytest.approx(predicted[0], rel=1e-9)


def test_the_best_groups_are_as_good_as_two(report: Report) -> None:
    for row in report.data["simulated"]:
        if row[f"{BEST_GROUPS}_s"] is not None:
            assert row[f"{BEST_GROUPS}_s"] <= 1.005 * row[f"{TWO_GROUPS}_s"]


def test_published_figures_are_found_by_network_size_and_model() -> None:
    assert published("pcie_as_published", 8, "resnet50", "dgc") == (18, 70)
    assert published("pcie_8gpu", 8, "mask_rcnn", "topk_then") == (14, 15)
    assert published("pcie_8gpu", 4, "resnet50", "onebit") == (25, 73)
    assert published("nvlink_8gpu", 2, "resnet101", "fp16") == (96, 99)
    assert published("nvlink_8gpu", 2, "resnet101", "dgc") is None
    assert published("pcie_8gpu", 4, "resnet101", "dgc") is None
    assert published("ethernet_10g", 8, "resnet50", "dgc") is None


def test_scaling_and_gain_are_ratios_of_steps() -> None:
    cell = Cell("n", 8, "m", "dgc", 1e-5, 0.1, {LAYERWISE: 0.4, TWO_GROUPS: 0.2})
    assert cell.scaling(TWO_GROUPS) == pytest.approx(50)
    assert cell.gain(TWO_GROUPS, LAYERWISE) == pytest.approx(2)


def measured_row(entry: str, ratio: float, *, is_void: bool = False) -> dict[str, str]:
    return {
        "point": "compressor=topk",
        "model": "resnet50",
        "world_size": "2",
        "stands_for_mbit": "1600.0",
        "entry": entry,
        "step_s": str(0.2 * ratio),
        "ratio": str(ratio),
        "is_void": str(is_void),
    }


def test_measured_rows_are_compared_with_the_layerwise_ones() -> None:
    rows = [
        measured_row("exact", 1.0),
        measured_row("layerwise", 4.0, is_void=True),
        measured_row("compute alone", 0.8),
    ]
    assert measured_gains(rows) == {"topk": 4.0}
    table = measured_table(rows, "study", [], "there.")
    assert table.rows == [["topk", "800*", "-", "200", "4.00x", "20 -> 80"]]
    assert "stands for 1.6 Gb/s" in table.title
    assert measured_table(rows, "study", ["dgc"], "").rows == []


def test_dear_bench_takes_what_the_sibling_asks_for() -> None:
    (sibling,) = config().siblings.values()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        cfg = compose(sibling.program, list(sibling.overrides))
    assert [entry.name for entry in entries_of(cfg)] == ["exact", "heuristic", "layerwise"]
    assert [point["compressor"] for point in points_of(cfg)] == ["efsignsgd", "topk", "int8"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["as_published.model=vgg16"], "must be among models"),
        (["+models.vgg16=1.0", "as_published.model=vgg16"], "no published figure"),
        (["as_published.cluster=ethernet_10g"], "all GPUs in one node"),
        (["world_sizes=8"], "must be a list"),
        (["compressors=[dgd]", "as_published=null", "world_sizes=[8]"], "Unknown compressor"),
    ],
)
def test_it_says_what_is_wrong(overrides: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        make(config(*overrides), tmp_path, tmp_path)
