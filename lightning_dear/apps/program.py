"""A program that measures for long: its first line, its report of a folder, its end at a signal.

Imports nothing that takes long, so that the first line comes at once.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_dear.names import APPS, need
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
        name: Of the script; `conf/` has a config by the part behind its hyphen.
        job: Runs one job of Hydra's; imports what it needs.
        report: Makes the report of a folder again, and prints it.
        folder: Where the present job writes; set by the job.
    """

    name: str
    job: Callable[[Any], None]
    report: Callable[[Path], None]
    folder: Path | None = None
    _is_first: bool = field(default_factory=lambda: _STARTED_VARIABLE not in os.environ)

    def main(self) -> None:
        """Do what the command line says."""
        need(self.name, *APPS, error=SystemExit)
        if sys.argv[1:2] == ["report"]:
            self._report(sys.argv[2:])
        else:
            self.run(self.job)

    def run(self, job: Callable[[Any], None]) -> None:
        """Have Hydra compose what the command line says, and run jobs of it."""
        with INTERRUPTS.call(self._end), self._said_when_interrupted():
            if self._is_first:
                os.environ[_STARTED_VARIABLE] = self.name
                print(f"{self.name}: loading torch and Lightning ...", file=sys.stderr, flush=True)
            import hydra

            config_name = self.name.partition("-")[2]
            hydra.main(str(conf_dir()), config_name, version_base="1.3")(job)()

    def _report(self, arguments: list[str]) -> None:
        if len(arguments) != 1 or arguments[0].startswith("-"):
            raise SystemExit(f"usage: {self.name} report FOLDER (of a run, finished or not)")
        try:
            self.report(Path(arguments[0]))
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
            again = "Interrupted before anything was measured: start it again."
            if self.folder is not None and (self.folder / "summary.csv").exists():
                again = f"Interrupted: add hydra.run.dir={self.folder} to the command to go on."
            print(f"{self.name}: {again}", file=sys.stderr, flush=True)
