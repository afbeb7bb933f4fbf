"""dear-recipe dear_fusion: what it compares, says and draws, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from lightning_dear.apps.recipe.dear_fusion import make
from lightning_dear.apps.recipe.dear_fusion_plans import cases
from lightning_dear.apps.recipe.report import Report
from lightning_dear.apps.recipe.steps import measured_steps
from lightning_dear.paths import conf_dir

FEW = ("models=[vgg16]", "clusters=[dear_ethernet]")
ALL = ["none", "1 MiB", "5 MiB", "25 MiB", "100 MiB", "single"]
ALL += ["bayesian", "mgwfbp", "exact", "mergecomp", "auto"]


def asked(*overrides: str):
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose("recipe/dear_fusion", list(overrides))


def made(folder: Path, *overrides: str) -> Report:
    return make(asked(*overrides), folder / "recorded", folder)


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Report:
    fusions = "fusions=[none,threshold,single,bayesian,mgwfbp,exact,mergecomp,auto]"
    return made(tmp_path_factory.mktemp("run"), *FEW, fusions)


def test_every_fusion_has_its_step_and_its_loss_against_the_best(report) -> None:
    steps, losses, *_ = report.tables
    assert list(steps.titles) == ["cluster", "model", "one rank", *ALL]
    assert list(losses.titles) == ["cluster", "model", *ALL]
    rows = {row["fusion"]: row for row in report.data["simulated"]}
    assert list(rows) == ALL
    best_s = min(row["step_s"] for row in rows.values())
    for name, cell, loss in zip(ALL, steps.rows[0][3:], losses.rows[0][2:], strict=True):
        row = rows[name]
        assert cell == f"{1e3 * row['step_s']:.1f}"
        assert loss == f"{100 * (row['step_s'] / best_s - 1):.1f} % ({row['num_buckets']})"
        assert row["step_s"] >= row["alone_s"]
    assert rows["none"]["num_buckets"] == 32
    assert rows["single"]["num_buckets"] == 1
    assert rows["exact"]["num_early"] == 0
    assert rows["mergecomp"]["step_s"] <= 1.002 * rows["exact"]["step_s"]


def test_tuners_leave_a_trace(report) -> None:
    traces = report.data["traces"]
    bayesian = [row for row in traces if row["fusion"] == "bayesian"]
    assert [row["trial"] for row in bayesian] == list(range(1, 11))
    assert bayesian[0]["cap_mb"] == 25
    assert all(1 <= row["cap_mb"] <= 256 for row in bayesian)
    best_s = [row["best_so_far_s"] for row in bayesian]
    assert best_s == sorted(best_s, reverse=True)
    steps_s = {row["fusion"]: row["step_s"] for row in report.data["simulated"]}
    assert best_s[-1] == steps_s["bayesian"]
    auto = [row for row in traces if row["fusion"] == "auto"]
    assert {"mergecomp", "threshold(25 MiB, first 1 MiB)"} <= {row["plan"] for row in auto}
    assert min(row["step_s"] for row in auto) == steps_s["auto"]
    tuners = report.tables[2]
    assert [row[2:4] for row in tuners.rows] == [["bayesian", "10"], ["auto", str(len(auto))]]
    assert len(report.figure.axes) == 2


def test_sentences_say_what_was_found(report) -> None:
    said = "\n".join(report.summary)
    for words in (
        "none of the figures below stands beside a published one",
        "No fusion takes",
        "One bucket for all takes",
        "Of the fixed caps 1 MiB, 5 MiB, 25 MiB, 100 MiB the best one for all models is",
        "The exact plan is",
        "The Bayesian tuner is within 2 % of the exact plan in",
        "MG-WFBP's rule makes steps that are",
        "`auto`, which tries",
    ):
        assert words in said
    assert "NOT RUN" in report.tables[3].heading


def test_what_is_not_asked_for_is_neither_run_nor_said(tmp_path) -> None:
    few = made(tmp_path, *FEW, "fusions=[threshold,none]", "caps=[25,50]")
    assert list(few.tables[0].titles[3:]) == ["25 MiB", "50 MiB", "none"]
    assert few.figure is None
    assert not few.data["traces"]
    assert not any("exact" in sentence for sentence in few.summary)
    with_tuner = made(tmp_path, *FEW, "fusions=[bayesian]", "bayesian.num_trials=2")
    assert len(with_tuner.data["traces"]) == 2
    assert "over exact" not in with_tuner.tables[2].titles


def test_a_cluster_of_ones_own_and_its_ranks() -> None:
    options = ("models=[vgg16]", "fusions=[single]", "compute_factor=2")
    (own,) = cases(asked(*options, "cluster=ethernet_25g", "world_size=null"))
    (slower,) = cases(asked(*options, "clusters=[ethernet_10g]"))
    assert own.alone_s == slower.alone_s
    assert own.fused["single"].step_s < slower.fused["single"].step_s


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("fusions=[threshold,best]", "Unknown fusion 'best'; valid ones: none, threshold"),
        ("fusions=none", "must be a list"),
        ("caps=[0]", "must be > 0"),
        ("caps=[many]", "caps must be numbers of MiB"),
        ("bayesian.num_trials=1", "num_trials must be >= 2"),
        ("exact.max_pieces=0", "max_pieces must be >= 1"),
    ],
)
def test_it_refuses_what_there_is_not(override: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        next(cases(asked(*FEW, override)))


def test_measured_steps_are_compared_with_the_entry_of_just_that_name() -> None:
    common = {
        "point": "0",
        "model": "vgg16",
        "world_size": "4",
        "stands_for_mbit": "10000",
        "is_void": "False",
    }
    rows = [
        {**common, "entry": entry, "step_s": step_s, "ratio_min": "1", "ratio_max": "1"}
        for entry, step_s in (("dear_none", "2"), ("dear", "1"), ("dear_auto (3)", "0.5"))
    ]
    assert [row[4] for row in measured_steps(rows, "dear", "").rows] == ["0.50", "1.00", "2.00"]
    assert [row[4] for row in measured_steps(rows, "dear_auto", "").rows][0] == "0.25"
