"""dear-recipe mergecomp_scaling: what is fitted and simulated, what it shows and refuses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from lightning_dear.apps.bench.config import entries_of, points_of
from lightning_dear.apps.plan.config import compressed
from lightning_dear.apps.recipe.mergecomp_cases import Cell, cells
from lightning_dear.apps.recipe.mergecomp_fit import fitted, fp32_scaling, workload_of
from lightning_dear.apps.recipe.mergecomp_measured import (
    measured_gains,
    measured_table,
    said_of_measured,
)
from lightning_dear.apps.recipe.mergecomp_published import FP32, fp32_sizes, published
from lightning_dear.apps.recipe.mergecomp_said import said
from lightning_dear.apps.recipe.mergecomp_scaling import make
from lightning_dear.apps.recipe.mergecomp_schemes import (
    BEST_GROUPS,
    LAYERWISE,
    OURS_LAYERWISE,
    OURS_SCHEDULED,
    TWO_GROUPS,
    grouped,
    two_groups,
)
from lightning_dear.apps.recipe.mergecomp_tables import published_of
from lightning_dear.apps.recipe.mergecomp_verdict import verdict
from lightning_dear.apps.recipe.report import Report
from lightning_dear.paths import conf_dir
from lightning_dear.planning.programme import Course
from lightning_dear.simulator import Link, Network, simulate
from lightning_dear.simulator.strategies import Strategy
from lightning_dear.studies.device_costs import Device
from lightning_dear.workloads.replay.profile import load_profile

FEW = (
    "models=[resnet50]",
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


@pytest.mark.slow
def test_only_fp32_is_fitted_and_scales_as_published(report: Report) -> None:
    row = row_of(report, "pcie_as_published", FP32)
    assert row["alone_s"] / row["layerwise_s"] == pytest.approx(0.24, rel=1e-6)
    assert row["alone_s"] == pytest.approx(0.0713)


@pytest.mark.slow
def test_other_models_may_have_seconds_of_their_own() -> None:
    few = ("models=[resnet50,resnet101]", "clusters=[nvlink_8gpu]")
    fit, plain = (
        fitted(config(*few, *more)) for more in ((), ("as_published.fits_seconds=false",))
    )
    assert fit is not None
    assert plain is not None
    assert set(fit.seconds) == {"resnet101"}
    assert not plain.seconds
    assert fit.beta_s == plain.beta_s
    assert fit.assumed["resnet50"] == pytest.approx(24, rel=1e-6)
    network = fit.network(8)
    of_its_own = workload_of("resnet101", fit.seconds["resnet101"])
    assert fp32_scaling(of_its_own, network) == pytest.approx(53, rel=1e-6)


@pytest.mark.parametrize(("world_size", "figure"), [(2, 48), (4, 38), (8, 24)])
def test_the_fit_is_to_the_figure_of_as_many_gpus(world_size: int, figure: float) -> None:
    fit = fitted(config("models=[resnet50]", f"world_sizes=[{world_size}]"))
    assert fit is not None
    assert fit.assumed["resnet50"] == pytest.approx(figure, rel=1e-6)


def test_the_fitted_model_need_not_be_shown() -> None:
    fit = fitted(config("models=[mask_rcnn]"))
    assert fit is not None
    assert fit.model == "resnet50"
    assert set(fit.assumed) == set(fit.seconds) == {"mask_rcnn"}


def test_a_models_seconds_are_shared_as_in_its_profile() -> None:
    profile = load_profile("resnet50")
    times = workload_of("resnet50", 0.3).times
    assert times.forward_s + times.backward_s == pytest.approx(0.3)
    ratio = profile.backward_s / profile.forward_s
    assert times.backward_s / times.forward_s == pytest.approx(ratio)


def test_the_old_topk_takes_longer_and_gains_less_than_a_new_one(report: Report) -> None:
    old, new = (row_of(report, "pcie_as_published", name) for name in ("topk_then", "topk"))
    assert old["layerwise_s"] / old["two_groups_s"] < new["layerwise_s"] / new["two_groups_s"]
    assert all(old[f"{name}_s"] > new[f"{name}_s"] for name in (LAYERWISE, TWO_GROUPS, "ours"))


def test_every_table_says_where_it_comes_from_and_the_summary_what_came_out(
    report: Report,
) -> None:
    for table in report.tables:
        assert all(len(row) == len(table.titles) for row in table.rows), table.title
    kinds = [table.kind for table in report.tables]
    assert kinds == sorted(kinds, reverse=True)
    said = "\n".join(report.summary)
    assert "reproduced" in report.summary[0].lower()
    assert "3.83x is published for DGC, which was left out" in said
    assert "99 % (published: FP16 over NVLink) is" in said
    assert "Why, as far as it can be computed" in said
    assert "Nothing of compressors is fitted" in said
    assert "as published:" not in said
    assert "as published" not in "".join(title for table in report.tables for title in table.titles)
    assert "NOT RUN" in report.tables[-1].heading
    assert report.figure is not None


@pytest.mark.slow
def test_on_fewer_gpus_only_what_has_figures_unless_all_is_asked_for() -> None:
    few = (
        "models=[resnet50,resnet101]",
        "as_published=null",
        "clusters=[nvlink_8gpu]",
        "world_sizes=[2,8]",
    )
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
    step = simulate(strategy.program(workload, network))
    assert step.step_s == pytest.approx(predicted[0], rel=1e-9)


def test_the_best_groups_are_as_good_as_two(report: Report) -> None:
    for row in report.data["simulated"]:
        if row[f"{BEST_GROUPS}_s"] is not None:
            assert row[f"{BEST_GROUPS}_s"] <= 1.005 * row[f"{TWO_GROUPS}_s"]


def test_published_figures_are_found_by_cluster_size_and_model() -> None:
    assert published("pcie_8gpu", 8, "resnet50", "dgc") == (18, 70)
    assert published("pcie_8gpu", 8, "mask_rcnn", "topk_then") == (14, 15)
    assert published("pcie_8gpu", 4, "resnet50", "onebit") == (25, 73)
    assert published("nvlink_8gpu", 2, "resnet101", "fp16") == (96, 99)
    assert published("nvlink_8gpu", 2, "resnet101", "dgc") is None
    assert published("pcie_8gpu", 4, "resnet101", "dgc") is None
    assert published("pcie_8gpu", 3, "resnet50", "dgc") is None
    assert published("my_pcie_8gpu", 8, "resnet50", "dgc") is None
    assert published(None, 8, "resnet50", "dgc") is None
    assert fp32_sizes("pcie_8gpu", "resnet50") == [2, 4, 8]
    assert fp32_sizes("pcie_8gpu", "mask_rcnn") == [8]


@pytest.mark.slow
def test_a_cluster_of_the_command_line_has_no_figures() -> None:
    few = ("models=[resnet50]", "compressors=[fp16]", "world_sizes=[8]")
    given = list(cells(config("cluster=pcie_8gpu", *few), None))
    assert given
    assert all(published_of(one) is None for one in given)
    own = list(cells(config("clusters=[pcie_8gpu]", *few), None))
    assert all(published_of(one) is not None for one in own)


def cell_of(compressor: str, layerwise_s: float, two_groups_s: float, **fields: Any) -> Cell:
    steps_s = {
        LAYERWISE: layerwise_s,
        TWO_GROUPS: two_groups_s,
        BEST_GROUPS: two_groups_s,
        OURS_LAYERWISE: layerwise_s,
        OURS_SCHEDULED: two_groups_s,
    }
    own: dict[str, Any] = {"network": "pcie_8gpu", "world_size": 8, "model": "resnet50", **fields}
    return Cell(
        figures_of=own["network"],
        compressor=compressor,
        kernel_s=1e-5,
        alone_s=0.1,
        steps_s=steps_s,
        **own,
    )


def test_scaling_and_gain_are_ratios_of_steps() -> None:
    cell = cell_of("dgc", 0.4, 0.2)
    assert cell.scaling(TWO_GROUPS) == pytest.approx(50)
    assert cell.gain(TWO_GROUPS, LAYERWISE) == pytest.approx(2)


def test_the_summary_says_first_what_is_reproduced() -> None:
    simulated = [cell_of(FP32, 0.1, 0.1), cell_of("dgc", 0.5, 0.125), cell_of("fp16", 0.2, 0.25)]
    first = list(verdict(None, simulated, []))
    assert len(first) <= 5
    assert first[0].startswith("Not reproduced: scheduling shortens a step in 1 of the 2 cases")
    assert "Of 2 each, 1 layer by layer and 0 scheduled" in first[1]
    assert first[2].startswith("Reproduced: 3.83x")
    assert "DGC gains at most 4.0x" in first[2]
    assert "FP32 scales by 100 % (published 24)" in first[3]
    sentences = said(None, simulated, [])
    assert sentences[: len(first)] == first
    (longer,) = (one for one in sentences if "longer than layer by layer" in one)
    assert "fp16 on resnet50, `pcie_8gpu`, 8 GPUs 50 -> 40 %" in longer
    assert "dgc" not in longer


@pytest.mark.parametrize(
    ("fp32", "scheduled", "words"),
    [
        (99.9, 99.0, "is reached, as uncompressed FP32 reaches it, too (100 %): no evidence"),
        (91.0, 99.0, "Reproduced: 99 % (published: FP16 over NVLink) is reached"),
        (91.0, 98.6, "is not reached everywhere"),
    ],
)
def test_99_per_cent_counts_only_where_fp32_does_not_have_them(
    fp32: float, scheduled: float, words: str
) -> None:
    where = {"network": "nvlink_8gpu", "world_size": 2}
    simulated = [
        cell_of(FP32, 10 / fp32, 10 / fp32, **where),
        cell_of("fp16", 0.11, 10 / scheduled, **where),
    ]
    assert any(words in one for one in verdict(None, simulated, []))


def measured_row(
    entry: str, ratio: float, compressor: str = "topk", *, is_void: bool = False
) -> dict[str, str]:
    return {
        "point": f"compressor={compressor}",
        "model": "resnet50",
        "world_size": "2",
        "stands_for_mbit": "1600.0",
        "entry": entry,
        "step_s": str(0.2 * ratio),
        "ratio": str(ratio),
        "is_void": str(is_void),
    }


VOID = [
    measured_row("exact", 1.0),
    measured_row("layerwise", 4.0, is_void=True),
    measured_row("compute alone", 0.8),
]
SOUND = [measured_row("exact", 1.0, "dgc"), measured_row("layerwise", 3.0, "dgc")]


def test_measured_rows_are_compared_with_the_layerwise_ones() -> None:
    table = measured_table(VOID, "study", [], "there.")
    assert table.rows == [["topk", "800*", "-", "200", "4.00x*", "20* -> 80"]]
    assert "stands for 1.6 Gb/s" in table.title
    assert measured_table(VOID, "study", ["dgc"], "").rows == []


def test_void_rows_say_nothing() -> None:
    assert measured_gains([*VOID, *SOUND]) == {"dgc": 3.0}
    both, none, other = said_of_measured(
        {
            "both": [*VOID, *SOUND],
            "none": VOID,
            "other": [measured_row("exact", 1.0, is_void=True), measured_row("layerwise", 2.0)],
        }
    )
    assert "3.0 (dgc) to 3.0 times (dgc)" in both
    assert "1 of 2 pairs are left out" in both
    assert "all rows of layer by layer are void: the machine was busy" in none
    assert "each pair has a void row: the machine was busy" in other
    assert not list(said_of_measured({"not run": []}))


def test_dear_bench_takes_what_the_sibling_asks_for() -> None:
    (sibling,) = config().siblings.values()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        cfg = compose(sibling.program, list(sibling.overrides))
    assert [entry.name for entry in entries_of(cfg)] == ["exact", "heuristic", "layerwise"]
    assert [point["compressor"] for point in points_of(cfg)] == ["efsignsgd", "topk", "int8"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["as_published.model=vgg16"], "'vgg16' has no seconds in compute_s, which has .*resnet50"),
        (["models=[vgg16]"], "'vgg16' has no seconds in compute_s, which has .*resnet50"),
        (["models=resnet50"], "models must be a list"),
        (["+compute_s.vgg16=1.0", "as_published.model=vgg16"], "set as_published=null"),
        (["world_sizes=[16]"], "set as_published=null, or let .* be one of 2, 4, 8"),
        (["world_sizes=[2,4]"], "on 4 GPUs .*; set as_published.fits_seconds=false"),
        (["as_published.name=pcie_8gpu"], "must not be one of clusters"),
        (["as_published.cluster=ethernet_10g"], "no published figure for ethernet_10g"),
        (["world_sizes=8"], "must be a list"),
        (["compressors=[dgd]", "as_published=null", "world_sizes=[8]"], "Unknown compressor"),
    ],
)
def test_it_says_what_is_wrong(overrides: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        make(config(*overrides), tmp_path, tmp_path)
