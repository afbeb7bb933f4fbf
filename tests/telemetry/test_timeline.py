"""What a timeline shows: of made-up steps in a picture and a trace, and of trained ones by name."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lightning_dear.compression import GTopk, Int8, OkTopk, PowerSGD
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.telemetry.timeline import Span, Timeline, plot_timeline
from tests.distributed.harness import distributed
from tests.training.linear import SHAPES, Run


def steps(num_buckets: int, num_steps: int = 2) -> Iterator[Span]:
    """Steps of 0.4 s each, with nothing encoded.

    0.1 s of forward, with a wait of 0.06 s in it from the second step on; 0.1 s of backward, and
    as long a wait for the rest of the reduce-scatters; 0.1 s of steps and gathers, which take
    another 0.1 s, in the next forward.
    """
    for step in range(num_steps):
        begin_s = 0.4 * step
        yield Span("forward", "forward", begin_s, begin_s + 0.1)
        if step:
            yield Span("wait", "net.0", begin_s + 0.04, begin_s + 0.1)
        yield Span("backward", "backward", begin_s + 0.1, begin_s + 0.2)
        yield Span("wait", "gradients", begin_s + 0.2, begin_s + 0.3)
        for number in range(num_buckets):
            name, turn_s = f"bucket {number}", 0.1 / num_buckets
            # All are launched before the first is there.
            at_s = begin_s + 0.1 + 2 * turn_s * (number + 1)
            yield Span("reduce_scatter", name, begin_s + 0.1, at_s)
            at_s = begin_s + 0.3 + turn_s * number
            yield Span("step", name, at_s, at_s + turn_s)
            yield Span("all_gather", name, begin_s + 0.3, begin_s + 0.3 + 2 * turn_s * (number + 1))


def made(num_buckets: int, num_steps: int = 2) -> list[Span]:
    return sorted(steps(num_buckets, num_steps), key=lambda one: one.start_s)


def texts(spans: list[Span], tmp_path: Path) -> list[str]:
    """What is written in the picture: matplotlib has it in comments beside its outlines."""
    pytest.importorskip("matplotlib")
    plot_timeline(spans, tmp_path / "timeline.svg")
    drawn = (tmp_path / "timeline.svg").read_text()
    assert "<pattern" in drawn, "waits are not hatched"
    return re.findall(r"<!-- (.*?) -->", drawn)


def test_the_title_says_how_long_a_step_is_and_how_much_is_hidden(tmp_path: Path) -> None:
    """0.4 s of travel, of which waits are 0.1 s + 0.06 s."""
    title = "400.0 ms from forward to forward. Data travel for 400.0 ms, 60% of it hidden"
    assert any(one.startswith(title) for one in texts(made(5), tmp_path))


def test_the_title_names_the_late_rank(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_timeline(made(5), tmp_path / "timeline.svg", "Rank 2 is late.")
    assert "<!-- Rank 2 is late. -->" in (tmp_path / "timeline.svg").read_text()


@pytest.mark.parametrize(("num_buckets", "are_shown"), [(5, True), (60, False)])
def test_buckets_have_labels_where_these_fit(
    num_buckets: int, are_shown: bool, tmp_path: Path
) -> None:
    found = Counter(texts(made(num_buckets), tmp_path))
    # In reduce-scatters, steps and all-gathers, of two steps. Axes are numbered otherwise.
    assert [found[str(number)] == 6 for number in (1, 3)] == [are_shown] * 2
    # Waits are wide enough.
    assert found["gradients"] == 2
    assert found["net.0"] == 1


def test_two_steps_are_drawn(tmp_path: Path) -> None:
    assert Counter(texts(made(5, 4), tmp_path))["gradients"] == 2


def test_rows_are_of_what_there_is(tmp_path: Path) -> None:
    assert "encoding" not in texts(made(5), tmp_path)
    encoding = Span("encode", "bucket 0", 0.1, 0.2)
    assert "encoding" in texts([*made(5), encoding], tmp_path)


def test_nothing_overlaps_within_a_thread_of_the_trace(tmp_path: Path) -> None:
    """Perfetto would leave it out."""
    timeline = Timeline()
    spans = [*made(20), Span("encode", "bucket 0", 0.1, 0.2), Span("encode", "bucket 1", 0.15, 0.3)]
    for one in spans:
        timeline.record(one.lane, one.name, 100.0 + one.start_s, 100.0 + one.end_s)
    timeline.write_chrome_trace(tmp_path / "timeline.json")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    drawn: dict[int, list[Any]] = {}
    for event in events:
        if event["ph"] == "X":
            drawn.setdefault(event["tid"], []).append(event)
    lanes = {one["tid"]: one["args"]["name"] for one in events if one["ph"] == "M"}
    assert drawn.keys() == lanes.keys()
    assert sum(map(len, drawn.values())) == len(spans)
    for tid, own in drawn.items():
        assert {one["cat"] for one in own} == {lanes[tid]}
        assert all(one["ts"] + one["dur"] <= two["ts"] + 1e-3 for one, two in pairwise(own))
    assert min(one["ts"] for own in drawn.values() for one in own) == 0
    last = [one["dur"] for own in drawn.values() for one in own if one["name"] == "bucket 19"]
    # From launch to arrival, with its turn behind others.
    assert max(last) == pytest.approx(2e5)


def _recorded(options: ExchangeOptions) -> list[Span]:
    run, timeline = Run(options), Timeline()
    run.step()
    run.pipeline.timeline = timeline
    for _ in range(2):
        run.step()
    run.pipeline.complete_parameters()
    timeline.clock.finish()
    return timeline.spans


@distributed(world_sizes=(2,))
def test_waits_are_named_by_module() -> None:
    """Here of parameters in a list, which is what reads them."""
    names = {one.name for one in _recorded(ExchangeOptions()) if one.lane == "wait"}
    assert "weights" in names
    assert "ParameterList" not in names


@distributed(world_sizes=(2,))
def test_encoding_and_decoding_have_lanes_of_their_own() -> None:
    """Of each bucket in both halves of both steps; those of exchanges not by rows as they come."""
    spans = _recorded(ExchangeOptions("gradients", compressor=Int8()))
    for lane in "encode", "decode":
        found = Counter(one.name for one in spans if one.lane == lane)
        assert {name for name in found if name.startswith("bucket ")} == {*found}
        # The first step's results arrive in the recording, too.
        assert all(count in (4, 5) for count in found.values()), found
        assert 2 <= len(found) <= len(SHAPES)
        assert all(one.end_s > one.start_s for one in spans if one.lane == lane)
    for codec in (OkTopk(density=0.3), GTopk(density=0.3), PowerSGD(min_saving=1.0)):
        lanes = {one.lane for one in _recorded(ExchangeOptions("gradients", compressor=codec))}
        assert {"encode", "decode"} <= lanes, codec
    assert "encode" not in {one.lane for one in _recorded(ExchangeOptions())}
