"""results/README.md, from the JSON files beside it alone: the same text for the same numbers."""

import math
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, Optional

from reproduction import gains
from reproduction.claims import CLAIMS, RULE, Comparison, Evidence, Judgement, judge
from reproduction.results import UNMIXED, Study, training_minutes
from reproduction.samples import FEWEST, LEVEL, MOST, POWER, Sample, sample, seeds_wanted
from reproduction.tables import SCALES, TEXTS, cell

TITLE = "# What was measured here, beside the papers\n"
HEAD = f"""{TITLE}
Written by `scripts/reproduce.py report` from the JSON files of this folder, which have every run: values, flags, seed,
wall time, device, versions, checksum of the text, commit (with + where the code or the recipes differed from it).
"""
LEGEND = f"""## How to read this

*softmax* is the attention that fairseq has; *A* mixes the heads' attention matrices by one matrix for each attention
(Mixhead A, position-independent), *B* by one for each position (Mixhead B, position-wise); *random* and *average* by a
matrix that is not learnt; *d_k* is the size of a head, *n* the length of a sequence. Perplexity is per word, and less
is better; of BLEU, scores and F1 more is better.

*Ours* is the mean over seeds ± their standard deviation, with the number of seeds in brackets. *Gain* is how much
better a row is than softmax with the same seed: for perplexities the difference of the logarithms in percent, for the
rest points. From {FEWEST} seeds on its {1 - LEVEL:.0%} interval is in brackets, with fewer their number. The models,
texts and updates of `small` are not the papers', so neither the numbers nor the sizes of the gains need agree with
theirs: an effect of a paper that is outside our interval does not contradict it.

*Effective rank* is of the attention matrices as they act, after mixing: the exponential of the entropy of their
singular values' shares, from 1 to the length of the sequence; the mean over the layers and heads of all
self-attention, and over some windows of the validation set.

*s/update* and *peak memory* are measured by `scripts/reproduce.py cost`, which trains all rows in turn for a few
updates, some rounds: the medians of the rounds, and in brackets the median, the least and the greatest of their ratios
to softmax in the same round. The plugin computes softmax, too; its README compares that with fairseq's own code. On a
CPU memory is of the whole process, Python and the data included, on a GPU what torch had allocated, to 0.1 GiB. The
load is the number of processes that wanted a core, a minute's mean. The minutes of the trainings are those of their
updates, on a machine that did other work too.

{textwrap.fill(f"**Verdicts.** {RULE}", 120, break_on_hyphens=False)}
"""


def render(studies: Sequence[Study]) -> str:
    verdicts, rests = claims(studies)
    parts = [HEAD, verdicts, LEGEND, rests, *longer(studies)]
    for _, same in groupby(studies, key=lambda study: study.table):
        parts.append(table(list(same)))
    return "\n".join(parts)


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


# ---- claims ----------------------------------------------------------------------------------------------------------

BESIDE = " (beside the test)"


def claims(studies: Sequence[Study]) -> tuple[str, str]:
    """The verdicts, one for each claim and scale, and what they rest on; what was only tried decides nothing."""
    scales = [scale for scale in SCALES if scale != "tiny" and any(study.scale == scale for study in studies)]
    judged = [[judge(claim, [s for s in studies if s.scale == scale]) for scale in scales] for claim in CLAIMS]
    heads = ["claim", "tested on", *(f"at `{scale}`" for scale in scales)]
    rows = [
        [claim.text, claim.source, *(judgement.words for judgement in of_claim)]
        for claim, of_claim in zip(CLAIMS, judged)
    ]
    rests = "## What the verdicts rest on\n"
    for claim, of_claim in zip(CLAIMS, judged):
        for scale, judgement in zip(scales, of_claim):
            if judgement.evidence:
                rests += f"\n**{claim.text}, at `{scale}`: {judgement.words}**\n\n{grounds(judgement)}"
    return "## Claims of the Mixhead paper\n\n" + markdown(heads, rows), rests


def grounds(judgement: Judgement) -> str:
    text = ""
    for evidence in judgement.evidence:
        beside = [comparison for comparison in evidence.comparisons if comparison.values]
        text += f"- {evidence.study.table}"
        if evidence.wanted == 1 and evidence.counted:
            (own,) = evidence.counted
            beside.remove(own)
            text += f"{'' if evidence.is_tested else BESIDE}: {told(own)}\n"
        elif evidence.counted:
            text += f", mean of {basis(evidence)}{'' if evidence.is_tested else BESIDE}: "
            text += f"{effect(evidence.values, evidence.counted[0].unit)}\n"
        else:  # what it has of the test was counted of another table
            text += ":\n"
        text += "".join(f"  - {told(comparison)}\n" for comparison in beside)
    for test in judgement.tests:
        if len(test.evidence) > 1:
            names = " and ".join(found.study.table for found in test.evidence)
            unit = test.evidence[0].counted[0].unit
            text += f"- the text of `examples/{test.example}`, mean of {names}: {effect(test.values, unit)}\n"
    return text


def basis(evidence: Evidence) -> str:
    """What a table's number is the mean of."""
    found = evidence.counted
    of = "" if len(found) == evidence.wanted else f" of {evidence.wanted}"
    seeds = {frozenset(comparison.values) for comparison in found}
    return f"{len(found)}{of} comparisons{', over the seeds that all of them have' if len(seeds) > 1 else ''}"


def told(comparison: Comparison) -> str:
    values = list(comparison.values.values())
    text = f"{comparison.what}{'' if comparison.counts else BESIDE}: {effect(values, comparison.unit)}"
    if comparison.published is None or len(values) < FEWEST:
        return text
    found = sample(values)
    where = "within" if abs(comparison.published - found.mean) <= found.margin else "outside"
    return f"{text}; the paper's {comparison.published:+.2f} is {where}"


def effect(values: Sequence[float], unit: str) -> str:
    """The mean, and what is known of it."""
    found = sample(values)
    seeds = "1 seed" if found.n == 1 else f"{found.n} seeds"
    if found.n < FEWEST:
        return f"{found.mean:+.2f} {unit} ({seeds})"
    return f"{found.interval()} {unit} ({seeds}, p {found.p:.2g})"


def longer(studies: Sequence[Study]) -> list[str]:
    """A section, if there are such rows."""
    found = [of_row for of_row in gains.by_updates(studies) if all(len(one.by_seed) >= FEWEST for one in of_row)]
    if not found:
        return []
    text = "## The same models after fewer and more updates\n\nWhat is left of a gain after as many updates as the "
    text += "paper's was not measured.\n\n"
    for of_row in found:
        unit = gains.short_unit(of_row[0].study)
        names = [f"{one.study.table} {'/'.join(one.row)}" for one in of_row]
        after = [f"{gain(one.by_seed)} {unit} after {one.updates:,} updates" for one in of_row]
        text += f"- {', '.join(names)}: {'; '.join(after)}\n"
    return [text]


# ---- tables ----------------------------------------------------------------------------------------------------------


def table(studies: Sequence[Study]) -> str:
    first = studies[0]
    text = f"## {first.title}\n\n"
    if any(study.part["runs"] for study in studies):
        text += f"![{first.title}]({first.table}.svg)\n\n"
    if any("spectrum" in run for study in studies for run in study.part["runs"]):
        text += f"![Spectra, {first.title}]({first.table}_spectrum.svg)\n\n"
    return text + "\n".join(scale(study) for study in studies)


def scale(study: Study) -> str:
    return f"### `{study.scale}`: {study.part['title']}\n\n{words(study)}\n\n{numbers(study)}"


def words(study: Study) -> str:
    """What was run, and how it differs from the paper's."""
    part = study.part
    lines = [f"Runs: {size(study)}."]
    lines += noise(study)
    if paper := part.get("paper"):
        same = "the same recipe" if paper["example"] == part["example"] else f"`examples/{paper['example']}`"
        updates = f"{paper['updates']:,} updates of {paper['tokens_per_update']:,} tokens"
        lines.append(f"The paper's rows, as they are at `full`: {same}, {updates}{parameters(paper)}.")
    wanted = len(study.rows)
    done = sum(bool(study.values(row, study.metric)) for row in study.rows)
    if done < wanted:
        lines.append(f"{done} of {wanted} rows have runs.")
    for name, found in (
        ("Devices", devices(study)),
        ("Versions", versions(study)),
        ("Text", texts(study)),
        ("Commits", commits(study)),
        ("Effective ranks", windows(study)),
    ):
        if found:
            lines.append(f"{name}: {found}.")
    if cost := part.get("cost"):
        lines.append(
            f"Time and memory: {cost['rounds']} rounds of {cost['updates']} updates on {cost['device']}{workers(cost)} "
            f"({loads(cost)})."
        )
    else:
        lines.append("Time and memory were not measured in turn.")
    about = f"{part['about']}\n\n" if part.get("about") else ""
    return about + "\n".join(f"- {line}" for line in lines)


def parameters(paper: Mapping[str, Any]) -> str:
    return f", about {paper['parameters'] / 1e6:,.3g} million parameters" if paper.get("parameters") else ""


def workers(cost: Mapping[str, Any]) -> str:
    """What of the device a measured run had."""
    if cost.get("gpus"):
        return f", {cost['gpus']} of them"
    threads = cost.get("threads")
    return f", {threads} thread{'s' * (threads > 1)}" if threads else ""


def loads(cost: Mapping[str, Any]) -> str:
    after = f", after {cost['load_after']:g}" if "load_after" in cost else ""
    return f"load before {cost['load_before']:g}{after}"


def noise(study: Study) -> list[str]:
    """How far runs of one row lie apart, how wide the intervals of gains are, and which gains they tell."""
    base = next((row for row in study.rows if study.attention(row) == "softmax"), None)
    if base is None or len(values := list(study.values(base, study.metric).values())) < FEWEST:
        return []
    found: dict[str, Sample] = {}
    for row in study.rows:
        own = study.other(row, "softmax")
        differences = list(gains.by_seed(study, row, own).values()) if own and row != own else []
        if len(differences) >= FEWEST:
            found["/".join(row)] = sample(differences)
    if not found:
        return []
    unit = gains.short_unit(study)
    unit = unit if unit == "%" else f" {unit}"
    of_base = 100 * sample(values).deviation / sample(values).mean
    deviations = span((s.deviation for s in found.values()), ".2g")
    margin = statistics.median(s.margin for s in found.values())
    lines = [
        f"Seed noise: {'/'.join(base)} varies by {of_base:.2g}% between seeds, gains by {deviations}{unit} (standard "
        f"deviations); half the width of a gain's interval is {margin:.2g}{unit} by the median."
    ]
    undecided = {row: s for row, s in found.items() if s.p >= LEVEL}
    lines.append(f"Told from none: {len(found) - len(undecided)} of {len(found)} gains.")
    if undecided:
        wanted = ", ".join(f"{row} {seeds_wanted(s) or f'more than {MOST}'}" for row, s in undecided.items())
        lines[-1] += (
            " If the means and deviations of the others are as found, these numbers of seeds would tell them with "
            f"probability {POWER:g}: {wanted}."
        )
    return lines


def span(values: Iterable[float], form: str = ",.0f") -> str:
    found = sorted(values)
    low, high = (format(value, form) for value in (found[0], found[-1]))
    return low if low == high else f"{low} to {high}"


def size(study: Study) -> str:
    part = study.part
    found = [f"`examples/{part['example']}`"]
    if parameters := [run["parameters"] for run in part["runs"] if run.get("parameters")]:
        found.append(f"{span((p / 1e6 for p in parameters), ',.3g')} million parameters")
    if updates := [run["updates"] for run in part["runs"] if run.get("updates")]:
        recipe = part.get("recipe")
        tokens = f" of at most {recipe['tokens_per_update']:,} tokens" if recipe else ""
        found.append(f"{span(updates)} updates{tokens}")
    if minutes := [taken for run in part["runs"] if (taken := training_minutes(run))]:
        found.append(f"{span(minutes)} minutes each, {statistics.median(minutes):.0f} by the median")
    return ", ".join(found)


def distinct(found: Iterable[str]) -> str:
    return "; ".join(sorted(set(found)))


def commits(study: Study) -> str:
    """A training that went on after a pause may have several."""
    found = [run["commit"].split(", ") for run in study.part["runs"] if run.get("commit")]
    dirty = sum(any(commit.endswith("+") for commit in of_run) for of_run in found)
    text = ", ".join(sorted({commit for of_run in found for commit in of_run}))
    return f"{text}; with + {dirty} of {len(found)} runs" if dirty else text


def windows(study: Study) -> str:
    """Of what the spectra of its runs are."""
    spectra = [run["spectrum"] for run in study.part["runs"] if "spectrum" in run]
    sizes = sorted({(s["windows"], s["length"]) for s in spectra}, key=lambda size: size[1])
    return ", ".join(f"{number} windows of {length} tokens" for number, length in sizes) + " a run" if sizes else ""


def devices(study: Study) -> str:
    def with_threads(run: Mapping[str, Any]) -> str:
        threads = {None: "", 1: ", one thread a run"}
        count = run.get("threads")
        return run["device"] + threads.get(count, f", {count} threads a run")

    return distinct(with_threads(run) for run in study.part["runs"] if run.get("device"))


def texts(study: Study) -> str:
    """By their checksums"""
    known = dict.fromkeys(run["data"] for run in study.part["runs"] if run.get("data"))
    return "; ".join(f"SHA-256 {text}...{f' ({TEXTS[text]})' if text in TEXTS else ''}" for text in known)


def versions(study: Study) -> str:
    return distinct(
        ", ".join(f"{name} {version}" for name, version in run["versions"].items())
        for run in study.part["runs"]
        if run.get("versions")
    )


def numbers(study: Study) -> str:
    metrics = study.part["metrics"]
    named = any(study.published.values())
    heads = [*study.axes]
    heads += [f"paper ({'/'.join(study.published_metrics)})"] if named else []
    heads += [f"ours: {metric}" for metric in metrics]
    has_base = any("softmax" in labels for labels in study.axes.values())
    if has_base:
        unit = gains.short_unit(study)
        heads += [f"paper's gain, {unit}"] if named else []
        heads += [f"our gain, {unit} ({metric})" for metric in compared(study)]
    heads += ["s/update", "peak MiB"]
    rows = []
    for row in study.rows:
        cells = [*row]
        cells += [cell(study.published, row)] if named else []
        cells += [mean(list(study.values(row, metric).values())) for metric in metrics]
        cells += gained(study, row, named) if has_base else []
        cells += costs(study.cost(row))
        rows.append(cells)
    return markdown(heads, rows)


def mean(values: Sequence[float]) -> str:
    if not values:
        return "-"
    found = sample(values)
    spread = "" if math.isnan(found.deviation) else f" ± {found.deviation:.2f}"
    return f"{found.mean:.2f}{spread} ({found.n})"


def compared(study: Study) -> list[str]:
    """The metrics that gains are shown of."""
    return [study.metric, *([UNMIXED] if study.unmixed else [])]


def gained(study: Study, row: Sequence[str], named: bool) -> list[str]:
    """The paper's gain over softmax, where the table has its numbers, and ours."""
    base = study.other(row, "softmax")
    if base is None or tuple(row) == base:
        return [""] * (named + len(compared(study)))
    theirs = gains.published(study, row, base)
    ours = [gain(gains.by_seed(study, row, base, metric)) for metric in compared(study)]
    return [*(["-" if theirs is None else f"{theirs:+.2f}"] if named else []), *ours]


def gain(by_seed: Mapping[int, float]) -> str:
    """The mean with its interval, or with the number of seeds where they are few."""
    if not by_seed:
        return "-"
    found = sample(list(by_seed.values()))
    return f"{found.mean:+.2f} ({found.n})" if found.n < FEWEST else found.interval()


def costs(cost: Mapping[str, Any]) -> tuple[str, str]:
    if not cost:
        return "-", "-"
    time, memory = f"{cost['seconds_per_update']:.3g}", f"{cost['peak_memory_mib']:.0f}"
    return time + ratios(cost.get("time_ratios")), memory + ratios(cost.get("memory_ratios"))


def ratios(found: Optional[Sequence[float]]) -> str:
    """The median, and the least and the greatest; softmax is 1 in all."""
    if not found:
        return ""
    apart = f"; {span(found, '.2f')}" if min(found) < max(found) else ""
    return f" ({statistics.median(found):.2f}{apart})"
