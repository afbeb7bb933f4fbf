"""What the programs leave behind when they are interrupted at random moments.

    python -m tests.benchmarks.interruptions --moments 10 --programs bench plan

Each program is started anew for each moment, and gets SIGINT and SIGTERM in turn: SIGINT as Ctrl-C
sends it, to all of its processes, SIGTERM to the first one only. Prints a row for each: when the
signal came, how long the end took, the exit code, what was on the screen last, what of the results
was in the folder, and what was left running. A hang is ended after two minutes, and said.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lightning_dear.studies.table import format_table

REPLAY = ("cluster.num_hosts=2", "model.compute_s=0.1", "model.scale=64")

COMMANDS = {
    "bench": ("dear-bench", *REPLAY, "rounds=2", "steps=2", "entries=[ddp,dear]"),
    "converge": (
        *("dear-converge", "trainer.max_steps=12", "seeds=[1,2]", "tuning_seeds=[]"),
        *("entries=[dense,bf16]", "lr_factors=[1]", "dense_shares=[0]"),
        *("reference_lr_factors=[1]", "~buckets.layer-wise"),
    ),
    "recipe": ("dear-recipe", "mergecomp_scaling"),
    "plan": ("dear-plan", "calibrate"),
}
"""Program -> a run of it that takes some 20 to 40 seconds."""

LAST_S = {"bench": 30.0, "converge": 40.0, "recipe": 15.0, "plan": 20.0}
"""Seconds in which the signal comes."""

MARK = "LIGHTNING_DEAR_INTERRUPTION"
HANG_S = 120.0


def interrupted(name: str, number: signal.Signals, after_s: float) -> tuple[str, ...]:
    """Starts a program, interrupts it, and says what became of it."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    program, *arguments = COMMANDS[name]
    command = [str(Path(sys.executable).with_name(program)), *arguments]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as screen:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, MARK: mark},
            stdout=screen,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        time.sleep(after_s)
        was_done, before = process.poll() is not None, time.monotonic()
        if not was_done:
            send = os.killpg if number == signal.SIGINT else os.kill
            send(process.pid, number)
        try:
            code = str(process.wait(HANG_S))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = "hung"
        took_s = time.monotonic() - before
        # What is being ended may need a moment.
        time.sleep(2)
        screen.seek(0)
        said = [line.strip() for line in screen.read().splitlines() if line.strip()]
        files = sorted({path.name for path in Path(folder).rglob("*.csv")})
        left = len(marked(mark))
    last = said[-1][:70] if said else "nothing"
    if "Traceback" in "\n".join(said):
        last = f"TRACEBACK, {last}"
    seen = " ".join(files) or "-"
    how = "was done" if was_done else number.name
    return (name, how, f"{after_s:.1f}", f"{took_s:.1f}", code, last, seen, str(left))


def marked(mark: str) -> list[int]:
    """Processes that come of the one that was started with `mark`."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except (OSError, ValueError):
            continue
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    parser.add_argument("--moments", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    draw, rows = random.Random(args.seed), []
    for name in args.programs:
        for moment in range(args.moments):
            number = (signal.SIGINT, signal.SIGTERM)[moment % 2]
            rows.append(interrupted(name, number, draw.uniform(0.3, LAST_S[name])))
            print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    titles = ("program", "signal", "after s", "took s", "code", "last line", "results", "left")
    print(format_table(titles, rows))


if __name__ == "__main__":
    main()
