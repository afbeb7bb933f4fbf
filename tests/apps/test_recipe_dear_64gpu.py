"""dear-recipe dear_64gpu: what it varies, which numbers make claims true, and what it refuses."""

from __future__ import annotations

from functools import partial

import pytest
from hydra import compose, initialize_config_dir

from lightning_dear.apps.recipe import run
from lightning_dear.apps.recipe.report import Report, compared, read_rows
from lightning_dear.paths import conf_dir, recipes_dir
from lightning_dear.simulator.strategies import STRATEGIES, horovod_program

dear = run.load("dear_64gpu")
RECORDED = recipes_dir() / "dear_64gpu"
FEW = ("models=[resnet50]", "clusters=[ethernet_10g,dear_ethernet]")


def asked(*overrides: str):
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose("recipe/dear_64gpu", list(overrides))


def made(*overrides: str) -> Report:
    cfg = asked(*overrides)
    return dear.make(cfg, run.siblings_of(cfg, RECORDED))


def cases_of(*overrides: str) -> dict[str, list]:
    cases: dict[str, list] = {}
    for case in dear.cases_of(asked(*overrides)):
        cases.setdefault(case.network_name, []).append(case)
    return cases


@pytest.fixture(scope="module")
def cases() -> dict[str, list]:
    return cases_of(*FEW)


# --- what is varied -------------------------------------------------------------------------------


def test_networks_are_varied_where_nccl_could_choose(cases) -> None:
    assert list(cases) == [
        "ethernet_10g",
        "ethernet_10g, rings",
        "ethernet_10g, rings, 2 NICs",
        "dear_ethernet",
    ]
    best, rings, nics, theirs = (own[0] for own in cases.values())
    assert rings.network.all_reduce_s(1e6) > best.network.all_reduce_s(1e6)
    assert rings.network.half_s(1e6) == best.network.half_s(1e6)
    assert nics.rate == pytest.approx(2 * rings.rate)
    # Of an all-reduce of 64 ranks in the authors' code.
    assert theirs.network.all_reduce_s(0.0) == pytest.approx(7.043e-3, rel=1e-3)
    assert theirs.network.all_reduce_s(1e9) == pytest.approx(0.9643 + 7.043e-3, rel=1e-3)
    assert theirs.rate == pytest.approx(16.33e9, rel=1e-3)


def test_a_model_with_a_public_speed_counts_twice(cases) -> None:
    profile, public = cases["dear_ethernet"]
    assert [profile.workload.name, public.workload.name] == ["resnet50", "resnet50, public speed"]
    times = public.workload.times
    assert times.forward_s + times.backward_s == pytest.approx(64 / 294, rel=1e-3)
    assert profile.workload.tensors == public.workload.tensors


def test_dear_has_its_best_cap_and_others_their_defaults(cases) -> None:
    case = cases["dear_ethernet"][0]
    caps = [case.steps_s[f"dear_paper, {cap} MB"] for cap in (25, 50, 100)]
    assert case.dear_s == min(caps) == case.tuned_s(case.network)
    assert case.steps_s["dear_paper, 25 MB"] == case.step_s(STRATEGIES["dear_paper"].build)
    assert case.steps_s["dear_paper, nothing fused"] > max(caps)
    assert case.gain("horovod", "ddp") == case.gain("ddp") < 0 < case.gain("horovod")
    cycles = [case.gain(f"horovod{cycle}") for cycle in ("", ", 2.5 ms", ", 5 ms", ", 10 ms")]
    assert cycles == sorted(cycles, reverse=True)


def test_ddps_buffers_are_those_of_batch_norms(cases) -> None:
    """ResNet-50 has 53 of them, of 26,560 channels."""
    case = cases["ethernet_10g"][0]
    half_s = case.network.half_s
    assert case.buffers_s == pytest.approx(half_s(2 * 4 * 26_560) + half_s(8 * 53))
    whole_s = case.steps_s["ddp"] + case.buffers_s
    assert case.steps_s["ddp, with module buffers"] == pytest.approx(whole_s)
    (bert,) = cases_of("models=[bert_base]", "clusters=[dear_ethernet]")["dear_ethernet"]
    assert bert.buffers_s == 0


# --- what must be true ----------------------------------------------------------------------------


def number(words: str, unit: str) -> float:
    return float(words.removesuffix(unit).split()[-1])


def test_a_cycle_gives_the_published_gain(cases) -> None:
    own = cases["dear_ethernet"]
    claim = dear.cycle_of(own).claim("over Horovod", 0.83, "here")
    build = partial(horovod_program, cycle_s=number(claim.must_be_true, "ms") / 1e3)
    assert max(case.step_s(build) / case.dear_s for case in own) == pytest.approx(1.83, abs=0.02)
    assert (claim.published, claim.plausible) == ("+83 %", "no")


def test_a_start_gives_the_published_gain(cases) -> None:
    own = cases["ethernet_10g, rings"]
    start = dear.start_of(own, ["wfbp", "bytescheduler"])
    # At the known start it is what was simulated.
    others = [one.steps_s[way] for one in own[:1] for way in ("wfbp", "bytescheduler")]
    unfused_s = own[0].steps_s["dear_paper, nothing fused"]
    alone = dear.start_of(own[:1], ["wfbp", "bytescheduler"])
    assert alone.gain(alone.known) == pytest.approx(max(others) / unfused_s - 1)
    claim = start.claim("nothing fused", 0.83, "here")
    found_s = number(claim.must_be_true, "ms") / 1e3
    assert start.gain(found_s) == pytest.approx(0.83, abs=0.02)
    assert claim.plausible == "no"


def test_buffers_give_the_published_gain(cases) -> None:
    buffers = dear.buffers_of(cases["dear_ethernet"])
    claim = buffers.claim("over DDP", 0.83, "here")
    found_s = number(claim.must_be_true, "ms") / 1e3
    gains = [(case.steps_s["ddp"] + found_s) / case.dear_s - 1 for case in cases["dear_ethernet"]]
    assert max(gains) == pytest.approx(0.83, abs=0.01)
    assert buffers.known == max(case.buffers_s for case in cases["dear_ethernet"])


def test_a_rate_gives_the_published_gain() -> None:
    few = (
        "models=[bert_large]",
        "clusters=[infiniband_100g]",
        "baselines=[horovod]",
        "ours=[dear]",
    )
    own = cases_of(*few)["infiniband_100g"]
    rate = dear.rate_of(own, 26.7e9)
    assert rate.gain(own[0].rate) == pytest.approx(own[0].gain("horovod"))
    claim = rate.claim("over Horovod", 0.15, "here")
    assert rate.gain(1e9 * number(claim.must_be_true, "Gb/s")) == pytest.approx(0.15, abs=5e-3)
    assert (claim.checked, claim.plausible) == ("26.7 Gb/s, their own table", "yes")


def test_what_no_number_gives_is_said(cases) -> None:
    claim = dear.cycle_of(cases["ethernet_10g"]).claim("over Horovod", 0.83, "here")
    assert (claim.must_be_true, claim.plausible) == ("no cycle of 0.1 to 20 ms", "no")


@pytest.mark.parametrize(("found", "said"), [(1.5, "yes"), (1.6, "no"), (0.67, "yes"), (0.6, "no")])
def test_plausible_is_near_on_either_side(found: float, said: str) -> None:
    assert dear.is_plausible(found, 1.0) == said


# --- what comes out -------------------------------------------------------------------------------


def test_a_part_of_what_is_recorded_comes_out_again() -> None:
    report = made("models=[resnet50]", "clusters=[dear_ethernet]")
    recorded = [
        row
        for row in read_rows(RECORDED / "summary.csv")
        if row["network"] == "dear_ethernet" and row["model"].startswith("resnet50")
    ]
    assert compared(report.summary, recorded) == "Same as recorded."
    titles = [one.claim for one in report.claims]
    assert titles[0] == "over the best, all networks"
    assert "over Horovod, dear_ethernet" in titles
    assert not any("infiniband" in title or "nothing fused" in title for title in titles)
    assert report.claims[-1].kind == "measured"


@pytest.mark.slow
def test_all_that_is_recorded_comes_out_again() -> None:
    report = made()
    assert compared(report.summary, read_rows(RECORDED / "summary.csv")) == "Same as recorded."
    written = read_rows(RECORDED / "claims.csv")
    assert [one.must_be_true for one in report.claims] == [row["must_be_true"] for row in written]


def test_another_cluster_takes_the_place_of_all() -> None:
    report = made(FEW[0], "cluster=infiniband_100g", "world_size=16", "baselines=[ddp]")
    assert {row["network"] for row in report.summary} == {"own", "own, rings"}
    assert all(row["alone_s"] <= row["step_s"] for row in report.summary)
    assert [one.kind for one in report.claims] == ["simulated", "measured"]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("clusters=[ethernet_11g]", "Unknown cluster 'ethernet_11g'; valid names: aries"),
        ("models=[bert_huge]", "Unknown profile 'bert_huge'"),
        ("baselines=[dpp]", "Unknown strategy 'dpp'"),
        ("baselines=ddp", r"baselines=ddp must be a list, such as baselines=\[ddp\]"),
    ],
)
def test_what_does_not_exist_is_refused(override: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        made(*FEW, override)
