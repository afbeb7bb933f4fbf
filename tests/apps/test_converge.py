"""`dear-converge`: its config, and a study from end to end."""

from __future__ import annotations

import csv
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, open_dict

from lightning_dear.apps import keys
from lightning_dear.apps.bench.build import build_strategy
from lightning_dear.apps.converge.config import (
    Entry,
    Options,
    buckets_of,
    config_of,
    entries_of,
    key_of,
)
from lightning_dear.compression import COMPRESSORS
from lightning_dear.paths import conf_dir

ROOT = conf_dir().parent


@contextmanager
def job(*overrides: str, folder: str = "out") -> Iterator[DictConfig]:
    """The config of a running job, composed as the command line does, which may compose more."""
    previous = HydraConfig.instance().cfg
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = compose("converge", list(overrides), return_hydra_config=True)
        with open_dict(config):
            config.hydra.runtime.output_dir = folder
            config.hydra.job.config_name = "converge"
        HydraConfig.instance().set_config(config)
        with open_dict(config):
            del config["hydra"]
        try:
            yield config
        finally:
            HydraConfig.instance().cfg = previous


def check(cfg: DictConfig) -> None:
    keys.check("dear-converge", cfg, HydraConfig.get())


JUDGED = ("fp16", "bf16", "int8", "int4", "loco", "powersgd", "efsignsgd", "topk", "dgc")
SPARSE_ALL_REDUCES = ("oktopk", "topka", "topkdsa", "gtopk", "gaussiank")
FILES = [*(ROOT / "recipes").glob("*/README.md"), *(ROOT / "recipes").glob("*/commands.sh")]
RECIPES = "\n".join(path.read_text() for path in sorted(FILES))
COMMANDS = re.findall(r"^OMP_NUM_THREADS=1 dear-converge ((?:.*\\\n)*.+)$", RECIPES, re.MULTILINE)


# --- config -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("study", ["converge_digits", "converge_gpt"])
def test_every_entry_of_a_study_composes(study: str) -> None:
    with job(f"experiment={study}") as cfg:
        check(cfg)
        assert cfg.metric.margin in (1.0, 0.02)
        entries = {entry.name: entry for entry in entries_of(cfg)}
        _check_momentum(entries)
    assert list(entries)[0] == "dense"
    assert sum(entry.is_control for entry in entries.values()) == 2
    judged = {name for name, one in entries.items() if one.reference and not one.below}
    assert set(JUDGED) <= judged
    assert set(COMPRESSORS) - entries.keys() == {"none", "fp32", *SPARSE_ALL_REDUCES}


@pytest.mark.slow
def test_the_longer_studies_compose() -> None:
    with job("experiment=converge_gpt_long") as cfg:
        check(cfg)
        entries = {entry.name: entry for entry in entries_of(cfg)}
    assert {"topk", "efsignsgd", "powersgd", "oktopk_2"} <= entries.keys()
    assert {entry.max_steps for entry in entries.values()} == {8000}
    assert entries["topk_no_residual"].is_control
    with job("experiment=converge_gpt_sgd") as cfg:
        check(cfg)
        _, dgc = entries_of(cfg)
        optimizer = config_of(dgc, (), Options(1, 0), 0.1).optimizer
    assert dgc.name == "dgc"
    assert not optimizer.get("momentum")


@pytest.mark.slow
def test_commands_of_the_recipes_compose() -> None:
    assert len(COMMANDS) == RECIPES.count("dear-converge ") > 0
    for command in COMMANDS:
        with job(*shlex.split(command.replace("\\\n", ""))) as cfg:
            check(cfg)
            entries_of(cfg)
            assert len(cfg.seeds) >= 5


def _check_momentum(entries: dict[str, Entry]) -> None:
    """Who keeps momentum itself is compared with SGD with momentum, and has none in SGD."""
    for name in ("dgc", "signum"):
        for entry in (entries[name], entries[entries[name].reference or ""]):
            optimizer = config_of(entry, (), Options(1, 0), 0.1).optimizer
            assert optimizer._target_ == "torch.optim.SGD"
            assert bool(optimizer.get("momentum")) is (entry.name != name)


def find(cfg: DictConfig, name: str) -> Entry:
    return next(entry for entry in entries_of(cfg) if entry.name == name)


@pytest.mark.slow
def test_options_reach_the_training() -> None:
    topk = "{name: mine, compressor: topk, compressor.density: 0.1, optimizer.lr: 7}"
    with job(f"entries=[dense,{topk}]") as cfg:
        buckets = buckets_of(cfg)["layer-wise"]
        own = config_of(find(cfg, "mine"), buckets, Options(0.1, 0.1), 0.005)
        assert (own.optimizer.lr, own.compressor.density) == (0.005, 0.1)
        assert own.fusion._target_.endswith("NoFusion")
        strategy = build_strategy(own)
    assert strategy.compression_schedule._dense_steps == 18


@pytest.mark.slow
def test_the_dense_share_is_one_of_the_entrys_own_steps() -> None:
    with job("entries=[dense,{name: long, compressor: topk, trainer.max_steps: 400}]") as cfg:
        own = config_of(find(cfg, "long"), (), Options(1, 0.1), 0.1)
        assert own.trainer.max_steps == 400
        assert build_strategy(own).compression_schedule._dense_steps == 40
        cfg.entries[1]["trainer.max_steps"] = 0
        with pytest.raises(
            ValueError, match=r"Entry long has trainer\.max_steps=0\. Choose 1 or more"
        ):
            entries_of(cfg)


@pytest.mark.slow
def test_a_key_knows_all_that_has_a_say_and_nothing_else() -> None:
    with job("entries=[dense,topk,topk_too]", folder="one") as cfg:
        cfg.entries[2] = {"name": "topk_too", "compressor": "topk"}
        topk, too = find(cfg, "topk"), find(cfg, "topk_too")
        given = [
            (topk, Options(1, 0), 0.1, 1),
            (topk, Options(1, 0), 0.2, 1),
            (topk, Options(1, 0.1), 0.1, 1),
            (topk, Options(1, 0), 0.1, 2),
        ]
        keys = [key_of(config_of(*one[:1], (), *one[1:3]), one[3]) for one in given]
        assert len(set(keys)) == len(given)
        own = config_of(too, (), Options(0.5, 0), 0.1)
        assert key_of(own, 1) == keys[0]
    with job("entries=[dense,topk]", folder="another") as cfg:
        again = config_of(find(cfg, "topk"), (), Options(1, 0), 0.1)
        assert key_of(again, 1) == keys[0]


@pytest.mark.slow
def test_references_come_first_and_have_as_many_tries() -> None:
    late = "{name: sgd, optimizer: sgd_plain}"
    with job(f"entries=[dense,int8,{late},topk]") as cfg:
        entries = entries_of(cfg)
        assert [entry.name for entry in entries] == ["dense", "sgd", "int8", "topk"]
        assert [entry.reference for entry in entries] == [None, None, "dense", "dense"]
        dense, int8 = entries[0].tries, entries[2].tries
    assert len(dense) == len(int8) == 6
    assert {one.dense_share for one in dense} == {0}
    assert Options(0.333, 0.1) in int8
    small = "{name: small, compressor: efsignsgd, lr_factors: [0.1, 0.01, 0.001]}"
    with job(f"entries=[dense,{small}]") as cfg:
        tries = find(cfg, "small").tries
    assert [one.lr_factor for one in tries[::2]] == [0.1, 0.01, 0.001]


@pytest.mark.slow
def test_an_entry_may_have_dense_shares_of_its_own() -> None:
    one = ("lr_factors=[1]", "dense_shares=[0.1]", "reference_lr_factors=[1]", "tuning_seeds=[]")
    with job("entries=[dense,int8,{name: a, compressor: bf16, dense_shares: [0]}]", *one) as cfg:
        check(cfg)
        assert find(cfg, "int8").tries == (Options(1.0, 0.1),)
        assert find(cfg, "a").tries == (Options(1.0, 0.0),)


@pytest.mark.slow
def test_other_strategies_are_references() -> None:
    with job("entries=[{name: ddp, strategy: ddp},{name: dear, compressor: none},int8]") as cfg:
        references = [(one.name, one.reference) for one in entries_of(cfg)]
    assert references == [("ddp", None), ("dear", None), ("int8", "ddp")]


@pytest.mark.slow
def test_nothing_goes_dense_before_votes_which_try_more_learning_rates() -> None:
    small = "{name: small, compressor: signsgd, lr_factors: [6, 5, 4, 3, 2, 1]}"
    signum = "{name: signum, compressor: signum, optimizer: sgd_plain}"
    with job(f"entries=[dense,{signum},{small}]") as cfg:
        tries = [find(cfg, name).tries for name in ("signum", "small")]
        usual = list(cfg.reference_lr_factors)
    assert [[one.lr_factor for one in each] for each in tries] == [usual, [6, 5, 4, 3, 2, 1]]
    assert {one.dense_share for each in tries for one in each} == {0}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ("[int8]", "no dense entry before it"),
        ("[dense,{name: a, compressor: int8, reference: b}]", "compared with b"),
        ("[dense,{name: a, reference: dense}]", "encodes nothing"),
        ("[dense,int8,int8]", "int8 more than once"),
        ("[dense,{compressor: int8}]", "has no name"),
        (
            "[dense,{name: a, compressor: int8, lr_factors: [1]}]",
            r"a has 2 tries \(lr_factors times dense_shares.*references 6 \(reference_lr_factors",
        ),
        ("[dense,{name: a, compressor: signsgd, lr_factors: [1, 2, 3]}]", "a has 3 tries"),
        ("[dense,{name: a, compressor: int8, dense_shares: [0]}]", "a has 3 tries"),
        (
            "[dense,{name: a, compressor: signsgd, dense_shares: [0, 1]}]",
            "Entry a votes and has dense_shares. Leave them out",
        ),
        ("[{name: a, compressor: none, dense_shares: [0, 1]}]", "a reference: dense_shares has no"),
        ("[dense,dgc]", "Entry dgc: .* keeps momentum itself.* Add optimizer: sgd_plain"),
        ("[dense,{name: a, compressor: signum}]", "Entry a: .* keeps momentum itself"),
    ],
)
def test_wrong_entries_are_refused(entries: str, message: str) -> None:
    with job(f"entries={entries}") as cfg, pytest.raises(ValueError, match=message):
        entries_of(cfg)


@pytest.mark.slow
def test_unknown_and_impossible_compressors_are_refused_before_anything_starts() -> None:
    unknown = job("entries=[dense,nope]")
    with unknown as cfg, pytest.raises(MissingConfigException, match="compressor/nope"):
        entries_of(cfg)
    for ignored, message in (
        ("{name: b, compressor: none, control: true}", "a reference: control has no effect"),
        ("{name: b, compressor: none, lr_factors: [1, 2, 3]}", "a reference: lr_factors has no"),
        ("{name: b, compressor: int8, control: true, below: 1.0}", "has both control and below"),
        (
            "{name: b, compressor: int8, strategy.compression_schedule: null}",
            "which dense_shares would replace",
        ),
    ):
        entry = job(f"entries=[dense,{ignored}]")
        with entry as cfg, pytest.raises(ValueError, match=message):
            entries_of(cfg)


# --- running ------------------------------------------------------------------------------------

QUICK = (
    *("model=mlp", "model.net.width=64", "model.net.num_hidden=2", "fusion=small"),
    *("trainer.max_steps=12", "loss_steps=4", "curve_steps=4", "seeds=[1,2]"),
    *("lr_factors=[1]", "dense_shares=[0,0.5]", "reference_lr_factors=[1,0.3]"),
    "hydra.run.dir=out",
)
BUG = "compressor._target_: lightning_dear.studies.training.DoubledTopK"
BROKEN = f"{{name: bad, compressor: topk, {BUG}, control: true}}"


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "lightning_dear.apps.converge", *QUICK, *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def read(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        command(*arguments),
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result


@pytest.mark.slow
def test_two_entries_end_to_end(tmp_path: Path) -> None:
    result = run(tmp_path, "entries=[dense,int8]")
    for notice in ("GPU available", "many workers", "DistributedSampler", "Tip:", "gathers"):
        assert notice not in result.stdout + result.stderr
    raw = read(tmp_path / "out/raw.csv")
    # Two tries with one bucketing, and two seeds with both, for each entry.
    assert [line["phase"] for line in raw] == ["tuning", "tuning", *["final"] * 4] * 2
    assert {line["num_steps"] for line in raw} == {"12"}
    assert len({(line["weights"], line["batches"], line["seed"]) for line in raw}) == 3
    tried = [float(line["lr"]) for line in raw[:2]]
    assert tried == pytest.approx([0.05, 0.015])
    best = max(raw[:2], key=lambda line: (float(line["metric"]), -float(line["train_loss"])))
    assert {line["lr"] for line in raw[2:]} == {best["lr"]}
    assert {line["dense_share"] for line in raw[6:8]} == {"0.0", "0.5"}
    dense = [line for line in raw if line["entry"] == "dense" and line["phase"] == "final"]
    by_seed = {seed: [one for one in dense if one["seed"] == seed] for seed in "12"}
    for ends in by_seed.values():
        assert len({(one["metric"], one["train_loss"]) for one in ends}) == 1
    rows = read(tmp_path / "out/summary.csv")
    assert [row["verdict"] for row in rows[:2]] == ["reference"] * 2
    assert all(abs(float(row["loss_worse_mean"])) < 0.05 for row in rows[2:])
    curves = read(tmp_path / "out/loss_over_time.csv")
    assert [line["step"] for line in curves] == ["4", "8", "12"] * 8
    for first, last in zip(curves[::3], curves[2::3], strict=True):
        assert 0 < float(first["time_s"]) < float(last["time_s"]) < 60
        assert float(last["sent_mb"]) > float(first["sent_mb"]) > 0
    for name in ("plot.png", "table.txt", "config.yaml"):
        assert (tmp_path / "out" / name).stat().st_size > 100


@pytest.mark.slow
def test_an_entry_that_comes_later_changes_no_other(tmp_path: Path) -> None:
    run(tmp_path, "entries=[dense,int8]")
    rows = read(tmp_path / "out/summary.csv")
    before = (tmp_path / "out/raw.csv").read_text()
    more = run(tmp_path, f"entries=[dense,{BROKEN},int8]", "trainer.max_steps=12")
    after = (tmp_path / "out/raw.csv").read_text()
    assert after.startswith(before)
    assert {line["entry"] for line in read(tmp_path / "out/raw.csv")[12:]} == {"bad"}
    assert "int8" in more.stdout
    # The same numbers as without a broken training before it.
    assert read(tmp_path / "out/summary.csv")[-2:] == rows[2:]


@pytest.mark.slow
def test_a_training_that_breaks_off_does_not_touch_the_next(tmp_path: Path) -> None:
    wild = (f"entries=[dense,{BROKEN},int8]", "~buckets.layer-wise", "trainer.max_steps=60")
    one = ("reference_lr_factors=[1]", "dense_shares=[0]")
    run(tmp_path, *wild, *one)
    raw = {(line["entry"], line["seed"]): line for line in read(tmp_path / "out/raw.csv")}
    assert raw["bad", "1"]["metric"] == "nan"
    assert 10 < int(raw["bad", "1"]["num_steps"]) < 60
    # One try is no choice.
    assert {line["phase"] for line in raw.values()} == {"final"}
    (bad,) = (row for row in read(tmp_path / "out/summary.csv") if row["entry"] == "bad")
    assert (bad["verdict"], bad["num_broken_off"]) == ("fails, as it must", "2")
    run(tmp_path, *wild[1:], *one, "entries=[dense,int8]", "hydra.run.dir=alone")
    alone = {(line["entry"], line["seed"]): line for line in read(tmp_path / "alone/raw.csv")}
    for place, line in alone.items():
        same = ("key", "metric", "train_loss", "weights", "batches")
        assert [raw[place][name] for name in same] == [line[name] for name in same]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_study_keeps_what_it_trained(tmp_path: Path, number: signal.Signals) -> None:
    once = ("reference_lr_factors=[1]", "dense_shares=[0]", "~buckets.layer-wise")
    arguments = ("entries=[dense,int8]", "trainer.max_steps=50", *once)
    running = subprocess.Popen(
        command(*arguments),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Whoever runs the tests in the background makes their processes ignore Ctrl-C.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    out = tmp_path / "out"
    deadline_s = time.monotonic() + 150
    while not (out / "table.txt").exists() and time.monotonic() < deadline_s:
        time.sleep(0.1)
    running.send_signal(number)
    output, _ = running.communicate(timeout=60)
    assert running.returncode == 128 + number, output
    assert "Traceback" not in output
    assert read(out / "summary.csv")[0]["entry"] == "dense"
    assert (out / "table.txt").read_text() in output
    assert f"dear-converge: Interrupted: add hydra.run.dir={out} to the command" in output
    before = (out / "raw.csv").read_text()
    report = [sys.executable, "-m", "lightning_dear.apps.converge", "report", "out"]
    table = (out / "table.txt").read_text()
    (out / "table.txt").unlink()
    shown = subprocess.run(
        **{"args": report, "cwd": tmp_path, "env": environment(), "check": False},
        **{"capture_output": True, "text": True},
    )
    assert shown.returncode == 0, shown.stderr
    assert table in shown.stdout
    assert (out / "table.txt").read_text() == table
    run(tmp_path, *arguments)
    assert (out / "raw.csv").read_text().startswith(before)
    assert len(read(out / "raw.csv")) == 4
