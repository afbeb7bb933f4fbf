"""Some of the random trainings of `soak.py`; `python -m tests.soak` runs a thousand."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tests.soak import local
from tests.soak.job import EXTRAS, LAWS, Job, job_of
from tests.soak.net import SoakNet, net_of
from tests.soak.soak import compare, judge

JOBS = 40


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_random_trainings_are_those_of_ddp(ranks: int) -> None:
    first = random.SystemRandom().randrange(10**6)
    print(f"seeds {first} to {first + JOBS - 1} at {ranks} ranks")
    found = [judge(seed, ranks) for seed in range(first, first + JOBS)]
    faults = [one for one in found if one["verdict"] == "FAULT"]
    assert not faults, "\n".join(f"{one['job']}\n{one.get('said', one)}" for one in faults)
    trained = [one for one in found if one["verdict"] in ("equal", "near", "finite")]
    assert len(trained) > JOBS / 2


def test_a_seed_says_all_of_a_job() -> None:
    assert [job_of(seed) for seed in range(50)] == [job_of(seed) for seed in range(50)]
    assert len({str(job_of(seed)) for seed in range(50)}) == 50


def test_all_laws_and_extras_of_local_steps_are_drawn() -> None:
    jobs = [job for job in map(job_of, range(2000)) if job.local]
    assert 400 < len(jobs) < 600
    assert {job.law for job in jobs} == {*LAWS}
    assert {job.extra for job in jobs} == {"none", *EXTRAS}


def test_a_weight_that_breaks_the_law_of_local_steps_is_noticed() -> None:
    job = next(one for one in map(job_of, range(2000)) if one.law == "reference")
    ours, theirs = _nets(job)
    assert not local.broken(job, ours, [], theirs, 3)
    with torch.no_grad():
        next(ours.net.parameters()).mul_(1.01)
    assert local.broken(job, ours, [], theirs, 3).startswith("weights off by")
    ours, theirs = _nets(replace(job, extra="folder"))
    with torch.no_grad():
        next(theirs.net.parameters()).mul_(1 + 1e-6)
    assert "a folder is off" in local.broken(ours.job, ours, [theirs], None, 3)


def _nets(job: Job) -> tuple[SoakNet, SoakNet]:
    nets = net_of(job), net_of(job)
    for net in nets:
        net.losses.append(torch.ones(()))
    return nets


def test_a_weight_that_is_not_ddps_is_noticed() -> None:
    exact = next(job for job in map(job_of, range(99)) if job.is_exact)
    ours, theirs = _nets(exact)
    assert compare(exact, ours, theirs, 2)["verdict"] == "equal"
    with torch.no_grad():
        next(ours.parameters()).flatten()[0] += 1e-6
    assert compare(exact, ours, theirs, 2)["verdict"] == "FAULT"
    assert compare(exact, ours, theirs, 3)["verdict"] == "near"
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.mul_(1.01)
    assert compare(exact, ours, theirs, 3)["verdict"] == "FAULT"


def test_a_loss_that_is_no_number_is_noticed() -> None:
    lossy = next(job for job in map(job_of, range(99)) if job.is_lossy)
    ours, theirs = _nets(lossy)
    assert compare(lossy, ours, theirs, 2)["verdict"] == "finite"
    ours.losses.append(torch.tensor(float("nan")))
    assert compare(lossy, ours, theirs, 2)["verdict"] == "FAULT"
