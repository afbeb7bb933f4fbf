"""Types, bounds and names of the programs' own keys, checked before torch is loaded.

Config groups, such as model and strategy, are checked by the code that builds objects from them.
Defaults are in `conf/`.
"""

import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, errors
from typing_extensions import override

from lightning_dear.names import check_name
from lightning_dear.paths import conf_dir
from lightning_dear.studies.convergence import Metric

LONG_S = 60.0
"""Seconds of a step above which the program asks whether milliseconds are meant."""

_PROFILES = Path(__file__).parents[1] / "workloads" / "replay" / "profiles"


def _takes(words: str, holds: Callable[[Any], bool] = lambda value: True) -> Any:
    return field(metadata={"words": words, "holds": lambda one: one is None or holds(one)})


def _list(words: str, holds: Callable[[Any], bool] = lambda value: True) -> Any:
    return _takes(f"a list of {words}", lambda some: bool(some) and all(map(holds, some)))


def _whole(least: int) -> Any:
    return _takes(f"a whole number, {least} or more", lambda number: number >= least)


def _positive(words: str) -> Any:
    return _takes(words, lambda number: 0 < number < math.inf)


@dataclass
class Bench:
    """The keys of `dear-bench`."""

    task_name: str = _takes("a name")
    seed: int = _whole(0)
    entries: list[Any] = _list("entries, such as [ddp,dear]")
    competitors: dict[str, dict[str, Any]] = _takes("overrides by name, as in conf/bench.yaml")
    rounds: int = _whole(1)
    steps: int = _whole(1)
    warm_up_steps: int = _whole(3)
    grid_rounds: int = _whole(1)
    grid_steps: int = _whole(1)
    num_batches: int = _whole(1)
    ratio: float | None = _positive("a number above 0, such as 1.5, or null")
    points: list[Any] = _takes("overrides: [{ratio: 1}]", lambda s: all(map(OmegaConf.is_dict, s)))
    sweep: dict[str, list[Any]] | None = _takes("lists: {ratio: [1,2]}", lambda s: all(s.values()))


@dataclass
class Converge:
    """The keys of `dear-converge`."""

    task_name: str = _takes("a name")
    seed: int = _whole(0)
    entries: list[Any] = _list("entries, such as [dense,int8]")
    buckets: dict[str, dict[str, Any]] = _takes("overrides by name, as in conf/converge.yaml", bool)
    seeds: list[int] = _takes(
        "two or more different whole numbers, such as [1,2]", lambda s: 1 < len(s) == len({*s})
    )
    tuning_seeds: list[int] = _takes("a list of whole numbers, such as [101], or []")
    lr_factors: list[float] = _list("numbers above 0, such as [1,0.3]", lambda one: one > 0)
    dense_shares: list[float] = _list("shares, 0 to 1, such as [0,0.1]", lambda one: 0 <= one <= 1)
    reference_lr_factors: list[float] = _list("numbers above 0, such as [3,1]", lambda one: one > 0)
    metric: Metric = _takes(
        "a test metric: scale a number, margin and loss_margin 0 or more",
        lambda m: min(m.margin, m.loss_margin) >= 0,
    )
    loss_steps: int = _whole(1)
    curve_steps: int = _whole(1)

    def __post_init__(self) -> None:
        """Check keys that depend on each other."""
        has_choice = len(self.reference_lr_factors) > 1
        if (has_choice and not self.tuning_seeds) or {*self.tuning_seeds} & {*self.seeds}:
            # Options that were chosen on a seed are biased towards that seed.
            raise ValueError(
                f"tuning_seeds={self.tuning_seeds} is empty, or shares one with seeds={self.seeds}."
                " Give one or more tuning_seeds that are not in seeds."
            )


@dataclass
class Device:
    """Key `device` of `dear-plan`: speed of the device that encodes."""

    kernel_s: float
    bytes_per_s: float


@dataclass
class Staged:
    """Key `staged` of `dear-plan`: speed of the way through the host."""

    bus_bytes_per_s: float
    sum_bytes_per_s: float
    copy_s: float


@dataclass
class Plan:
    """The keys of `dear-plan`."""

    task_name: str = _takes("a name")
    profile: str = _takes("a name from docs/replay.md, or a .json file")
    compute_s: float | None = _positive("seconds above 0, such as 0.25, or null")
    step_s: float = _takes("seconds, 0 or more, such as 0.01", lambda s: 0 <= s < math.inf)
    strategies: list[str] | None = _list("names, such as [ddp,dear], or null for all")
    compressors: list[str] | None = _takes("a list of names, such as [bf16,int8], or null")
    device: Device = _takes(
        "kernel_s (0 or more) and bytes_per_s (above 0)", lambda d: d.bytes_per_s > 0 <= d.kernel_s
    )
    local_steps: int | None = _takes("a whole number above 0, or null", lambda n: n > 0)
    backend: str | None = _takes("a name, such as staged, or null")
    staged: Staged = _takes(
        "bus_bytes_per_s and sum_bytes_per_s (above 0) and copy_s (0 or more)",
        lambda s: min(s.bus_bytes_per_s, s.sum_bytes_per_s) > 0 <= s.copy_s,
    )
    algorithm: str | None = _takes("a name, such as ring, or null")
    need: float | None = _takes("a share of 1, such as 0.9, or null", lambda share: 0 < share < 1)
    world_sizes: list[int] | None = _list("numbers of ranks, as [8,64], or null", lambda n: n > 0)
    enough: float = _takes("a share of a step, 0 to 1, such as 0.03", lambda share: 0 <= share < 1)

    def __post_init__(self) -> None:
        """Check names, and ask on stderr whether a long time was meant in milliseconds."""
        from lightning_dear.simulator.network import ALGORITHMS, BACKENDS
        from lightning_dear.simulator.strategies import resolve_strategy

        for name in self.strategies or ():
            resolve_strategy(name)
        theirs = [one.name for one in entry_points(group="lightning_dear.compressors")]
        for name in self.compressors or ():
            check_name("compressor", name, [*_files(conf_dir() / "compressor"), *theirs])
        check_name("algorithm", self.algorithm or "nccl", ALGORITHMS)
        check_name("backend", self.backend or "gloo", BACKENDS)
        if not self.profile.endswith(".json"):
            check_name("profile", self.profile, _files(_PROFILES))
        for key in ("compute_s", "step_s"):
            if (value := getattr(self, key) or 0) > LONG_S:
                meant = f"If {value:g} ms are meant, set {key}={value / 1e3:g}."
                print(f"dear-plan: {key}={value:g} is {value:g} s. {meant}", file=sys.stderr)


def _files(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.iterdir())


KEYS: dict[str, type[Any]] = {"dear-plan": Plan, "dear-bench": Bench, "dear-converge": Converge}
"""Program -> the class with its keys."""

_ONE_TRAININGS = (
    "callbacks logger debug trainer.max_epochs trainer.fast_dev_run trainer.limit_val_batches"
    " trainer.num_sanity_val_steps trainer.val_check_interval trainer.log_every_n_steps"
    " trainer.enable_checkpointing trainer.enable_progress_bar trainer.enable_model_summary"
)
IGNORED = {
    "dear-plan calibrate": "eval doctor doctor_timeout_s ckpt_path optimized_metric debug fusion",
    "dear-plan": "cluster.interface cluster.mtu cluster.socket_buffer_bytes cluster.loss",
    "dear-bench": f"{_ONE_TRAININGS} trainer.max_steps",
    "dear-converge": _ONE_TRAININGS,
}
"""Program -> options that its command line must not have.

Hydra accepts them, because they are in shared config files, but the program does not read them.
"""


def check(program: str, cfg: DictConfig, hydra: Any) -> None:
    """Check a program's command line and its own keys; ask on stderr about likely mistakes.

    Args:
        program: Name of the program as the user types it.
        cfg: Config of the job; its groups are not checked.
        hydra: Hydra's own config of the job.

    Raises:
        ValueError: For the first key that is wrong, unknown or without effect.
    """
    words: Any = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    for name in IGNORED.get(program, "").split():
        if _is_given(name, words):
            raise ValueError(f"{name} has no effect in {program}. Leave it out.")
    if program == "dear-plan" and hydra.runtime.choices.get("cluster") == "emulated_1gbit":
        raise ValueError(
            "cluster=emulated_1gbit does not fit dear-plan. Choose cluster=ethernet_1g. The"
            " links of emulated_1gbit have 1/16 of 1 Gb/s, for replays of 1/16 of a model's bytes."
        )
    if keys := KEYS.get(program):
        known = {one.name: one.metadata for one in fields(keys)}
        for name in {*cfg} - {*hydra.runtime.choices, "hydra"}:
            # Only keys on the command line: one in the user's own file may serve interpolations.
            if _is_given(str(name), words):
                check_name("key", str(name), known)
        _check_values(cfg, keys, known)
    _check_numbers(words, hydra)


def _check_numbers(words: Sequence[str], hydra: Any) -> None:
    """Refuse a word where the file of the option has a number. Others would say it much later."""
    for word in words:
        option, _, value = word.lstrip("+").partition("=")
        group, _, rest = option.partition(".")
        chosen = f"{group}/{hydra.runtime.choices.get(group)}" if rest else hydra.job.config_name
        path = conf_dir() / f"{chosen}.yaml"
        file = OmegaConf.load(path) if path.is_file() else OmegaConf.create()
        default = OmegaConf.select(file, rest or option, throw_on_resolution_failure=False)
        is_number = isinstance(default, int | float) and not isinstance(default, bool)
        if is_number and re.fullmatch(r"(?!(null|auto|inf|nan)$)[a-zA-Z_]+", value):
            raise ValueError(f"{word} is not valid. {option} must be a number, such as {default}.")


def _is_given(name: str, words: Sequence[str]) -> bool:
    """Whether the command line sets the option `name`."""
    return any(re.match(rf"[+~]*{name}[.=]", f"{word}=") for word in words)


def _check_values(cfg: DictConfig, keys: type[Any], known: Mapping[str, Any]) -> None:
    try:
        given = {name: _resolved(cfg, name) for name in known}
        own: Any = OmegaConf.merge(OmegaConf.structured(keys), given)
        wrong = [name for name, key in known.items() if not key["holds"](own[name])]
        wrong += sorted(OmegaConf.missing_keys(own))
    except errors.OmegaConfBaseException as error:
        wrong = [str(error.full_key)]
    if wrong:
        # `path` is, for example, step_s, device.kernel_s or world_sizes[0].
        path, got = wrong[0], OmegaConf.select(cfg, wrong[0])
        key, got = re.split(r"[.\[]", path)[0], "null" if got is None else got
        part = "" if path == key else f" as a part of {key}"
        raise ValueError(f"{path}={got} is not valid{part}. {key} must be {known[key]['words']}.")
    keys(**{name: own[name] for name in known})


def _resolved(cfg: DictConfig, name: str) -> Any:
    """Return the value of a key with its interpolations resolved.

    If an interpolation needs Hydra's job, which has not begun yet, the text of it is kept.
    """
    if not OmegaConf.is_config(value := cfg[name]):
        return value
    try:
        return OmegaConf.to_container(value, resolve=True)
    except errors.InterpolationResolutionError:
        return OmegaConf.create(OmegaConf.to_yaml(value).replace("${", "$ {"))


class Check(Callback):
    """Ends a run whose keys are wrong with one message, before Hydra creates the job's folder.

    Args:
        program: Name of the program as the user types it.
    """

    def __init__(self, program: str) -> None:
        self._program = program

    @override
    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        try:
            check(self._program, config, config.hydra)
        except (ValueError, errors.OmegaConfBaseException) as error:
            raise SystemExit(f"{self._program}: {error}") from None
