"""dear-recipe mergecomp_scaling: what is fitted to whom, what is predicted, and what is checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from lightning_dear.apps.recipe.report import Report, compared, read_rows
from lightning_dear.apps.recipe.run import load, siblings_of
from lightning_dear.paths import conf_dir, recipes_dir
from lightning_dear.planning import SingleFusion
from tests.apps.test_recipe import read_claims

RECIPE = load("mergecomp_scaling")
FOLDER = recipes_dir() / "mergecomp_scaling"
PUBLISHED = list(RECIPE.fit.read_figures())


def config(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose("recipe/mergecomp_scaling", list(overrides))


def predicted(figures: Sequence[Any], *overrides: str) -> list[Any]:
    return list(RECIPE.fit.Server.of(config(*overrides), figures).predicted(figures))


@pytest.fixture(scope="module")
def server() -> Any:
    return RECIPE.fit.Server.of(config(), PUBLISHED)


@pytest.fixture(scope="module")
def report() -> Report:
    cfg = config()
    return RECIPE.make(cfg, siblings_of(cfg, FOLDER))


def figure(model: str, compressor: str, network: str = "pcie_8gpu", num_gpus: int = 8) -> Any:
    (found,) = (
        one
        for one in PUBLISHED
        if one.is_of(network, num_gpus, model) and one.compressor == compressor
    )
    return found


def test_what_is_recorded_comes_out_again(report: Report) -> None:
    assert compared(report.summary, read_rows(FOLDER / "summary.csv")) == "Same as recorded."
    assert list(report.claims) == read_claims(FOLDER / "claims.csv")


def test_published_figures_are_those_of_the_claims(report: Report) -> None:
    gain = float(report.claims[0].published.partition("x")[0])
    alone, merged = figure("resnet50", "dgc").pair
    assert (alone, merged) == (0.18, 0.70)
    # Each may be off by a point.
    assert (merged - 0.01) / (alone + 0.01) < gain < (merged + 0.01) / (alone - 0.01)
    assert max(one.pair[1] for one in PUBLISHED if one.network == "nvlink_8gpu") == 0.99
    assert len(PUBLISHED) == 3 * 10 + 2 + 4 + 3 * 3 * 2


def test_fp32_of_every_model_scales_as_published(server: Any) -> None:
    for model, workload in server.workloads.items():
        here = RECIPE.fit.scaling(RECIPE.fit.LAYERWISE, workload, server.network)
        assert here == pytest.approx(figure(model, "fp32").pair[0], rel=1e-8)


def test_a_host_is_what_a_figure_says(server: Any) -> None:
    host = server.host(figure("resnet50", "dgc"))
    # 161 tensors, of which two groups are made.
    assert host.per_tensor_s == pytest.approx((0.0713 / 0.18 - 0.0713 / 0.70) / 159)
    assert host.per_byte_s * server.workloads["resnet50"].nbytes == pytest.approx(
        0.0713 / 0.70 - 0.0713
    )


@pytest.mark.parametrize("model", ["resnet50", "resnet101", "mask_rcnn"])
def test_every_fit_hits_its_published_figure(server: Any, model: str) -> None:
    for one in PUBLISHED:
        if one.is_of("pcie_8gpu", 8, model) and one.compressor != "fp32":
            pair = server.host(one).scaling(server.workloads[model])
            assert pair == pytest.approx(one.pair, rel=1e-12)


def test_compressors_figures_of_other_models_predict_nothing(server: Any) -> None:
    plain = list(server.predicted(PUBLISHED))
    assert {one.model for one in plain} == {"resnet101", "mask_rcnn"}
    assert len(plain) == 2 * 9
    is_fitted_to = [one.model == "resnet50" or one.compressor == "fp32" for one in PUBLISHED]
    altered = [
        one if is_used else replace(one, pair=(one.pair[0] / 2, one.pair[1] / 3))
        for one, is_used in zip(PUBLISHED, is_fitted_to, strict=True)
    ]
    assert altered != PUBLISHED
    assert repr(predicted(altered)) == repr(plain)


@pytest.mark.parametrize(("model", "compressor"), [("resnet50", "dgc"), ("resnet101", "fp32")])
def test_fp32_and_resnet50_are_looked_at(server: Any, model: str, compressor: str) -> None:
    altered = [
        replace(one, pair=(one.pair[0] * 0.9, one.pair[1]))
        if one == figure(model, compressor)
        else one
        for one in PUBLISHED
    ]
    assert repr(predicted(altered)) != repr(list(server.predicted(PUBLISHED)))


def test_predictions_do_not_depend_on_the_assumed_seconds(server: Any) -> None:
    shorter = predicted(PUBLISHED, "compute_s=0.05")
    for one, other in zip(server.predicted(PUBLISHED), shorter, strict=True):
        assert one.pair == pytest.approx(other.pair, rel=0.01)


def test_what_fails_stands_in_the_same_table(report: Report) -> None:
    plausible = {one.claim: one.plausible for one in report.claims}
    assert plausible["9 compressors on resnet101"] == "yes"
    assert plausible["9 compressors on mask_rcnn"] == "no"
    assert plausible["DGC on resnet50, 2 GPUs, PCIe"] == "no"
    cycle = next(one for one in report.claims if "cycle" in one.claim)
    assert "5.0 ms, MergeComp's 0.1 ms" in cycle.checked


def test_two_groups_are_no_slower_than_any_other_two(server: Any) -> None:
    workload, network = server.workloads["resnet50"], server.network
    encoded = RECIPE._compressed(config(), workload, "signsgd", network)
    best = RECIPE._merged(encoded, network)
    assert best > RECIPE.fit.scaling(RECIPE.fit.LAYERWISE, encoded, network)
    build = RECIPE.strategies.planned(SingleFusion().plan, all_reduces=True)
    single = RECIPE.strategies.Strategy("single", build, compresses="whole")
    assert best > RECIPE.fit.scaling(single, encoded, network)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("clusters=[moon]", "Unknown cluster 'moon'"),
        ("compute_s=10000", "FP32's scaling factor of resnet50 is never 0.24 from"),
    ],
)
def test_what_makes_no_sense_is_refused(override: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RECIPE.fit.Server.of(config(override), PUBLISHED)
