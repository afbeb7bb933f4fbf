"""`dear-recipe outside`: what is predicted from which facts, and in which unit it is compared."""

from __future__ import annotations

from functools import cache

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from lightning_dear.apps.recipe import run
from lightning_dear.apps.recipe.report import Claim, Report, compared, read_rows
from lightning_dear.apps.recipe.simulated import load_cluster
from lightning_dear.paths import conf_dir, recipes_dir
from lightning_dear.simulator import Link, Network, ranking
from lightning_dear.simulator.strategies import STRATEGIES

outside = run.load("outside")
RECORDED = recipes_dir() / "outside"
AVERAGING = "parameters averaged each step, the same"
DILOCO = "publications.diloco_measured"


def asked(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose("recipe/outside", list(overrides))


def made(*overrides: str) -> Report:
    return outside.make(asked(*overrides), {})


@cache
def report() -> Report:
    return made()


def facts_of(claim: str) -> list[dict]:
    return [one for one in outside._facts(asked()) if one["claim"].startswith(claim)]


def rows_of(claim: str) -> list[dict]:
    return [row for row in report().summary if row["claim"].startswith(claim)]


# --- facts ----------------------------------------------------------------------------------------


def test_a_figures_own_facts_replace_its_claims_and_its_publications() -> None:
    first, second, *_ = facts_of("BERT-Large")
    assert (first["hosts"], second["hosts"]) == (2, 4)
    assert first["compute_s"] != second["compute_s"]
    assert first["source"] == "arxiv.org/abs/2102.02888"
    (stage,) = facts_of("1-bit Adam")
    assert stage["source"].startswith("deepspeed.ai/")
    assert (stage["step_s"], first["step_s"], stage["gpus"]) == (0, 0.0755, 4)


def test_the_model_is_the_published_one() -> None:
    facts = facts_of("DDP at")[0]
    model = outside._workload(facts)
    assert sum(tensor.numel for tensor in model.tensors) == 30_846_720
    assert len(model.tensors) == 1 + 6 * 9 + 2
    times = model.times
    assert times.forward_s + times.backward_s == pytest.approx(facts["compute_s"])
    assert times.backward_s == pytest.approx(2 * times.forward_s)
    assert ranking.alone_s(model) == pytest.approx(facts["compute_s"] + facts["step_s"])


@pytest.mark.parametrize(
    ("claim", "millions"),
    [("BERT-Large", 336), ("DDP's fp16 hook", 46), ("CoCa", 638.45), ("thousand words", 39.5)],
)
def test_other_models_have_as_many_parameters_as_is_said(claim: str, millions: float) -> None:
    tensors = outside._workload(facts_of(claim)[0]).tensors
    assert sum(tensor.numel for tensor in tensors) / 1e6 == pytest.approx(millions, rel=2e-3)


def test_links_cost_what_the_clusters_of_dear_plan_cost() -> None:
    cfg, plan = asked(), load_cluster("ethernet_10g")
    assert (cfg.alpha_s, cfg.within.alpha_s) == (plan.alpha_s, plan.within.alpha_s)
    assert cfg.within.beta_s == plan.within.beta_s_per_byte


# --- predictions ----------------------------------------------------------------------------------


def test_ddp_is_dear_plans_and_averaging_is_an_all_reduce_a_tensor() -> None:
    facts = facts_of("DDP at")[2]
    model = outside._workload(facts)
    network = Network(Link(5e-5, 8e-9), 4)
    ddp, averaged = rows_of("DDP at")[2], rows_of(AVERAGING)[2]
    assert (ddp["rate_mbit"], averaged["rate_mbit"]) == (1000, 1000)
    expected = ranking.predicted(STRATEGIES["ddp"], model, network).step.step_s
    assert ddp["simulated"] == pytest.approx(expected)
    sums_s = sum(network.all_reduce_s(4 * tensor.numel) for tensor in model.tensors)
    assert averaged["simulated"] == pytest.approx(ranking.alone_s(model) + sums_s)
    # By hand: a ring sends 3/4 of all bytes twice.
    bytes_s = 2 * 3 / 4 * 4 * 30_846_720 * 8e-9
    assert averaged["simulated"] == pytest.approx(0.0258 + bytes_s, rel=0.015)


def test_an_error_is_the_prediction_over_the_figure() -> None:
    for row in report().summary:
        assert row["error"] == pytest.approx(row["simulated"] / row["published"] - 1)
    # Nothing is fitted: errors are what they are.
    errors = [row["error"] for row in rows_of(AVERAGING)]
    assert max(map(abs, errors[2:])) < 0.01 < min(map(abs, errors[:2]))
    assert all(row["error"] < -0.2 for row in rows_of("DDP at")[:4])
    assert rows_of("DDP at")[4]["error"] > 0.2


def test_a_gain_is_the_other_ways_step_over_the_ways() -> None:
    cfg, facts = asked(), facts_of("DDP's fp16 hook")[0]
    network = Network(Link(5e-5, 8e-10), 12, 6, Link(1e-5, 1e-10))
    model = outside._workload(facts)
    hook_s, ddp_s = (outside._step_s(cfg, way, model, network) for way in facts["ways"])
    assert rows_of("DDP's fp16 hook")[0]["simulated"] == pytest.approx(ddp_s / hook_s)
    # Half the bytes, which are most of a step; and next to nothing if computing hides them.
    short, long = (row["simulated"] for row in rows_of("DDP's fp16 hook"))
    assert 1.5 < short < 2
    assert 1 < long < 1.05


def test_work_is_done_in_a_step() -> None:
    two, three = rows_of("CoCa")
    # 24 images in a step, which ends when a ring of 16 ranks has all bytes.
    bytes_s = 2 * 15 / 16 * 4 * 638.45e6 * 8e-10
    assert bytes_s < 24 / two["simulated"] < 0.8 + bytes_s
    assert three["simulated"] < two["simulated"]


def test_the_hook_of_seventeen_hours() -> None:
    """With 950 ms of computing DDP's step is that of 17 hours for 62,550 steps."""
    cfg, facts = asked(), facts_of("DDP's fp16 hook")[1]
    network = Network(Link(5e-5, 8e-10), 12, 6, Link(1e-5, 1e-10))
    ddp_s = outside._step_s(cfg, "ddp", outside._workload(facts), network)
    assert ddp_s == pytest.approx(17 * 3600 / (100 * 120_098 / (12 * 16)), rel=0.01)


def test_a_message_that_costs_nothing_leaves_computing() -> None:
    row = made("alpha_s=0", f"{DILOCO}.hosts=1").summary[0]
    assert row["simulated"] == pytest.approx(0.0258)


# --- what comes out -------------------------------------------------------------------------------


def test_what_is_recorded_comes_out_again() -> None:
    assert compared(report().summary, read_rows(RECORDED / "summary.csv")) == "Same as recorded."
    written = [Claim(**row) for row in read_rows(RECORDED / "claims.csv")]  # type: ignore[arg-type]
    assert list(report().claims) == written


def test_a_claim_has_its_address_and_says_what_was_simulated() -> None:
    for claim in report().claims:
        assert "/" in claim.checked
        assert claim.kind == "simulated"
        assert claim.must_be_true
        assert claim.here.count(",") == 2 * claim.published.count(",")


def test_a_claim_is_plausible_if_all_its_figures_are() -> None:
    row = rows_of("thousand words")[0]
    near, far = row, row | {"simulated": 6.0, "error": -0.4}
    said = [outside._claim(rows).plausible for rows in ([near], [near, far], [far, near])]
    assert said == ["yes", "no", "no"]
    twice = row | {"simulated": 16.0, "error": 0.6}
    assert outside._claim([near, twice]).plausible == "no"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("publications.fairseq.compute_s=0", "compute_s=0 is not valid"),
        ("alpha_s=-1", "alpha_s=-1 of a link is not valid"),
    ],
)
def test_numbers_out_of_range_are_refused(override: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        made(override)


def test_an_unknown_way_is_refused() -> None:
    cfg = asked()
    [claim] = cfg.publications.fairseq.claims.values()
    claim.ways = ["dpp"]
    with pytest.raises(ValueError, match="Unknown strategy 'dpp'"):
        outside.make(cfg, {})
