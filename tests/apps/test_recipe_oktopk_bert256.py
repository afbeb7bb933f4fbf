"""dear-recipe oktopk_bert256: what is sent, the rates that are fitted, and what is checked."""

from __future__ import annotations

from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from lightning_dear.apps.recipe.report import Report, compared, read_rows
from lightning_dear.apps.recipe.run import load, siblings_of
from lightning_dear.paths import conf_dir, recipes_dir
from lightning_dear.simulator.ranking import predicted
from tests.apps.test_recipe import read_claims
from tests.planning.models import compute_s

RECIPE = load("oktopk_bert256")
FOLDER = recipes_dir() / "oktopk_bert256"
SMALL = ("profile=lstm", "world_size=16")


def config(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose("recipe/oktopk_bert256", list(overrides))


def case(*overrides: str) -> Any:
    return RECIPE.Case.of(config(*overrides))


def step_of(one: Any, scheme: str) -> Any:
    return predicted(RECIPE.AT_ONCE, one.workloads[scheme], one.network).step


@pytest.fixture(scope="module")
def report() -> Report:
    cfg = config()
    return RECIPE.make(cfg, siblings_of(cfg, FOLDER))


def test_what_is_recorded_comes_out_again(report: Report) -> None:
    assert compared(report.summary, read_rows(FOLDER / "summary.csv")) == "Same as recorded."
    assert list(report.claims) == read_claims(FOLDER / "claims.csv")
    assert {row["kind"] for row in report.summary} == {"simulated", "measured", "counted"}


def test_every_fit_hits_its_published_figure() -> None:
    bert = case()
    for over, gain in (("topkdsa", 3.29), ("gaussiank", 12.95), ("gtopk", 3.29)):
        assert bert.gain(over, bert.rate_for(over, gain)) == pytest.approx(gain, rel=1e-9)
    seconds = bert.compute_s_for("topkdsa", 3.29)
    shorter = case(f"compute_factor={0.25 * seconds / bert.compute_s}")
    assert shorter.gain("topkdsa") == pytest.approx(3.29, rel=1e-9)


def test_one_rate_meets_both_ends_and_gtopk_contradicts_it(report: Report) -> None:
    plausible = {one.claim: one.plausible for one in report.claims}
    assert plausible["least gain, over topkdsa"] == "yes"
    assert plausible["largest gain, over gaussiank"] == "yes"
    assert plausible["least gain, if also over gtopk"] == "no"
    bert = case()
    fitted = bert.rate_for("topkdsa", 3.29)
    assert bert.gain("gaussiank", fitted) == pytest.approx(12.95, rel=0.01)
    assert bert.gain("gtopk", fitted) < 2


def test_with_few_ranks_no_rate_gives_the_largest_gain() -> None:
    with pytest.raises(ValueError, match=r"The gain over gaussiank is never 12.95 from"):
        case("world_size=2").rate_for("gaussiank", 12.95)


def test_only_rate_times_computing_is_fitted() -> None:
    """But for what kernels and messages take: then both ends still meet."""
    long = case("compute_factor=1")
    least, most = long.rate_for("topkdsa", 3.29), long.rate_for("gaussiank", 12.95)
    assert least == pytest.approx(most, rel=0.01)
    assert least == pytest.approx(case().rate_for("topkdsa", 3.29) / 4, rel=0.06)


def test_nothing_overlaps_by_their_schedule() -> None:
    small = case(*SMALL)
    dense = small.workloads["dense"]
    sending_s = small.network.all_reduce_s(dense.nbytes)
    assert small.step_s("dense") == pytest.approx(small.compute_s + sending_s)
    for name in small.workloads:
        step = step_of(small, name)
        messages_s = sum(message.seconds for message in step.program.messages)
        assert step.step_s == pytest.approx(compute_s(step.program) + messages_s)


@pytest.mark.parametrize("world_size", [2, 16, 256])
def test_a_rank_sends_what_formulas_say(world_size: int) -> None:
    small = case("profile=lstm", f"world_size={world_size}")
    n, p = small.workloads["dense"].nbytes // 4, world_size
    k = n / 100
    words = {
        "dense": (2 * n * (p - 1) / p,) * 2,
        "oktopk": (2 * k * (p - 1) / p, 6 * k * (p - 1) / p),
        "topka": (2 * k * (p - 1),) * 2,
        "gaussiank": (2 * k * (p - 1),) * 2,
        "topkdsa": (4 * k * (p - 1) / p, (2 * k + n) * (p - 1) / p),
        "gtopk": (4 * k * (p - 1).bit_length(),) * 2,
    }
    assert words.keys() == small.workloads.keys()
    for name, (least, most) in words.items():
        step = step_of(small, name)
        assert 4 * least * (1 - 1e-3) <= step.program.sent_bytes <= 4 * most * (1 + 1e-3)


def test_the_bound_was_never_passed(report: Report) -> None:
    all_runs, long_runs = (row for row in report.summary if row["kind"] == "counted")
    assert all_runs["steps"] == 84 * 500
    assert long_runs["steps"] == 280
    assert 0.5 < long_runs["share_of_6k"] < all_runs["share_of_6k"] < 1


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("profile=bert_huge", "Unknown profile"),
        ("density=2", "density"),
        ("device.bytes_per_s=0", "bytes_per_s"),
        ("cluster.beta_s_per_byte=null", "cluster.beta_s_per_byte"),
    ],
)
def test_what_makes_no_sense_is_refused(override: str, words: str) -> None:
    with pytest.raises((ValueError, OSError), match=words):
        case(override)
