"""`python ending_ranks.py FOLDER JOBS`: two ranks end, job after job, with threads of gloo busy.

Prints the exit code of every rank. A rank is a fork, so that a job costs no imports, and leaves by
the end of the interpreter, as a script does.
"""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist


@atexit.register
def _check_ended() -> None:
    """Leaves with 3 if a group is left, which may abort the process, or may not."""
    if dist.is_initialized():
        os._exit(3)


# Last in, first out: what the package registers must run before the check.
from lightning_dear.collectives.factory import new_collectives  # noqa: E402


def main(folder: Path, jobs: int) -> None:
    """Start the ranks of each job, and wait for them."""
    for job in range(jobs):
        ranks = []
        for rank in range(2):
            ranks.append(os.fork())
            if ranks[-1] == 0:
                end(rank, folder / f"store-{job}")
                return
        for rank in ranks:
            print(os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]))


def end(rank: int, store: Path) -> None:
    """What a rank's last steps may look like, under the worst of schedules."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    collectives = new_collectives(torch.device("cpu"))
    collectives.launch_max(torch.zeros(1, dtype=torch.uint8)).wait()
    # The thread that sent the last tensor gets to free it only after this one is done.
    sys.setswitchinterval(1000)
    dist.all_reduce(torch.ones(10))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
