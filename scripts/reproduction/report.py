"""results/README.md, from the JSON files beside it alone: the same text for the same numbers."""

import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from reproduction import samples
from reproduction.claims import CLAIMS, HOLDS, RULE, Finding, findings_of, verdict
from reproduction.results import Study
from reproduction.tables import cell

HEAD = f"""# What was measured here, beside the papers

Written by `scripts/reproduce.py report` from the JSON files of this folder, which have every run: values, flags, seed,
wall time, device, versions, commit. *Ours* is the mean over seeds ± the standard deviation, with the number of seeds in
brackets. *Difference* is the mean of ours minus softmax of the same seed ± its standard error, with p of the paired
t-test.

{RULE}

Perplexity is per word, and less is better; of BLEU, scores and F1 more is better. Time and memory are measured by
`scripts/reproduce.py cost`, all rows in turn on a machine whose load before is given, with the ratio to softmax in
brackets: on a CPU memory is the peak of the whole process, Python and the data included; on a GPU what torch had
allocated, to 0.1 GiB. The wall time of the trainings themselves is of a machine that may have done other work.
"""


def render(studies: Sequence[Study]) -> str:
    parts = [HEAD, claims(studies)]
    for _, same in groupby(studies, key=lambda study: study.table):
        parts.append(table(list(same)))
    return "\n".join(parts)


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


# ---- claims ----------------------------------------------------------------------------------------------------------


def claims(studies: Sequence[Study]) -> str:
    shown = [study for study in studies if study.scale != "tiny"]
    found = [(claim, findings_of(claim, shown)) for claim in CLAIMS]
    rows = [[claim.text, claim.source, verdict(f), counts(f)] for claim, f in found]
    text = "## Claims\n\n" + markdown(["claim", "of", "verdict", "comparisons"], rows)
    for claim, findings in found:
        if findings:
            text += f"\n**{claim.text}: {verdict(findings)}**\n\n"
            text += "".join(f"- {finding.words}\n" for finding in findings)
    return text


def counts(findings: Sequence[Finding]) -> str:
    if not findings:
        return "none was run"
    counted = [finding.verdict == HOLDS for finding in findings if finding.verdict in (HOLDS, "does not hold here")]
    said = f"{len(findings)}: {sum(counted)} for it, {len(counted) - sum(counted)} against"
    return f"{said}, {len(findings) - len(counted)} undecided"


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
    lines = [part["about"]] if part.get("about") else []
    lines.append(f"Runs: {size(study)}.")
    if paper := part.get("paper"):
        same = "the same recipe" if paper["example"] == part["example"] else f"`examples/{paper['example']}`"
        updates = f"{paper['updates']:,} updates of {paper['tokens_per_update']:,} tokens"
        lines.append(f"The paper's rows, at `full`: {same}, {updates}.")
    wanted = len(study.rows)
    done = sum(bool(study.values(row, study.metric)) for row in study.rows)
    if done < wanted:
        lines.append(f"{done} of {wanted} rows have runs.")
    for name, found in (("Devices", devices(study)), ("Versions", versions(study)), ("Commits", commits(study))):
        if found:
            lines.append(f"{name}: {found}.")
    if cost := part.get("cost"):
        lines.append(
            f"Time and memory: medians of {cost['rounds']} rounds of {cost['updates']} updates on {cost['device']} "
            f"(load before: {cost['load_before']:g})."
        )
    else:
        lines.append("Time and memory: not measured.")
    return " ".join(lines)


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
        tokens = f" of {recipe['tokens_per_update']:,} tokens" if recipe else ""
        found.append(f"{span(updates)} updates{tokens}")
    if seconds := [run["wall_seconds"] for run in part["runs"] if run.get("wall_seconds")]:
        found.append(f"{span((s / 60 for s in seconds), ',.1f')} minutes each")
    return ", ".join(found)


def distinct(found: Iterable[str]) -> str:
    return "; ".join(sorted(set(found)))


def devices(study: Study) -> str:
    return distinct(run["device"] for run in study.part["runs"] if run.get("device"))


def versions(study: Study) -> str:
    return distinct(
        ", ".join(f"{name} {version}" for name, version in run["versions"].items())
        for run in study.part["runs"]
        if run.get("versions")
    )


def commits(study: Study) -> str:
    return distinct(run["commit"] for run in study.part["runs"] if run.get("commit"))


def numbers(study: Study) -> str:
    metrics = study.part["metrics"]
    named = any(study.published.values())
    heads = [*study.axes]
    heads += [f"paper ({'/'.join(study.published_metrics)})"] if named else []
    heads += [f"ours: {metric}" for metric in metrics]
    has_base = any("softmax" in labels for labels in study.axes.values())
    heads += [f"difference: {study.metric}"] if has_base else []
    heads += ["s/update", "peak MiB"]
    rows = []
    for row in study.rows:
        cells = [*row]
        cells += [cell(study.published, row)] if named else []
        cells += [mean(list(study.values(row, metric).values())) for metric in metrics]
        cells += [difference(study, row)] if has_base else []
        cells += costs(study, row)
        rows.append(cells)
    return markdown(heads, rows)


def mean(values: Sequence[float]) -> str:
    if not values:
        return "-"
    found = samples.sample(values)
    spread = "" if math.isnan(found.deviation) else f" ± {found.deviation:.2f}"
    return f"{found.mean:.2f}{spread} ({found.n})"


def difference(study: Study, row: Sequence[str]) -> str:
    base = study.other(row, "softmax")
    if base is None or tuple(row) == base:
        return ""
    values = samples.paired(study.values(row, study.metric), study.values(base, study.metric))
    if not values:
        return "-"
    found = samples.sample(values)
    return f"{found.mean:+.2f}" if found.n < 2 else f"{found.mean:+.2f} ± {found.error:.2f} (p {found.p:.2g})"


def costs(study: Study, row: Sequence[str]) -> list[str]:
    cost = study.cost(row)
    if not cost:
        return ["-", "-"]

    def ratio(name: str) -> str:
        return f" ({cost[name]:.2f})" if name in cost else ""

    return [
        f"{cost['seconds_per_update']:.3g}{ratio('time_ratio')}",
        f"{cost['peak_memory_mib']:.0f}{ratio('memory_ratio')}",
    ]


def write(folder: Path, text: str) -> Path:
    path = folder / "README.md"
    unfinished = path.with_name("README.md.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)
    return path
