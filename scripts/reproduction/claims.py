"""The papers' claims, and whether they hold for what was run.

Each claim has one test at each scale. A table gives the claim one number for each seed, the mean over the rows that it
speaks of, and a text the mean over its tables, which share models and seeds; then comes a paired t-test over the seeds,
and the tests of several texts are combined by Stouffer's method. So rows that were compared by the way cannot decide
it, however many they are.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import NormalDist, fmean
from typing import NamedTuple, Optional

from reproduction import gains
from reproduction.results import UNMIXED, Study
from reproduction.samples import FEWEST, LEVEL, sample, slope

ALL = range(1, 11)
HOLDS = "holds here"
FAILS = "does not hold here"
OPEN = "not testable at this size"


class Comparison(NamedTuple):
    """Of two rows, or of a line through several: by seed a number that the claim says is above 0."""

    what: str
    values: Mapping[int, float]
    unit: str
    runs: frozenset[tuple[str, str]]  # digests of what is compared, by which tables' common runs are known
    counts: bool = True  # in the test; others are told beside it
    published: Optional[float] = None  # the paper's number
    unfit: str = ""  # why what was run cannot be compared


class Evidence(NamedTuple):
    """What one table says of a claim."""

    study: Study
    comparisons: Sequence[Comparison]
    is_asked: bool  # whether the claim is tested on it, or it is told beside the test

    @property
    def counted(self) -> list[Comparison]:
        return [comparison for comparison in self.comparisons if comparison.counts and comparison.values]

    @property
    def wanted(self) -> int:
        """How many comparisons of the table count, with those that were not run."""
        return sum(comparison.counts for comparison in self.comparisons)

    @property
    def by_seed(self) -> dict[int, float]:
        """The mean over the rows."""
        return means([comparison.values for comparison in self.counted])

    @property
    def values(self) -> list[float]:
        return list(self.by_seed.values())

    @property
    def is_tested(self) -> bool:
        return self.is_asked and len(self.values) >= FEWEST


class OfText(NamedTuple):
    """What the tables of one text say of a claim together."""

    example: str  # whose text it is
    evidence: Sequence[Evidence]

    @property
    def values(self) -> list[float]:
        """By seed the mean over the tables."""
        return list(means([found.by_seed for found in self.evidence]).values())

    @property
    def normal(self) -> float:
        """The normal deviate of the t-test's one-sided p."""
        found = sample(self.values)
        beyond = min(max(found.p / 2, 1e-15), 0.5)
        return math.copysign(NormalDist().inv_cdf(1 - beyond), found.mean)


def means(found: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """By seed, of the seeds that all have."""
    seeds = set.intersection(*map(set, found)) if found else set()
    return {seed: fmean(values[seed] for values in found) for seed in sorted(seeds)}


class Judgement(NamedTuple):
    verdict: str
    reason: str  # of OPEN
    p: float  # nan where nothing could be tested
    evidence: Sequence[Evidence]
    tests: Sequence[OfText] = ()

    @property
    def words(self) -> str:
        text = f"{self.verdict}{': ' if self.reason else ''}{self.reason}"
        if math.isnan(self.p):
            return text
        tested = [found for test in self.tests for found in test.evidence]
        done, wanted = sum(len(found.counted) for found in tested), sum(found.wanted for found in tested)
        return f"{text} (p {self.p:.2g}{f'; {done} of {wanted} comparisons were run' if done < wanted else ''})"


class Claim(NamedTuple):
    text: str
    tables: Sequence[int]  # of the Mixhead paper, which it is tested on
    comparisons: Callable[[Study], Iterator[Comparison]]  # of one table
    beside: Sequence[int] = ()  # tables that have such rows, too

    @property
    def source(self) -> str:
        if len(self.tables) == len(ALL):
            return "all tables"
        return f"table{'s' * (len(self.tables) > 1)} {', '.join(map(str, self.tables))}"


def judge(claim: Claim, studies: Sequence[Study]) -> Judgement:
    """By the studies of one scale."""
    evidence = [found for found in evidence_of(claim, studies) if any(c.values for c in found.comparisons)]
    tests = by_text([found for found in evidence if found.is_tested])
    if not tests:
        return Judgement(OPEN, why_untested(claim, studies), math.nan, evidence)
    deviate = sum(test.normal for test in tests) / math.sqrt(len(tests))
    p = 2 * NormalDist().cdf(-abs(deviate))
    if p >= LEVEL:
        counted = [comparison for test in tests for found in test.evidence for comparison in found.counted]
        return Judgement(OPEN, undecided(counted), p, evidence, tests)
    return Judgement(HOLDS if deviate > 0 else FAILS, "", p, evidence, tests)


def by_text(found: Sequence[Evidence]) -> list[OfText]:
    """Of the texts whose tables have enough seeds in common."""
    examples = dict.fromkeys(evidence.study.part["example"] for evidence in found)
    of_texts = [OfText(name, [e for e in found if e.study.part["example"] == name]) for name in examples]
    return [of_text for of_text in of_texts if len(of_text.values) >= FEWEST]


def why_untested(claim: Claim, studies: Sequence[Study]) -> str:
    asked = [found for found in evidence_of(claim, studies) if found.is_asked]
    if unfit := next((c.unfit for found in asked for c in found.comparisons if c.unfit), ""):
        return unfit
    most = max((len(found.values) for found in asked), default=0)
    return f"{most} of the {FEWEST} seeds that a test takes" if most else "not run here"


def undecided(counted: Sequence[Comparison]) -> str:
    """What the seeds cannot tell; where the paper's effect is the only other one, what they can."""
    (first, *others) = counted
    found = sample(list(first.values.values()))
    if not others and first.published is not None and first.published > found.mean + found.margin:
        return "its seeds tell it from the paper's effect, but not from none"
    return "its seeds cannot tell it from no effect"


def evidence_of(claim: Claim, studies: Sequence[Study]) -> list[Evidence]:
    """By table; what several tables compare of the same runs is the first one's that has most seeds.

    Tables that a claim is tested on come before those that are told beside.
    """
    asked, beside = ({f"table{number}" for number in numbers} for numbers in (claim.tables, claim.beside))
    own_studies = [study for names in (asked, beside) for study in studies if study.table in names]
    found = [(study, comparison) for study in own_studies for comparison in claim.comparisons(study)]
    kept: list[tuple[Study, Comparison]] = []
    for study, own in sorted(found, key=lambda pair: (pair[0].table not in asked, -len(pair[1].runs))):
        # lines through some of the same points are not the same
        if not own.runs or not any(theirs is not study and own.runs <= other.runs for theirs, other in kept):
            kept.append((study, own))
    of_studies = [(study, [own for s, own in found if s is study and (s, own) in kept]) for study in own_studies]
    return [Evidence(study, own, study.table in asked) for study, own in of_studies if own]


# ---- what is compared ------------------------------------------------------------------------------------------------


def place(study: Study, row: Sequence[str]) -> str:
    """The row's labels but the attention's, with their axes."""
    own = study.attention(row)
    return ", ".join(f"{axis} {label}" for axis, label in zip(study.axes, row) if label != own)


def compared(study: Study, row: Sequence[str], base: Sequence[str], seeds: Mapping[int, float]) -> frozenset:
    """The digests of two rows, by seed."""
    ours, theirs = study.field(row, "digest"), study.field(base, "digest")
    return frozenset((ours[seed], theirs[seed]) for seed in seeds)


def against(label: str, base: str, sign: int = 1) -> Callable[[Study], Iterator[Comparison]]:
    """Rows of one attention are better (`sign` -1: worse) than those of another."""

    def comparisons(study: Study) -> Iterator[Comparison]:
        for row in study.rows:
            other = study.other(row, base)
            if study.attention(row) != label or other is None:
                continue
            found = gains.by_seed(study, row, other)
            values = {seed: sign * value for seed, value in found.items()}
            what = f"{label} {'better' if sign > 0 else 'worse'} than {base}"
            what += f", {where}" if (where := place(study, row)) else ""
            # decoded as theirs, ours stand beside them in the table
            theirs = None if study.unmixed else gains.published(study, row, other)
            yield Comparison(
                what,
                values,
                gains.unit(study),
                compared(study, row, other, found),
                published=None if theirs is None else sign * theirs,
            )

    return comparisons


def several(*parts: Callable[[Study], Iterator[Comparison]]) -> Callable[[Study], Iterator[Comparison]]:
    def comparisons(study: Study) -> Iterator[Comparison]:
        for part in parts:
            yield from part(study)

    return comparisons


# Axes along which d_k / n changes, by table, and the sign of x where it gets smaller.
SQUEEZED = {"table4": ("heads", 1), "table9": ("tokens", 1), "table10": ("head-size", -1)}


def grows_with_the_squeeze(label: str) -> Callable[[Study], Iterator[Comparison]]:
    """The gain over softmax as d_k / n halves: the slope of a line through all points of a seed, three at least."""

    def comparisons(study: Study) -> Iterator[Comparison]:
        axis, sign = SQUEEZED.get(study.table, ("", 1))
        rows = [row for row in study.rows if study.attention(row) == label and study.other(row, "softmax")]
        if axis not in study.axes or len(rows) < 3:
            return
        points: dict[int, list[tuple[float, float]]] = {}
        runs: set[tuple[str, str]] = set()
        for row in rows:
            base = study.other(row, "softmax")
            x = sign * math.log2(float(row[list(study.axes).index(axis)]))
            found = gains.by_seed(study, row, base)
            runs |= compared(study, row, base, found)
            for seed, value in found.items():
                points.setdefault(seed, []).append((x, value))
        # a seed that lacks a point would have another line
        slopes = {seed: slope(of_seed) for seed, of_seed in points.items() if len(of_seed) == len(rows)}
        what = f"gain of {label} for each halving of d_k / n ({axis})"
        yield Comparison(what, slopes, gains.unit(study), frozenset(runs))

    return comparisons


def largest_fixhead(study: Study) -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """For each attention what is compared, the row of the largest head size, and the one of the size below."""
    sizes = study.axes.get("head-size", [])
    if len(sizes) < 2:
        return
    below, largest = sorted(sizes, key=int)[-2:]
    for row in study.rows:
        if largest in row:
            other = tuple(below if label == largest else label for label in row)
            yield f"{study.attention(row)}, head size {largest} against {below}", row, other


def distances(study: Study, row: Sequence[str]) -> dict[int, float]:
    """By seed how far the last validation loss is above the training loss of the last epoch, in bits."""
    valid, train = (study.field(row, name) for name in ("valid_loss", "train_loss"))
    return {seed: valid[seed] - train[seed] for seed in sorted(valid.keys() & train.keys())}


def unfit(study: Study, row: Sequence[str]) -> str:
    found = distances(study, row).values()
    return "no model overfits" if found and fmean(found) <= 0 else ""


def large_fixhead_is_worse(study: Study) -> Iterator[Comparison]:
    for what, row, other in largest_fixhead(study):
        found = gains.by_seed(study, row, other)
        why = unfit(study, row)
        values = {} if why else {seed: -value for seed, value in found.items()}
        yield Comparison(what, values, gains.unit(study), compared(study, row, other, found), unfit=why)


def large_fixhead_is_further(study: Study) -> Iterator[Comparison]:
    for what, row, other in largest_fixhead(study):
        ours, theirs = (distances(study, r) for r in (row, other))
        why = unfit(study, row)
        values = {} if why else {seed: ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())}
        yield Comparison(what, values, "bits", compared(study, row, other, values), unfit=why)


def raises_the_rank(label: str, counts: bool = True) -> Callable[[Study], Iterator[Comparison]]:
    def comparisons(study: Study) -> Iterator[Comparison]:
        for row in study.rows:
            base = study.other(row, "softmax")
            if study.attention(row) != label or base is None or not study.ranks(row):
                continue
            ours, theirs = study.ranks(row), study.ranks(base)
            values = {seed: ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())}
            where = place(study, row)
            what = f"{label} above softmax{f', {where}' if where else ''}"
            yield Comparison(what, values, "in effective rank", compared(study, row, base, values), counts)

    return comparisons


def unmixed_decoding_costs(study: Study) -> Iterator[Comparison]:
    for row in study.rows:
        mixed, unmixed = study.values(row, "test"), study.values(row, UNMIXED)
        if study.attention(row) in ("A", "B") and unmixed:
            values = {seed: mixed[seed] - unmixed[seed] for seed in sorted(mixed.keys() & unmixed.keys())}
            where = place(study, row)
            what = f"{study.attention(row)}, mixed above unmixed{f', {where}' if where else ''}"
            yield Comparison(what, values, study.measure.name, compared(study, row, row, values))


UNMIXED_COSTS = Claim("Decoding unmixed, as the published code does, costs BLEU", (4,), unmixed_decoding_costs)
CLAIMS = (
    Claim("Mixhead A beats softmax", ALL, against("A", "softmax")),
    Claim("Mixhead B beats softmax", ALL, against("B", "softmax")),
    # the paper says it of these tables; elsewhere, by its numbers, now one is better and now the other
    Claim(
        "B beats A",
        (1, 2, 3, 7),
        several(against("B", "A"), against("B + sigsoftmax", "A + sigsoftmax")),
        beside=(4, 8, 9, 10),
    ),
    Claim(
        "Sigsoftmax helps a little",
        (1, 2),
        several(against("sigsoftmax", "softmax"), against("A + sigsoftmax", "A"), against("B + sigsoftmax", "B")),
    ),
    Claim("Random mixing hurts", (7,), against("random", "softmax", -1)),
    Claim("Average mixing hurts", (7,), against("average", "softmax", -1)),
    Claim(
        "Mixing matters most when d_k << n",
        (4, 9, 10),
        several(grows_with_the_squeeze("A"), grows_with_the_squeeze("B")),
    ),
    Claim("Fixhead overfits when large: it is worse on the test set", (10,), large_fixhead_is_worse),
    Claim("Fixhead overfits when large: it is further from its training loss", (10,), large_fixhead_is_further),
    # the paper draws the spectra of one model; here they are of every table whose models are at hand
    Claim(
        "Mixing raises the effective rank",
        ALL,
        several(
            raises_the_rank("A"),
            raises_the_rank("B"),
            raises_the_rank("random", False),
            raises_the_rank("average", False),
        ),
    ),
    UNMIXED_COSTS,
)
RULE = (
    "Each claim has one test at each scale. A table gives it one number for each seed, the mean over the rows that the "
    "claim speaks of. Tables of one text share models and seeds, so that they count as one, by the mean over them, and "
    f"a two-sided paired t-test over the seeds if there are at least {FEWEST}; the tests of several texts are combined "
    "by Stouffer's method, each with the same weight. A and B are tested against softmax on every table that was run, "
    "also where the paper's own do not beat it, as in table 4 with 4 heads. Told beside the test are attentions and "
    f"tables that the paper does not say a claim of, and what has fewer seeds. At p < {LEVEL:g} a claim *holds here*, "
    "or *does not hold here* if the difference is against it; otherwise it is *not testable at this size*, and why is "
    f"said, be it that nothing was run. If none of the {len(CLAIMS)} claims were true, about "
    f"{LEVEL * len(CLAIMS):.2g} of them would still be decided, by chance. Where two rows are compared and the paper "
    "has both, its own effect is said to be within our interval or outside it; not so for table 4, whose models the "
    "paper presumably decodes otherwise, nor for Fixhead, which is of other sizes there. Fixhead is the largest head "
    "size of a table, compared with the one below. It is *further from its training loss* by the last validation loss "
    "less the mean of training's last epoch, and it overfits if that is above 0; where it does not, neither of the two "
    "claims is tested."
)
