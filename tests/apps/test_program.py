"""What all programs answer at once: help, versions, configs and misspelt options."""

from __future__ import annotations

import os
import re
import resource
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from lightning_dear.apps import programs
from lightning_dear.paths import conf_dir
from lightning_dear.workloads.replay.profile import PROFILES

ROOT = conf_dir().parent
NAMES = ("train", "bench", "converge", "plan")
HEAVY = ("torch", "lightning", "matplotlib", "scipy", "sklearn", "rich")


@cache
def heavy_s() -> float:
    """CPU seconds that importing torch takes here: more than any answer that does not import it."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def said(folder: Path, name: str, *arguments: str) -> tuple[int, str, float]:
    """Exit code, all that was printed, and the CPU seconds that it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", f"lightning_dear.apps.{name}", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (
        done.returncode,
        done.stdout,
        after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("words", [["--help"], ["--version"], ["--cfg", "job"]], ids=" ".join)
def test_questions_are_answered_at_once(tmp_path: Path, name: str, words: list[str]) -> None:
    code, output, took_s = said(tmp_path, name, *words)
    assert code == 0, output
    assert took_s < heavy_s()
    assert not any(tmp_path.iterdir())
    begin = {"--help": f"dear-{name}: ", "--version": f"dear-{name} ", "--cfg": ""}[words[0]]
    assert output.startswith(begin)
    assert max(map(len, output.splitlines())) <= 100 or words == ["--cfg", "job"]


@pytest.mark.parametrize(
    ("option", "meant"),
    [("strategy.fusio=none", "fusion"), ("modle=gpt", "model"), ("model=gpd", "gpt")],
)
def test_misspelt_options_are_answered_soon(tmp_path: Path, option: str, meant: str) -> None:
    code, output, took_s = said(tmp_path, "train", option)
    assert code == 1
    # Instead of Hydra's many lines.
    assert re.match(rf"dear-train: Unknown name '\w+'\. Is '{meant}' meant\?", output)
    assert output.count("\n") == 1
    assert took_s < heavy_s()
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["model=bert"], r"Unknown name 'bert'\. Valid names: densenet201, gpt, .*, vgg16\."),
        (["foo=1"], r"Unknown name 'foo'\. Valid names: task_name, .*\bmodel, .*"),
        (
            ["trainer.profiler=simple"],
            r"Unknown name 'profiler'\. Valid names: default_root_dir, .*max_epochs, .*"
            r" To add it, write \+trainer\.profiler=simple\.",
        ),
        (
            ["--strategy=ddp"],
            r"unrecognized arguments: --strategy=ddp\. Options have no dashes: strategy=ddp\. .*",
        ),
        (["--epochs", "3"], r"unrecognized arguments: --epochs\. .* dashes: epochs=VALUE\. See .*"),
        (["model"], r"Cannot read 'model'\. Write NAME=VALUE, or .*"),
        (["ckpt_path=a=b.ckpt"], r"Cannot read 'ckpt_path=a=b\.ckpt'\. Write .*"),
        (
            ["trainer.max_epochs=one"],
            r"trainer\.max_epochs=one is not valid\. .* must be a number, such as 10\.",
        ),
    ],
    ids=str,
)
def test_a_wrong_option_is_one_line(tmp_path: Path, words: list[str], answer: str) -> None:
    code, output, took_s = said(tmp_path, "train", *words)
    assert code in (1, 2)
    assert re.fullmatch(rf"dear-train: {answer}\n", output), output
    assert took_s < heavy_s()
    assert not any(tmp_path.iterdir())


def test_what_is_refused_leaves_no_files(tmp_path: Path) -> None:
    code, output, _ = said(tmp_path, "train", "eval=true")
    assert code == 1
    assert "dear-train: ValueError: eval=true tests a checkpoint, but has none. Add" in output
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("name", [*NAMES, "recipe"])
def test_examples_of_help_name_what_exists(name: str) -> None:
    text = getattr(programs, name).__doc__
    commands = re.findall(r"^ +(dear-.*?)(?:   .*)?$", text, re.MULTILINE)
    assert len(commands) >= 3
    for command in commands:
        for word in shlex.split(command)[1:]:
            key, is_choice, value = word.partition("=")
            if is_choice and (conf_dir() / key).is_dir():
                for choice in value.split(","):
                    assert (conf_dir() / key / f"{choice}.yaml").is_file(), word


def test_nothing_that_takes_long_is_loaded_before_the_first_line() -> None:
    code = f"import sys, lightning_dear.apps.programs; print({set(HEAVY)} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout == "set()\n", done.stderr


def test_a_sweep_ends_with_a_table_and_without_a_terminal_each_epoch_has_a_line(
    tmp_path: Path,
) -> None:
    quick = ("model.net.channels=[4,8]", "model.net.num_blocks=1", "cluster=single_process")
    jobs = ("-m", "strategy=single", "optimizer.lr=0.1,0.2", "debug=limit", "trainer.max_epochs=2")
    code, output, _ = said(tmp_path, "train", *jobs, *quick)
    assert code == 0, output
    assert len(re.findall(r"^Epoch \d, step \d+, .*val_loss", output, re.MULTILINE)) == 4
    assert output.count("samples per second") == 2
    rows = [line for line in output.splitlines() if re.match(r"optimizer.lr=0\.[12] +\d", line)]
    assert len(rows) == 2
    (saved, *_) = re.findall(r"ckpt_path=(\S+)", output)
    tested, output, _ = said(
        tmp_path, "train", *quick, "strategy=single", "eval=true", f"ckpt_path={saved}"
    )
    assert tested == 0, output
    assert "test accuracy" in output
    assert "Epoch" not in output


def test_help_of_dear_plan_names_all_profiles() -> None:
    text = " ".join(str(programs.plan.__doc__).split())
    assert all(f" {name}, " in text for name in PROFILES)
    assert "need=0.9" in text
    assert "world_sizes=[" in text
