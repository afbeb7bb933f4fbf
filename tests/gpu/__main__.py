"""All that a GPU can show, in ten minutes at most: `make gpu`. One device is enough.

Says in the end what it has covered, and what was cut off or NOT RUN. Exits with 1 if anything
failed, or nothing could be run. Arguments go to pytest.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

import torch

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
DEADLINE_S = 555.0
"""Without what it takes to import torch, and to end what was cut off."""

GRACE_S = 10.0
"""For who is told to end. torchrun's ranks are in groups of their own: it must end them itself."""


@dataclass(frozen=True)
class Stage:
    """A part of the run.

    Attributes:
        title: What it covers.
        command: What is run.
        most_s: After how many seconds it is cut off.
    """

    title: str
    command: tuple[str, ...]
    most_s: float

    def run(self, left_s: float) -> str:
        """What came of it, in a word or two."""
        most_s, begin_s = min(self.most_s, left_s), time.perf_counter()
        if most_s < 10:
            return "NOT RUN: no time left"
        print(f"--- {self.title}", flush=True)
        # A group of its own, so that its children end with it.
        process = subprocess.Popen(self.command, start_new_session=True)
        try:
            code = process.wait(most_s)
        except subprocess.TimeoutExpired:
            _end(process)
            return f"CUT OFF after {most_s:.0f} s"
        spent_s = time.perf_counter() - begin_s
        return f"{'passed' if code == 0 else f'FAILED ({code})'} in {spent_s:.0f} s"


def _end(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    # Children may be left of it.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def stages() -> list[Stage]:
    """In the order of what each second answers."""
    tests = sys.executable, "-m", "pytest", "-n", "0", "-m", "gpu", "-q", "tests/gpu"
    two = "tests.gpu.two_on_one"
    return [
        Stage("gloo between 2 ranks on one GPU", (*TORCHRUN, "2", "-m", two, "gloo"), 90),
        Stage("gloo between 3 ranks on one GPU", (*TORCHRUN, "3", "-m", two, "gloo"), 90),
        Stage("codecs, clock, DDP's bits, a Trainer in 16-mixed", (*tests, *sys.argv[1:]), 220),
        Stage("NCCL between 2 ranks on one GPU", (*TORCHRUN, "2", "-m", two), 150),
        Stage(
            "order of streams: threads as ranks", (sys.executable, "-m", "tests.gpu.threads"), 90
        ),
        Stage("host cost of a step", (sys.executable, "-m", "tests.gpu.host_cost", "cuda"), 100),
        Stage("NCCL in two hops: 2 x 2 ranks on one GPU", (*TORCHRUN, "4", "-m", two), 150),
        Stage("NCCL between 3 ranks on one GPU", (*TORCHRUN, "3", "-m", two), 100),
    ]


def main() -> int:
    """Runs all stages; whether one was not passed."""
    if not torch.cuda.is_available():
        print("NOT RUN: there is no CUDA device.")
        return 1
    begin_s = time.perf_counter()
    found = [(one.title, one.run(begin_s + DEADLINE_S - time.perf_counter())) for one in stages()]
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}:")
    for title, said in found:
        print(f"  {title}: {said}")
    return int(any("passed" not in said for _, said in found))


if __name__ == "__main__":
    sys.exit(main())
