"""dear-recipe oktopk_bert256: volumes, steps, what it says of the claim, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from lightning_dear.apps.recipe.oktopk_bert256 import _needed, _simulated, make, verdict
from lightning_dear.apps.recipe.oktopk_cases import AT_ONCE, DENSE, OURS, cases_of
from lightning_dear.apps.recipe.oktopk_recorded import said
from lightning_dear.apps.recipe.oktopk_volumes import FORMULAS, sent_mb, volumes
from lightning_dear.apps.recipe.report import write_report
from lightning_dear.apps.recipe.simulated import networks_of
from lightning_dear.paths import conf_dir, recipes_dir
from lightning_dear.workloads.replay.planned import planned
from lightning_dear.workloads.replay.profile import load_profile
from tests.workloads.replaying import divided

SMALL = "cases=[{profile: lstm, world_size: 8, density: 0.02, label: small}]"
BERT = "cases=[{profile: bert_base, world_size: 256, density: 0.01, compute_factor: 0.25}]"
SPARSE = ("oktopk", "topka", "topkdsa", "gtopk", "gaussiank")


def config(*overrides: str):
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose("recipe/oktopk_bert256", list(overrides))


def steps(*overrides: str):
    cfg = config(*overrides)
    [run] = _simulated(cfg, cases_of(cfg)[0], [AT_ONCE], SPARSE)
    return cfg, run


def test_it_is_written_where_it_should_be(tmp_path) -> None:
    report = make(config(SMALL), tmp_path / "none", tmp_path)
    readme = (recipes_dir() / "oktopk_bert256" / "README.md").read_text()
    write_report(report, "oktopk_bert256", tmp_path, readme)
    assert (tmp_path / "oktopk_bert256.png").stat().st_size > 10_000
    rows = (tmp_path / "simulated.csv").read_text().splitlines()
    # Four ways to send gradients as they are, and three for each of five schemes.
    assert len(rows) == 1 + 4 + 3 * 5
    text = (tmp_path / "README.md").read_text()
    for words in ("**Published: what Ok-Topk gains**", "**Simulated: step, ms**", "NOT RUN"):
        assert words in text
    assert "published: 3.29x" not in " ".join(report.summary)
    assert "Simulated with the authors' schedule, Ok-Topk is" in report.summary[0]
    assert "`at_once` is their schedule: one bucket after backward." in text


def test_what_was_recorded_elsewhere_is_shown(tmp_path) -> None:
    report = make(config(SMALL), recipes_dir() / "oktopk_bert256", tmp_path)
    steps_of_8, sent, ends = [table for table in report.tables if table.kind == "measured"][1:]
    assert {row[2] for row in steps_of_8.rows} > {"oktopk", "ddp", *SPARSE}
    assert {(row[0], row[1]) for row in sent.rows} >= {
        (gradients, name) for gradients in ("digits", "gpt") for name in SPARSE
    }
    assert {row[0] for row in ends.rows} == {"converge_oktopk", "converge_gpt_oktopk"}
    assert report.summary[-1].startswith("Measured at 8 ranks on links that stand for 400 Mb/s")


def test_void_steps_are_named_where_something_rests_on_them() -> None:
    def row(entry: str, step_s: str, is_void: str = "False") -> dict[str, str]:
        same = {"world_size": "8", "stands_for_mbit": "400", "point": ""}
        return {**same, "entry": entry, "step_s": step_s, "is_void": is_void}

    fine = [row("oktopk", "2"), row("topka", "3"), row("ddp", "8"), row("bf16", "4", "True")]
    [sentence] = said(fine)
    assert "4.00 times as fast as `ddp` and 1.50 to 1.50 times" in sentence
    assert "void" not in sentence
    [sentence] = said([*fine, row("gtopk", "5", "True")])
    assert sentence.endswith("; void, as the machine was busy: `gtopk`.")
    assert not list(said(fine[:1]))
    assert not list(said([]))


@pytest.mark.parametrize("world_size", [2, 16, 256])
def test_ours_sends_no_more_than_formulas_say(world_size: int) -> None:
    _, run = steps(f"cases=[{{profile: lstm, world_size: {world_size}, density: 0.01}}]")
    k = run.case.compressor(OURS).entries(run.case.numel)
    for name in SPARSE:
        least, most = (
            4e-6 * words(run.case.numel, k, world_size)
            for words in (FORMULAS[name].least, FORMULAS[name].most)
        )
        # Costs are of a share of all numbers, formulas of k, which is rounded up.
        assert least * (1 - 1e-3) <= sent_mb(run, name) <= most * (1 + 1e-3)
    [formula, ours] = volumes([run], [DENSE, "gtopk"]).rows
    assert formula[2] == ours[2]
    assert float(formula[3]) == pytest.approx(float(ours[3]), rel=0.01, abs=0.1)


def test_nothing_overlaps_by_their_schedule() -> None:
    cfg, run = steps(SMALL)
    [network] = networks_of(cfg, 8).values()
    dense_s = run.alone_s + network.all_reduce_s(run.case.workload.nbytes)
    assert run.step_s("at_once", DENSE) == pytest.approx(dense_s)
    for name in SPARSE:
        step = run.of["at_once", name].step
        messages_s = sum(message.seconds for message in step.program.messages)
        assert step.step_s == pytest.approx(step.program.compute_s + messages_s)


@pytest.mark.parametrize(
    "overrides",
    [
        [BERT.replace("density: 0.01", "density: 0.001")],
        [BERT.replace("world_size: 256", "world_size: 128")],
        [BERT.replace("bert_base", "lstm")],
        [BERT, "clusters=[ethernet_10g]"],
        [BERT, "cluster=aries", "cluster.beta_s_per_byte=1.0e-9"],
    ],
)
def test_nothing_published_stands_beside_other_cases_and_clusters(overrides: list[str]) -> None:
    _, run = steps(*overrides)
    assert not run.is_claimed


def test_ok_topk_is_ahead_of_dense_and_of_those_that_grow_with_the_ranks() -> None:
    _, run = steps(BERT)
    assert run.is_claimed
    assert run.times("at_once", ("at_once", DENSE)) > 1.2
    assert run.times("at_once", ("at_once", "topka")) > 2
    assert run.others("at_once")[-1][1] in ("topka", "gaussiank")
    # Computing of the length that is said to be needed gives just what was claimed.
    needed_s = float(_needed(run).split()[-2]) / 1e3
    dense_s, own_s = (run.step_s("at_once", name) - run.alone_s for name in (DENSE, OURS))
    assert (needed_s + dense_s) / (needed_s + own_s) == pytest.approx(3.29, rel=0.03)


def test_factors_keep_the_ratio_of_backward_to_forward(tmp_path: Path) -> None:
    profile = divided(load_profile("lstm"), 0.075, 0.225)
    profile.save(tmp_path / "own.json")
    saved = load_profile(tmp_path / "own.json")

    def times(factor: float):
        entry = f"profile: {tmp_path}/own.json, world_size: 8, density: 0.01"
        [case] = cases_of(config(f"cases=[{{{entry}, compute_factor: {factor}}}]"))
        return case.workload.times

    assert times(1) == planned(saved)[1]
    assert times(0.5).forward_s == pytest.approx(saved.forward_s / 2)
    assert times(0.5).backward_s == pytest.approx(saved.backward_s / 2)


def test_computing_that_hides_nothing_is_all_that_factors_change() -> None:
    _, quarter = steps(BERT)
    _, half = steps(BERT, "compute_factor=2")
    assert half.alone_s == pytest.approx(2 * quarter.alone_s)
    for key in quarter.compared:
        assert half.beyond(key) == pytest.approx(quarter.beyond(key))


@pytest.mark.parametrize(
    ("gains", "words"),
    [
        ((1.1, 3.2), "is not reproduced in simulation"),
        ((1.1, 3.3), "is reproduced in part in simulation"),
        ((3.3, 12.9), "is reproduced in part in simulation"),
        ((3.3, 13.0), "is reproduced in simulation"),
    ],
)
def test_verdicts(gains, words) -> None:
    assert verdict(gains) == words


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("cases=bert_base", "cases must be a list"),
        ("cases=[lstm]", "Each of cases must be such as"),
        ("cases=[{}]", "lacks profile, world_size, density"),
        ("cases=[{profile: lstm, density: 0.01}]", "lacks world_size"),
        ("cases=[{profile: null, world_size: 8, density: 0.01}]", "lacks profile"),
        ("cases=[{profile: lstm, world_size: 8, density: 0.01, ranks: 8}]", "Unknown in a case"),
        ("cases=[{profile: lstm, world_size: many, density: 0.01}]", "must be a number"),
        ("cases=[{profile: no.json, world_size: 8, density: 0.1}]", "Unknown profile"),
        ("cases=[{profile: lstm, world_size: 1, density: 0.01}]", "at least 2 ranks"),
        ("cases=[{profile: lstm, world_size: 8, density: 2}]", "density"),
        ("cases=[{profile: lstn, world_size: 8, density: 0.1}]", "Unknown profile"),
        (f"{SMALL[:-1]},{SMALL[7:]}", "same label"),
        ("sparse=[oktopk]", "names no other scheme"),
        ("sparse=[dgc]", "no sparse all-reduce"),
        ("clusters=[moon]", "Unknown cluster"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, override: str, words: str) -> None:
    small = [] if override.startswith("cases") else [SMALL]
    with pytest.raises(ValueError, match=words):
        make(config(*small, override), tmp_path, tmp_path)
