"""What Linux says of the machine."""

from __future__ import annotations

import math
import socket
import sys
import time

import pytest

from lightning_dear.studies import machine

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_the_loopback_counts_what_is_sent() -> None:
    before = machine.sent_bytes("lo")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", 0))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.sendto(bytes(20_000), receiver.getsockname())
        assert receiver.recv(30_000)
    after = machine.sent_bytes("lo")
    assert after - before >= 20_000
    assert math.isnan(machine.sent_bytes("no such interface"))


NET_DEV = """Inter-|   Receive                            |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop
    lo:     100       1    0    0    0     0          0         0      200       1    0    0
  eth0:  111111    2222    0    0    0     0          0         0  3333333    4444    0    0
"""


def test_what_was_sent_is_not_what_was_received(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_read", {"net/dev": NET_DEV}.get)
    assert machine.sent_bytes("eth0") == 3333333
    assert machine.sent_bytes("lo") == 200


def test_a_busy_core_is_seen() -> None:
    before = machine.counters()
    while time.process_time() - before.process_s < 0.2:
        pass
    spent = machine.counters().since(before)
    # At least this process's share of the cores, as ticks of 10 ms count it.
    busy_s = spent.machine_use * spent.total_s
    assert 0.5 * spent.process_s <= busy_s <= 1.01 * spent.total_s


def test_peak_memory_is_counted_anew() -> None:
    assert machine.forget_peak_memory()
    low = machine.peak_memory()
    block = bytearray(64 << 20)
    high = machine.peak_memory()
    assert high - low > 32 << 20
    del block
    assert machine.forget_peak_memory()
    again = machine.peak_memory()
    assert again < high - (32 << 20)


def test_what_is_not_known_is_nan() -> None:
    unknown = machine.Counters(0.0, 0.0, 0.0, math.nan, math.nan, math.nan)
    assert math.isnan(unknown.since(unknown).machine_use)
    same = machine.counters()
    assert math.isnan(same.since(same).machine_use)
