"""The effective ranks of trained models, by `python -m mixhead_plugin.analysis spectrum`, into the table's JSON."""

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import sweep

from reproduction import keeping, provenance, results
from reproduction.errors import Problem, fail, warn
from reproduction.identity import Pair, pairs
from reproduction.running import RecordingRunner, folder_of
from reproduction.tables import Table


def trained(table: Table, scale: str, seeds: int, out: Path) -> list[tuple[Pair, Path]]:
    """The runs of `out` that are trained, with their best checkpoints."""
    runner = RecordingRunner(folder_of(out, table, scale), 1)
    found = []
    for pair in pairs(table.grid(scale), seeds):
        folder = runner.folder(pair.run)
        checkpoint = folder / "checkpoints" / "checkpoint_best.pt"
        if checkpoint.exists() and (folder / "trained").exists() and not runner.outdated(pair):
            found.append((pair, checkpoint))
    return found


def groups(
    found: Sequence[tuple[Pair, Path]], axes: Mapping[str, Collection[str]]
) -> dict[str, list[tuple[Pair, Path]]]:
    """Those of one seed that differ in the axis of softmax alone: effective ranks of one length can be compared."""
    axis = next((i for i, labels in enumerate(axes.values()) if "softmax" in labels), None)
    grouped = defaultdict(list)
    for pair, checkpoint in found:
        others = [label for i, label in enumerate(pair.labels) if i != axis]
        grouped[sweep.as_name(",".join([*others, f"seed {pair.seed}"]))].append((pair, checkpoint))
    return grouped


def read(path: Path) -> dict[str, dict[str, Any]]:
    """By label what is kept of the numbers of a spectrum.json."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        length = content["length"]
        return {label: {"length": length, **kept(model)} for label, model in content["models"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise Problem(f"{path}: cannot be read: {type(error).__name__}: {error}") from error


def kept(model: Mapping[str, Any]) -> dict[str, Any]:
    places = {
        place: {
            "mean_effective_rank": round(values["mean_effective_rank"], 3),
            "mean_cumulative": [round(share, 4) for share in values["mean_cumulative"]],
        }
        for place, values in model["places"].items()
    }
    return {"windows": model["windows"], "places": places}


def measure(table: Table, scale: str, seeds: int, out: Path, folder: Path) -> int:
    """Returns the exit status: 1 if nothing of what was trained is in the results, or a spectrum could not be made."""
    found = trained(table, scale, seeds, out)
    if not found:
        fail(
            f"{folder_of(out, table, scale)}: has no trained run; `scripts/reproduce.py run {table.name} "
            f"--scale {scale}` makes them"
        )
    grid = table.grid(scale)
    runner = RecordingRunner(folder_of(out, table, scale), 1)
    entries = {entry["digest"]: entry for entry in results.runs(folder, table.name, scale)}
    known, others = [], []
    for pair, checkpoint in found:
        same = entries.get(pair.bare.digest, {}).get("values") == runner.values(pair.run)
        (known if same else others).append((pair, checkpoint))
    for pair, _ in others:
        has = f"{folder / table.name}.json has {'other numbers of' if pair.bare.digest in entries else 'not'} this run"
        warn(f"{runner.folder(pair.run)}: {has}; its spectrum is left out")
    for name, group in groups(known, grid.axes).items():
        titles = ", ".join("/".join(pair.labels) for pair, _ in group)
        if all("spectrum" in entries[pair.bare.digest] for pair, _ in group):
            print(f"{name}: {titles}: done before", flush=True)
            continue
        output = folder_of(out, table, scale) / "spectrum" / name
        # numbers as labels: the rows' own may have commas
        labels = [str(i) for i, _ in enumerate(group)]
        command = [provenance.python_of_the_recipes(), "-m", "mixhead_plugin.analysis", "spectrum"]
        command += [*(str(checkpoint) for _, checkpoint in group), "--labels", ",".join(labels)]
        command += ["--output", str(output)]
        # a group of its own: Ctrl-C ends it from here, without its traceback
        status = subprocess.run(
            command, cwd=sweep.ROOT, stdin=subprocess.DEVNULL, process_group=0, check=False
        ).returncode
        if status:
            print(f"reproduce: spectrum of {name} ended with status {status}", file=sys.stderr)
            return 1
        ranks = read(output / "spectrum.json")
        with keeping.changed(folder, table) as content:
            part = keeping.scale_of(content, table, scale, grid)
            for label, (pair, _) in zip(labels, group):
                for entry in part["runs"]:
                    if entry["digest"] == pair.bare.digest:
                        entry["spectrum"] = ranks[label]
        keeping.share(folder, table, scale)
        print(f"{name}: {titles}", flush=True)
    return 0 if known else 1
