"""A console program: its help, the start of its job, and its end at a signal.

Imports nothing that takes long, so that help and a misspelt option are answered without torch.
"""

import os
import re
import sys
import textwrap
import time
from contextlib import nullcontext, redirect_stderr
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import version
from inspect import cleandoc
from io import StringIO
from pathlib import Path
from typing import Any

from typing_extensions import override

from lightning_dear.names import APPS, is_meant, need
from lightning_dear.paths import conf_dir
from lightning_dear.studies.interrupts import INTERRUPTS, SIGNALS

_STARTED_VARIABLE = "LIGHTNING_DEAR_PROGRAM"
"""Variable that a program sets for the processes it starts: only the first process prints notes."""

_ENDED = frozenset(128 + number for number in SIGNALS)

_OTHER_RANKS_S = 2.0
"""Seconds for which, after a signal, other ranks wait so that rank 0 prints first."""


@dataclass
class Program:
    """A console script, or `python -m` of its package.

    Attributes:
        name: Name of the program as the user types it.
        config: Name of its config in `conf/`.
        module: Module in `lightning_dear.apps` whose `run_job(cfg, program)` runs a job.
        what: Help text, without the groups of the config.
        shown_by: Module in `lightning_dear.studies` whose `show_again(folder)` prints the report of
            an earlier run. Empty means that the program has no such report.
        trains: Whether the job is a Lightning training. Then Lightning handles signals, and the
            extra `apps` is not needed.
        folder: Folder of the present job; the null device before a job begins.
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
        """Run the program with the arguments in `sys.argv`."""
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
            with nullcontext() if self.trains else INTERRUPTS.call(self._end):
                self._run()

    def help(self) -> str:
        """Return the help text, and the groups of the config with their choices."""
        from omegaconf import OmegaConf

        config = OmegaConf.load(conf_dir() / f"{self.config}.yaml")
        defaults = OmegaConf.select(config, "defaults", default=[])
        lines = [f"{self.name}: {cleandoc(self.what or '')}", ""]
        # A string in the defaults is the file itself ("_self_") or its base config, not a group.
        for one in (one for one in defaults if not isinstance(one, str)):
            ((group, name),) = one.items()
            group = group.removeprefix("override ")
            names = ", ".join(sorted(path.stem for path in (conf_dir() / group).glob("*.yaml")))
            head = f"  {group}={name or 'null'}"
            lines.append(textwrap.fill(f"{head:<28}{names}", 100, subsequent_indent=" " * 28))
        return "\n".join([*lines, "GROUP=NAME chooses. All options with their values: --cfg job."])

    def _run(self) -> None:
        """Let Hydra compose the config from the command line, and run its job or jobs."""
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
            # Hydra's own message about a wrong config may be replaced by a shorter one.
            with redirect_stderr(held):
                hydra.main(str(conf_dir()), self.config, version_base="1.3")(run)()
        except SystemExit as end:
            # A signal has ended the child processes that measure.
            if end.code in _ENDED:
                self.say_how_to_go_on()
            raise
        finally:
            context = getattr(sys.exc_info()[1], "__context__", None)
            held.pass_on(_short(context, self, held.getvalue()))
        # The module is not imported if there was no job, for example with --cfg.
        getattr(sys.modules.get(f"{__package__}.{self.module}"), "jobs_end", lambda: None)()

    def _report(self, arguments: list[str]) -> None:
        if len(arguments) != 1 or arguments[0].startswith("-"):
            raise SystemExit(f"usage: {self.name} report FOLDER (of a run, finished or not)")
        try:
            import_module(f"lightning_dear.studies.{self.shown_by}").show_again(Path(arguments[0]))
        except ValueError as error:
            raise SystemExit(f"{self.name}: {error}") from None

    def _end(self, number: int) -> None:
        """Act on a signal before anything has been measured."""
        if os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) != "0":
            time.sleep(_OTHER_RANKS_S)
        self.say_how_to_go_on()

    def say_how_to_go_on(self) -> None:
        """Print on stderr, in the first process of the job, how to continue an interrupted job."""
        if self._is_first:
            again = "Interrupted before anything was written: start it again."
            if (self.folder / "summary.csv").exists():
                again = f"Interrupted: add hydra.run.dir={self.folder} to the command to go on."
            elif (self.folder / "table.txt").exists():
                again = f"Interrupted: what was finished is in {self.folder}."
            print(f"{self.name}: {again}", file=sys.__stderr__, flush=True)


class _Held(StringIO):
    """Replaces stderr: keeps written text until `pass_on`, and writes directly after it.

    Attributes:
        stream: The original stderr.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stream = sys.stderr
        self._passes = False

    def __reduce__(self) -> Any:
        # Some Hydra launchers pickle the job to send it to another process; kept text stays here.
        return _Held, ()

    @override
    def write(self, text: str, /) -> int:
        return self.stream.write(text) if self._passes else super().write(text)

    @override
    def flush(self) -> None:
        self.stream.flush()

    @override
    def fileno(self) -> int:
        return self.stream.fileno()

    def pass_on(self, instead: str = "") -> None:
        """Write the kept text, if any, to stderr; or `instead` for it, if that is not empty."""
        if kept := self.getvalue():
            self.stream.write(instead or kept)
        self.truncate(0)
        self._passes = True
        self.stream.flush()


def _short(error: BaseException | None, program: Program, said: str) -> str:
    """Return a short message in place of what Hydra said of a wrong option; empty if none fits.

    Args:
        error: Hydra's error. None means that Hydra raised none.
        program: The program, whose config names the valid options.
        said: What Hydra and argparse wrote to stderr.
    """
    cause, wrong, known = getattr(error, "__cause__", None), "", list[str]()
    if found := re.search(r"unrecognized arguments: (-\S+)", said):
        option = found[1].lstrip("-")
        form = option if "=" in option else f"{option}=VALUE"
        text = f"unrecognized arguments: {found[1]}. Options have no dashes: {form}. See --help"
        return f"{program.name}: {text}.\n"
    if override := getattr(error, "override", None):
        quoted = "'NAME=\"VALUE\"' where VALUE has one of = , : [ ] { }"
        return f"{program.name}: Cannot read {override!r}. Write NAME=VALUE, or {quoted}.\n"
    if isinstance(cause, (AttributeError, KeyError)) and hasattr(cause, "parent_node"):
        # OmegaConf raises these for unknown keys, with the node that lacks the key.
        wrong, known = str(getattr(cause, "key", "")), list(map(str, cause.parent_node or ()))
    elif options := getattr(error, "options", None):
        wrong, known = Path(str(getattr(error, "missing_cfg_file", ""))).name, options
    elif found := re.match(r"Could not override '(\w+)'", str(error)):
        text = (conf_dir() / f"{program.config}.yaml").read_text()
        wrong, known = found[1], re.findall(r"^(?:  - )?(\w+):", text, re.MULTILINE)
    known = [name for name in known if not name.startswith("_") and name != "hydra"]
    question = is_meant(wrong, known) or (known and f" Valid names: {', '.join(known)}.")
    if question and "." in (added := "".join(re.findall(r"config use (\+\S+)", str(error)))):
        question += f" To add it, write {added}."
    return f"{program.name}: Unknown name {wrong!r}.{question}\n" if question else ""
