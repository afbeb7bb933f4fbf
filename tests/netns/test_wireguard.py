"""Through WireGuard nothing of gradients, weights and the store can be read between hosts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lightning_dear.emulation import EmulatedCluster, EmulatedHost
from tests.netns.wireguard import MARKERS

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = [sys.executable, str(Path(__file__).with_name("wireguard.py"))]

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(
        not (shutil.which("wireguard-go") and shutil.which("wg") and Path("/dev/net/tun").exists()),
        reason="needs /dev/net/tun, and: apt-get install wireguard-go wireguard-tools",
    ),
]


@contextmanager
def tunnel(hosts: list[EmulatedHost], folder: Path) -> Iterator[list[str]]:
    """Yields the addresses of the two hosts in a WireGuard network; its interface is wg0."""

    def run(host: EmulatedHost, *words: str) -> None:
        subprocess.run(host.command([*words]), check=True, capture_output=True, timeout=30)

    keys = [subprocess.check_output(["wg", "genkey"]) for _ in hosts]
    public = [subprocess.check_output(["wg", "pubkey"], input=key).decode().strip() for key in keys]
    addresses = ["10.77.0.1", "10.77.0.2"]
    started = []
    try:
        for number, host in enumerate(hosts):
            # All namespaces share the folder of sockets, so that each device needs its own name.
            device = f"wg{number}"
            started.append(
                subprocess.Popen(
                    host.command(["wireguard-go", "--foreground", device]),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )
            control = Path(f"/var/run/wireguard/{device}.sock")
            while not control.exists():
                time.sleep(0.05)
            (folder / device).write_bytes(keys[number])
            other = 1 - number
            run(
                host,
                *("wg", "set", device, "listen-port", "51820"),
                *("private-key", str(folder / device), "peer", public[other]),
                *("allowed-ips", f"{addresses[other]}/32"),
                *("endpoint", f"{hosts[other].address}:51820"),
            )
            run(host, "ip", "address", "add", f"{addresses[number]}/24", "dev", device)
            run(host, "ip", "link", "set", device, "mtu", "1420", "up")
        yield addresses
    finally:
        for one in started:
            one.terminate()
            one.wait(timeout=30)


def counted(hosts: list[EmulatedHost], addresses: list[str], interfaces: list[str]) -> list[int]:
    """Trains on both hosts, and returns the packets with each marker on the link of host 0."""
    listener = subprocess.Popen(
        hosts[0].command([*SCRIPT, "listen", hosts[0].interface]), stdout=subprocess.PIPE, text=True
    )
    assert listener.stdout is not None
    assert listener.stdout.readline() == "ready\n"
    ranks = []
    for rank, (host, interface) in enumerate(zip(hosts, interfaces, strict=True)):
        variables = {
            **{name: str(rank) for name in ("RANK", "GROUP_RANK", "NODE_RANK")},
            **{name: "2" for name in ("WORLD_SIZE", "GROUP_WORLD_SIZE")},
            **{"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "wireguard"},
            **{"MASTER_ADDR": addresses[0], "MASTER_PORT": "29533", "OMP_NUM_THREADS": "1"},
            **{"GLOO_SOCKET_IFNAME": interface, "PYTHONPATH": str(ROOT)},
        }
        command = host.command([*SCRIPT, "train"])
        ranks.append(subprocess.Popen(command, env=os.environ | variables))
    try:
        assert [one.wait(timeout=90) for one in ranks] == [0, 0]
    finally:
        for one in ranks:
            one.kill()
        listener.terminate()
        said, _ = listener.communicate(timeout=30)
    return list(map(int, said.split()))


@pytest.mark.alone
@pytest.mark.slow
def test_nothing_can_be_read_through_wireguard(tmp_path: Path) -> None:
    with EmulatedCluster(num_hosts=2, rate_mbit=None) as cluster:
        hosts = list(cluster.hosts)
        plain = counted(hosts, [one.address for one in hosts], [one.interface for one in hosts])
        # Without it both are seen, or the listener sees nothing.
        assert len(plain) == len(MARKERS)
        assert min(plain) > 0
        with tunnel(hosts, tmp_path) as addresses:
            assert counted(hosts, addresses, ["wg0", "wg1"]) == [0, 0]
