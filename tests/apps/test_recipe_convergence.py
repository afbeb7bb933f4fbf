"""`dear-recipe convergence`: when entries reach DDP's loss, by curves made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from lightning_dear.apps.converge.config import buckets_of, entries_of
from lightning_dear.apps.recipe.report import Report
from lightning_dear.apps.recipe.run import load, siblings_of
from lightning_dear.paths import conf_dir
from tests.apps.test_converge import job
from tests.apps.test_keys import check

RECIPE = load("convergence")
TITLES = "entry,buckets,seed,step,train_loss,time_s,sent_mb"
SLOW, FAST = 1.0, 0.25
"""Seconds of a step."""


def config(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose("recipe/convergence", list(overrides))


def made(folder: Path, *overrides: str) -> Report:
    cfg = config(*overrides)
    return RECIPE.make(cfg, siblings_of(cfg, folder))


def lines(entry: str, seed: int, losses: Sequence[float], step_s: float) -> list[str]:
    """A point for every 10 steps, each with its mean; 2 MB a step after the first point."""
    return [
        f"{entry},small,{seed},{step},{loss},{step * step_s},{2 * step + 5}"
        for step, loss in zip(range(10, 10 * len(losses) + 10, 10), losses, strict=True)
    ]


def record(folder: Path, model: str, trainings: Mapping[tuple[str, int], tuple]) -> None:
    own = folder / "measured" / model
    own.mkdir(parents=True)
    (own / "summary.csv").write_text("entry,loss_margin\nddp,0.25\n")
    body = [line for place, one in trainings.items() for line in lines(*place, *one)]
    (own / "loss_over_time.csv").write_text("\n".join([TITLES, *body]) + "\n")


TRAININGS = {
    # Running means over 20 steps: 3, 1.5, 1 on both seeds, the second 1 higher; targets 1.25, 2.25.
    ("ddp", 1): ([4.0, 2.0, 1.0, 1.0], SLOW),
    ("ddp", 2): ([5.0, 3.0, 2.0, 2.0], SLOW),
    ("int8", 1): ([4.0, 2.0, 1.0, 1.0], FAST),
    # One point sooner.
    ("int8", 2): ([4.0, 2.0, 2.0, 2.0], SLOW),
    # Not on the second seed.
    ("topk", 1): ([4.0, 1.0, 1.0, 1.0], FAST),
    ("topk", 2): ([5.0, 5.0, 4.0, 3.0], FAST),
    # Has no second seed.
    ("onebit", 1): ([4.0, 1.0, 1.0, 1.0], FAST),
}


@pytest.fixture
def report(tmp_path: Path) -> Report:
    record(tmp_path, "digits", TRAININGS)
    return made(tmp_path)


def rows_of(report: Report) -> dict[str, Mapping]:
    return {row["entry"]: row for row in report.summary}


def test_times_are_compared_with_ddps_on_the_same_seed(report: Report) -> None:
    rows = rows_of(report)
    assert rows["ddp"]["target_loss"] == pytest.approx(1.75)
    assert (rows["ddp"]["target_s"], rows["ddp"]["speedup"]) == (40.0, 1.0)
    # 40 s over 10 s, and over 30 s.
    int8 = rows["int8"]
    assert (int8["speedup_min"], int8["speedup_max"]) == pytest.approx((40 / 30, 4))
    assert int8["speedup"] == pytest.approx((4 + 40 / 30) / 2)
    assert int8["target_s"] == pytest.approx(20)
    assert int8["target_steps"] == 35
    assert int8["step_s"] == pytest.approx((FAST + SLOW) / 2)
    assert int8["sent_mb_per_step"] == pytest.approx(2)
    assert int8["over_reference"] == pytest.approx(0)


@pytest.mark.parametrize("entry", ["topk", "onebit"])
def test_what_never_arrives_has_no_time_and_says_so(report: Report, entry: str) -> None:
    row = rows_of(report)[entry]
    assert (row["num_arrived"], row["target_s"], row["speedup"]) == (1, None, None)
    said = {claim.claim.partition(":")[0]: claim.here for claim in report.claims}
    assert said[entry] == "digits never on 1 of 2 seeds"
    assert said["int8"] == "digits 2.67x"
    assert said["gpt"] == "NOT RUN, measure=true does it"


def test_the_picture_has_a_line_for_each_entry_and_the_target(report: Report) -> None:
    (axes,) = report.figure.axes
    labels = [line.get_label() for line in axes.get_lines()]
    assert labels == ["ddp", "int8", "topk", "onebit", "target"]
    assert list(axes.get_lines()[0].get_xdata()) == [10, 20, 30, 40]
    assert axes.get_lines()[-1].get_ydata()[0] == pytest.approx(1.75)


def test_nothing_recorded_is_said(tmp_path: Path) -> None:
    report = made(tmp_path)
    assert (report.summary, report.figure) == ([], None)
    assert [claim.here for claim in report.claims] == ["NOT RUN, measure=true does it"] * 2


def test_what_gives_no_target_is_refused(tmp_path: Path) -> None:
    record(tmp_path, "digits", {("ddp", 1): ([4.0], SLOW)})
    for override, message in (
        ("reference=fsdp2", "digits has no entry 'fsdp2'. Set reference to one of ddp"),
        ("window_steps=20", "ddp has made fewer than window_steps steps on digits"),
        ("window_steps=15", "window_steps=15 must be a multiple of 10"),
    ):
        with pytest.raises(ValueError, match=message):
            made(tmp_path, override)


def test_running_means_begin_when_there_are_enough_steps(tmp_path: Path) -> None:
    record(tmp_path, "digits", TRAININGS)
    (sibling, _) = siblings_of(config(), tmp_path).values()
    run = RECIPE.runs_of(sibling.rows("loss_over_time"), 20)["ddp"][1]
    assert list(run.losses[1:]) == [3.0, 1.5, 1.0]
    assert run.reaches(1.5) == 2
    assert run.reaches(0.5) is None
    # The first point has no mean, and is reached by nothing.
    assert run.reaches(9.0) == 1


def test_the_siblings_compose() -> None:
    cfg = config("seeds=[1,2]", "steps.gpt=40")
    assert list(cfg.siblings) == ["digits", "gpt"]
    overrides = list(cfg.siblings.gpt.overrides)
    assert {"seeds=[1, 2]", "trainer.max_steps=40", "cluster.rate_mbit=100"} <= set(overrides)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["digits", "gpt"])
def test_the_siblings_studies_compose(model: str) -> None:
    overrides = list(config().siblings[model].overrides)
    check("dear-converge", *overrides)
    with job(*overrides) as cfg:
        entries = entries_of(cfg)
        (buckets,) = buckets_of(cfg)
    assert buckets == "small"
    assert [entry.name for entry in entries[:3]] == ["ddp", "ddp_bf16", "dear"]
    assert {entry.reference for entry in entries[3:]} == {"ddp"}
    assert all(len(entry.tries) == 1 for entry in entries)
