"""Ok-Topk's headline: 3.29x to 12.95x for BERT on 256 GPUs (Li and Hoefler, arXiv 2201.07598)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig

from lightning_dear.apps.plan.config import device_of
from lightning_dear.apps.recipe.report import Answer, Claim, Report, Sibling, check
from lightning_dear.apps.recipe.simulated import fitted, networks_of, workload_of
from lightning_dear.compression import SparseAllReduce, resolve_compressor
from lightning_dear.paths import recipes_dir
from lightning_dear.planning import SingleFusion
from lightning_dear.simulator import Link, Network, Workload, ranking, strategies
from lightning_dear.studies.device_costs import compressed
from lightning_dear.studies.files import read_rows
from lightning_dear.workloads.replay.profile import load_profile

Row = dict[str, Any]

LEAST, MOST = 3.29, 12.95
"""Range of Ok-Topk's speed-up over other schemes, BERT on 256 GPUs, from the paper's abstract."""

OURS, DENSE = "oktopk", "dense"
LEAST_OVER, MOST_OVER = "topkdsa", "gaussiank"
"""Schemes over which Ok-Topk is assumed to have these speed-ups: the abstract names none."""

OTHERS = (DENSE, LEAST_OVER, "topka", MOST_OVER, "gtopk")

_IN_ONE = strategies.planned(SingleFusion().plan, all_reduces=True)
AT_ONCE = strategies.Strategy("at_once", _IN_ONE, compresses="whole")
"""The paper's schedule: one bucket, sent after backward."""

_RATES = 1e6, 1e12
"""Least and largest rate to try, in bytes per second."""


@dataclass(frozen=True)
class Case:
    """The paper's model and network, under each scheme.

    Attributes:
        network: Network with the nominal rate.
        workloads: Scheme -> the model with the scheme's costs of encoding.
    """

    network: Network
    workloads: Mapping[str, Workload]

    @classmethod
    def of(cls, cfg: DictConfig) -> "Case":
        """Return the case of a config.

        Raises:
            ValueError: If a profile or a cluster is unknown, or a number is out of range.
        """
        [network] = networks_of(cfg, int(cfg.world_size)).values()
        plain = workload_of(load_profile(cfg.profile), float(cfg.compute_factor))
        workloads = {DENSE: plain}
        for name in (OURS, *OTHERS[1:]):
            made = resolve_compressor(name)
            assert isinstance(made, SparseAllReduce)
            sparse = made.at_density(float(cfg.density))
            workloads[name] = compressed(plain, sparse, device_of(cfg), network.world_size)
        return cls(network, workloads)

    @property
    def rate(self) -> float:
        """Nominal rate of a node, in bytes per second."""
        return 1 / self.network.outer_link.beta_s

    @property
    def compute_s(self) -> float:
        """Seconds of a step of one rank alone."""
        return ranking.alone_s(self.workloads[DENSE])

    def step_s(self, scheme: str, rate: float | None = None) -> float:
        """Return the seconds of a step by the paper's schedule. None means the nominal rate."""
        link = Link(self.network.outer_link.alpha_s, 1 / (rate or self.rate))
        network = replace(self.network, between=link, within=link)
        return ranking.predicted(AT_ONCE, self.workloads[scheme], network).step.step_s

    def gain(self, over: str, rate: float | None = None) -> float:
        """Return Ok-Topk's speed-up over the scheme `over`. None means the nominal rate."""
        return self.step_s(over, rate) / self.step_s(OURS, rate)

    def rate_for(self, over: str, gain: float) -> float:
        """Return the bytes per second at which Ok-Topk's speed-up over a scheme is `gain`.

        Raises:
            ValueError: If there is no such rate.
        """
        return fitted(lambda rate: self.gain(over, rate), gain, _RATES, f"The gain over {over}")

    def compute_s_for(self, over: str, gain: float) -> float:
        """Return the seconds of computing at which the speed-up is `gain`, at the nominal rate.

        With this schedule computing hides no communication. The result is negative if no compute
        time is short enough.
        """
        theirs, ours = (self.step_s(name) - self.compute_s for name in (over, OURS))
        return (theirs - gain * ours) / (gain - 1)


def make(cfg: DictConfig, siblings: Mapping[str, Sibling]) -> Report:
    """Sweep the rate, find the one at which each published gain holds, and compare.

    Raises:
        ValueError: If the config has an unknown name, or no rate gives a published gain.
    """
    case = Case.of(cfg)
    goals = {LEAST_OVER: LEAST, MOST_OVER: MOST, "gtopk": LEAST}
    fits = {over: case.rate_for(over, gain) for over, gain in goals.items()}
    rates = sorted({*map(float, cfg.rates), case.rate, *fits.values()})
    simulated = list(_simulated(case, rates))
    counted = list(_counted())
    claims = [*_speed_claims(case, fits, float(cfg.least_compute_s)), _volume_claim(*counted)]
    return Report(claims, [*simulated, *_measured(siblings), *counted], _picture(simulated, fits))


def _row(kind: str, scheme: str, **fields: Any) -> Row:
    names = "num_ranks", "rate_bytes_per_s", "compute_s", "step_s", "gain", "steps", "share_of_6k"
    return {"kind": kind, "scheme": scheme, **dict.fromkeys(names), **fields}


def _simulated(case: Case, rates: Sequence[float]) -> Iterator[Row]:
    same = {"num_ranks": case.network.world_size, "compute_s": case.compute_s}
    for rate in rates:
        for name in (OURS, *OTHERS):
            both = {"step_s": case.step_s(name, rate), "gain": case.gain(name, rate)}
            yield _row("simulated", name, rate_bytes_per_s=rate, **same, **both)


def _measured(siblings: Mapping[str, Sibling]) -> Iterator[Row]:
    """Yield the siblings' measured steps, and their time over that of Ok-Topk's step."""
    for one in siblings.values():
        for row in one.rows():
            rate, num_ranks = float(row["link_rate_mbit"]) * 1e6 / 8, int(row["world_size"])
            both = {"step_s": float(row["step_s"]), "gain": float(row["ratio"])}
            yield _row("measured", row["entry"], num_ranks=num_ranks, rate_bytes_per_s=rate, **both)


def _counted() -> Iterator[Row]:
    """Yield the most that a rank sent or received, as a share of 6 k (P - 1) / P words.

    The first row is of all runs, the second one of long runs. They were counted for
    recipes/compression; k is the number of selected values.
    """
    folder = recipes_dir() / "compression" / "volumes"
    num_steps, shares = 0, []
    for name in ("oktopk.txt", "oktopk8.txt"):
        for words in map(str.split, (folder / name).read_text().splitlines()):
            if words[0] == OURS and words[4] != "0":
                shares.append(float(words[6].rstrip("%")) / 100)
            if words[1] == "steps,":
                num_steps += int(words[0])
    yield _row("counted", OURS, steps=num_steps, share_of_6k=max(shares))
    long = read_rows(folder / "million.csv")
    shares = [max(float(one["sent"]), float(one["received"])) / float(one["bound"]) for one in long]
    yield _row("counted", OURS, steps=len(long), share_of_6k=max(shares))


def _speed_claims(case: Case, fits: Mapping[str, float], least_compute_s: float) -> Iterator[Claim]:
    nominal, at = case.rate, fits[LEAST_OVER]

    def here(over: str) -> str:
        return f"{case.gain(over):.2f}x at {_gb(nominal)}, {case.gain(over, at):.2f}x at {_gb(at)}"

    def claim(what: str, over: str, published: float, other: str) -> Claim:
        must = f"a node sends {_gb(fits[over])}"
        checked = check(f"{_gb(fits[other])} by {other}", fits[over], fits[other])
        return Claim(f"{what} {over}", f"{published}x", here(over), "simulated", must, **checked)

    yield claim("least gain, over", LEAST_OVER, LEAST, MOST_OVER)
    yield claim("largest gain, over", MOST_OVER, MOST, LEAST_OVER)
    is_between = LEAST <= case.gain(DENSE, at) <= MOST
    published, must = f"{LEAST}x to {MOST}x", f"a node sends {_gb(at)}"
    checked = f"{'between' if is_between else 'not between'} both ends; not fitted"
    plausible: Answer = "yes" if is_between else "no"
    yield Claim("gain over dense", published, here(DENSE), "simulated", must, checked, plausible)
    yield claim("least gain, if also over", "gtopk", LEAST, LEAST_OVER)
    seconds = case.compute_s_for(LEAST_OVER, LEAST)
    what = f"least gain, over {LEAST_OVER}, at the nominal rate"
    found = f"{case.gain(LEAST_OVER):.2f}x with {1e3 * case.compute_s:.0f} ms of computing"
    must = f"a step computes {1e3 * seconds:.1f} ms"
    p100 = check(f"a P100 needs {1e3 * least_compute_s:.0f} ms", seconds, least_compute_s)
    yield Claim(what, f"{LEAST}x", found, "simulated", must, **p100)


def _volume_claim(of_all: Row, of_long: Row) -> Claim:
    def words(row: Row) -> str:
        return f"at most {6 * row['share_of_6k']:.1f} k (P-1)/P in any of {row['steps']:,} steps"

    what, here = "words a rank sends in a step", f"{words(of_all)}, P = 2 to 8"
    checked = f"{words(of_long)} of a million numbers"
    plausible: Answer = "yes" if of_long["share_of_6k"] <= 1 else "no"
    return Claim(what, "below 6 k", here, "measured", "", checked, plausible)


def _gb(rate: float) -> str:
    return f"{rate / 1e9:.2f} GB/s"


def _picture(rows: Sequence[Row], fits: Mapping[str, float]) -> Any:
    """Draw gains over the rate, the published range, and the fitted rate of its lower end."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name in OTHERS:
        own = [row for row in rows if row["scheme"] == name]
        rates = [row["rate_bytes_per_s"] / 1e9 for row in own]
        axes.plot(rates, [row["gain"] for row in own], marker="o", markersize=3, label=name)
    axes.axhspan(LEAST, MOST, color="black", alpha=0.1, label="published")
    axes.axvline(fits[LEAST_OVER] / 1e9, color="black", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="GB/s that a node sends", ylabel="gain of Ok-Topk")
    axes.set_title("How many times as fast Ok-Topk is, 256 ranks, simulated", fontsize=10)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    return figure
