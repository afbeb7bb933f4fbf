"""What every test gets: the ranks' fork server, a leak check, and the meaning of the markers."""

from __future__ import annotations

import functools
import os
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.distributed.harness import start_server, stop_server
from tests.distributed.leaks import check_leaks
from tests.distributed.turns import key, turn

pytest_plugins = ["pytester"]

__all__ = ["check_leaks"]


def pytest_configure() -> None:
    """Fork the server while pytest is still small and has one thread."""
    start_server()
    from hypothesis import settings

    # An example takes as long as the machine has other things to do.
    settings.register_profile("patient", deadline=None)
    settings.load_profile("patient")


def pytest_unconfigure() -> None:
    """End the server and with it every rank."""
    stop_server()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """With several workers (`-n 2`), a test marked `alone` runs while no other does.

    One marked `netns` runs while no other of these does, as they count what namespaces there are.
    """
    if not hasattr(item.config, "workerinput"):
        return (yield)
    assert item.config.inipath is not None
    alone = item.get_closest_marker("alone") is not None
    with ExitStack() as stack:
        if item.get_closest_marker("netns"):  # taken first: who waits for it bars no door
            stack.enter_context(key(Path(__file__)))
        stack.enter_context(turn(item.config.inipath, item.config.rootpath, alone=alone))
        return (yield)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked `netns` or `gpu` where they cannot run, saying why."""
    if item.get_closest_marker("gpu") and (reason := _why_no_gpu()):
        pytest.skip(reason)
    if item.get_closest_marker("netns") and (reason := _why_no_namespaces()):
        if os.environ.get("CI") == "true" and os.geteuid() == 0:
            pytest.fail(f"tests marked netns must run in CI as root: {reason}", pytrace=False)
        pytest.skip(reason)


@functools.cache
def _why_no_gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "NOT RUN: torch finds no CUDA device here"


@functools.cache
def _why_no_namespaces() -> str | None:
    from lightning_dear.emulation import EmulatedCluster, EmulationUnavailable

    try:
        with EmulatedCluster(num_hosts=1, rate_mbit=100):
            return None
    except EmulationUnavailable as error:
        return str(error)
