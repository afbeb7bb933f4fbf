"""Keys of programs: the same as in `conf/`, and wrong ones are told before anything is loaded."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf, open_dict

from lightning_dear.apps import keys
from lightning_dear.paths import conf_dir
from lightning_dear.studies import convergence, device_costs
from tests.apps.test_program import heavy_s, said
from tests.conf.composing import options_of

CONFIGS = {
    "dear-plan": "plan",
    "dear-plan calibrate": "calibrate",
    "dear-bench": "bench",
    "dear-converge": "converge",
    "dear-train": "train",
}


def check(program: str, *overrides: str) -> None:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = compose(CONFIGS[program], list(overrides), return_hydra_config=True)
    keys.check(program, config, config.hydra)


def names(kind: type) -> list[str]:
    return [one.name for one in dataclasses.fields(kind)]


@pytest.mark.parametrize("program", keys.KEYS)
def test_they_are_those_of_conf_which_alone_has_defaults(program: str) -> None:
    config = OmegaConf.load(conf_dir() / f"{CONFIGS[program]}.yaml")
    own = [name for name in config if name not in ("defaults", "hydra")]
    assert names(keys.KEYS[program]) == own
    for one in dataclasses.fields(keys.KEYS[program]):
        assert one.default is one.default_factory is dataclasses.MISSING
        assert set(one.metadata) == {"words", "holds"}


def test_keys_within_keys_are_those_that_are_read() -> None:
    plan, converge = (OmegaConf.load(conf_dir() / f"{name}.yaml") for name in ("plan", "converge"))
    assert names(keys.Device) == list(plan.device) == names(device_costs.Device)
    assert names(keys.Metric) == list(converge.metric) == names(convergence.Metric)


@pytest.mark.parametrize("program", CONFIGS)
def test_every_program_asks_hydra_to_check(program: str) -> None:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = compose(CONFIGS[program], return_hydra_config=True)
    target = f"{keys.Check.__module__}.{keys.Check.__name__}"
    assert config.hydra.callbacks == {"keys": {"_target_": target, "program": program}}
    keys.check(program, config, config.hydra)


STUDIES = [one for one in options_of("experiment") if one.startswith(("bench", "converge"))]


@pytest.mark.parametrize("experiment", STUDIES)
def test_experiments_pass(experiment: str) -> None:
    check(f"dear-{experiment.partition('_')[0]}", f"experiment={experiment}")


@pytest.mark.parametrize(
    "override",
    [
        "points=[{ratio: ${cluster.num_hosts}}]",
        "entries=[ddp,{name: mine, strategy: '${hydra:job.name}'}]",
        "rounds=${cluster.num_hosts}",
    ],
)
def test_keys_may_refer_to_others(override: str) -> None:
    check("dear-bench", override)


def test_a_users_file_may_have_keys_of_its_own() -> None:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = compose("bench", ["rounds=2"], return_hydra_config=True)
    with open_dict(config):
        config.my_rate = 100
    keys.check("dear-bench", config, config.hydra)


@pytest.mark.parametrize(
    ("program", "override", "words"),
    [
        ("plan", "compute_s=abc", "compute_s=abc is not valid. compute_s must be seconds above 0,"),
        ("plan", "compute_s=0", "compute_s must be seconds above 0"),
        ("plan", "compute_s=nan", "compute_s must be seconds above 0"),
        ("plan", "step_s=-1", "step_s=-1 is not valid. step_s must be seconds, 0 or more,"),
        ("plan", "step_s=inf", "step_s must be"),
        ("plan", "enough=2", "enough must be a share of a step"),
        ("plan", "world_sizes=[0]", "world_sizes must be a list of numbers of ranks"),
        ("plan", "world_sizes=8", "world_sizes must be a list"),
        ("plan", "world_sizes=[a]", "world_sizes[0]=a is not valid as a part of world_sizes."),
        ("plan", "local_steps=0", "local_steps must be a whole number above 0, or null"),
        ("plan", "local_steps=1.5", "local_steps must be a whole number above 0, or null"),
        ("plan", "local_steps=auto", "local_steps must be a whole number above 0, or null"),
        ("plan", "local_steps=many", "local_steps must be a whole number above 0, or null"),
        ("plan", "strategies=ddp", "strategies must be a list of names, such as [ddp,dear]"),
        ("plan", "strategies=[]", "strategies must be a list"),
        ("plan", "compressors=int8", "compressors must be a list of names"),
        (
            "plan",
            "device.kernel_s=abc",
            "kernel_s=abc is not valid as a part of device. device must be kernel_s",
        ),
        ("plan", "device.bytes_per_s=0", "device must be"),
        ("plan", "+device.kernels=3", "device.kernels=3 is not valid"),
        ("plan", "algorithm=rings", "Unknown algorithm 'rings'; valid names: pairwise"),
        ("plan", "algorithm=best", "Unknown algorithm 'best'; valid names: pairwise"),
        ("plan", "need=0", "need must be a share of 1, such as 0.9, or null"),
        ("plan", "need=1", "need must be a share of 1"),
        ("plan", "need=90", "need must be a share of 1"),
        ("plan", "strategies=[dare]", "Is 'dear' meant?"),
        ("plan", "strategies=[ddp_bf61]", "Is 'ddp_bf16' meant?"),
        ("plan", "compressors=[int9]", "Unknown compressor 'int9'; valid names: bf16"),
        ("plan", "profile=bert_huge", "Unknown profile 'bert_huge'; valid names: bert_base"),
        ("plan", "+compute=3", "Unknown key 'compute'; valid names: task_name"),
        ("plan", "cluster=emulated_1gbit", "Choose cluster=ethernet_1g."),
        ("plan", "+cluster.loss=0.1", "cluster.loss has no effect in dear-plan. Leave it out"),
        ("plan", "cluster.interface=lo", "cluster.interface has no effect in dear-plan. Leave it"),
        ("plan calibrate", "eval=true", "eval has no effect in dear-plan calibrate. Leave it out"),
        ("plan calibrate", "debug=limit", "debug has no effect"),
        ("plan calibrate", "doctor=true", "doctor has no effect"),
        ("plan calibrate", "ckpt_path=a.ckpt", "ckpt_path has no effect"),
        ("plan calibrate", "fusion.bucket_cap_mb=3", "fusion has no effect"),
        ("bench", "rounds=0", "rounds=0 is not valid. rounds must be a whole number, 1 or more."),
        ("bench", "rounds=1.5", "rounds must be a whole number"),
        ("bench", "warm_up_steps=2", "warm_up_steps must be a whole number, 3 or more"),
        ("bench", "entries=[]", "entries must be a list of entries, such as [ddp,dear]"),
        ("bench", "ratio=0", "ratio must be a number above 0"),
        ("bench", "points=[3]", "points=[3] is not valid. points must be overrides: [{ratio: 1}]"),
        ("bench", "sweep={ratio: 1}", "sweep must be lists"),
        ("bench", "sweep=3", "sweep must be lists"),
        ("bench", "competitors.dear=3", "competitors must be overrides by name"),
        ("bench", "sweep={ratio: []}", "sweep must be lists"),
        ("bench", "+debug=limit", "debug has no effect in dear-bench"),
        ("bench", "trainer.max_epochs=3", "trainer.max_epochs has no effect"),
        ("bench", "+callbacks=timeline", "callbacks has no effect"),
        ("bench", "+eval=true", "Unknown key 'eval'"),
        ("converge", "seeds=[]", "seeds=[] is not valid. seeds must be two or more different"),
        ("converge", "seeds=[1,1]", "seeds must be two or more"),
        ("converge", "tuning_seeds=[12]", "tuning_seeds=[12] is empty, or shares one with seeds="),
        ("converge", "tuning_seeds=[]", "Give one or more tuning_seeds that are not in seeds."),
        ("converge", "+buckets.small=3", "buckets must be overrides by name"),
        ("converge", "dense_shares=[2]", "dense_shares must be a list of shares"),
        ("converge", "metric.margin=-1", "metric must be"),
        ("converge", "metric.name=???", "metric.name=null is not valid"),
        ("converge", "entries=???", "entries must be a list of entries"),
        ("converge", "~loss_steps", "loss_steps must be a whole number"),
        ("converge", "trainer.fast_dev_run=true", "trainer.fast_dev_run has no effect"),
    ],
)
def test_what_is_wrong_is_one_sentence(program: str, override: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        check(f"dear-{program}", override)
    assert "\n" not in str(caught.value)


def test_what_looks_alike_is_not_taken_for_it() -> None:
    check("dear-converge", "trainer.max_steps=5")
    check("dear-plan calibrate", "trainer.max_steps=5", "experiment=replay")
    check("dear-plan", "cluster=emulated", "cluster.rate_mbit=62.5", "strategies=[ddp_bf16]")


def test_many_seconds_are_asked_about(capsys: pytest.CaptureFixture[str]) -> None:
    check("dear-plan", "compute_s=60", "step_s=1")
    assert capsys.readouterr().err == ""
    check("dear-plan", "compute_s=250")
    question = "If 250 ms are meant, set compute_s=0.25."
    assert capsys.readouterr().err == f"dear-plan: compute_s=250 is 250 s. {question}\n"


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        ("plan", ["compute_s=abc"]),
        ("plan", ["strategies=[dare]"]),
        ("bench", ["rounds=0"]),
        ("converge", ["seeds=[]"]),
        ("plan", ["calibrate", "eval=true"]),
        ("plan", ["-m", "compute_s=abc,1"]),
    ],
    ids=" ".join,
)
def test_it_is_told_soon_and_leaves_no_files(
    tmp_path: Path, program: str, arguments: list[str]
) -> None:
    code, output, took_s = said(tmp_path, program, *arguments)
    assert code == 1
    assert took_s < heavy_s()
    *lines, last = output.splitlines()
    if "-m" in arguments:
        # Its folder was made before the job was looked at.
        assert last == "Nothing was written. HYDRA_FULL_ERROR=1 prints the traceback."
        assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["multirun.yaml"]
    else:
        assert lines == []
        assert last.startswith(f"dear-{program}")
        assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "override",
    [
        "trainer.max_epochs=one",
        "+trainer.max_epochs=one",
        "optimizer.lr=fast",
        "seed=abc",
        "cluster.devices=two",
    ],
)
def test_a_word_in_place_of_a_number_is_told_before_training(override: str) -> None:
    option = override.lstrip("+").partition("=")[0]
    with pytest.raises(ValueError, match=f"{option}=.* {option} must be a number, such as "):
        check("dear-train", override.replace("+", "++"))


@pytest.mark.parametrize(
    "override",
    [
        "trainer.max_epochs=-1",
        "optimizer.lr=1e-3",
        "cluster.devices=auto",
        "cluster.devices='[0,1]'",
        "trainer.gradient_clip_val=null",
        "trainer.precision=bf16-mixed",
        "ckpt_path=last",
        "trainer.max_epochs=${seed}",
        "trainer.max_epochs=null",
        "+trainer.profiler=simple",
        "model=gpt",
        "debug=limit",
    ],
)
def test_other_values_pass(override: str) -> None:
    check("dear-train", override)
