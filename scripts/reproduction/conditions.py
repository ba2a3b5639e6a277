"""Before any training: whether runs can begin here, and whether they can be compared with what there is already.

A digest says nothing of the text, nor of the precision that a machine takes by itself. Both have to be the same for all
runs of a table whose recipe gives them the same folder of text.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import sweep
from sweep import Grid, Runner

from reproduction import provenance, recipes
from reproduction.errors import Problem
from reproduction.identity import Pair, pairs

Labels = tuple[str, ...]


class Conditions(NamedTuple):
    """What a run is of; None is not known."""

    labels: Labels
    text: Optional[str]
    precision: Optional[str]


def check(
    todo: Sequence[Pair], done: Sequence[Pair], entries: Sequence[Mapping[str, Any]], grid: Grid, runner: Runner
) -> None:
    """A Problem if a run of `todo` cannot begin, or what there is then cannot be compared.

    `done` are those of the runner's folder that are finished; `entries` are of the results, where both replace theirs.
    """
    answers = ask(todo, runner.jobs)
    if refusal := next((answer.refusal for answer in answers.values() if answer.refusal), ""):
        raise Problem(refusal)
    new = {pair.bare.digest for pair in (*todo, *done)}
    # results may be of labels that the grid had before, and of rows that it has no more
    seeds = max((entry["seed"] for entry in entries), default=1)
    labels = {pair.bare.digest: pair.labels for pair in pairs(grid, seeds) if pair.bare.digest not in new}
    found = [
        *(Conditions(pair.labels, *now(answers[pair.labels])) for pair in todo),
        *(of_start(pair.labels, start) for pair in (*todo, *done) for start in starts(pair, runner)),
        *(of_start(labels[entry["digest"]], entry) for entry in entries if entry["digest"] in labels),
    ]
    if next(differences(found), None) is None:
        return
    answers |= ask([pair for pair in pairs(grid, 1) if pair.labels not in answers], runner.jobs)
    by_folder = defaultdict(list)
    for conditions in found:
        by_folder[answers[conditions.labels].data].append(conditions)
    if difference := next((text for group in by_folder.values() for text in differences(group)), None):
        raise Problem(f"{runner.out} and the results: {difference}; --out FOLDER --results FOLDER keep them apart")


def ask(todo: Sequence[Pair], jobs: int) -> dict[Labels, recipes.Answer]:
    """What train.sh says of every row."""
    place = dict(sweep.places(jobs)[0])
    found: dict[Labels, recipes.Answer] = {}
    for pair in todo:
        if pair.labels not in found:  # its seeds are alike
            found[pair.labels] = answer = recipes.ask(pair.run, place)
            if answer.flags:
                place["GPUS"] = answer.gpus  # torch, which takes seconds to import, need not be asked again
    return found


def now(answer: recipes.Answer) -> tuple[Optional[str], str]:
    return provenance.checksum(answer.data), recipes.precision(answer.flags)


def starts(pair: Pair, runner: Runner) -> Sequence[Mapping[str, Any]]:
    return provenance.read(runner.folder(pair.run)).starts


def of_start(labels: Labels, known: Mapping[str, Any]) -> Conditions:
    flags = known.get("flags")
    return Conditions(labels, known.get("data"), recipes.precision(flags) if flags else None)


def differences(found: Sequence[Conditions]) -> Iterator[str]:
    """What some of the runs have otherwise than others."""
    for name, values in (
        ("texts (SHA-256)", {conditions.text for conditions in found}),
        ("precisions", {conditions.precision for conditions in found}),
    ):
        if len(known := sorted(values - {None})) > 1:
            yield f"their runs would be of different {name}: {', '.join(known)}"
