"""Score a model with fewer and fewer heads, and draw its scores."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from tqdm import tqdm

from mixhead_plugin.fairseq.analysis import scores
from mixhead_plugin.fairseq.analysis.loading import Loaded
from mixhead_plugin.heads import figures
from mixhead_plugin.heads.ablation import without
from mixhead_plugin.heads.assembly_attention import AssemblyAttention
from mixhead_plugin.heads.attention import HeadNumbers
from mixhead_plugin.heads.choosing import all_heads, least_important

FRACTION = 0.1  # of all heads, removed from one step to the next


class Step(NamedTuple):
    """The score after some heads were removed."""

    fraction: float  # removed, of all heads
    removed: int
    score: float


def score_with_fewer_heads(
    loaded: Loaded,
    attentions: Sequence[AssemblyAttention],
    weights: HeadNumbers,
    batches: scores.Batches,
    metric: str,
    at_least: int,
) -> list[Step]:
    """Return the scores of a model with fewer and fewer heads; the first step has all heads.

    Args:
        loaded: the model
        attentions: the attentions of the model whose heads may be removed
        weights: the importance of each head; the least important are removed first
        batches: the data to score the model on
        metric: a key of `scores.METRICS`
        at_least: the number of heads that stay in each attention
    """
    number = len(all_heads(attentions))
    profile: list[Step] = []
    rounds = tqdm(
        range(round(1 / FRACTION) + 1),
        desc=f"{loaded.name}: pruning",
        unit="step",
        disable=None,
        leave=False,
    )
    for i in rounds:
        removed = least_important(weights, i * FRACTION, at_least)
        if profile and len(removed) == profile[-1].removed:
            continue  # at_least keeps all that are left
        with without(attentions, removed):
            score = scores.score(loaded, batches, [metric])[metric]
        profile.append(Step(len(removed) / number, len(removed), score))
    return profile


def updates_of(loaded: Loaded) -> int:
    """Return the number of updates of a checkpoint's training."""
    return loaded.history["optimizer_history"][-1]["num_updates"]


def profile_label(loaded: Loaded, alone: bool) -> str:
    """Return the name of a checkpoint in the picture.

    Args:
        loaded: the model
        alone: whether it is the only one; else its epoch and updates are enough, because
            checkpoints of one training differ in them
    """
    progress = _training_progress(loaded)
    if not progress:
        return loaded.name
    if alone:
        return f"{loaded.name}, {progress}"
    return progress


def _training_progress(loaded: Loaded) -> str:
    """Return words for the epoch and the updates of a checkpoint; empty without updates."""
    updates = updates_of(loaded)
    if not updates:
        return ""
    iterator = loaded.history["extra_state"].get("train_iterator") or {}
    epoch = iterator.get("epoch", 1)
    if not iterator.get("iterations_in_epoch"):
        epoch -= 1  # between two epochs, fairseq stores the number of the next one
    if epoch > 0:
        return f"epoch {epoch}, {updates:,} updates"
    return f"{updates:,} updates"


def worse_by(profile: Sequence[Step], metric: str) -> list[float]:
    """Return by how much each step is worse than the first, in percent of the first.

    If the first score is 0, as BLEU may be, all are NaN.
    """
    whole = profile[0].score
    if whole == 0:
        return [math.nan] * len(profile)
    sign = 1 if metric == "loss" else -1
    return [100 * sign * (step.score - whole) / abs(whole) for step in profile]


def draw_profiles(profiles: dict[str, list[Step]], metric: str) -> Any:
    """Draw the scores of one checkpoint, or how much worse those of several become.

    Args:
        profiles: by label, the steps of each checkpoint
        metric: a key of `scores.METRICS`
    """
    title = scores.METRICS[metric]
    several = len(profiles) > 1
    with figures.style():
        figure, ((panel,),) = figures.subplots(1, 1, (4.6, 3.4))
        looks = figures.looks(profiles)
        for label, profile in profiles.items():
            x = [100 * step.fraction for step in profile]
            y = [step.score for step in profile]
            if several:
                y = worse_by(profile, metric)
            legend = f"{label} ({profile[0].score:.2f} with all heads)"
            look = {**looks[label], "marker": "o", "markersize": 3, "label": legend}
            panel.plot(x, y, **look)
        if several:
            panel.axhline(0, color="grey", linewidth=0.8, zorder=0)  # the whole models
            change = "increase" if metric == "loss" else "decrease"
            panel.set_ylabel(f"{change} of {title.partition(' (')[0]} (%)")
            panel.legend(title=title, title_fontsize=8)
        else:
            ((label, profile),) = profiles.items()
            whole = profile[0].score
            panel.axhline(whole, color="grey", linewidth=0.8, zorder=0)
            panel.set(ylabel=title, title=label)
        panel.set(xlabel="heads removed (%)", xlim=(-2, 102))
    return figure
