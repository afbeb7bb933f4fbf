"""A program: what it says of itself, how it begins, and its end at a signal.

Imports nothing that takes long: its help and a misspelt option are answered without torch.
"""

import os
import re
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import version
from inspect import cleandoc
from io import TextIOBase
from pathlib import Path
from typing import Any

from typing_extensions import override

from lightning_dear.names import APPS, is_meant, need
from lightning_dear.paths import conf_dir
from lightning_dear.studies.interrupts import INTERRUPTS, SIGNALS

_STARTED_VARIABLE = "LIGHTNING_DEAR_PROGRAM"
"""Set in whatever a program starts: only the first of its processes speaks of itself."""

_ENDED = frozenset(128 + number for number in SIGNALS)

_OTHER_RANKS_S = 2.0
"""Seconds after a signal in which ranks other than 0 leave it the floor."""


@dataclass
class Program:
    """A console script, or `python -m` of its package.

    Attributes:
        name: As it is typed.
        config: Its config's name in `conf/`.
        module: Of `lightning_dear.apps`; a job is its `run_job(cfg, program)`.
        what: Its help, without the groups of its config.
        shown_by: Of `lightning_dear.studies`, if its `show_again(folder)` makes a report again.
        trains: Whether Lightning's own training is the job: Lightning ends it at a signal then,
            and it needs no extra.
        folder: Where the present job writes; nowhere before it begins.
    """

    name: str
    config: str
    module: str
    what: str | None
    shown_by: str = ""
    trains: bool = False
    folder: Path = Path(os.devnull)
    _is_first: bool = field(default_factory=lambda: _STARTED_VARIABLE not in os.environ)

    def main(self) -> None:
        """Do what the command line says."""
        words = sys.argv[1:]
        if words[:1] == ["report"] and self.shown_by:
            self._report(words[1:])
        elif {"-h", "--help"} & {*words}:
            print(self.help())
        elif "--version" in words:
            print(f"{self.name} {version('lightning-dear')}")
        else:
            if not self.trains:
                need(self.name, *APPS, error=SystemExit)
            heard = nullcontext() if self.trains else INTERRUPTS.call(self._end)
            with heard, self._said_when_interrupted():
                self._run()

    def help(self) -> str:
        """What it does, and the groups of its config with what there is to choose from."""
        from omegaconf import OmegaConf

        config = OmegaConf.load(conf_dir() / f"{self.config}.yaml")
        defaults = OmegaConf.select(config, "defaults", default=[])
        lines = [f"{self.name}: {cleandoc(self.what or '')}", ""]
        # Strings are this file itself, or one that it is based on.
        for one in (one for one in defaults if not isinstance(one, str)):
            ((group, name),) = one.items()
            group = group.removeprefix("override ")
            names = ", ".join(sorted(path.stem for path in (conf_dir() / group).glob("*.yaml")))
            head = f"  {group}={name or 'null'}"
            lines.append(textwrap.fill(f"{head:<28}{names}", 100, subsequent_indent=" " * 28))
        return "\n".join([*lines, "GROUP=NAME chooses. All options with their values: --cfg job."])

    def _run(self) -> None:
        """Have Hydra compose what the command line says, and run jobs of it."""
        import hydra
        from hydra.core.hydra_config import HydraConfig

        from lightning_dear.apps import job, keys

        held = _Held()

        def run(cfg: Any) -> Any:
            held.pass_on()
            with redirect_stderr(held.stream), job.one_message(self.name):
                config = HydraConfig.get()
                if str(config.mode) == "RunMode.MULTIRUN":
                    keys.check(self.name, cfg, config)
                if self._is_first and _STARTED_VARIABLE not in os.environ:
                    os.environ[_STARTED_VARIABLE] = self.name
                    print(f"{self.name}: loading torch and Lightning ...", file=sys.stderr)
                self.folder = Path(config.runtime.output_dir)
                module = import_module(f"{__package__}.{self.module}")
                with job.isolated_job():
                    return module.run_job(cfg, self)

        try:
            # What Hydra says of a config before a job begins may be said better.
            with redirect_stderr(held):
                hydra.main(str(conf_dir()), self.config, version_base="1.3")(run)()
        finally:
            held.pass_on(_meant(getattr(sys.exc_info()[1], "__context__", None), self))
        # Nothing was imported for what needs no job, as --cfg.
        getattr(sys.modules.get(f"{__package__}.{self.module}"), "jobs_end", lambda: None)()

    def _report(self, arguments: list[str]) -> None:
        if len(arguments) != 1 or arguments[0].startswith("-"):
            raise SystemExit(f"usage: {self.name} report FOLDER (of a run, finished or not)")
        try:
            import_module(f"lightning_dear.studies.{self.shown_by}").show_again(Path(arguments[0]))
        except ValueError as error:
            raise SystemExit(f"{self.name}: {error}") from None

    def _end(self, number: int) -> None:
        """What a signal does while nothing has been measured yet."""
        if os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) != "0":
            time.sleep(_OTHER_RANKS_S)
        self.say_how_to_go_on()

    @contextmanager
    def _said_when_interrupted(self) -> Iterator[None]:
        """Where other processes of the job have measured, and a signal has ended them."""
        try:
            yield
        except SystemExit as end:
            if end.code in _ENDED:
                self.say_how_to_go_on()
            raise

    def say_how_to_go_on(self) -> None:
        """Print it on stderr, in the first process of the job."""
        if self._is_first:
            again = "Interrupted before anything was written: start it again."
            if (self.folder / "summary.csv").exists():
                again = f"Interrupted: add hydra.run.dir={self.folder} to the command to go on."
            elif (self.folder / "table.txt").exists():
                again = f"Interrupted: what was finished is in {self.folder}."
            print(f"{self.name}: {again}", file=sys.__stderr__, flush=True)


class _Held(TextIOBase):
    """Stands for stderr, and keeps what is written until it is passed on, and nothing from then on.

    Attributes:
        stream: Stderr as it was.
    """

    def __init__(self) -> None:
        self.stream = sys.stderr
        self._kept: list[str] | None = []

    def __reduce__(self) -> Any:
        # Some launchers of Hydra's send the job to another process.
        return _Held, ()

    @override
    def write(self, text: str) -> int:
        if self._kept is None:
            return self.stream.write(text)
        self._kept.append(text)
        return len(text)

    @override
    def flush(self) -> None:
        self.stream.flush()

    @override
    def fileno(self) -> int:
        return self.stream.fileno()

    def pass_on(self, instead: str = "") -> None:
        """Writes what was kept, if anything was; or something else in its place."""
        if self._kept:
            self.stream.write(instead or "".join(self._kept))
        self._kept = None
        self.stream.flush()


def _meant(error: BaseException | None, program: Program) -> str:
    """A sentence instead of Hydra's on what it could not compose; empty if nothing comes close."""
    cause, wrong, known = getattr(error, "__cause__", None), "", list[str]()
    if isinstance(cause, (AttributeError, KeyError)) and hasattr(cause, "parent_node"):
        # What OmegaConf raises for names that it does not have.
        wrong, known = str(getattr(cause, "key", "")), list(map(str, cause.parent_node or ()))
    elif options := getattr(error, "options", None):
        wrong, known = Path(str(getattr(error, "missing_cfg_file", ""))).name, options
    elif found := re.match(r"Could not override '(\w+)'", str(error)):
        text = (conf_dir() / f"{program.config}.yaml").read_text()
        wrong, known = found[1], re.findall(r"^(?:  - )?(\w+):", text, re.MULTILINE)
    question = is_meant(wrong, known)
    return question and f"{program.name}: Unknown name {wrong!r}.{question}\n"
