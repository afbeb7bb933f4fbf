"""What every test gets: the fork server of the ranks, and a check that it leaves nothing behind."""

from __future__ import annotations

from tests.distributed.harness import start_server, stop_server
from tests.distributed.leaks import check_leaks

pytest_plugins = ["pytester"]

__all__ = ["check_leaks"]


def pytest_configure() -> None:
    """Fork the server while pytest is still small and has one thread."""
    start_server()


def pytest_unconfigure() -> None:
    """End the server and with it every rank."""
    stop_server()
