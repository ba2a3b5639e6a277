"""The papers' claims, each with a verdict from the differences of runs of the same seed."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from reproduction.results import Study
from reproduction.samples import FEWEST, LEVEL, paired, sample, slope

HOLDS = "holds here"
FAILS = "does not hold here"
OPEN = "not testable at this size"
RULE = (
    f"A difference counts where at least {FEWEST} seeds have both runs and a two-sided paired t-test over the seeds "
    f"gives p < {LEVEL:g}; otherwise it is within seed noise. A claim *holds here* if some of its differences count "
    "and all that do have the claimed sign; it *does not hold here* if one that counts has the other; it is *not "
    "testable at this size* if none counts. Nothing is corrected for the number of comparisons."
)


class Finding(NamedTuple):
    """One comparison: values by seed, which the claim says are above 0."""

    study: str
    what: str
    values: Sequence[float]
    unit: str

    @property
    def verdict(self) -> str:
        if len(self.values) < FEWEST:
            return OPEN
        found = sample(self.values)
        if not found.p < LEVEL:
            return OPEN
        return HOLDS if found.mean > 0 else FAILS

    @property
    def words(self) -> str:
        if not self.values:
            return f"{self.study}: {self.what}: no runs of the same seed"
        found = sample(self.values)
        if len(self.values) < FEWEST:
            seeds = "1 seed" if found.n == 1 else f"{found.n} seeds"
            return f"{self.study}: {self.what}: {found.mean:+.3g} {self.unit}, of {seeds} only"
        numbers = f"{found.mean:+.3g} ± {found.error:.2g} {self.unit} (n {found.n}, p {found.p:.2g})"
        within = ": no difference beyond seed noise" if self.verdict == OPEN else ""
        return f"{self.study}: {self.what}: {numbers}{within}"


class Claim(NamedTuple):
    text: str
    source: str
    findings: Callable[[Study], Iterator[Finding]]  # of one table


def findings_of(claim: Claim, studies: Sequence[Study]) -> list[Finding]:
    """Each comparison once: tables share runs."""
    found: list[Finding] = []
    for finding in (finding for study in studies for finding in claim.findings(study)):
        if not finding.values or all(finding.values != other.values for other in found):
            found.append(finding)
    return found


def verdict(findings: Sequence[Finding]) -> str:
    found = {finding.verdict for finding in findings}
    return FAILS if FAILS in found else HOLDS if HOLDS in found else OPEN


# ---- what is compared ------------------------------------------------------------------------------------------------


def better(study: Study, row: Sequence[str], base: Sequence[str]) -> list[float]:
    """By how much `row` is better than `base`, by seed, in the measure's own unit."""
    differences = paired(study.values(row, study.metric), study.values(base, study.metric))
    return [study.measure.sign * difference for difference in differences]


def place(study: Study, row: Sequence[str]) -> str:
    """The row's labels but the attention's, with their axes."""
    own = study.attention(row)
    labels = [f"{axis} {label}" for axis, label in zip(study.axes, row) if label != own]
    return f", {', '.join(labels)}" if labels else ""


def against(label: str, base: str, worse: bool = False) -> Callable[[Study], Iterator[Finding]]:
    """Rows of one attention are better, or worse, than those of another."""

    def findings(study: Study) -> Iterator[Finding]:
        for row in study.rows:
            other = study.other(row, base)
            if study.attention(row) != label or other is None:
                continue
            values = better(study, row, other)
            what = f"{label} {'worse' if worse else 'better'} than {base}{place(study, row)}"
            yield Finding(study.name, what, [-v for v in values] if worse else values, study.measure.name)

    return findings


def several(*parts: Callable[[Study], Iterator[Finding]]) -> Callable[[Study], Iterator[Finding]]:
    def findings(study: Study) -> Iterator[Finding]:
        for part in parts:
            yield from part(study)

    return findings


def gain(study: Study, value: float, base: float) -> float:
    """What models of different sizes can be compared in: nats a word for perplexity, else the measure's points."""
    if study.measure.name == "perplexity":
        return math.log(base) - math.log(value)
    return study.measure.gain(value, base)


# Axes along which d_k / n changes, by table, and the sign of x where it gets smaller.
SQUEEZED = {"table4": ("heads", 1), "table9": ("tokens", 1), "table10": ("head-size", -1)}


def grows_with_the_squeeze(label: str) -> Callable[[Study], Iterator[Finding]]:
    """The gain over softmax as d_k / n halves: the slope of a line through all points of a seed."""

    def findings(study: Study) -> Iterator[Finding]:
        axis, sign = SQUEEZED.get(study.table, ("", 1))
        if axis not in study.axes:
            return
        by_seed: dict[int, list[tuple[float, float]]] = {}
        rows = [row for row in study.rows if study.attention(row) == label]
        if not rows:
            return
        for row in rows:
            ours, base = (study.values(r, study.metric) for r in (row, study.other(row, "softmax")))
            x = sign * math.log2(float(row[list(study.axes).index(axis)]))
            for seed in ours.keys() & base.keys():
                by_seed.setdefault(seed, []).append((x, gain(study, ours[seed], base[seed])))
        # a seed that lacks a point would have another line
        slopes = [slope(points) for _, points in sorted(by_seed.items()) if len(points) == len(rows) > 1]
        unit = "nats a word" if study.measure.name == "perplexity" else study.measure.name
        yield Finding(study.name, f"gain of {label} as d_k / n halves ({axis})", slopes, unit)

    return findings


def large_fixhead_overfits(study: Study) -> Iterator[Finding]:
    """Against the head size below it, the largest one is worse, and further from its training loss."""
    sizes = study.axes.get("head-size", [])
    if study.table != "table10" or len(sizes) < 2:
        return
    below, largest = sorted(sizes, key=int)[-2:]
    for row in study.rows:
        if largest not in row:
            continue
        other = tuple(below if label == largest else label for label in row)
        attention = study.attention(row)
        worse = [-value for value in better(study, row, other)]
        what = f"{attention}, head size {largest} worse than {below}"
        yield Finding(study.name, what, worse, study.measure.name)
        gaps = [
            {seed: valid[seed] - train[seed] for seed in valid.keys() & train.keys()}
            for valid, train in ((study.field(r, "valid_loss"), study.field(r, "train_loss")) for r in (row, other))
        ]
        what = f"{attention}, validation loss minus training loss, head size {largest} above {below}"
        yield Finding(study.name, what, paired(*gaps), "bits")


def raises_the_rank(label: str) -> Callable[[Study], Iterator[Finding]]:
    def findings(study: Study) -> Iterator[Finding]:
        for row in study.rows:
            base = study.other(row, "softmax")
            if study.attention(row) != label or base is None or not study.ranks(row):
                continue
            values = paired(study.ranks(row), study.ranks(base))
            yield Finding(study.name, f"{label} above softmax{place(study, row)}", values, "of effective rank")

    return findings


def unmixed_decoding_costs(study: Study) -> Iterator[Finding]:
    for row in study.rows:
        unmixed = study.values(row, "test unmixed")
        if study.attention(row) in ("A", "B") and unmixed:
            values = paired(study.values(row, "test"), unmixed)
            what = f"{study.attention(row)}, mixed above unmixed{place(study, row)}"
            yield Finding(study.name, what, values, study.measure.name)


CLAIMS = (
    Claim(
        "Mixhead A and B beat softmax",
        "Mixhead, tables 1 to 4, 7 to 10",
        several(*(against(x, "softmax") for x in "AB")),
    ),
    Claim("B beats A", "Mixhead, tables 1 to 3 and 7", against("B", "A")),
    Claim(
        "Sigsoftmax helps a little",
        "Mixhead, tables 1 and 2",
        several(against("sigsoftmax", "softmax"), against("A + sigsoftmax", "A"), against("B + sigsoftmax", "B")),
    ),
    Claim(
        "Random and average mixing hurt",
        "Mixhead, table 7",
        several(*(against(x, "softmax", worse=True) for x in ("random", "average"))),
    ),
    Claim(
        "Mixing matters most when d_k << n",
        "Mixhead, tables 4, 9 and 10",
        several(*map(grows_with_the_squeeze, "AB")),
    ),
    Claim("Fixhead overfits when large", "Mixhead, table 10", large_fixhead_overfits),
    Claim("Mixing raises the effective rank", "Mixhead, figures 1 and 3", several(*map(raises_the_rank, "AB"))),
    Claim("Decoding unmixed costs BLEU", "the published code beside Mixhead, table 4", unmixed_decoding_costs),
)
