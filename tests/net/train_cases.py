"""One rank of two that trains every case of `compare_trees` and writes hashes of what came out.

Run by path, with `PYTHONPATH` set to the tree that is to be looked at:

    RANK=0 WORLD_SIZE=2 python tests/net/train_cases.py --out FILE --rendezvous FILE
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from finding import find, of
from hashing import digest
from torch import Tensor, nn
from torch.nn import functional as F

NUM_STEPS = 6
KINDS = ("reduce_scatter", "all_gather", "all_reduce", "other", "metadata")
GATHERS = ("parameters", "gradients")
VARIANTS = ("plain", "clip", "accumulate", "16bit", "resumed")

EXTRA_COMPRESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "int4 one way": ("int4", {"halves": "reduce"}),
    "topk one way": ("topk", {"halves": "reduce"}),
    "randomk dense": ("randomk", {"density": 0.2}),
    "oktopk denser": ("oktopk", {"density": 0.1}),
    "oktopk static": ("oktopk", {"mode": "static", "density": 0.05}),
    "topkdsa denser": ("topkdsa", {"density": 0.1}),
    "dgc denser": ("dgc", {"density": 0.05}),
    "powersgd rank 1": ("powersgd", {"rank": 1}),
}
"""Name of a case -> compressor and options: what the defaults do not reach."""

EXTRA_OPTIONS: dict[str, dict[str, Any]] = {
    "depth 1": {"depth": 1},
    "all-reduced": {"decouple": False},
}
"""Other options of the exchange, without a compressor."""


@dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
        compressor: One of the registry, or of `EXTRA_COMPRESSORS`.
        options: One of `EXTRA_OPTIONS`, or empty.
        gather: What travels back.
        variant: One of `VARIANTS`.
    """

    compressor: str
    options: str
    gather: str
    variant: str

    @property
    def name(self) -> str:
        """For people, and as a key."""
        return "/".join(filter(None, (self.compressor, self.options, self.gather, self.variant)))


def all_cases() -> list[Case]:
    """Every compressor and every other option with each gather in each variant."""
    names = [*find("compression", "COMPRESSORS"), *EXTRA_COMPRESSORS]
    kinds = [*((name, "") for name in names), *(("none", option) for option in EXTRA_OPTIONS)]
    return [
        Case(*kind, gather, variant)
        for kind, gather, variant in itertools.product(kinds, GATHERS, VARIANTS)
    ]


class OddNet(nn.Module):
    """Sizes that divide by nothing, buffers, and a parameter that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(7, 131),
            nn.BatchNorm1d(131),
            nn.Tanh(),
            nn.Linear(131, 61),
            nn.Tanh(),
            nn.Linear(61, 61, bias=False),
            nn.Tanh(),
            nn.Linear(61, 3),
        )
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        out: Tensor = self.layers(x)
        return out


def _batch(step: int, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(9, 7, generator=generator).to(dtype)
    return inputs, torch.randint(3, (9,), generator=generator)


def _optimizer(model: nn.Module, case: Case, codec: Any) -> torch.optim.Optimizer:
    """Adam or SGD with momentum, in two groups; neither where the codec keeps momentum.

    Weight decay that belongs into such momentum is refused, so that there is none.
    """
    own = list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in own if p.dim() > 1], "weight_decay": 0.05},
        {"params": [p for p in own if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.03},
    ]
    if codec is not None and codec.brings_momentum:
        if codec.kind != "vote":
            groups[0]["weight_decay"] = 0.0
        return torch.optim.SGD(groups, lr=0.05)
    if case.variant in ("clip", "accumulate"):
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    return torch.optim.Adam(groups, lr=0.01)


def _codec(name: str) -> Any:
    if name not in EXTRA_COMPRESSORS:
        return find("compression", "resolve_compressor")(name)
    base, options = EXTRA_COMPRESSORS[name]
    return type(find("compression", "resolve_compressor")(base))(**options)


def _new_pipeline(model: nn.Module, case: Case, options: Any, timeout: timedelta) -> Any:
    fusion = find("planning", "ThresholdFusion")(bucket_cap_mb=0.012, first_bucket_cap_mb=0.004)
    collectives = find("collectives", "new_collectives")(torch.device("cpu"), timeout)
    # Older trees call it codec.
    codec = options.compressor if hasattr(options, "compressor") else options.codec
    optimizer = _optimizer(model, case, codec)
    return find("pipeline", "Pipeline")(model, [optimizer], collectives, fusion, options=options)


def _step(pipeline: Any, model: nn.Module, case: Case, step: int, seen: dict[str, Any]) -> None:
    part, rank = pipeline.parts[0], dist.get_rank()
    optimizer, dtype = part.optimizer, next(model.parameters()).dtype
    backwards = 2 if case.variant == "accumulate" else 1
    for number in range(backwards):
        with pipeline.forward():
            inputs, targets = _batch(2 * step + number, rank, dtype)
            loss = F.cross_entropy(model(inputs), targets)
        if number == 0:
            optimizer.zero_grad()
        with pipeline.backward(synchronize=number == backwards - 1):
            loss.backward()
        seen["losses"].append(float(loss.detach()).hex())
    if case.variant == "clip":
        seen["norms"].append(float(of(part, "clip_by_norm")(0.2)).hex())
    optimizer.step()
    if step == NUM_STEPS // 2:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
    if case.options != "depth 1":
        # With a depth it depends on the clock what has been sent by now.
        seen["sent"].append(pipeline.collectives.ledger.total())


def train(case: Case, timeout: timedelta) -> dict[str, Any]:
    """Trains one case on this rank; returns what is compared. Collective.

    Returns:
        `{"refused": type, "message": ...}` where options are refused.
    """
    torch.manual_seed(7)
    try:
        codec = _codec(case.compressor)
        more = EXTRA_OPTIONS.get(case.options, {})
        new_options = find("options", "ExchangeOptions")
        # Older trees call it codec.
        name = "compressor" if hasattr(new_options, "compressor") else "codec"
        options = new_options(gather=case.gather, **{name: codec}, **more)
        model = OddNet().to(torch.bfloat16 if case.variant == "16bit" else torch.float32)
        pipeline = _new_pipeline(model, case, options, timeout)
    except ValueError as error:
        return {"refused": type(error).__name__, "message": str(error)}
    seen: dict[str, Any] = {"losses": [], "norms": [], "sent": []}
    for step in range(NUM_STEPS):
        if case.variant == "resumed" and step == NUM_STEPS - 2:
            pipeline, model = _resume(pipeline, model, case, options, timeout)
        _step(pipeline, model, case, step, seen)
    return _results(pipeline, model) | seen


def _resume(
    pipeline: Any, model: nn.Module, case: Case, options: Any, timeout: timedelta
) -> tuple[Any, nn.Module]:
    """Another pipeline for a new model, with the state of the old ones."""
    state = of(pipeline.parts[0], "optimizer_state_dict")()
    pipeline.complete_parameters()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    pipeline.detach()
    torch.manual_seed(8)
    other = OddNet().to(next(model.parameters()).dtype)
    other.load_state_dict(weights)
    resumed = _new_pipeline(other, case, options, timeout)
    resumed.parts[0].optimizer.load_state_dict(state)
    return resumed, other


def _results(pipeline: Any, model: nn.Module) -> dict[str, Any]:
    part = pipeline.parts[0]
    # Gathers that were held back are sent now.
    pipeline.complete_parameters()
    ledger = pipeline.collectives.ledger
    found: dict[str, Any] = {kind: ledger[kind] for kind in KINDS}
    found["total"] = ledger.total()
    found["buckets"] = len(part.plan.buckets)
    found["weights"] = digest(model.state_dict())
    figures = of(part, "encoding_figures")()
    found["figures"] = {name: float(value).hex() for name, value in sorted(figures.items())}
    state = dict(of(part, "optimizer_state_dict")())
    found["residuals"] = digest(state.pop("residuals", None))
    found["state"] = digest(state)
    # Whoever saves sends nothing that counts.
    found["total after saving"] = pipeline.collectives.ledger.total()
    of(part, "sync_replicas")()
    found["synced"] = digest(model.state_dict())
    pipeline.detach()
    found["detached"] = digest(model.state_dict())
    found["grads"] = digest([parameter.grad for parameter in model.parameters()])
    return found


# --- the process --------------------------------------------------------------------------------


def _perturbed(found: dict[str, Any]) -> dict[str, Any]:
    return {**found, "weights": digest(found.get("weights"))}


def run(cases: Sequence[Case], perturb: str | None) -> dict[str, Any]:
    """Trains all cases one after the other; an error is a result too. Collective."""
    found: dict[str, Any] = {}
    num_errors = 0
    for case in cases:
        # After an error others may still be in the midst of it: new groups.
        timeout = timedelta(seconds=20 + num_errors)
        try:
            found[case.name] = train(case, timeout)
        except Exception as error:
            found[case.name] = {"error": type(error).__name__, "message": traceback.format_exc()}
        errors: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, "error" in found[case.name])
        num_errors += any(errors)
        if case.name == perturb:
            found[case.name] = _perturbed(found[case.name])
    return found


def main() -> None:
    """Joins the other rank, trains, writes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rendezvous", type=Path, required=True)
    parser.add_argument("--tree", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--perturb")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    import lightning_dear

    assert Path(lightning_dear.__file__).is_relative_to(options.tree), lightning_dear.__file__
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{options.rendezvous}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=120),
    )
    cases = [case for case in all_cases() if all(word in case.name for word in options.only)]
    options.out.write_text(json.dumps(run(cases, options.perturb), indent=1))
    dist.barrier()


if __name__ == "__main__":
    main()
