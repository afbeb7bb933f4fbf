"""`dear-recipe local_steps`: steps over DDP's, by losses made by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from lightning_dear.apps.converge.config import buckets_of, entries_of
from lightning_dear.apps.recipe.report import Report
from lightning_dear.apps.recipe.run import load, siblings_of
from lightning_dear.paths import conf_dir
from tests.apps.test_converge import job
from tests.apps.test_keys import check

RECIPE = load("local_steps")


def config(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose("recipe/local_steps", list(overrides))


def record(folder: Path, sibling: str, ends: Mapping[str, float], unit: str = "nats") -> None:
    own = folder / "measured" / sibling
    own.mkdir(parents=True)
    rows = [f"{entry},0.01,3,{unit},9.0,0.001,{end}" for entry, end in ends.items()]
    (own / "summary.csv").write_text(
        "\n".join(["entry,lr,num_seeds,unit,mean,sd,median", *rows]) + "\n"
    )


def made(folder: Path, *siblings: str, **claims: list[str]) -> Report:
    cfg = OmegaConf.create(
        {
            "siblings": dict.fromkeys(siblings),
            "claims": {name: {"model": "gpt", "runs": runs} for name, runs in claims.items()},
        }
    )
    return RECIPE.make(cfg, siblings_of(cfg, folder))


def times(report: Report) -> dict[tuple[str, int], float | None]:
    return {(row["setting"], row["steps"]): row["times_steps"] for row in report.summary}


def test_steps_are_compared_at_the_same_loss(tmp_path: Path) -> None:
    ends = {"ddp 100": 4.0, "ddp 400": 2.0, "a 400": 3.0, "b 400": 4.5, "c 400": 1.5, "d 800": 4.0}
    record(tmp_path, "gpt_1", ends)
    report = made(tmp_path, "gpt_1", one=["a 400", "b 400"], other=["a 800"])
    found = times(report)
    # Half of the way from 100 to 400 steps, by their logarithms.
    assert found["a", 400] == pytest.approx(2)
    # DDP never ends that badly; nor does it end that well.
    assert found["b", 400] is None
    assert found["c", 400] == pytest.approx(1)
    assert found["d", 800] == pytest.approx(8)
    assert (found["ddp", 100], found["ddp", 400]) == pytest.approx((1, 1))
    assert [(one.claim, one.here) for one in report.claims] == [
        ("one", "2.00x, far more"),
        ("other", "NOT RUN"),
    ]
    over = {(row["setting"], row["steps"]): row["over_reference"] for row in report.summary}
    assert (over["a", 400], over["d", 800]) == (1.0, None)


def test_each_setting_has_its_best_rate(tmp_path: Path) -> None:
    record(tmp_path, "gpt_1", {"ddp 100": 4.0, "ddp 400": 2.5, "a 400": 3.0})
    record(tmp_path, "gpt_2", {"ddp 400": 2.0, "a 400": 3.5})
    assert times(made(tmp_path, "gpt_1", "gpt_2"))["a", 400] == pytest.approx(2)


def test_a_worse_end_of_more_steps_does_not_count(tmp_path: Path) -> None:
    record(tmp_path, "gpt_1", {"ddp 100": 4.0, "ddp 200": 4.2, "ddp 400": 2.0, "a 400": 4.0})
    assert times(made(tmp_path, "gpt_1"))["a", 400] <= 4


def test_an_accuracy_is_taken_as_an_error(tmp_path: Path) -> None:
    record(tmp_path, "gpt_1", {"ddp 100": 96.0, "ddp 400": 98.0, "a 400": 97.0}, "points")
    report = made(tmp_path, "gpt_1")
    assert times(report)["a", 400] == pytest.approx(2)
    assert report.figure is not None


def test_nothing_recorded_is_said(tmp_path: Path) -> None:
    report = made(tmp_path, "gpt_1", one=["a 400"])
    assert (report.summary, report.figure) == ([], None)
    assert [claim.here for claim in report.claims] == ["NOT RUN"]


@pytest.mark.slow
def test_the_siblings_studies_compose() -> None:
    cfg = config("seeds=[1,2]")
    for name, one in cfg.siblings.items():
        overrides = list(one.overrides)
        assert "seeds=[1, 2]" in overrides
        check("dear-converge", *overrides)
        with job(*overrides) as study:
            entries = entries_of(study)
            assert list(buckets_of(study)) == ["scheduled"]
        assert entries[0].name.startswith("ddp "), name
        for entry in entries:
            setting, steps = entry.name.split()
            assert entry.max_steps == int(steps), setting
            assert len(entry.tries) == 1


def test_claims_are_of_what_is_trained() -> None:
    cfg = config()
    text = {name: " ".join(one.overrides) for name, one in cfg.siblings.items()}
    for claim in cfg.claims.values():
        for word in claim.runs:
            models = [body for name, body in text.items() if name.startswith(f"{claim.model}_")]
            assert any(f"name: {word}," in body or f"name: {word}}}" in body for body in models)
