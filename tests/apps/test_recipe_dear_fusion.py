"""dear-recipe dear_fusion: what it compares, and what it refuses."""

from __future__ import annotations

import pytest
from hydra import compose, initialize_config_dir

from lightning_dear.apps.recipe import run
from lightning_dear.apps.recipe.report import Report, compared, read_rows
from lightning_dear.paths import conf_dir, recipes_dir

fusion = run.load("dear_fusion")
RECORDED = recipes_dir() / "dear_fusion"
FEW = ("models=[vgg16]", "clusters=[dear_ethernet]")
ALL = ["none", "1 MiB", "5 MiB", "25 MiB", "100 MiB", "single"]
ALL += ["bayesian", "mgwfbp", "exact", "auto"]


def asked(*overrides: str):
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose("recipe/dear_fusion", list(overrides))


def made(*overrides: str) -> Report:
    cfg = asked(*overrides)
    return fusion.make(cfg, run.siblings_of(cfg, RECORDED))


@pytest.fixture(scope="module")
def report() -> Report:
    return made(*FEW)


def test_every_fusion_has_its_step_and_its_loss_against_the_best(report) -> None:
    rows = {row["fusion"]: row for row in report.summary}
    assert list(rows) == ALL
    best_s = min(row["step_s"] for row in rows.values())
    for row in rows.values():
        assert row["loss"] == row["step_s"] / best_s - 1
        assert row["step_s"] >= row["alone_s"]
    assert rows["none"]["num_buckets"] == 32
    assert rows["single"]["num_buckets"] == 1
    assert rows["exact"]["num_all_reduced"] == 0
    # Exact is so but for ties of 0.2 % and all-reduces.
    others_s = [rows[name]["step_s"] for name in ALL if name not in ("exact", "auto")]
    assert rows["exact"]["step_s"] <= 1.002 * min(others_s)


def test_claims_are_made_of_the_summary(report) -> None:
    losses = {row["fusion"]: 100 * row["loss"] for row in report.summary}
    simulated = {one.claim: one.here for one in report.claims if one.kind == "simulated"}
    assert simulated == {
        words: f"+{losses[name]:.1f} to +{losses[name]:.1f} %"
        for name, (words, _) in fusion.CLAIMS.items()
    }


def test_what_was_measured_stands_beside(report) -> None:
    measured = {one.claim: one.here for one in report.claims if one.kind == "measured"}
    rows = {
        (row["model"], row["entry"]): float(row["step_s"])
        for row in read_rows(RECORDED / "measured/replay_p4/summary.csv")
    }
    overs = [
        100 * (rows[model, "dear_single"] / rows[model, "dear"] - 1)
        for model in ("resnet50", "bert_base")
    ]
    assert measured["one bucket"] == f"{overs[0]:+.1f} to {overs[1]:+.1f} %"


def test_what_is_not_asked_for_is_neither_run_nor_said() -> None:
    few = made(*FEW, "fusions=[threshold,none]", "caps=[25,50]")
    assert [row["fusion"] for row in few.summary] == ["25 MiB", "50 MiB", "none"]
    assert not any("exact" in one.claim for one in few.claims)


def test_a_cluster_of_ones_own_and_its_ranks() -> None:
    options = ("models=[vgg16]", "fusions=[single]", "compute_factor=2")
    (own,) = made(*options, "cluster=ethernet_25g", "world_size=null").summary
    (slower,) = made(*options, "clusters=[ethernet_10g]").summary
    assert own["alone_s"] == slower["alone_s"]
    assert own["step_s"] < slower["step_s"]


def test_a_part_of_what_is_recorded_comes_out_again() -> None:
    some = "fusions=[none,threshold,single,mgwfbp]"
    new = made("models=[resnet50]", "clusters=[dear_ethernet]", some)
    recorded = {
        row["fusion"]: row
        for row in read_rows(RECORDED / "summary.csv")
        if (row["cluster"], row["model"]) == ("dear_ethernet", "resnet50")
    }
    for row in new.summary:
        # The loss is against all fusions there.
        old = {**recorded[row["fusion"]], "loss": str(row["loss"])}
        assert compared([row], [old]) == "Same as recorded."


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_that_is_recorded_comes_out_again() -> None:
    assert compared(made().summary, read_rows(RECORDED / "summary.csv")) == "Same as recorded."


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "fusions=[threshold,best]",
            "Unknown name 'best' in fusions; valid names: exact, threshold",
        ),
        ("fusions=none", "must be a list"),
        ("caps=[0]", "must be > 0"),
        ("bayesian.num_trials=1", "num_trials must be >= 2"),
        ("exact.max_pieces=0", "max_pieces must be >= 1"),
    ],
)
def test_it_refuses_what_there_is_not(override: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fusion.planners_of(asked(*FEW, override))
