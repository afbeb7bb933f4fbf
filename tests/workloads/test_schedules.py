import pytest
import torch

from lightning_dear.workloads.schedules import warmup_cosine


def learning_rates(total_steps: int, **options: float) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = warmup_cosine(optimizer, total_steps, **options)
    rates = []
    for _ in range(total_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_rises_linearly_then_falls_to_the_final_fraction():
    rates = learning_rates(100, warmup_fraction=0.1, final_fraction=0.25)
    assert rates[:10] == pytest.approx([0.2 * step for step in range(1, 11)])
    assert rates[10] == pytest.approx(2.0)
    assert all(later < earlier for earlier, later in zip(rates[10:], rates[11:], strict=False))
    assert rates[-1] == pytest.approx(0.5, abs=2e-3)


def test_one_step_is_enough():
    assert learning_rates(1) == [2.0]


@pytest.mark.parametrize("options", [{"warmup_fraction": 1.0}, {"final_fraction": 1.5}])
def test_fractions_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}=.* is not valid"):
        learning_rates(10, **options)


def test_a_run_without_an_end_is_refused():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ValueError, match=r"trainer\.max_steps"):
        warmup_cosine(optimizer, total_steps=-1)
