"""Random trainings under DDP and under ours, side by side; what is not the same is printed.

    python -m tests.soak                        # the jobs of seeds 0 to 999, on two ranks
    python -m tests.soak --first 1155 --jobs 1  # one of them again
    python -m tests.soak --ranks 3 --out FILE   # a line of JSON for each job, too
    python -m tests.soak --local                # jobs with local steps alone, see `local.py`

Verdicts: "equal" by the bit, "near" (a norm is summed up in another order, or three ranks are),
"finite" (gradients are encoded: ranks are equal, and losses finite), "refused" on every
rank before any weight changed, "ddp raised", and "FAULT". With local steps also "raised", as the
job wants; "torch raised", as on one device; and "diverges", in plain torch, too.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_dear.planning import ThresholdFusion
from tests.distributed.harness import RanksFailed, run_ranks
from tests.lightning.fitting import ddp, dear, digest, fit
from tests.soak import local
from tests.soak.job import Job, job_of
from tests.soak.net import Habit, SoakNet, net_of
from tests.training.models import distance

NUM_BATCHES = 4
NEAR = 2e-3
"""Norm of the difference of the weights divided by theirs. Adam and its kin turn a rounding error
of a gradient that is zero but for rounding into a step of full length."""


def options_of(job: Job) -> dict[str, Any]:
    """Of the strategy, with planners made."""
    options = dict(job.strategy)
    fusion = options.pop("fusion")
    if fusion == "small":
        fusion = ThresholdFusion(bucket_cap_mb=0.02, first_bucket_cap_mb=0.005)
    # All batches weigh the same, so that the mean is DDP's.
    return {**options, "fusion": fusion, "weights": "samples" if job.weighs else None}


def train(job: Job, is_ours: bool, ranks: int) -> tuple[SoakNet, str]:
    """Fits a new module; also what was raised, empty if nothing was. On every rank."""
    net = net_of(job)
    unused, buffers = job.model == "branches", job.strategy["broadcast_buffers"]
    data = "mlp" if job.model == "branches" else job.model
    options = dict(job.trainer)
    if ranks > 2 or job.trainer.get("gradient_clip_algorithm") == "norm":
        # Sums come in another order, which some optimizers make much of in single precision.
        options["precision"] = "64-true"
    try:
        strategy = (
            dear(**options_of(job))
            if is_ours
            else ddp(find_unused_parameters=unused, broadcast_buffers=buffers)
        )
        fit(strategy, net, Habit(), model=data, num_samples=2 * ranks * NUM_BATCHES, **options)
    except (ValueError, TypeError, RuntimeError) as error:
        if is_ours and net.losses and "No weight has changed" not in str(error):
            raise
        return net, f"{type(error).__name__}: {error}"
    return net, ""


def run_job(seed: int, ranks: int) -> dict[str, Any]:
    """On every rank: what this rank saw of a job."""
    job = job_of(seed)
    is_other_order = ranks > 2 or not (job.is_exact or job.is_lossy)
    if is_other_order and job.optimizer in ("rprop", "lion", "trusted"):
        # Of a rounding error, such as the gradient of a bias that batch norm takes off again, these
        # take the sign, or a multiple as long as the weights.
        job = replace(job, optimizer="adamw")
    if job.local:
        return local.run(job, ranks)
    theirs, raised = train(job, False, ranks)
    if raised:
        return {"verdict": "ddp raised", "said": raised}
    ours, refused = train(job, True, ranks)
    if refused:
        return {"verdict": "refused", "said": refused}
    return compare(job, ours, theirs, ranks)


def compare(job: Job, ours: SoakNet, theirs: SoakNet, ranks: int) -> dict[str, Any]:
    """The verdict over two fits that ended."""
    weights = [[p.detach() for p in net.parameters()] for net in (ours, theirs)]
    found = {"weights": digest(weights[0]), "apart": distance(*weights)}
    losses = [torch.stack(net.losses).double() for net in (ours, theirs)]
    is_finite = all(bool(one.isfinite().all()) for one in [*weights[0], losses[0]])
    if job.is_lossy:
        return {**found, "verdict": "finite" if is_finite else "FAULT"}
    same = _same(weights[0], weights[1]) and torch.equal(*losses)
    same = same and _same(ours.noted, theirs.noted)
    if same:
        return {**found, "verdict": "equal"}
    near = found["apart"] < NEAR and len(ours.noted) == len(theirs.noted)
    is_allowed = near and (ranks > 2 or not job.is_exact)
    return {**found, "verdict": "near" if is_allowed else "FAULT"}


def _same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def judge(seed: int, ranks: int) -> dict[str, Any]:
    """Runs a job on new or kept ranks; what all of them saw together. Blocks."""
    job = job_of(seed)
    about = {"seed": seed, "job": str(job)}
    ends = job.extra == "raises"
    how = {"timeout_s": 120, "keeps_ranks": not ends, "init_process_group": not ends}
    try:
        seen = run_ranks(run_job, ranks, seed, ranks, **how)
    except RanksFailed as failure:
        return {**about, "verdict": "FAULT", "said": str(failure)}
    verdicts = {one["verdict"] for one in seen}
    if len(verdicts) > 1 or len({one.get("weights") for one in seen}) > 1:
        return {**about, "verdict": "FAULT", "said": f"ranks differ: {seen}"}
    return {**about, **seen[0]}


def main(arguments: list[str]) -> int:
    """Prints a line for each job that is not equal, and a table; returns the number of faults."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--local", action="store_true", help="only jobs with local steps")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    counts: Counter[str] = Counter()
    for seed in range(options.first, options.first + options.jobs):
        if options.local and not job_of(seed).local:
            continue
        found = judge(seed, options.ranks)
        counts[found["verdict"]] += 1
        if found["verdict"] in ("FAULT", "refused", "ddp raised"):
            print(f"{found['verdict']} {found['job']}\n  {found.get('said', found)}", flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(found) + "\n")
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
    return counts["FAULT"]
