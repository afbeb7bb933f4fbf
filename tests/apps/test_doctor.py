"""`dear-train doctor=true`: what it finds out about ranks, links and the job."""

import ast
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from lightning_dear import DearStrategy
from lightning_dear.apps.doctor import doctor
from lightning_dear.apps.doctor.doctor import late_row, layout_row, verdict
from lightning_dear.apps.doctor.measuring import Compute
from lightning_dear.apps.doctor.reachability import (
    Door,
    MeetingPoint,
    UnreachableError,
    announced_address,
    knock_from,
    open_door,
)
from lightning_dear.collectives.factory import new_collectives
from lightning_dear.collectives.world import World
from lightning_dear.doctor.links import Pair, link_rows, pairs_to_measure
from lightning_dear.doctor.prescription import Case
from lightning_dear.doctor.step_watch import StepTimes
from lightning_dear.emulation import EmulatedCluster
from lightning_dear.local_steps import LocalSteps
from lightning_dear.paths import conf_dir
from lightning_dear.planning import LinkCost, ModelTimes, TensorSpec
from lightning_dear.studies.device_costs import Device
from tests.distributed.harness import distributed
from tests.distributed.rank import staged

ROOT = conf_dir().parent
QUICK = ("model.net.channels=[4,8]", "model.net.num_blocks=1")
TIMEOUT_S = 120
RUN = ["-m", "lightning_dear.apps.train", "doctor=true", "hydra.run.dir=out", *QUICK]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def rank_environment(rank: int, world_size: int, port: int, address: str = "127.0.0.1") -> dict:
    """What a launcher outside sets for one rank, one rank on each host."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world_size),
        "NODE_RANK": str(rank),
        "LOCAL_RANK": "0",
    }


def start(arguments, environment, folder, prefix=()):
    folder.mkdir(exist_ok=True)
    return subprocess.Popen(
        [*prefix, sys.executable, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ends(processes):
    """Wait for all and return (exit code, stdout, stderr) of each."""
    try:
        printed = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(p.returncode, out, err) for p, (out, err) in zip(processes, printed, strict=True)]


# --- whole runs -------------------------------------------------------------------------------


def run_alone(folder, *overrides):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return ends([start([*RUN, *overrides], environment, folder)])[0]


@pytest.mark.slow
def test_two_ranks_are_examined_and_nothing_is_trained(tmp_path):
    # On a busy machine a rank may take more than half a minute to start.
    code, table, errors = run_alone(tmp_path, "doctor_timeout_s=120")
    assert code == 0, errors
    for row in (
        r"connections +all ranks reach each other",
        r"layout +one host with 2 ranks",
        r"torch +\d+\.\d+\.\d+\S*",
        r"lightning_dear +\S.*",
        r"backend +gloo",
        r"latency of an exchange among all ranks +\d+ us",
        r"longest round trip between two ranks +[\d.]+ ms",
        r"rate of each rank while all send +([\d.]+ MB/s|too fast to tell)",
        r"rate of each rank in the backend's all-reduces +([\d.]+ MB/s|too fast to tell)",
        r"slowest pair within hosts +ranks 0 and 1: [\d.]+ MB/s",
        r"gradients +0\.0\d MB",
        r"backward \(median\) +[\d.]+ ms",
        r"late rank +(none|rank \d, by [\d.]+ ms a batch; split=.*faster)",
    ):
        assert re.search(f"^{row}$", table, re.MULTILINE), (row, table)
    assert re.search(r"^Communication is \d+% of a step", table, re.MULTILINE)
    assert table.count("doctor: digits") == 1
    # On rank 0 alone.
    assert [errors.count(f"doctor: {what} ...") for what in ("connections", "links")] == [1, 1]
    assert not (tmp_path / "out/metrics.csv").exists()
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_other_launchers(start_method, tmp_path):
    code, table, errors = run_alone(tmp_path, f"strategy.start_method={start_method}")
    assert code == 0, errors
    assert "Communication is" in table


@pytest.mark.slow
def test_one_rank_is_told_so(tmp_path):
    code, table, errors = run_alone(tmp_path, "strategy=single")
    assert code == 0, errors
    assert "One rank sends nothing: strategy=single would do as well." in table


OTHER_VERSION = """
from lightning_dear.apps.doctor import doctor
from lightning_dear.apps import programs
facts_of = doctor.facts_of
doctor.facts_of = lambda: {**facts_of(), "torch": "2.6.0"}
programs.train()
"""


@pytest.mark.slow
def test_another_version_on_one_rank_fails(tmp_path):
    (tmp_path / "other.py").write_text(OTHER_VERSION)
    port = free_port()
    programs = (RUN, [str(tmp_path / "other.py"), *RUN[2:]])
    (code, table, _), (other_code, other_table, _) = ends(
        [
            start(
                [*program, "cluster.num_nodes=2", "cluster.devices=1"],
                rank_environment(rank, 2, port),
                tmp_path / str(rank),
            )
            for rank, program in enumerate(programs)
        ]
    )
    assert (code, other_code, other_table) == (1, 0, "")
    assert re.search(r"^PROBLEM: torch differs: \S+ \(rank 0\), 2\.6\.0 \(rank 1\)\.", table, re.M)
    assert "Communication is" not in table


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "words"),
    [
        (0, "Rank 1 did not report to rank 0 at 127.0.0.1:"),
        (1, "Rank 1 could not reach rank 0 at 127.0.0.1:"),
    ],
)
def test_a_rank_that_is_not_there_is_named_in_time(rank, words, tmp_path):
    overrides = ("doctor_timeout_s=2", "cluster.num_nodes=2", "cluster.devices=1")
    begin_s = time.monotonic()
    environment = rank_environment(rank, 2, free_port())
    ((code, _, errors),) = ends([start([*RUN, *overrides], environment, tmp_path)])
    assert code == 1
    assert f"UnreachableError: {words}" in errors
    assert "within 2 s" in errors
    assert time.monotonic() - begin_s < 60


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.netns
def test_a_slow_link_is_measured(tmp_path):
    ends_of_ranks = on_two_hosts(tmp_path, [{}, {}], rate_mbit=200)
    code, table, errors = ends_of_ranks[0]
    assert code == 0, errors
    together = float(re.search(r"while all send +([\d.]+) MB/s", table)[1])
    alone = float(re.search(r"slowest pair between hosts +ranks 0 and 1: (\S+) MB/s", table)[1])
    assert 8 < together < 26  # 200 Mbit/s are 25 MB/s with headers
    assert 8 < alone < 26
    assert re.search(r"^layout +one rank a host$", table, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.netns
def test_links_within_hosts_are_told_from_those_between_them(tmp_path):
    hosts = ("cluster=emulated", "cluster.num_hosts=2", "cluster.ranks_per_host=2")
    code, table, errors = run_alone(
        tmp_path, *hosts, "cluster.rate_mbit=200", "doctor_timeout_s=120"
    )
    assert code == 0, errors
    assert re.search(r"^layout +2 hosts with 2 ranks each: two hops$", table, re.MULTILINE)
    figures = r" hosts +ranks (\d) and (\d): ([\d.]+) MB/s; median of (\d) pairs: ([\d.]+) MB/s$"
    found = {
        kind: re.search(f"^slowest pair {kind}{figures}", table, re.MULTILINE).groups()
        for kind in ("within", "between")
    }
    assert [one[3] for one in found.values()] == ["2", "4"]
    assert found["within"][:2] in (("0", "1"), ("2", "3"))
    assert 8 < float(found["between"][4]) < 26
    assert float(found["within"][2]) > 2 * float(found["between"][4])


@pytest.mark.netns
@pytest.mark.slow
def test_an_interface_that_others_cannot_reach_fails(tmp_path):
    ends_of_ranks = on_two_hosts(tmp_path, [{}, {"GLOO_SOCKET_IFNAME": "lo"}], rate_mbit=None)
    code, table, errors = ends_of_ranks[0]
    assert code == 1, errors
    assert re.search(
        r"PROBLEM: rank 0 .* -> rank 1 \(.*127\.0\.0\.1:\d+\): connection refused", table
    )


def on_two_hosts(folder, extra, rate_mbit):
    with EmulatedCluster(num_hosts=2, rate_mbit=rate_mbit) as cluster:
        address = cluster.hosts[0].address
        return ends(
            [
                start(
                    [*RUN, "cluster.num_nodes=2", "cluster.devices=1"],
                    {
                        **rank_environment(host.index, 2, 29500, address),
                        "GLOO_SOCKET_IFNAME": host.interface,
                        **extra[host.index],
                    },
                    folder / str(host.index),
                    prefix=host.command([]),
                )
                for host in cluster.hosts
            ]
        )


# --- meeting and knocking ---------------------------------------------------------------------


def test_values_are_exchanged_in_rank_order():
    port = free_port()

    def one(rank):
        meeting = MeetingPoint("127.0.0.1", port, rank, 3, 20)
        found = meeting.exchange("topic", {"rank": rank})
        done.wait()
        return found

    done = threading.Barrier(3)
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(one, range(3))) == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]] * 3


def test_missing_ranks_are_named():
    meeting = MeetingPoint("127.0.0.1", free_port(), 0, 4, 0.3)
    meeting._store.set("topic/2", "null")
    with pytest.raises(UnreachableError, match=r"^Ranks 1, 3 did not report .*for: topic"):
        meeting.exchange("topic", 0)


def test_open_and_closed_doors():
    listening = [open_door(3) for _ in range(3)]
    doors = [Door(rank, "here", *one.getsockname()) for rank, one in enumerate(listening)]
    assert knock_from(0, doors) == []
    listening[2].close()
    (closed,) = knock_from(0, doors)
    assert re.match(
        r"rank 0 .* -> rank 2 .*: connection refused. Open all ports of any firewall", closed
    )
    for one in listening[:2]:
        one.close()


def test_a_loopback_address_of_another_host_gets_the_advice():
    here, there = (
        Door(rank, host, "127.0.1.1", free_port())
        for rank, host in enumerate(("here", "elsewhere"))
    )
    (sentence,) = knock_from(0, [here, there])
    assert "Set cluster.interface or GLOO_SOCKET_IFNAME" in sentence


def test_the_announced_address_follows_the_interface(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert announced_address() == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth99")
    with pytest.raises(ValueError, match=r"'eth99'.*no such interface.*lo"):
        announced_address()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^eth99")
    socket.create_server((announced_address(), 0)).close()


# --- what is concluded ------------------------------------------------------------------------


def test_versions_are_compared_by_rank():
    same = {"torch": "2.13.0", "python": "3.11.7"}
    assert doctor.version_problems([same, same]) == []
    (problem,) = doctor.version_problems([same, {**same, "torch": "2.6.0"}, same])
    assert problem.startswith("torch differs: 2.13.0 (ranks 0, 2), 2.6.0 (rank 1).")


def test_pairs():
    assert pairs_to_measure(3) == [(0, 1), (0, 2), (1, 2)]
    assert len(pairs_to_measure(8)) == 28
    assert pairs_to_measure(9)[-2:] == [(7, 8), (0, 8)]


def test_the_slowest_pair_is_named():
    cost = LinkCost(1e-4, 1 / 5e6, LinkCost(1e-3, 0.0))
    pairs = [Pair(0, 1, 9e8, 0.002), Pair(0, 2, 1e8, 0.1), Pair(1, 2, 9e8)]
    rows = dict(link_rows(cost, pairs, (0, 1, 2)))
    slowest = "ranks 0 and 2: 100.00 MB/s; median of 3 pairs: 900.00 MB/s"
    assert rows["slowest pair between hosts"] == slowest
    assert "slowest pair within hosts" not in rows
    assert rows["latency of an exchange among all ranks"] == "100 us"
    assert rows["longest round trip between two ranks"] == "100.0 ms"
    assert rows["rate of each rank while all send"] == "5.00 MB/s"
    assert rows["rate of each rank in the backend's all-reduces"] == "too fast to tell"
    few = dict(link_rows(cost, [Pair(0, 1, 9e8), Pair(1, 2, 8e8)], [0] * 9))
    slowest = "ranks 1 and 2: 800.00 MB/s; median of 2 neighbouring pairs: 850.00 MB/s"
    assert few["slowest pair within hosts"] == slowest


@pytest.mark.parametrize(
    ("error_s", "totals_s", "found"),
    [
        (0.0, (0.3, 0.2, 0.2), "rank 0, by 100.0 ms a batch; split=[2, 3, 3]: 1.3 times faster"),
        (0.0, (0.2, 0.2, 0.3), "rank 2, by 100.0 ms a batch; split=[3, 3, 2]: 1.3 times faster"),
        (0.0, (0.2, 0.21, 0.2), "none"),
        (0.06, (0.3, 0.2, 0.2), "none"),
    ],
)
def test_the_rank_that_computes_longest_is_named(error_s, totals_s, found):
    assert late_row([(one, error_s) for one in totals_s]) == ("late rank", found)


def test_links_within_hosts_are_apart_from_those_between_them():
    rates = {(0, 1): 8e9, (2, 3): 9e9, (0, 2): 25e6, (0, 3): 24e6, (1, 2): 23e6, (1, 3): 25e6}
    pairs = [Pair(*ranks, rate) for ranks, rate in rates.items()]
    rows = link_rows(LinkCost(1e-4, 1 / 5e6), pairs, (0, 0, 2, 2))
    assert rows[4:] == [
        (
            "slowest pair within hosts",
            "ranks 0 and 1: 8000.00 MB/s; median of 2 pairs: 8500.00 MB/s",
        ),
        (
            "slowest pair between hosts",
            "ranks 1 and 2: 23.00 MB/s; median of 4 pairs: 24.50 MB/s",
        ),
    ]


@distributed((2,))
def test_gpus_are_told_the_way_through_the_host() -> None:
    compute = Compute(StepTimes(TIMES, 0.3, 0.0, 0.0, 1), TENSORS)
    cost = LinkCost(0.0, 1e-3)
    with staged():
        collectives = new_collectives(torch.device("cpu"))
        for backend, words in (("gloo", r"at least \S+ s, predicted"), ("nccl", r"1e\+04 s\.")):
            ((title, found),), said = doctor._host_path(collectives, compute, cost, backend)
            assert title == "through the host, for dear-plan"
            with initialize_config_dir(str(conf_dir()), version_base="1.3"):
                cfg = compose("plan", found.split())
            assert cfg.backend == "staged"
            assert min(cfg.staged.bus_bytes_per_s, cfg.staged.sum_bytes_per_s) > 1e8
            assert re.search(rf"through the host's memory.* and with NCCL {words}", said)


@pytest.mark.parametrize(
    ("hosts", "hops", "words"),
    [
        ((0, 0, 2, 2), 2, "2 hosts with 2 ranks each: two hops"),
        ((0, 0, 2, 2), 1, "2 hosts with 2 ranks each: no two hops"),
        ((0, 0, 0, 3), 1, "2 hosts with 1 to 3 ranks: no two hops"),
        ((0, 1), 1, "one rank a host"),
        ((0, 0), 1, "one host with 2 ranks"),
    ],
)
def test_the_layout_is_one_sentence(hosts, hops, words):
    assert layout_row(World(0, len(hosts), hosts), hops) == ("layout", words)


TENSORS = [TensorSpec(0, "weight", 2_500_000, 4, "fp32", 0, 0)]
TIMES = ModelTimes(0.1, 0.2, {0: 0.0}, {0: 0.2})


def case(rate: float, one_way_s: float = 0.0, num_accumulated: int = 1) -> Case:
    """10 MB of gradients at 4 ranks: 15 MB go through each link. Encoding takes no time."""
    devices = dict.fromkeys(("bf16", "int8"), Device(0.0, 1e18))
    cost = LinkCost(one_way_s, 1 / rate)
    return Case(TENSORS, TIMES, num_accumulated, cost, 4, devices, 0.0, True, "ddp")


@pytest.mark.parametrize(
    ("rate", "num_accumulated", "share"),
    [(1e9, 1, 5), (1e8, 1, 33), (1e8, 10, 5), (6e7, 1, 45), (1e7, 1, 83)],
)
def test_the_verdict(rate, num_accumulated, share):
    """The only bucket is sent when backward has ended."""
    said = verdict(case(rate, num_accumulated=num_accumulated), LinkCost(0.0, 1 / rate), 9)
    assert f"Communication is {share}% of a step" in said
    if share < 10:
        assert said.endswith("nothing here will help. strategy=ddp would do as well.")
        return
    assert said.startswith("Nothing was trained: the step is predicted.")
    assert "  dear-train strategy=dear compressor=int8" in said
    assert "ddp (now)" in said


def proposed(said: str) -> LocalSteps:
    """What the two lines to paste make."""
    *_, options, script = said.splitlines()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        strategy = compose("train", shlex.split(options)).strategy
    steps = instantiate(strategy.local_steps)
    assert (strategy.compressor._target_, strategy._target_) == (
        "lightning_dear.compression.Int8",
        "lightning_dear.DearStrategy",
    )
    known = {"DearStrategy": DearStrategy, "LocalSteps": LocalSteps}
    built = eval(script.removeprefix("In a script: "), known)
    assert isinstance(built, DearStrategy)
    assert f"every={steps.every}, fragments={steps.fragments}, delay={steps.delay})" in script
    return steps


@pytest.mark.parametrize(
    ("rate", "one_way_s", "num_modules", "found", "steps_ms"),
    [
        # 2.5 million numbers at 4 ranks: int8 sends 3.75 MB a step, beside 0.3 s of computing, so
        # that 1.25 x 3.75 / 0.3 = 15.6 steps hide them. A fragment needs a quarter of 12.5, and up
        # to one more before its way back.
        (1e6, 0.0, 9, (16, 4, 5), (3750.0, 300.0)),
        # Each fragment goes there and back: 4 x 0.4 s more, in 22.3 steps.
        (1e6, 0.2, 9, (32, 4, 6), (4150.0, 300.0)),
        (1e6, 0.0, 1, (16, 1, 15), (3750.0, 300.0)),
        # More than the longest round hides: 3750 / 512 s in each step.
        (1e3, 0.0, 9, (512, 4, 128), (3750000.0, 7324.2)),
        (6.2e6, 0.0, 9, (4, 4, 2), (604.8, 300.0)),
    ],
)
def test_local_steps_are_proposed_where_steps_mostly_wait(
    rate, one_way_s, num_modules, found, steps_ms
):
    said = verdict(case(rate, one_way_s), LinkCost(one_way_s, 1 / rate), num_modules)
    steps = proposed(said)
    assert (steps.every, steps.fragments, steps.delay) == found
    # Buckets wait for backward, and forward for them, so that nothing hides either half.
    found_ms = re.search(r"int8 a batch would still take ([\d.]+) ms, and with local steps", said)
    assert float(found_ms[1]) == pytest.approx(300 + steps_ms[0] + 3e3 * one_way_s, rel=0.05)
    assert f"with local steps about {steps_ms[1]:.1f} ms." in said
    assert "They cost samples: about 1.5 to 2 times the steps for a small model" in said


@pytest.mark.parametrize(
    ("rate", "num_accumulated", "is_proposed"),
    # Computing takes 0.3 s, and int8's messages 3.75 MB / rate more.
    [(1e7, 1, True), (1.3e7, 1, False), (1e9, 1, False), (1e6, 1, True), (1e6, 20, False)],
)
def test_local_steps_are_not_proposed_where_int8_will_do(rate, num_accumulated, is_proposed):
    said = verdict(case(rate, num_accumulated=num_accumulated), LinkCost(0.0, 1 / rate), 9)
    assert ("local_steps" in said) == is_proposed


# --- docs/clusters.md ---------------------------------------------------------------------------


def own_texts():
    """Every string of the package, with `...` for what a format fills in."""
    for path in (ROOT / "lightning_dear").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (getattr(part, "value", None) for part in node.values)
                yield "".join(part if isinstance(part, str) else "..." for part in parts)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield re.sub(r"%[sdg]", "...", node.value)


def documented_messages():
    text = (ROOT / "docs" / "clusters.md").read_text()
    rows = [line.split("|")[1:3] for line in text.splitlines() if "| lightning_dear |" in line]
    return [message.strip(" `") for message, _ in rows]


def test_messages_in_the_docs_are_ours():
    texts = list(own_texts())
    messages = documented_messages()
    assert len(messages) >= 10
    for message in messages:
        pieces = [piece for piece in message.split("...") if piece.strip(" ,")]
        assert any(all(piece in text for piece in pieces) for text in texts), message
