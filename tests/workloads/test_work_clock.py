"""A host that shares its core: what it waits for the core is work, what it sleeps is not."""

import os
import subprocess
import sys
import threading
import time

import pytest

from lightning_dear.workloads.replay import waiter as module
from lightning_dear.workloads.replay.waiter import work_clock

SHARES_A_CORE = """
import os, subprocess, sys, time
from lightning_dear.workloads.replay.waiter import work_clock
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
busy = subprocess.Popen([sys.executable, "-c", "sum(range(10**9))"])
time.sleep(0.2)
began = time.perf_counter(), time.thread_time(), work_clock()
while time.perf_counter() < began[0] + 0.6: pass
ended = time.perf_counter(), time.thread_time(), work_clock()
busy.kill()
print(*(after - before for before, after in zip(began, ended)))
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/thread-self/schedstat"), reason="no schedstats")
def test_waiting_for_a_core_is_work():
    command = [sys.executable, "-c", SHARES_A_CORE]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    wall_s, computed_s, worked_s = map(float, done.stdout.split())
    assert computed_s < 0.8 * wall_s
    assert worked_s > 0.9 * wall_s


def test_sleeping_is_not():
    before = work_clock()
    time.sleep(0.2)
    assert work_clock() - before < 0.1


def test_each_thread_has_a_clock_of_its_own():
    until = work_clock() + 0.05
    while work_clock() < until:
        pass
    seen = []
    thread = threading.Thread(target=lambda: seen.append(work_clock()))
    thread.start()
    thread.join()
    assert seen[0] < work_clock() - 0.04


def test_a_kernel_that_does_not_tell(monkeypatch):
    monkeypatch.setattr(module, "_SCHEDSTAT", "/nowhere")
    monkeypatch.setattr(module, "_of_thread", threading.local())
    before = time.thread_time()
    assert before <= work_clock() <= time.thread_time()
