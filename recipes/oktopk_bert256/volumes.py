"""Ok-Topk's recipe: what each scheme's ranks send, by formulas and in simulated steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_dear.apps.recipe.oktopk_cases import DENSE, OURS, WORD_BYTES, Case, Steps, titled
from lightning_dear.apps.recipe.report import Table

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
        k = case.compressor(OURS).entries(case.numel)
        ends = [
            f"{WORD_BYTES * words(case.numel, k, case.world_size) / 1e6:.1f}"
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
    OURS: Formula(
        "2 k (P-1)/P to 6 k (P-1)/P",
        "published: less than 6 k (abstract); derived: the least",
        lambda n, k, p: 2 * k * (p - 1) / p,
        lambda n, k, p: 6 * k * (p - 1) / p,
    ),
}
"""Scheme -> what it sends."""


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
    means = (
        "n numbers, of which each of P ranks selects k; a number travels with its place. gTop-k's"
        " README is that of github.com/hclhkbu/gtopkssgd at commit 6f57343."
    )
    titles = ["scheme", "words", "from"]
    return [
        Table("published", "what Ok-Topk gains", ["what", "figure"], claims, abstract),
        Table("published", "words of 4 bytes that a rank sends in a step", titles, words, means),
    ]


def sent_mb(run: Steps, scheme: str) -> float:
    """Return what a rank sends in a simulated step of `at_once`, MB."""
    return run.of["at_once", scheme].step.sent_bytes / 1e6


def volumes(runs: Sequence[Steps], schemes: Sequence[str]) -> Table:
    """Return what the formulas say for each case, beside what the simulator counts."""
    rows = []
    # What is sent is the same for all clusters, and however long computing takes.
    different = {
        (run.case.workload.name, run.case.world_size, run.case.density): run for run in runs
    }
    for (profile, world_size, density), run in different.items():
        where = [f"{profile}, {world_size} ranks, {density:g}"]
        rows.append([*where, "formula", *(FORMULAS[name].as_mb(run.case) for name in schemes)])
        rows.append([*where, "ours", *(f"{sent_mb(run, name):.1f}" for name in schemes)])
    return Table(
        "simulated",
        "MB that a rank sends in a step",
        ["case, density", "by", *map(titled, schemes)],
        rows,
        "Ours is what the steps below count, of sparse schemes what is usual. Of gTop-k both"
        " directions count, as what goes down its tree waits for what comes up; no rank sends, or"
        " receives, more than half of it.",
    )
