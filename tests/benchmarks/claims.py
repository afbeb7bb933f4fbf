"""Whether one entry is as fast as the best of others, judged on rounds that did not choose it.

`python -m tests.benchmarks.claims FOLDER ... --entry ENTRY --others OTHER ...` reads the blocks.csv
and summary.csv of `dear-bench` and prints a row for each point of all folders. The first half of
the rounds says which of the others is the best, of those that took part in them; the second half
says how long the entry takes, relative to that one, round by round.
"""

from __future__ import annotations

import argparse
import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import geometric_mean, median

from scipy import stats
from tabulate import tabulate

from lightning_dear.studies.summary import COMPUTE_ALONE
from lightning_dear.studies.table import MISSING, shown

Rounds = Mapping[str, Mapping[int, float]]
"""Entry -> round -> median step, seconds."""

Line = Mapping[str, str]


@dataclass(frozen=True)
class Claim:
    """One point's row.

    Attributes:
        point: Its label.
        steps_s: Entry -> median step over all rounds that it took part in.
        relative: Entry -> median, over the rounds of both, of its step over the judged entry's.
        best: The best of the others on the first half of the rounds.
        ratio: Median over the second half of step over `best`'s step.
        upper: Upper 95 % bound of that median; None where there are too few rounds for one.
        predicted_s: What the entry's plan was expected to take; None if nobody said.
        void: Entries for which the machine was too busy.
        num_rounds: Of the second half.
    """

    point: str
    steps_s: Mapping[str, float]
    relative: Mapping[str, float]
    best: str
    ratio: float
    upper: float | None
    predicted_s: float | None
    num_rounds: int
    void: frozenset[str] = frozenset()


def claim_of(
    point: str,
    rounds: Rounds,
    entry: str,
    others: Sequence[str],
    note: str = "",
    void: frozenset[str] = frozenset(),
) -> Claim:
    """The row of one point.

    Args:
        point: Its label.
        rounds: Of `entry` and `others` at least.
        entry: Whose claim it is.
        others: Whose best it is compared with.
        note: Of the entry; may say "predicted ... ms".
        void: Entries for which the machine was too busy.

    Raises:
        ValueError: If an entry was not measured, or not in two rounds, or if the best of the others
            took part in none of the second half.
    """
    where = point or "the only point"
    names = (entry, *others)
    if missing := [name for name in names if name not in rounds]:
        raise ValueError(
            f"{', '.join(missing)} was not measured at {where}; there are {', '.join(rounds)}."
        )
    own = sorted(rounds[entry])
    if len(own) < 2:
        raise ValueError(f"There are fewer than two rounds at {where}, and half of them choose.")
    first, second = own[: len(own) // 2], own[len(own) // 2 :]

    def ratios_of(name: str, among: Sequence[int]) -> list[float]:
        """Its steps over the entry's, in those rounds that have both."""
        return [rounds[name][one] / rounds[entry][one] for one in among if one in rounds[name]]

    # What took part in none of the first half cannot be chosen.
    best = min(others, key=lambda name: median(ratios_of(name, first) or [inf]))
    ratios = [1 / ratio for ratio in ratios_of(best, second)]
    if not ratios:
        raise ValueError(
            f"{best} is the best of the others at {where} and took part in none of the rounds that"
            " judge; measure it in all of them."
        )
    said = re.search(r"predicted ([\d.e+-]+) ms", note)
    return Claim(
        point,
        {name: median(of.values()) for name, of in rounds.items()},
        {name: median(found) for name in rounds if (found := ratios_of(name, own))},
        best,
        median(ratios),
        upper_bound(ratios),
        float(said.group(1)) / 1e3 if said else None,
        len(ratios),
        void,
    )


def upper_bound(values: Sequence[float]) -> float | None:
    """Upper 95 % bound of the median of what `values` are drawn from; None for fewer than 5.

    Without assumptions on how they are distributed: the k-th smallest of n is at least the median
    unless fewer than k of n fair coins come up heads, whose probability is to be 95 % or more.
    """
    place = int(stats.binom.ppf(0.95, len(values), 0.5))
    return sorted(values)[place] if place < len(values) else None


def format_claims(claims: Sequence[Claim], entry: str, others: Sequence[str]) -> str:
    """A Markdown table of all points, and what holds over all of them."""
    known = dict.fromkeys(name for one in claims for name in one.steps_s)
    names = [name for name in known if name not in (entry, *others, COMPUTE_ALONE)]
    columns = [*names, *others, entry]
    titles = ["point", *(f"{name}, ms" for name in columns), "best other", "ratio [95 %]"]
    titles += ["predicted / measured", f"gain over {others[0]}", "scaling factor"]
    cells = [
        [
            one.point or MISSING,
            *(
                shown(one.steps_s.get(name), ".1f", 1e3) + "*" * (name in one.void)
                for name in columns
            ),
            one.best,
            f"{one.ratio:.3f} [{shown(one.upper, '.3f')}]",
            shown(one.predicted_s, ".3f", 1 / one.steps_s[entry]),
            shown(one.relative.get(others[0]), ".3f"),
            shown(one.relative.get(COMPUTE_ALONE), ".3f"),
        ]
        for one in claims
    ]
    ratios = [one.ratio for one in claims]
    gains = [one.relative[others[0]] for one in claims if others[0] in one.relative]
    return "\n".join(
        [
            tabulate(cells, titles, tablefmt="github", disable_numparse=True),
            "",
            f"{entry} over the best other: geometric mean {geometric_mean(ratios):.3f}, largest"
            f" {max(ratios):.3f}, {min(one.num_rounds for one in claims)} paired rounds or more."
            f" Largest gain over {others[0]}: {max(gains):.2f}.",
            *["*: void, the machine was busy."] * any(one.void for one in claims),
        ]
    )


# --- folders ------------------------------------------------------------------------------------


def read(path: Path) -> list[Line]:
    """Return a file's lines.

    Raises:
        ValueError: If there is no such file, or if it is of another program.
    """
    if not path.exists():
        raise ValueError(f"{path.parent} has no {path.name} that dear-bench has written to.")
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    if not lines or "point" not in lines[0]:
        raise ValueError(f"{path.parent} has no {path.name} that dear-bench has written to.")
    return lines


def read_rounds(folder: Path) -> dict[str, dict[str, dict[int, float]]]:
    """Return the rounds of each point of a folder, without those in which entries were tuned."""
    points: dict[str, dict[str, dict[int, float]]] = {}
    for line in read(folder / "blocks.csv"):
        entries = points.setdefault(line["point"], {})
        if int(line["round"]) >= 0:
            entries.setdefault(line["entry"], {})[int(line["round"])] = float(line["step_s"])
    return points


def judged(
    label: str, rounds: Rounds, rows: Sequence[Line], entry: str, others: Sequence[str]
) -> Claim:
    """Return the row of one point of a folder, of which `rows` are the summary's."""
    note = next((row["note"] for row in rows if row["entry"] == entry), "")
    void = frozenset(row["entry"] for row in rows if row["is_void"] == "True")
    return claim_of(label, rounds, entry, others, note, void)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table of all folders.

    Points that cannot be judged are named below it.

    Raises:
        SystemExit: If none can be, saying why.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path, help="what dear-bench has written to")
    parser.add_argument("--entry", required=True, help="whose claim it is")
    parser.add_argument(
        "--others", required=True, nargs="+", help="what it is compared with the best of"
    )
    given = parser.parse_args(arguments)
    claims: list[Claim] = []
    problems: list[str] = []
    rigs: list[str] = []
    for folder in given.folders:
        try:
            points, summary = read_rounds(folder), read(folder / "summary.csv")
        except ValueError as error:
            raise SystemExit(str(error)) from None
        rigs += [row["rig"] for row in summary if row.get("rig")]
        for point, rounds in points.items():
            # Points of two folders may have the same label.
            label = f"{folder.name}: {point}" if len(given.folders) > 1 else point
            rows = [row for row in summary if row["point"] == point]
            try:
                claims.append(judged(label, rounds, rows, given.entry, given.others))
            except ValueError as error:
                problems.append(f"Not judged: {error}")
    if not claims:
        raise SystemExit("\n".join(problems))
    table = format_claims(claims, given.entry, given.others)
    text = "\n\n".join(filter(None, ("; ".join(dict.fromkeys(rigs)), table, *problems)))
    print(text)


if __name__ == "__main__":
    main()
