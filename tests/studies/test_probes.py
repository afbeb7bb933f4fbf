"""What `dear-plan calibrate` times: by hand, and between real ranks."""

from __future__ import annotations

import pytest
import torch

from lightning_dear.collectives.factory import new_collectives
from lightning_dear.planning import LinkCost
from lightning_dear.studies import probes
from lightning_dear.studies.probes import alike, first_of, measure, with_starts
from tests.distributed.harness import distributed

CPU = torch.device("cpu")
LINKS = [LinkCost(1e-4, 1e-9, LinkCost(0.0, beta_s)) for beta_s in (1e-9, 2e-9, 3e-9)]


@pytest.mark.slow
@distributed(world_sizes=(2, 3))
def test_all_is_measured_alike_on_all_ranks(world_size: int) -> None:
    collectives = new_collectives(CPU)
    sent_before = collectives.ledger.total()
    norm = torch.nn.BatchNorm1d(1 << 20)
    optimizer = torch.optim.AdamW(norm.parameters())
    begun: list[str] = []
    ready_s = [1e-4 * number for number in range(20)]
    units = [[64] * 4, [1 << 16]]
    costs = measure(collectives, norm, optimizer, ready_s, units, begun.append)
    assert len(set(begun)) == len(begun) == 5
    assert len(costs.links) == 3
    for link in costs.links:
        for cost in (link, link.all_reduce):
            assert cost is not None
            assert 0 <= cost.alpha_s < 1
            assert 0 <= cost.beta_s < 1e-4
    for half in (costs.all_gather, costs.reduce_scatter):
        assert (min(half), max(half)) == (1 << 12, 1 << 20)
        assert all(0 < one < 1 for repeats in half.values() for one in repeats)
    assert 0 < costs.all_reduce_cpu_s < 1
    # BatchNorm's buffers are long enough for their sending not to be lost in noise.
    assert 0 < costs.ddp_s < 1
    assert costs.sharding_s is not None
    assert 0 < costs.sharding_s < 1
    assert collectives.all_gather_object(costs) == [costs] * world_size
    # Training's bytes stay training's, and so does the module.
    assert collectives.ledger.total() == sent_before
    assert norm.num_batches_tracked == 0
    assert norm.weight.grad is None


@pytest.mark.slow
@distributed(world_sizes=(2,))
def test_buffers_copies_and_units_take_their_time(world_size: int) -> None:
    collectives = new_collectives(CPU)
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    few, large, many = [[64] * 4], [[1 << 22] * 4], [[64] * 4] * 24
    few_s, large_s = (probes.ddp_seconds(collectives, CPU, one, []) for one in (few, large))
    buffers_s = probes.ddp_seconds(collectives, CPU, few, [torch.zeros(1 << 22)])
    assert few_s < min(large_s, buffers_s)
    one_s, units_s, bytes_s = (
        probes.sharding_seconds(collectives, CPU, one, optimizer) for one in (few, many, large)
    )
    assert one_s is not None
    assert units_s is not None
    assert bytes_s is not None
    assert one_s < min(units_s, bytes_s)


@distributed(world_sizes=(2,))
def test_the_shorter_of_two_starts_counts(world_size: int) -> None:
    collectives = new_collectives(CPU)
    # A backward of 20 all-reduces that hides them tells nothing but that a start takes less.
    hidden, cpu_s = with_starts(LINKS, collectives, CPU, [0.02 * number for number in range(20)])
    assert [one.all_reduce.beta_s for one in hidden if one.all_reduce] == [1e-9, 2e-9, 3e-9]
    assert all(0 < one.all_reduce.alpha_s < 0.021 for one in hidden if one.all_reduce)
    assert [(one.alpha_s, one.beta_s) for one in hidden] == [(1e-4, 1e-9)] * 3
    assert 0 < cpu_s < 1


def test_on_an_accelerator_starts_are_the_links_own() -> None:
    assert with_starts(LINKS, None, torch.device("cuda"), [0.0]) == (LINKS, 0.0)  # type: ignore[arg-type]


def test_starts_are_taken_from_what_took_less(monkeypatch: pytest.MonkeyPatch) -> None:
    class Alone:
        def all_gather_object(self, value: object) -> list[object]:
            return [value]

    def start_s(_: object, launches_s: list[float]) -> tuple[float, float]:
        return (0.5, 2.0) if len(launches_s) == 3 else (next(trains), 1.0)

    trains = iter([9.0, 0.1, 0.7, 0.6])
    monkeypatch.setattr(probes, "_start_s", start_s)
    found, cpu_s = with_starts(LINKS, Alone(), CPU, [0.0, 1.0, 2.0])  # type: ignore[arg-type]
    assert [one.all_reduce.alpha_s for one in found if one.all_reduce] == [0.1, 0.5, 0.5]
    assert cpu_s == 2.0


def test_of_a_large_model_the_first_units_are_measured() -> None:
    assert first_of([[3, 4], [5], [6, 7]], 10) == ([[3, 4], [3]], 10 / 25)
    assert first_of([[3, 4], [5]], 100) == ([[3, 4], [5]], 1)


def test_an_optimizer_is_made_again_for_another_module() -> None:
    unit, other = torch.nn.Linear(1, 1), torch.nn.Linear(2, 2)
    adam = torch.optim.AdamW(unit.parameters(), lr=0.5)
    unit(torch.ones(1)).backward()
    adam.step()
    again = alike(adam, other)
    assert type(again) is torch.optim.AdamW
    (group,) = again.param_groups
    assert (group["lr"], group["params"]) == (0.5, list(other.parameters()))
    assert not again.state
    before = [one.clone() for one in unit.parameters()]
    other(torch.ones(2)).sum().backward()
    again.step()
    assert len(again.state) == len(adam.state) == 2
    assert all(map(torch.equal, before, unit.parameters()))


def test_an_older_torch_leaves_out_fsdp2s_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(probes, "FSDPModule", object)
    adam = torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    assert probes.sharding_seconds(None, CPU, [[1]], adam) is None  # type: ignore[arg-type]
    assert "The host time of FSDP2 is not measured" in caplog.text
