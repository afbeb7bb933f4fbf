"""`dear-bench`: its config, and a comparison from end to end."""

from __future__ import annotations

import csv
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import instantiate
from lightning.pytorch import Trainer
from omegaconf import DictConfig, OmegaConf, open_dict

from lightning_dear.apps.bench.build import (
    build_strategy,
    link_rate_mbit,
    one_way_s,
    point_of,
    replay_overrides,
    round_of,
    scale_caps,
)
from lightning_dear.apps.bench.comparison import found_plan
from lightning_dear.apps.bench.config import (
    as_override,
    by_cluster,
    composed,
    entries_of,
    label_of,
    merged,
    overrides_of,
    points_of,
)
from lightning_dear.apps.bench.run import check_goes_on, check_points
from lightning_dear.callbacks.fusion_tuner import FusionTuner
from lightning_dear.paths import conf_dir
from lightning_dear.planning import AutoFusion
from lightning_dear.studies.block import BlockLength
from lightning_dear.studies.summary import bounds_of
from lightning_dear.workloads.replay import LayerProfile, ModelProfile

ROOT = conf_dir().parent


@contextmanager
def job(*overrides: str) -> Iterator[DictConfig]:
    """The config of a running job, composed as the command line does, which may compose more."""
    previous = HydraConfig.instance().cfg
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = compose("bench", list(overrides), return_hydra_config=True)
        with open_dict(config):
            config.hydra.runtime.output_dir = "out"
            config.hydra.job.config_name = "bench"
        HydraConfig.instance().set_config(config)
        with open_dict(config):
            del config["hydra"]
        try:
            yield config
        finally:
            HydraConfig.instance().cfg = previous


# --- config -------------------------------------------------------------------------------------


def test_papers_get_every_competitor_and_rounds() -> None:
    with job("experiment=bench_papers") as cfg:
        assert {"ddp_tuned", "fsdp2", "dear_auto"} <= {entry.name for entry in entries_of(cfg)}
        assert cfg.rounds >= 10


def test_what_is_wrong_with_an_entry_is_said_before_ranks_start() -> None:
    odd = job("entries=[ddp,{name: odd, strategy: dear, strategy.bucket_cap_mb: 3}]")
    with odd as cfg, pytest.raises(ValueError, match="bucket_cap_mb=3 has no effect"):
        check_points(points_of(cfg))


def test_every_competitor_composes_and_gets_a_strategy() -> None:
    with job() as cfg:
        names = list(cfg.competitors)
        with open_dict(cfg):
            cfg.entries = names
        assert [entry.name for entry in entries_of(cfg)] == names
        for entry in entries_of(cfg):
            own = composed([*entry.overrides, *entry.grid[-1:]])
            scale_caps(own, 2)
            strategy = build_strategy(own)
            trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False)
            assert trainer.world_size == 2
            if entry.plan_of:
                assert composed(entry.plan_of).strategy._target_.endswith("DearStrategy")


def test_an_entry_may_be_spelt_out() -> None:
    spelt = "{name: mine, strategy: dear, fusion: threshold, fusion.bucket_cap_mb: 3}"
    with job(f"entries=[ddp,{spelt}]") as cfg:
        ddp, mine = entries_of(cfg)
        assert ddp.overrides == ("strategy=ddp", "strategy.bucket_cap_mb=null")
        assert (mine.name, mine.rounds, mine.length) == ("mine", 3, BlockLength(3, 4))
        assert composed(mine.overrides).fusion.bucket_cap_mb == 3


def test_the_steps_of_a_round_are_read_from_an_entry() -> None:
    steps = "{_target_: lightning_dear.local_steps.LocalSteps, delay: 2}"
    with job():
        for local, expected in (("null", 1), ("8", 8), (steps, 32)):
            assert round_of(composed([f"strategy.local_steps={local}"])) == expected
        assert round_of(composed(["strategy=ddp"])) == 1
        assert round_of(composed(["strategy=torchft", "strategy.local_steps=16"])) == 16
    auto = job("entries=[{name: auto, strategy: dear, strategy.local_steps: auto}]")
    with auto as cfg, pytest.raises(ValueError, match="Train once with auto"):
        check_points(points_of(cfg))


def test_a_grid_is_one_option_with_its_values() -> None:
    grid = "{name: best, strategy: ddp, grid: {strategy.bucket_cap_mb: [1, 2.5]}}"
    with job(f"entries=[{grid}]") as cfg:
        (entry,) = entries_of(cfg)
        assert entry.grid == ("strategy.bucket_cap_mb=1", "strategy.bucket_cap_mb=2.5")
    two = job("entries=[{name: a, grid: {x: [1], y: [2]}}]")
    with two as cfg, pytest.raises(ValueError, match="grid of .* Keep only one option"):
        entries_of(cfg)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ("[nope]", "Unknown entry 'nope'; valid names: ddp, ddp_tuned"),
        ("[ddp,ddp]", "ddp more than once"),
        ("[{strategy: ddp}]", "has no name"),
        (
            "[ddp,{name: wfbp, strategy: wfbp, warm_up_steps: 2}]",
            "warm_up_steps=2 is too few. Set 3 or more",
        ),
    ],
)
def test_wrong_entries_are_refused(entries: str, message: str) -> None:
    with job(f"entries={entries}") as cfg, pytest.raises(ValueError, match=message):
        entries_of(cfg)


def test_single_is_no_entry() -> None:
    with job("strategy=single") as cfg, pytest.raises(ValueError, match="strategy=single is no"):
        build_strategy(cfg)


@pytest.mark.parametrize(
    "value", [None, True, 3, 0.25, "word", "two words", "it's", "a.b/c", [1, None, "x y"], {"a": 1}]
)
def test_settings_survive_hydras_own_parser(value: object) -> None:
    (parsed,) = OverridesParser.create().parse_overrides([as_override("some.key", value)])
    assert parsed.key_or_group == "some.key"
    assert parsed.value() == value


def test_what_comes_later_replaces_what_came_first() -> None:
    first = ["strategy=dear", "+a.b=1", "seed=2"]
    assert merged(first, ["strategy=ddp", "a.b=3"]) == ["seed=2", "strategy=ddp", "a.b=3"]
    with job("strategy=dear"):
        assert composed(["strategy=ddp"]).strategy._target_.endswith("DDPStrategy")


def test_points_are_grouped_by_what_needs_other_ranks() -> None:
    given = "[{ratio: 1, cluster.devices: 2}, {ratio: 2, cluster.devices: 2}, {cluster.devices: 4}]"
    with job(f"points={given}") as cfg:
        points = points_of(cfg)
    assert by_cluster(points) == [
        ({"cluster.devices": 2}, points[:2]),
        ({"cluster.devices": 4}, points[2:]),
    ]
    assert label_of(points[1]) == "ratio=2, cluster.devices=2"
    with job() as cfg:
        assert points_of(cfg) == [{}]
        assert by_cluster([{}]) == [({}, [{}])]
    swept = "sweep={ratio: [1, 2], cluster.devices: [2, 3]}"
    with job("points=[{rounds: 7}, {seed: 5}]", swept) as cfg:
        points = points_of(cfg)
    assert points[:3] == [
        {"rounds": 7, "ratio": 1, "cluster.devices": 2},
        {"rounds": 7, "ratio": 1, "cluster.devices": 3},
        {"rounds": 7, "ratio": 2, "cluster.devices": 2},
    ]
    assert len(points) == 8


FILES = [*(ROOT / "recipes").glob("*/README.md"), *(ROOT / "recipes").glob("*/commands.sh")]
RECIPES = "\n".join(path.read_text() for path in sorted(FILES))
COMMANDS = re.findall(r"^(?:\w+=\w+ )?dear-bench ((?:.*\\\n)*.+)$", RECIPES, re.MULTILINE)


@pytest.mark.parametrize(
    "command_line",
    [
        pytest.param(one, marks=[pytest.mark.slow] * (number % 5 > 0))
        for number, one in enumerate(COMMANDS)
    ],
    ids=lambda text: shlex.split(text)[-3][:40],
)
def test_commands_of_the_recipes_compose(command_line: str) -> None:
    arguments = shlex.split(command_line.replace("\\\n", " "))
    with job(*arguments) as cfg:
        entries, points = entries_of(cfg), points_of(cfg)
        assert len(entries) >= 2
        for point in points:
            own = composed(overrides_of(point))
            assert own.cluster.num_hosts >= 2
            assert link_rate_mbit(own) in (31.25, 100, 125, 200, 500, 1000)


def test_every_command_of_the_recipes_is_composed() -> None:
    # Those of dear-converge are in test_converge; dear-recipe's own configs are in test_recipe.
    assert len(COMMANDS) == len(re.findall(r"^[^`#\n]*dear-bench ", RECIPES, re.MULTILINE)) > 10


# --- what a point stands for ----------------------------------------------------------------------

REPLAY = ("cluster=local", "model=replay", "data=replay", "model.scale=1000")


def test_a_ratio_says_how_long_a_replay_computes() -> None:
    with job(*REPLAY, "ratio=2", "cluster.beta_s_per_byte=1e-8") as cfg:
        overrides = replay_overrides(cfg, world_size=4)
        with_ratio = composed(overrides)
    model = instantiate(with_ratio.model, _convert_="all")
    point = point_of(with_ratio, "", model, 4)
    assert bounds_of(point)["communication_ratio"] == pytest.approx(2, rel=1e-3)
    assert point["backward_s"] == pytest.approx(2 * point["forward_s"])
    assert (point["scale"], point["link_rate_mbit"]) == (1000, 800)
    assert (point["stands_for_mbit"], point["rate_source"]) == (800_000, "assumed")
    assert point["model_bytes"] == sum(p.nbytes for p in model.parameters())
    assert (point["is_replay"], point["compute_source"]) == (True, "profile")


@pytest.mark.parametrize(
    ("overrides", "world_size"),
    [
        (("ratio=0", "cluster.beta_s_per_byte=1e-8"), 2),
        (("ratio=1", "cluster.beta_s_per_byte=1e-8"), 1),
        (("ratio=1", "cluster.beta_s_per_byte=null"), 2),
    ],
)
def test_a_ratio_needs_communication(overrides: tuple[str, ...], world_size: int) -> None:
    wanted = "must be above 0, and needs two or more ranks and a cluster whose"
    with job(*REPLAY, *overrides) as cfg, pytest.raises(ValueError, match=wanted):
        replay_overrides(cfg, world_size)


def test_more_links_carry_more() -> None:
    with job(*REPLAY, "cluster.beta_s_per_byte=1e-8") as cfg:
        seconds = [one_way_s(cfg, 40_000_000, count) for count in (1, 2, 4)]
    assert seconds == pytest.approx([0, 0.2, 0.3])


def test_accumulated_batches_share_a_steps_compute() -> None:
    link = "cluster.beta_s_per_byte=1e-8"
    with job(*REPLAY, "ratio=2", link, "trainer.accumulate_grad_batches=4") as cfg:
        with_ratio = composed(("trainer.accumulate_grad_batches=4", *replay_overrides(cfg, 2)))
    model = instantiate(with_ratio.model, _convert_="all")
    point = point_of(with_ratio, "", model, 2)
    assert bounds_of(point)["communication_ratio"] == pytest.approx(2, rel=1e-3)
    assert point["forward_s"] == pytest.approx(4 * model.profile.forward_s)


def test_ranks_of_a_host_share_its_link() -> None:
    hosts = ("cluster=emulated", "cluster.num_hosts=2", "cluster.ranks_per_host=2")
    with job(*REPLAY, *hosts) as cfg:
        point = point_of(cfg, "", instantiate(cfg.model, _convert_="all"), 4)
        rate = link_rate_mbit(cfg) * 1e6 / 8
    # Each host sends half the model each way, and what its ranks send each other stays on it.
    assert point["one_way_s"] == pytest.approx(point["model_bytes"] / 2 / rate)


def test_narrow_parameters_are_fewer_bytes() -> None:
    with job(*REPLAY, "trainer.precision=bf16-true") as cfg:
        model = instantiate(cfg.model, _convert_="all")
        point = point_of(cfg, "", model, 2)
    assert point["model_bytes"] == sum(p.nbytes for p in model.parameters()) / 2


def test_one_option_alone_says_how_long_a_replay_computes() -> None:
    both = job(*REPLAY, "ratio=2", "model.compute_s=1")
    with both as cfg, pytest.raises(ValueError, match=r"ratio and model\.compute_s"):
        replay_overrides(cfg, 2)


def test_a_model_that_computes_has_no_ratio() -> None:
    computing = job("cluster=local", "model=resnet", "data=digits", "ratio=1")
    with computing as cfg, pytest.raises(ValueError, match="choose model=replay"):
        replay_overrides(cfg, 2)
    with job("cluster=local", "model=resnet", "data=digits") as cfg:
        assert replay_overrides(cfg, 2) == ()
        point = point_of(cfg, "", instantiate(cfg.model, _convert_="all"), 2)
    assert (point["model"], point["scale"], point["is_replay"]) == ("ResNet", 1, False)
    assert bounds_of(point)["bound_s"] is None


def test_caps_are_those_of_the_whole_model() -> None:
    with job(*REPLAY):
        dear = composed(["strategy=dear"])
        ddp = composed(["strategy=ddp", "strategy.bucket_cap_mb=8"])
        plain = composed(["strategy=ddp", "model.scale=1", "strategy.bucket_cap_mb=8"])
    for cfg in (dear, ddp, plain):
        scale_caps(cfg, 4)
    assert dear.fusion.bucket_cap_mb == pytest.approx(0.016)
    assert dear.fusion.first_bucket_cap_mb == pytest.approx(0.001)
    assert ddp.strategy.bucket_cap_mb == pytest.approx(0.008)
    assert plain.strategy.bucket_cap_mb == 8


# --- running ------------------------------------------------------------------------------------

QUICK = (*REPLAY, "model.compute_s=0.01", "rounds=2", "steps=4", "warm_up_steps=3")
PROFILE = ModelProfile(
    "small",
    "flops",
    "for a test",
    tuple(LayerProfile(f"layer {n}", ((256, 256), (256,)), 0.001, 0.002) for n in range(6)),
)


def command(*arguments: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "lightning_dear.apps.bench",
        *arguments,
        "hydra.run.dir=out",
    ]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def read(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_three_competitors_end_to_end(tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "small.json")
    small = ("model.profile=small.json", "model.scale=1", "fusion=none")
    result = run(tmp_path, "entries=[ddp,ddp_bf16,dear]", *QUICK, *small)
    assert result.returncode == 0, result.stdout + result.stderr
    for notice in ("GPU available", "max_steps", "Tip:", "val_dataloader"):
        assert notice not in result.stdout + result.stderr
    assert "small, waiting instead of computing, 2 ranks" in result.stdout
    names = ["ddp", "ddp_bf16", "dear", "compute alone"]
    rows = read(tmp_path / "out/summary.csv")
    assert [row["entry"] for row in rows] == names
    assert rows[0]["ratio"] == "1.0"
    assert all(float(row["step_s"]) > 0.01 for row in rows)
    assert all(row["compute_source"] == "profile" for row in rows)
    dear = rows[2]
    assert dear["host_bytes"] == rows[0]["host_bytes"] == ""  # nothing leaves the only host
    assert int(dear["num_buckets"]) == 12
    raw = read(tmp_path / "out/raw.csv")
    assert len(raw) == len(names) * 2 * 4 * 2
    first_of_round = [line["entry"] for line in raw if line["place"] == "0"]
    assert set(first_of_round) == {"ddp", "ddp_bf16"}
    for name in ("plot.png", "table.txt", "config.yaml"):
        assert (tmp_path / "out" / name).stat().st_size > 100
    again = run(tmp_path, "entries=[ddp]", *QUICK, *small)
    assert again.returncode == 1
    assert "has the raw.csv of an earlier run with other values of entries" in again.stderr
    assert read(tmp_path / "out/raw.csv") == raw


def begun(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """A run that has just been started."""
    return subprocess.Popen(
        command(*arguments),
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Whoever runs the tests in the background makes their processes ignore Ctrl-C.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


def wait_for(is_done: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + 150
    while not is_done():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.1)


def others_with(word: str) -> set[str]:
    """Processes with a word in their command line."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if word in path.read_text() and path.parent.name != str(os.getpid()):
                found.add(path.parent.name)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_keeps_what_it_measured_and_goes_on(
    tmp_path: Path, number: signal.Signals
) -> None:
    arguments = ("entries=[ddp,wfbp]", *QUICK, f"task_name=bench_{number}_{tmp_path.name}")
    running = begun(tmp_path, *arguments, "rounds=500")
    out = tmp_path / "out"
    wait_for(lambda: (out / "table.txt").exists() and "wfbp" in table_of(out), "two blocks")
    # All files are there after the first blocks, and not in the end alone.
    assert (out / "plot.png").exists()
    assert read(out / "summary.csv")
    running.send_signal(number)
    output, _ = running.communicate(timeout=60)
    assert running.returncode == 128 + number, output
    assert "Traceback" not in output
    assert output.startswith("dear-bench: loading torch")
    assert f"\nMeasuring. After each block {out} has table and plot" in output
    assert f"dear-bench: Interrupted: add hydra.run.dir={out} to the command" in output
    assert table_of(out) in output
    assert others_with(f"bench_{number}_{tmp_path.name}") == set()
    before = read(out / "blocks.csv")
    rounds = {line["round"] for line in before}
    again = run(tmp_path, *arguments, f"rounds={len(rounds) + 1}")
    assert again.returncode == 0, again.stdout + again.stderr
    after = read(out / "blocks.csv")
    assert after[: len(before)] == before
    assert len({line["round"] for line in after}) >= len(rounds) + 1
    summary = read(out / "summary.csv")
    shown = subprocess.run(
        [sys.executable, "-m", "lightning_dear.apps.bench", "report", str(out)],
        **{"env": environment(), "capture_output": True, "text": True, "cwd": tmp_path},
        check=False,
    )
    assert (shown.returncode, shown.stderr) == (0, "")
    assert table_of(out) in shown.stdout
    assert read(out / "summary.csv") == summary


def table_of(folder: Path) -> str:
    return (folder / "table.txt").read_text()


def test_a_signal_ends_a_run_that_has_not_begun(tmp_path: Path) -> None:
    running = begun(tmp_path, "entries=[ddp]", *QUICK)
    assert running.stdout is not None
    assert running.stdout.readline() == "dear-bench: loading torch and Lightning ...\n"
    running.send_signal(signal.SIGTERM)
    output, _ = running.communicate(timeout=60)
    assert running.returncode == 143
    said = "dear-bench: Interrupted before anything was written: start it again.\n"
    assert output.endswith(said)


@pytest.mark.parametrize("arguments", [["report"], ["report", "--help"], ["report", "nowhere"]])
def test_a_report_wants_a_folder_with_blocks(tmp_path: Path, arguments: list[str]) -> None:
    for module in ("bench", "converge"):
        done = subprocess.run(
            [sys.executable, "-m", f"lightning_dear.apps.{module}", *arguments],
            **{"env": environment(), "capture_output": True, "text": True, "cwd": tmp_path},
            check=False,
        )
        assert done.returncode == 1
        wanted = f"dear-{module}: nowhere has no " if "nowhere" in arguments else "usage: dear-"
        assert done.stderr.startswith(wanted)
        assert done.stderr.count("\n") == 1


def test_only_a_folder_of_the_same_config_is_gone_on_with(tmp_path: Path) -> None:
    with job() as cfg:
        check_goes_on(tmp_path, cfg)
        (tmp_path / "raw.csv").touch()
        with pytest.raises(ValueError, match=r"earlier run with other values of .*hydra\.run\.dir"):
            check_goes_on(tmp_path, cfg)
        (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(cfg, resolve=True))
        check_goes_on(tmp_path, cfg)
        cfg.rounds = 20
        cfg.cluster.beta_s_per_byte = 1e-9
        check_goes_on(tmp_path, cfg)
        cfg.steps = 7
        with pytest.raises(ValueError, match="with other values of steps. Choose another folder"):
            check_goes_on(tmp_path, cfg)


@pytest.mark.slow
def test_a_killed_run_keeps_the_rows_of_the_points_it_finished(tmp_path: Path) -> None:
    running = subprocess.Popen(
        command("entries=[ddp]", *QUICK, "points=[{steps: 4}, {rounds: 500}]"),
        cwd=tmp_path,
        env=environment(),
        start_new_session=True,
    )
    table = tmp_path / "out/table.txt"
    deadline_s = time.monotonic() + 120
    while running.poll() is None and time.monotonic() < deadline_s:
        if table.exists() and "compute alone" in table.read_text():
            break
        time.sleep(0.1)
    is_running = running.poll() is None
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    assert is_running
    rows = read(tmp_path / "out/summary.csv")
    assert [(row["point"], row["entry"]) for row in rows][:2] == [
        ("steps=4", "ddp"),
        ("steps=4", "compute alone"),
    ]
    assert "compute alone" in table.read_text()


@pytest.mark.slow
def test_points_with_other_ranks_end_in_one_table(tmp_path: Path) -> None:
    points = "points=[{cluster.devices: 2}, {cluster.devices: 3}]"
    result = run(tmp_path, "entries=[ddp]", *QUICK, points)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = read(tmp_path / "out/summary.csv")
    assert [row["world_size"] for row in rows] == ["2", "2", "3", "3"]
    assert {line["world_size"] for line in read(tmp_path / "out/raw.csv")} == {"2", "3"}
    table = (tmp_path / "out/table.txt").read_text()
    assert table.count("peak") == 2
    assert table.count("step: median of the rounds") == 1
    assert f"All parts:\n\n{table}" in result.stdout
    assert (tmp_path / "out/plot.png").exists()


@pytest.mark.alone
@pytest.mark.netns
@pytest.mark.slow
def test_on_emulated_links_competitors_send_what_they_should(tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "small.json")
    result = subprocess.run(
        command(
            *("cluster=emulated", "cluster.rate_mbit=200", "ratio=1", "rounds=1"),
            "entries=[ddp,ddp_bf16,ddp_zero,fsdp2,wfbp,dear]",
            *("data=replay", "model.profile=small.json", "model.scale=1", "steps=8"),
        ),
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    rows = {row["entry"]: row for row in read(tmp_path / "out/summary.csv")}
    rig = rows["ddp"]["rig"]
    assert rig.startswith(
        "2 emulated hosts x 1 ranks, 200 Mb/s, cubic, socket buffers the kernel's"
    )
    assert rig.endswith(" in), MTU 9000, port queue 16 MiB")
    assert (tmp_path / "out/table.txt").read_text().startswith(f"{rig}\n")
    model_bytes = float(rows["ddp"]["model_bytes"])
    sent = {name: float(row["host_bytes"]) / model_bytes for name, row in rows.items()}
    for name, times in {"ddp": 1, "ddp_bf16": 0.5, "ddp_zero": 1.5, "wfbp": 1, "dear": 1}.items():
        assert sent[name] == pytest.approx(times, rel=0.1), name
    assert sent["fsdp2"] == pytest.approx(1.5, rel=0.1)
    assert sent["compute alone"] < 0.05
    assert rows["dear"]["rate_source"] == "shaped"
    assert float(rows["dear"]["communication_ratio"]) == pytest.approx(1, rel=0.01)
    # Nothing is faster than the link: else the rate or the bytes are wrong.
    for name in ("ddp", "wfbp", "dear"):
        assert float(rows[name]["over_bound"]) > 0.97, name


# --- tuning ---------------------------------------------------------------------------------------


PLAN = SimpleNamespace(name="by hand")


def _tuned(*callbacks: object, plan: object = PLAN) -> SimpleNamespace:
    trainer = SimpleNamespace(callbacks=callbacks)
    return SimpleNamespace(plan=plan, lightning_module=SimpleNamespace(trainer=trainer))


def test_the_plan_of_a_search_that_has_not_ended_is_no_result() -> None:
    tuner = FusionTuner(AutoFusion())
    assert found_plan("one", _tuned(tuner)) == (PLAN, "plan: by hand")
    tuner._tuning = SimpleNamespace(is_searching=False, reason="the best of two")
    assert found_plan("one", _tuned(tuner)) == (PLAN, "plan: the best of two")
    tuner._tuning = SimpleNamespace(is_searching=True)
    with pytest.raises(
        ValueError, match=r"still looking for its plan.*fusion\.num_steps of fusion=auto"
    ):
        found_plan("one", _tuned(tuner))
    with pytest.raises(ValueError, match="makes no plan to keep"):
        found_plan("one", SimpleNamespace())
