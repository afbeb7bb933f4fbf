"""Ok-Topk's recipe: its cases, their steps and volumes, and what was recorded elsewhere."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, ListConfig

from lightning_dear.apps.recipes.report import Table
from lightning_dear.apps.recipes.sibling import Row
from lightning_dear.apps.recipes.steps import measured_steps
from lightning_dear.compression import SparseAllReduce, resolve_compressor
from lightning_dear.planning import SingleFusion
from lightning_dear.simulator import Workload
from lightning_dear.simulator.ranking import Ranked, alone_s
from lightning_dear.simulator.strategies import Strategy
from lightning_dear.simulator.strategies import planned as by_rule
from lightning_dear.workloads.replay.planned import planned
from lightning_dear.workloads.replay.profile import load_profile

_NEEDED = ("profile", "world_size", "density")
_WORD_BYTES = 4
DENSE, OURS = "none", "oktopk"
"""What travels: all numbers as they are, or what Ok-Topk selects."""


@dataclass(frozen=True)
class Case:
    """A model among so many ranks, of which each selects `density` of the gradient's numbers."""

    label: str
    workload: Workload
    world_size: int
    density: float

    @property
    def numel(self) -> int:
        """Of the gradient."""
        return self.workload.nbytes // _WORD_BYTES

    def compressor(self, name: str) -> SparseAllReduce:
        """Return the sparse all-reduce of that name at this density.

        Raises:
            ValueError: If there is none, or the density is not in (0, 1].
        """
        made = resolve_compressor(name)
        if not isinstance(made, SparseAllReduce):
            raise ValueError(f"{name} is no sparse all-reduce; docs/compressors.md names those.")
        return made.at_density(self.density)


def cases_of(cfg: DictConfig) -> list[Case]:
    """Return the cases of the config, their seconds times both factors.

    Raises:
        ValueError: If they are no list, one lacks something, or two have the same label.
    """
    if not isinstance(cfg.cases, ListConfig) or not cfg.cases:
        raise ValueError(
            "cases must be a list, such as"
            " cases=[{profile: bert_base, world_size: 256, density: 0.01}]."
        )
    made = [_case(entry, float(cfg.compute_factor)) for entry in cfg.cases]
    if len({case.label for case in made}) < len(made):
        raise ValueError("Two cases have the same label; give each its own.")
    return made


def _case(entry: DictConfig, factor: float) -> Case:
    if lacking := [name for name in _NEEDED if name not in entry]:
        raise ValueError(f"A case lacks {', '.join(lacking)}; it needs {', '.join(_NEEDED)}.")
    world_size, density = int(entry.world_size), float(entry.density)
    if world_size < 2:
        raise ValueError(f"A case has at least 2 ranks, got world_size={world_size}.")
    profile = load_profile(entry.profile)
    seconds = profile.forward_s + profile.backward_s
    scaled = profile.with_compute(seconds * factor * float(entry.get("compute_factor", 1)))
    label = entry.get("label", f"{profile.name}, {world_size} ranks, {density:.2%}")
    return Case(str(label), Workload(profile.name, *planned(scaled)), world_size, density)


PUBLISHED = (3.29, 12.95)
"""How many times as fast Ok-Topk is for BERT on 256 GPUs, by the paper's abstract."""

AT_ONCE = Strategy(
    "at_once",
    "one bucket of everything after backward, as in the authors' code",
    by_rule(SingleFusion().plan, all_reduces=True),
    compresses="whole",
)
DENSE_AT_ONCE = (AT_ONCE.name, DENSE)


@dataclass(frozen=True)
class Steps:
    """One case on one cluster: (how it is scheduled, what is sent) -> its step."""

    case: Case
    cluster: str
    of: Mapping[tuple[str, str], Ranked]

    @property
    def alone_s(self) -> float:
        """Seconds of computing, which is all that one rank alone does."""
        return alone_s(self.case.workload)

    @property
    def is_claimed(self) -> bool:
        """Whether the paper's abstract speaks of it."""
        return self.case.workload.name == "bert_base" and self.case.world_size == 256

    def step_s(self, way: str, scheme: str = DENSE) -> float:
        """Seconds of a step."""
        return self.of[way, scheme].step.step_s

    def times(self, way: str, other: tuple[str, str]) -> float:
        """How many times as fast as `other` Ok-Topk is."""
        return self.step_s(*other) / self.step_s(way, OURS)

    def beyond(self, other: tuple[str, str]) -> float:
        """The same of what a step as published takes longer than computing."""
        return (self.step_s(*other) - self.alone_s) / (self.step_s("at_once", OURS) - self.alone_s)

    def others(self, way: str) -> list[tuple[str, str]]:
        """Other sparse schemes, the fastest first."""
        keys = [key for key in self.of if key[0] == way and key[1] not in (DENSE, OURS)]
        return sorted(keys, key=lambda key: self.step_s(*key))

    @property
    def compared(self) -> list[tuple[str, str]]:
        """What the paper compares with, as published: dense, and other sparse schemes."""
        return [DENSE_AT_ONCE, *self.others("at_once")]


Words = Callable[[int, int, int], float]
"""Of n numbers, of which each of P ranks selects k: words that a rank sends."""


@dataclass(frozen=True)
class Formula:
    """Words of 4 bytes, values and places, that a rank sends in a step: from `least` to `most`."""

    text: str
    source: str
    least: Words
    most: Words

    def as_mb(self, case: Case) -> str:
        """Return it in MB for a case; two numbers where it is a range."""
        k = case.compressor("oktopk").entries(case.numel)
        ends = [
            f"{_WORD_BYTES * words(case.numel, k, case.world_size) / 1e6:.1f}"
            for words in (self.least, self.most)
        ]
        return " to ".join(dict.fromkeys(ends))


def _only(text: str, source: str, words: Words) -> Formula:
    return Formula(text, source, words, words)


FORMULAS: dict[str, Formula] = {
    DENSE: _only("2 n (P-1)/P", "published, gTop-k's README", lambda n, k, p: 2 * n * (p - 1) / p),
    "topka": _only("2 k (P-1)", "published, gTop-k's README", lambda n, k, p: 2 * k * (p - 1)),
    "topkdsa": Formula(
        "4 k (P-1)/P to (2 k + n) (P-1)/P",
        "derived: ranks select the same, or the sums travel as they are",
        lambda n, k, p: 4 * k * (p - 1) / p,
        lambda n, k, p: (2 * k + n) * (p - 1) / p,
    ),
    "gtopk": _only(
        "4 k log2 P",
        "derived: 2 k log2 P (published, gTop-k's README) up the tree and as many down",
        lambda n, k, p: 4 * k * (p - 1).bit_length(),
    ),
    "gaussiank": _only("2 k (P-1)", "derived: as TopkA", lambda n, k, p: 2 * k * (p - 1)),
    "oktopk": Formula(
        "2 k (P-1)/P to 6 k (P-1)/P",
        "published: less than 6 k (abstract); derived: the least",
        lambda n, k, p: 2 * k * (p - 1) / p,
        lambda n, k, p: 6 * k * (p - 1) / p,
    ),
}
"""Scheme -> what it sends."""


def titled(scheme: str) -> str:
    """Return a scheme's name for people."""
    return "dense" if scheme == DENSE else scheme


def published(schemes: Sequence[str]) -> list[Table]:
    """Return what is known of Ok-Topk's gains, and which formula each scheme's volume has.

    Raises:
        ValueError: If there is no formula for one of them.
    """
    if unknown := [name for name in schemes if name not in FORMULAS]:
        raise ValueError(f"Unknown in sparse: {', '.join(unknown)}; valid: {', '.join(FORMULAS)}.")
    claims = [
        ["BERT on 256 GPUs, over dense and other sparse all-reduces", "3.29x to 12.95x"],
        ["words that a rank sends in a step", "less than 6 k"],
    ]
    words = [[titled(name), FORMULAS[name].text, FORMULAS[name].source] for name in schemes]
    abstract = "Abstract of arXiv 2201.07598, which has no figures of VGG-16 and the LSTM."
    means = "n numbers, of which each of P ranks selects k; a number travels with its place."
    titles = ["scheme", "words", "from"]
    return [
        Table("published", "what Ok-Topk gains", ["what", "figure"], claims, abstract),
        Table("published", "words of 4 bytes that a rank sends in a step", titles, words, means),
    ]


def sent_mb(case: Case, name: str) -> float:
    """Return what a rank of ours usually sends in a step of a case, or receives, MB."""
    if name == DENSE:
        return _WORD_BYTES * FORMULAS[name].most(case.numel, 0, case.world_size) / 1e6
    words = case.compressor(name).usual_words(case.numel, case.world_size)
    return _WORD_BYTES * words / 1e6


def volumes(cases: Sequence[Case], names: Sequence[str]) -> Table:
    """Return what the formulas say for each case, beside what ours sends."""
    rows = []
    different = {(case.workload.name, case.world_size, case.density): case for case in cases}
    for (profile, world_size, density), case in different.items():
        where = [f"{profile}, {world_size} ranks, {density:g}"]
        rows.append([*where, "formula", *(FORMULAS[name].as_mb(case) for name in names)])
        rows.append([*where, "ours", *(f"{sent_mb(case, name):.1f}" for name in names)])
    return Table(
        "simulated",
        "MB that a rank sends in a step",
        ["case, density", "by", *map(titled, names)],
        rows,
        "Ours counts the larger of sent and received, of the sparse ones as they usually are:"
        " gTopk receives on the way up the tree what it sends on the way down.",
    )


# --- what was measured for other pages ------------------------------------------------------------


def from_elsewhere(compression: Path) -> tuple[list[str], list[Table]]:
    """Return what of `recipes/compression` belongs here: steps of 8 ranks, volumes, convergence.

    Args:
        compression: That folder; what is not there is left out.

    Returns:
        Sentences and tables.
    """
    steps = _rows(compression / "oktopk_speed" / "p8_r10" / "summary.csv")
    ends = {
        name: _rows(compression / name / "summary.csv")
        for name in ("converge_oktopk", "converge_gpt_oktopk")
    }
    files = [compression / "volumes" / name for name in ("all.csv", "all8.csv")]
    sent = [row for path in files for row in _rows(path)]
    note = "Recorded; recipes/compression/README.md has the command and the machine."
    tables = [
        *([measured_steps(steps, "ddp", note)] if steps else []),
        *([_most_sent(sent, note)] if sent else []),
        *([_convergence(ends, note)] if any(ends.values()) else []),
    ]
    return ([_said(steps)] if steps else []), tables


def _said(rows: Sequence[Row]) -> str:
    step_s = {row["entry"]: float(row["step_s"]) for row in rows}
    over = {name: one / step_s[OURS] for name, one in step_s.items()}
    others = [over[name] for name in FORMULAS if name in over and name != OURS]
    return (
        f"Measured at {rows[0]['world_size']} ranks on links that stand for"
        f" {float(rows[0]['stands_for_mbit']):g} Mb/s: `dear` with Ok-Topk is {over['ddp']:.2f}"
        f" times as fast as `ddp` and {min(others):.2f} to {max(others):.2f} times as `dear` with"
        " the other sparse schemes."
    )


def _rows(path: Path) -> list[Row]:
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _most_sent(rows: Sequence[Row], note: str) -> Table:
    most: dict[tuple[str, str], dict[int, float]] = {}
    for row in rows:
        of = most.setdefault((row["gradients"], row["compressor"]), {})
        nbytes, ranks = max(float(row["sent"]), float(row["received"])), int(row["num_ranks"])
        of[ranks] = max(of.get(ranks, 0.0), nbytes)
    sizes = sorted({number for of in most.values() for number in of})
    cells = [
        [*key, *(f"{of[number] / 1e3:.1f}" if number in of else "-" for number in sizes)]
        for key, of in most.items()
    ]
    return Table(
        "measured",
        "most kB that a rank sent or received in a step of training, 1 %",
        ["gradients", "scheme", *(f"{number} ranks" for number in sizes)],
        cells,
        note,
    )


def _convergence(ends: Mapping[str, Sequence[Row]], note: str) -> Table:
    cells = []
    for name, rows in ends.items():
        for row in rows:
            worse = "-"
            if row["worse_mean"]:
                mean, *bounds = (float(row[f"worse_{of}"]) for of in ("mean", "lower", "upper"))
                worse = f"{mean:+.3f} [{bounds[0]:+.3f}, {bounds[1]:+.3f}]"
            end, margin = f"{float(row['mean']):.3f}", f"{float(row['margin']):g} {row['unit']}"
            cells.append([name, row["entry"], row["buckets"], end, worse, margin, row["verdict"]])
    return Table(
        "measured",
        "how training of 2 ranks ends",
        ["study", "entry", "buckets", "mean", "worse by [90 %]", "margin", "verdict"],
        cells,
        note,
    )
