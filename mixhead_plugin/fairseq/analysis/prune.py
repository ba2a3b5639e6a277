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

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.analysis import importance, loading, output, scores, smaller
from mixhead_plugin.fairseq.analysis.adapter import prunable
from mixhead_plugin.fairseq.analysis.compare import sizes_scores_times, table_of
from mixhead_plugin.fairseq.analysis.loading import Loaded
from mixhead_plugin.fairseq.analysis.profile import (
    Step,
    draw_profiles,
    profile_label,
    score_with_fewer_heads,
    updates_of,
)
from mixhead_plugin.heads.ablation import without
from mixhead_plugin.heads.assembly_attention import AssemblyAttention
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
        show_profiles(args)
    else:
        cut_off(args)


def importances(
    args: Namespace, loaded: Loaded, attentions: Sequence[AssemblyAttention]
) -> HeadNumbers:
    """Return the importances before --normalize.

    An --at-least that keeps all heads, and a set that is not there, are refused before the work.
    """
    most = max(max(attention.heads.values()) for attention in attentions)
    if most <= args.at_least:
        raise OptionError(f"--at-least {args.at_least}: no head of {loaded.path} can be removed")
    loading.load_subset(loaded, args.subset)
    if args.importance_subset is not None:
        loading.load_subset(loaded, args.importance_subset, "--importance-subset")
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


def picture_labels(args: Namespace) -> list[str]:
    """Return the names of the checkpoints in the picture; refuse equal ones.

    Without --labels they say how far each training had come. The checkpoints are loaded for that
    before the work, because a refusal after it would cost hours.
    """
    defaults = args.checkpoints
    if args.labels is None:
        alone = len(args.checkpoints) == 1
        defaults = []
        for path in args.checkpoints:
            defaults.append(profile_label(loading.load_from(args, path), alone))
    return output.labels(args, defaults)


def show_profiles(args: Namespace) -> None:
    """Score each checkpoint with fewer and fewer heads."""
    labels = picture_labels(args)
    entries: list[dict[str, Any]] = []
    profiles: list[list[Step]] = []
    for path, label in zip(args.checkpoints, labels, strict=True):
        loaded = loading.load_from(args, path)
        attentions = prunable(loaded)
        weights = importances(args, loaded, attentions)
        profile = score_with_fewer_heads(
            loaded,
            attentions,
            NORMALIZATIONS[args.normalize](weights),
            list(loading.batches_from(args, loaded)),
            args.metric,
            args.at_least,
        )
        profiles.append(profile)
        entries.append(
            {
                "label": label,
                "path": path,
                "updates": updates_of(loaded),
                "importance": as_json(weights),
                "steps": [step._asdict() for step in profile],
            }
        )
    for label, profile in zip(labels, profiles, strict=True):
        print(f"{label}: {scores.METRICS[args.metric]} by heads removed")
        for step in profile:
            print(f"  {step.fraction:6.1%} ({step.removed:d})  {step.score:.4f}")
    picture = draw_profiles(dict(zip(labels, profiles, strict=True)), args.metric)
    output.write(args, "prune", {"checkpoints": entries}, {"prune": picture})


def cut_off(args: Namespace) -> None:
    """Write a smaller checkpoint, and compare it with the whole one."""
    path, *others = args.checkpoints
    if others:
        raise OptionError(f"--save {args.save}: cuts one checkpoint, not {len(args.checkpoints)}")
    if os.path.exists(args.save) and os.path.samefile(args.save, path):
        raise OptionError(f"--save {args.save}: is the checkpoint itself")
    whole = loading.load_from(args, path)
    attentions = prunable(whole)
    smaller.refuse_what_cannot_be_cut(whole, attentions)
    weights = NORMALIZATIONS[args.normalize](importances(args, whole, attentions))
    removed = least_important(weights, args.fraction, args.at_least)
    if not removed:
        raise OptionError(
            f"--fraction {args.fraction}: removes none of {len(all_heads(attentions))} heads"
        )
    kept = kept_heads(attentions, removed)
    Path(args.save).absolute().parent.mkdir(parents=True, exist_ok=True)
    smaller.write_smaller(whole, attentions, kept, args.save)
    pruned = loading.load_from(args, args.save)

    batches = list(loading.batches_from(args, whole))
    metrics = list(dict.fromkeys(["loss", args.metric]))
    report = {
        "whole": sizes_scores_times(whole, batches, metrics),
        "pruned": sizes_scores_times(pruned, batches, metrics),
    }
    with without(attentions, removed):
        report["masked"] = scores.score(whole, batches, metrics)
    print(table_of(report))
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
