"""Remove the least important heads of all layers, in steps of 10%, and score what is left.

One checkpoint: its score over the heads removed (Michel et al. 2019, figure 7). Several checkpoints of one training:
how much of its score each loses, labelled by epoch and updates (figure 8).

The importance comes from the command's own pass over --importance-subset, or from --importance FILE. At least one head
stays in each attention. Where heads mix, source heads, whose weights are mixed, and mixed heads, whose outputs go to
out_proj, are ranked and removed apart, the same fraction of each. Attention that --attention-scope left to fairseq's
own stays as it is.

With --fraction 0.4 --save pruned.pt, the heads are cut off: a checkpoint with smaller projections and the numbers of
heads in its config, which fairseq-generate, fairseq-eval-lm and fairseq-train take. It computes what the whole model
computes with the others masked; parameters, time and score are printed for both.

Writes prune.{png,svg,json}, or with --save the checkpoint and prune-save.json.
"""

import argparse
import math
import os
from argparse import ArgumentParser, Namespace
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from fairseq import checkpoint_utils
from matplotlib.figure import Figure
from tqdm import tqdm

from mixhead_plugin.analysis import figures, head_numbers, importance, loading, scores, smaller
from mixhead_plugin.analysis.heads import all_heads, kept_heads, kinds, without
from mixhead_plugin.analysis.loading import Loaded
from mixhead_plugin.analysis.timing import medians
from mixhead_plugin.analysis.weighing import NORMALISATIONS, HeadNumbers, least_important
from mixhead_plugin.errors import OptionError
from mixhead_plugin.modules.pruning import number_of_heads

STEP = 0.1
TIMED_BATCHES = 4


def add_arguments(parser: ArgumentParser) -> None:
    loading.add_arguments(parser, several=True)
    parser.add_argument(
        "--importance", metavar="FILE", help="importance.json of the command importance; its first set counts"
    )
    parser.add_argument("--importance-subset", metavar="NAME", help="the set to weigh heads on (default: --subset)")
    importance.add_normalisation(parser, default="layer")
    parser.add_argument(
        "--at-least",
        type=loading.positive,
        default=1,
        metavar="N",
        help="heads that stay in each attention (default: 1)",
    )
    parser.add_argument("--fraction", type=fraction, metavar="F", help="with --save: how much of the heads to cut off")
    parser.add_argument("--save", metavar="FILE", help="write the checkpoint without them")
    scores.add_arguments(parser)
    figures.add_labels(parser)
    figures.add_arguments(parser)


def fraction(text: str) -> float:
    """argparse's type of a number above 0, at most 1."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text}: must be above 0 and at most 1")
    return value


def run(args: Namespace) -> None:
    if (args.save is None) != (args.fraction is None):
        given, missing = ("--fraction", "--save FILE") if args.save is None else ("--save", "--fraction F")
        raise OptionError(f"{given} {args.fraction if args.save is None else args.save}: needs {missing}")
    if args.save is None:
        _sweep(args)
    elif len(args.checkpoints) > 1:
        raise OptionError(f"--save {args.save}: cuts one checkpoint, not {len(args.checkpoints)}")
    else:
        _save(args, args.checkpoints[0])


def importances(args: Namespace, loaded: Loaded) -> HeadNumbers:
    """Of the heads that can go, as --importance or a pass over the data says, before --normalize."""
    found = smaller.prunable(loaded)
    if args.importance is not None:
        return head_numbers.read_importance(args.importance, found)
    flag = "--subset" if args.importance_subset is None else "--importance-subset"
    weighed = importance.weigh(args, loaded, args.importance_subset or args.subset, flag)
    return {name: weighed.weights[name] for name in found}


# ---- figures 7 and 8 -------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """One point of a pruning profile."""

    fraction: float  # of all heads that are gone
    removed: int
    score: float


class Profile(NamedTuple):
    """How the score of one checkpoint falls."""

    label: str
    updates: int
    steps: List[Step]

    def relative(self, higher_is_better: bool) -> List[float]:
        """By how much each step is worse than the first, in percent of it."""
        whole = self.steps[0].score
        sign = -1 if higher_is_better else 1
        return [100 * sign * (step.score - whole) / abs(whole) if whole else math.nan for step in self.steps]


def _sweep(args: Namespace) -> None:
    profiles, entries = [], []
    for path, given in zip(args.checkpoints, figures.labels(args, len(args.checkpoints))):
        loaded = loading.load_from(args, path)
        _check_at_least(args, loaded)
        label, updates = training_progress(path)
        weights = importances(args, loaded)
        # the checkpoints of one training are told by their updates
        words = [label] if len(args.checkpoints) > 1 and label else [loaded.name, label]
        profile = Profile(given or ", ".join(filter(None, words)), updates, steps(args, loaded, weights))
        profiles.append(profile)
        entries.append(
            {
                "label": profile.label,
                "path": path,
                "updates": updates,
                "importance": head_numbers.as_json(weights),
                "steps": [step._asdict() for step in profile.steps],
            }
        )
        print(_table(profile, args.metric))
    figures.check_distinct([profile.label for profile in profiles])
    figure = profile_figure(profiles, args.metric)
    files = figures.save(figure, args.output, "prune")
    files.append(figures.save_json(args.output, "prune", args, {"checkpoints": entries}))
    figures.report(files)


def steps(args: Namespace, loaded: Loaded, weights: HeadNumbers) -> List[Step]:
    """The scores while more and more heads are gone, until no more may go."""
    found = smaller.prunable(loaded)
    number = len(all_heads(found))
    normalised = NORMALISATIONS[args.normalize](weights)
    batches = list(loading.batches_from(args, loaded))
    done: List[Step] = []
    for i in tqdm(range(round(1 / STEP) + 1), desc=f"{loaded.name}: pruning", unit="step", disable=None, leave=False):
        removed = least_important(normalised, i * STEP, args.at_least)
        if done and len(removed) == done[-1].removed:
            continue  # few heads, or all that may go are gone
        with without(found, removed):
            score = scores.score(loaded, batches, args, [args.metric])[args.metric]
        done.append(Step(len(removed) / number, len(removed), score))
    return done


def training_progress(path: str) -> "tuple[Optional[str], int]":
    """What a checkpoint says of when in its training it was written, as a label, and the number of updates."""
    state = checkpoint_utils.load_checkpoint_to_cpu(path)
    updates = state["optimizer_history"][-1]["num_updates"]
    iterator = state["extra_state"].get("train_iterator") or {}
    if not updates:
        return None, 0
    # between two epochs fairseq names the one to come
    epoch = iterator.get("epoch", 1) - (0 if iterator.get("iterations_in_epoch") else 1)
    return (f"epoch {epoch}, " if epoch > 0 else "") + f"{updates:,} updates", updates


def profile_figure(profiles: Sequence[Profile], metric: str) -> Figure:
    """One profile as scores; several as what is lost of them, the score of the whole model in brackets."""
    kind = scores.METRICS[metric]
    with figures.style():
        figure, axes = figures.subplots(1, 1, (4.6, 3.4))
        panel = axes[0, 0]
        for i, profile in enumerate(profiles):
            x = [100 * step.fraction for step in profile.steps]
            if len(profiles) == 1:
                y = [step.score for step in profile.steps]
                panel.axhline(y[0], color="grey", linewidth=0.8, zorder=0)  # the whole model
                label = profile.label
            else:
                y = profile.relative(kind.higher_is_better)
                label = f"{profile.label} [{profile.steps[0].score:.2f}]"
            panel.plot(x, y, marker="o", markersize=3, label=label, **figures.line(i))
        if len(profiles) == 1:
            panel.set(ylabel=kind.title, title=profiles[0].label)
        else:
            panel.set(
                ylabel=f"{'decrease' if kind.higher_is_better else 'increase'} of {kind.title.partition(' (')[0]} (%)"
            )
            panel.legend(title=f"[{kind.title} of the whole model]", title_fontsize=8)
        panel.set(xlabel="heads removed (%)", xlim=(-2, 102))
        panel.grid(True)
    return figure


def _table(profile: Profile, metric: str) -> str:
    lines = [f"{profile.label}: {scores.METRICS[metric].title} by heads removed"]
    lines += [f"  {step.fraction:6.1%} ({step.removed:d})  {step.score:.4f}" for step in profile.steps]
    return "\n".join(lines)


# ---- a smaller checkpoint --------------------------------------------------------------------------------------------


def _save(args: Namespace, path: str) -> None:
    _check_target(args.save, path)
    loaded = loading.load_from(args, path)
    _check_at_least(args, loaded)
    found = smaller.prunable(loaded)
    weights = NORMALISATIONS[args.normalize](importances(args, loaded))
    removed = least_important(weights, args.fraction, args.at_least)
    if not removed:
        raise OptionError(
            f"--fraction {args.fraction}: removes none of {len(all_heads(found))} heads "
            f"with --at-least {args.at_least}; must be larger"
        )
    kept = kept_heads(found, removed)
    smaller.write(loaded, kept, args.save)
    cut = loading.load_from(args, args.save)

    batches = list(loading.batches_from(args, loaded))
    metrics = list(dict.fromkeys(["loss", args.metric]))
    report: Dict[str, Dict[str, Any]] = {
        "whole": scores.score(loaded, batches, args, metrics),
        "pruned": scores.score(cut, batches, args, metrics),
    }
    with without(found, removed):
        report["masked"] = scores.score(loaded, batches, args, metrics)
    _count(report["whole"], loaded)
    _count(report["pruned"], cut)
    for name, seconds in _times(args, loaded, cut, batches).items():
        for which, value in seconds.items():
            report[which][name] = value

    print(_comparison(report, metrics))
    print("to train on: fairseq-train with the flags of its training, and behind them")
    print(f"  {smaller.training_flags(cut, args.save)}")
    results = {
        "checkpoint": path,
        "heads_per_layer": cut.cfg.model.heads_per_layer,
        "kept": {name: stays._asdict() for name, stays in kept.items()},
        **report,
    }
    figures.report([args.save, figures.save_json(args.output, "prune-save", args, results)])


def _check_at_least(args: Namespace, loaded: Loaded) -> None:
    found = smaller.prunable(loaded)
    most = max((number_of_heads(a, kind) for a in found.values() for kind in kinds(a)), default=0)
    if most <= args.at_least:
        raise OptionError(
            f"--at-least {args.at_least}: no head of {loaded.path} can go; "
            + (f"must be below {most}, the most heads of an attention" if most > 1 else "each attention has one")
        )


def _check_target(file: str, path: str) -> None:
    folder = os.path.dirname(os.path.abspath(file))
    if not os.path.isdir(folder):
        raise OptionError(f"--save {file}: there is no folder {folder}")
    if os.path.isdir(file):
        raise OptionError(f"--save {file}: is a folder")
    if os.path.exists(file) and os.path.exists(path) and os.path.samefile(file, path):
        raise OptionError(f"--save {file}: is the checkpoint itself")
    figures.check_folder("--save", file, folder)


def _count(report: Dict[str, Any], loaded: Loaded) -> None:
    """Parameters, and heads by kind."""
    report["parameters"] = sum(parameter.numel() for parameter in loaded.model.parameters())
    found = smaller.prunable(loaded)
    report["heads"] = len([head for head in all_heads(found) if head.kind == "mixed"])
    if any("source" in kinds(attention) for attention in found.values()):
        report["source heads"] = len([head for head in all_heads(found) if head.kind == "source"])


def _times(args: Namespace, whole: Loaded, cut: Loaded, batches: scores.Batches) -> Dict[str, Dict[str, float]]:
    """Median seconds of passes over a few batches, and of their translation, of both models."""
    some = batches[:TIMED_BATCHES]
    models = {"whole": whole, "pruned": cut}
    times = {"forward_s": medians({n: lambda m=m: scores.criterion_averages(m, some) for n, m in models.items()})}
    if scores.translates(whole):
        flags = scores.generation_flags(whole, args)
        times["decoding_s"] = medians(
            {n: lambda m=m: scores.translate(m, some[:1], flags) for n, m in models.items()}, repetitions=3
        )
    return times


def _comparison(report: Dict[str, Dict[str, Any]], metrics: Sequence[str]) -> str:
    """The table of `_save`."""
    mixed = "mixed heads" if "source heads" in report["whole"] else "heads"
    titles = {"parameters": "parameters", "source heads": "source heads", "heads": mixed}
    titles |= {metric: scores.METRICS[metric].title for metric in metrics}
    titles |= {"forward_s": f"scoring of {TIMED_BATCHES} batches at most (s)", "decoding_s": "decoding of a batch (s)"}
    lines = [f"{'':36s}{'whole':>12s}{'masked':>12s}{'pruned':>12s}"]
    for row, title in titles.items():
        if row in report["whole"]:
            cells = []
            for which in ("whole", "masked", "pruned"):
                value = report[which].get(row)
                cells.append("" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4f}")
            lines.append(f"{title:36s}" + "".join(f"{cell:>12s}" for cell in cells))
    return "\n".join(lines)
