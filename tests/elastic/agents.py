"""Agents of torchrun, one for each host of a job, on this machine.

    python -m tests.elastic.agents 10

stops ten times one of three agents by SIGTERM at a random step, and prints a table.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("train.py")

_QUICK = "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"


def events(folder: Path, event: str) -> list[dict[str, Any]]:
    path = folder / "events"
    lines = path.read_text().splitlines() if path.exists() else []
    return [one for one in map(json.loads, lines) if one["event"] == event]


def until(condition: Any, what: str, timeout_s: float = 90) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(0.05)


@contextmanager
def agents(
    folder: Path, num: int, least: int, ranks: int, *arguments: str, restarts: int = 3
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Starts `num` agents with so many ranks each; the first one has the rendezvous store."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = (
        f"--nnodes={least}:{num} --nproc-per-node={ranks} --max-restarts={restarts}"
        f" --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{port} --rdzv-id=test"
        f" --rdzv-conf={_QUICK} --local-addr=127.0.0.1 --monitor-interval=0.2"
    )
    command = [sys.executable, "-m", "torch.distributed.run", *flags.split(), str(SCRIPT)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    started: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(num):
            with (folder / f"agent{number}.log").open("ab") as log:
                one = subprocess.Popen(
                    [*command, str(folder), *arguments],
                    env=environment,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            started.append(one)
            time.sleep(0.3 if number else 1.5)
        yield started
    finally:
        for one in started:
            if one.poll() is None:
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()


def stopped(folder: Path, num: int, ranks: int, gone: Sequence[int], step: int) -> dict[str, Any]:
    """Runs a job of `num` agents, of which those in `gone` get SIGTERM after about `step` steps.

    Then runs the rest of it by hand, with as many ranks, from the checkpoint of the stop.
    """
    folder.mkdir()
    size = num * ranks
    with agents(folder, num, num - len(gone), ranks) as started:
        until(lambda: len(events(folder, "first")) == size, "first steps")
        time.sleep(0.06 * step)
        begin_s = time.time()
        for number in gone:
            started[number].send_signal(signal.SIGTERM)
        codes = [one.wait(timeout=120) for one in started]
    stops = {one["step"] for one in events(folder, "stop")}
    (stop,) = stops
    again = [one for one in events(folder, "first") if one["begin"] > begin_s]
    elastic = {one["digest"] for one in events(folder, "end")}
    hand = folder / "hand"
    hand.mkdir()
    left = num - len(gone)
    with agents(hand, left, left, ranks, str(folder / f"from{stop}.ckpt")) as started:
        assert [one.wait(timeout=120) for one in started] == [0] * left
    by_hand = events(hand, "first")
    return {
        "stop": stop,
        "codes": codes,
        "worlds": sorted({one["world"] for one in again}),
        "first": sorted({one["step"] for one in again}),
        "equal": len(elastic) == 1 and elastic == {one["digest"] for one in events(hand, "end")},
        "restart_s": statistics.median(one["t"] - one["begin"] for one in again),
        "by_hand_s": statistics.median(one["t"] - one["begin"] for one in by_hand),
        "between_s": min(one["begin"] for one in again) - begin_s,
    }


def main(rounds: int) -> None:
    draw, found = random.Random(0), []
    cases = [(3, 1, [draw.choice([1, 2])]) for _ in range(rounds)]
    cases += [(3, 2, [2]), (4, 1, [1, 3])] if rounds > 1 else []
    for number, (num, ranks, gone) in enumerate(cases):
        with tempfile.TemporaryDirectory() as folder:
            one = stopped(Path(folder) / "job", num, ranks, gone, draw.randrange(5, 60))
        found.append(one)
        print(number, num, ranks, gone, one, flush=True)
    for name in ("restart_s", "by_hand_s", "between_s"):
        print(name, round(statistics.median(one[name] for one in found[:rounds]), 2))


if __name__ == "__main__":
    main(int(sys.argv[1]))
