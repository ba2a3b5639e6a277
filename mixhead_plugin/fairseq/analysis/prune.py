"""Show the score without the least important heads, or write a smaller checkpoint.

For one checkpoint, the figure shows the score over the fraction of heads removed, in steps of 10%.
For several checkpoints of one training, it shows how much worse each score becomes (sixteen-heads
essay, figures 7 and 8).

The importance comes from a pass over --importance-subset. At least one head stays in each
attention. Where heads mix, the same fraction of source and of mixed heads is removed. Attentions
outside --attention-scope do not change.

With --fraction 0.4 --save pruned.pt, the command writes a checkpoint without these heads: its
projections are smaller, and its config has the numbers of heads. All commands of fairseq can use
it. It computes the same as the whole model with the removed heads masked. The command prints the
parameters, time and score of both.

Writes prune.{png,svg,json}, or with --save the checkpoint and prune-save.json.

Example: prune checkpoint_best.pt --fraction 0.4 --save pruned.pt
"""

import math
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.benchmark import Timer
from tqdm import tqdm

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.analysis import importance, loading, output, scores, smaller
from mixhead_plugin.fairseq.analysis.adapter import prunable
from mixhead_plugin.fairseq.analysis.loading import Loaded
from mixhead_plugin.heads import figures
from mixhead_plugin.heads.ablation import without
from mixhead_plugin.heads.assembly import AssemblyAttention
from mixhead_plugin.heads.attention import HeadNumbers
from mixhead_plugin.heads.choosing import (
    Head,
    KeptHeads,
    all_heads,
    by_attention,
    kept_by,
    least_important,
)
from mixhead_plugin.heads.importance import NORMALIZATIONS
from mixhead_plugin.heads.numbers import as_json

STEP = 0.1
TIMED_BATCHES = 4
TITLES = {
    **scores.METRICS,
    "forward_s": "scoring of 4 batches at most (s)",
    "decoding_ms": "decoding of a batch (ms a token)",
}


def add_arguments(parser: ArgumentParser) -> None:
    loading.add_arguments(parser, several=True)
    parser.add_argument(
        "--importance-subset", metavar="NAME", help="the set to weigh heads on (default: --subset)"
    )
    importance.add_normalization(parser, default="layer")
    text = "heads that stay in each attention (default: %(default)s)"
    parser.add_argument("--at-least", type=loading.positive, default=1, metavar="N", help=text)
    parser.add_argument(
        "--fraction", type=float, metavar="F", help="with --save: the fraction of heads to cut off"
    )
    parser.add_argument(
        "--save",
        type=output.writable_file,
        metavar="FILE",
        help="a checkpoint without the cut heads",
    )
    scores.add_arguments(parser)
    output.add_arguments(parser, labels=True)


def run(args: Namespace) -> None:
    if (args.save is None) != (args.fraction is None):
        raise OptionError("--fraction and --save: each needs the other")
    if args.fraction is not None and not 0 < args.fraction <= 1:
        raise OptionError(f"--fraction {args.fraction}: must be above 0 and at most 1")
    if args.save is None:
        profiles(args)
    else:
        cut_off(args)


def importances(
    args: Namespace, loaded: Loaded, attentions: Sequence[AssemblyAttention]
) -> HeadNumbers:
    """Return the importances before --normalize; refuse an --at-least that keeps all heads."""
    most = max(max(attention.heads.values()) for attention in attentions)
    if most <= args.at_least:
        raise OptionError(f"--at-least {args.at_least}: no head of {loaded.path} can be removed")
    weights, _ = importance.weigh(args, loaded, args.importance_subset or args.subset)
    return {attention.name: weights[attention.name] for attention in attentions}


def kept_heads(
    attentions: Sequence[AssemblyAttention], removed: Sequence[Head]
) -> dict[str, KeptHeads]:
    """Return the heads of every attention that are not in `removed`."""
    gone = by_attention(removed)
    kept = {}
    for attention in attentions:
        kept[attention.name] = kept_by(attention, gone.get(attention.name, {}))
    return kept


class Step(NamedTuple):
    """The score after some heads were removed."""

    fraction: float  # removed, of all heads
    removed: int
    score: float


def profiles(args: Namespace) -> None:
    """Score each checkpoint with fewer and fewer heads."""
    output.labels(args, args.checkpoints)  # refuse wrong names before the work
    entries: list[dict[str, Any]] = []
    all_steps: list[list[Step]] = []
    for path in args.checkpoints:
        loaded = loading.load_from(args, path)
        attentions = prunable(loaded)
        weights = importances(args, loaded, attentions)
        steps_of_one = steps(args, loaded, attentions, weights)
        all_steps.append(steps_of_one)
        words, updates = training_progress(loaded)
        if not words:
            label = loaded.name
        elif len(args.checkpoints) == 1:
            label = f"{loaded.name}, {words}"
        else:
            label = words  # checkpoints of one training differ in their updates
        entries.append(
            {
                "label": label,
                "path": path,
                "updates": updates,
                "importance": as_json(weights),
                "steps": [step._asdict() for step in steps_of_one],
            }
        )
    labels = output.labels(args, [entry["label"] for entry in entries])
    for label, entry, steps_of_one in zip(labels, entries, all_steps, strict=True):
        entry["label"] = label
        print(f"{label}: {scores.METRICS[args.metric]} by heads removed")
        for step in steps_of_one:
            print(f"  {step.fraction:6.1%} ({step.removed:d})  {step.score:.4f}")
    picture = profile_figure(dict(zip(labels, all_steps, strict=True)), args.metric)
    output.write(args, "prune", {"checkpoints": entries}, {"prune": picture})


def steps(
    args: Namespace,
    loaded: Loaded,
    attentions: Sequence[AssemblyAttention],
    weights: HeadNumbers,
) -> list[Step]:
    """Return the scores of the model with fewer and fewer heads, down to --at-least."""
    number = len(all_heads(attentions))
    weights = NORMALIZATIONS[args.normalize](weights)
    batches = list(loading.batches_from(args, loaded))
    progress = f"{loaded.name}: pruning"
    done: list[Step] = []
    rounds = range(round(1 / STEP) + 1)
    for i in tqdm(rounds, progress, unit="step", disable=None, leave=False):
        removed = least_important(weights, i * STEP, args.at_least)
        if done and len(removed) == done[-1].removed:
            continue  # --at-least keeps all that are left
        with without(attentions, removed):
            score = scores.score(loaded, batches, [args.metric])[args.metric]
        done.append(Step(len(removed) / number, len(removed), score))
    return done


def training_progress(loaded: Loaded) -> tuple[str, int]:
    """Return words for the epoch and updates of a checkpoint, and the number of updates."""
    updates = loaded.history["optimizer_history"][-1]["num_updates"]
    iterator = loaded.history["extra_state"].get("train_iterator") or {}
    epoch = iterator.get("epoch", 1)
    if not iterator.get("iterations_in_epoch"):
        epoch -= 1  # between two epochs, fairseq stores the number of the next one
    if not updates:
        words = ""
    elif epoch > 0:
        words = f"epoch {epoch}, {updates:,} updates"
    else:
        words = f"{updates:,} updates"
    return words, updates


def worse_by(steps: Sequence[Step], metric: str) -> list[float]:
    """Return by how much each step is worse than the first, in percent of the first."""
    whole = steps[0].score
    if whole == 0:
        return [math.nan] * len(steps)
    sign = 1 if metric == "loss" else -1
    return [100 * sign * (step.score - whole) / abs(whole) for step in steps]


def profile_figure(profiles: dict[str, list[Step]], metric: str) -> Any:
    """Draw the scores of one checkpoint, or how much worse those of several become."""
    title = scores.METRICS[metric]
    several = len(profiles) > 1
    with figures.style():
        figure, ((panel,),) = figures.subplots(1, 1, (4.6, 3.4))
        lines = figures.lines(profiles)
        for label, steps in profiles.items():
            x = [100 * step.fraction for step in steps]
            y = worse_by(steps, metric) if several else [step.score for step in steps]
            legend = f"{label} ({steps[0].score:.2f} with all heads)"
            look = {**lines[label], "marker": "o", "markersize": 3, "label": legend}
            panel.plot(x, y, **look)
        panel.axhline(y[0], color="grey", linewidth=0.8, zorder=0)  # the whole model
        if several:
            change = "increase" if metric == "loss" else "decrease"
            panel.set_ylabel(f"{change} of {title.partition(' (')[0]} (%)")
            panel.legend(title=title, title_fontsize=8)
        else:
            panel.set(ylabel=title, title=label)
        panel.set(xlabel="heads removed (%)", xlim=(-2, 102))
    return figure


def cut_off(args: Namespace) -> None:
    """Write a smaller checkpoint, and compare it with the whole one."""
    path, *others = args.checkpoints
    if others:
        raise OptionError(f"--save {args.save}: cuts one checkpoint, not {len(args.checkpoints)}")
    if os.path.exists(args.save) and os.path.samefile(args.save, path):
        raise OptionError(f"--save {args.save}: is the checkpoint itself")
    whole = loading.load_from(args, path)
    attentions = prunable(whole)
    for attention in attentions:
        smaller.refuse_what_cannot_be_cut(attention)
    weights = NORMALIZATIONS[args.normalize](importances(args, whole, attentions))
    removed = least_important(weights, args.fraction, args.at_least)
    if not removed:
        raise OptionError(
            f"--fraction {args.fraction}: removes none of {len(all_heads(attentions))} heads"
        )
    kept = kept_heads(attentions, removed)
    smaller.write(whole, attentions, kept, args.save)
    pruned = loading.load_from(args, args.save)

    batches = list(loading.batches_from(args, whole))
    metrics = list(dict.fromkeys(["loss", args.metric]))
    report = {
        "whole": measured(whole, batches, metrics),
        "pruned": measured(pruned, batches, metrics),
    }
    with without(attentions, removed):
        report["masked"] = scores.score(whole, batches, metrics)
    print(comparison(report))
    print("to train on: fairseq-train with the flags of its training, followed by")
    print(f"  {smaller.training_flags(pruned, args.save, args.user_dir)}")
    print(f"wrote {args.save}")
    results = {
        "checkpoint": path,
        "heads_per_layer": pruned.cfg.model.heads_per_layer,
        "kept": {name: heads._asdict() for name, heads in kept.items()},
        **report,
    }
    output.write(args, "prune-save", results, {})


def measured(loaded: Loaded, batches: scores.Batches, metrics: Sequence[str]) -> dict[str, Any]:
    """Return the sizes, the scores and the times of a model."""
    report: dict[str, Any] = {**sizes(loaded), **scores.score(loaded, batches, metrics)}
    some = batches[:TIMED_BATCHES]
    report["forward_s"] = seconds(partial(scores.criterion_averages, loaded, some))
    if scores.translates(loaded):
        translate = partial(scores.translate, loaded, some[:1])
        # A token, because two models write translations of different lengths.
        tokens = sum(len(translation) for translation in translate()[0])
        report["decoding_ms"] = 1000 * seconds(translate) / tokens
    return report


def sizes(loaded: Loaded) -> dict[str, int]:
    """Return the numbers of parameters and of heads of a model."""
    stages = [head.stage for head in all_heads(prunable(loaded))]
    report = {
        "parameters": sum(p.numel() for p in loaded.model.parameters()),
        "heads": stages.count("mixed"),
    }
    if "source" in stages:
        report["source heads"] = stages.count("source")
    return report


def seconds(function: Callable[[], object]) -> float:
    """Return the median time of a call."""
    threads = torch.get_num_threads()
    timer = Timer("function()", globals={"function": function}, num_threads=threads)
    return timer.blocked_autorange().median


def comparison(report: dict[str, dict[str, Any]]) -> str:
    """Return a table with a column for each model."""
    models = ("whole", "masked", "pruned")
    lines = [" " * 36 + "".join(f"{name:>12s}" for name in models)]
    for row in report["whole"]:
        cells = "".join(f"{_cell(report[name].get(row)):>12s}" for name in models)
        lines.append(f"{TITLES.get(row, row):36s}{cells}")
    return "\n".join(lines)


def _cell(value: float | int | None) -> str:
    if value is None:  # a masked model is as large and as fast as the whole one
        return ""
    return f"{value:.4f}" if isinstance(value, float) else f"{value:,}"
