"""Score a model without each single head, and with only one head per layer.

The experiments are those of the sixteen-heads essay, figures 3 to 5:

  single  the model without this head (figure 3)
  only    the model with this head alone in its attention, and all other attentions whole (figure 5)

The score is the criterion's loss, and with --metric also accuracy or BLEU. The numbers are the
changes from the whole model, the baseline; red is worse. Each experiment scores the model once per
head: --limit saves time.

Where heads mix, source heads and mixed heads are removed, one head at a time.

To see whether the same heads matter on two sets, give --subset valid,test. The command then draws
the scores on one set over those on the other, a point for each head, and prints Pearson's r
(figure 4).

Writes ablate-single-<metric>.{png,svg}, ablate-only-<metric>.{png,svg} and ablate.json; for two
sets also the pictures ablate-*-<metric>-2 of the second one and ablate-*-<metric>-correlation.

Example: ablate checkpoint_best.pt --limit 20
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from tqdm import tqdm

from mixhead_plugin.fairseq.analysis import loading, output, scores
from mixhead_plugin.fairseq.analysis.adapter import attentions_of
from mixhead_plugin.heads.ablation import EXPERIMENTS, ablations
from mixhead_plugin.heads.attention import HeadNumbers
from mixhead_plugin.heads.correlation import correlation_figure, pearson
from mixhead_plugin.heads.numbers import as_json, heat_maps, shown_stages, table


def add_arguments(parser: ArgumentParser) -> None:
    loading.add_arguments(parser)
    scores.add_arguments(parser)
    output.add_arguments(parser)


class SubsetScores(NamedTuple):
    """The scores of the model on one subset of the data."""

    whole: dict[str, float]  # of the whole model, by metric
    ablated: dict[str, dict[str, HeadNumbers]]  # by experiment and metric


def run(args: Namespace) -> None:
    loaded, subsets = loading.load_with_subsets(args)
    metrics = list(dict.fromkeys(["loss", args.metric]))
    pictures: dict[str, Any] = {}
    by_subset: dict[str, SubsetScores] = {}
    for subset, ending in zip(subsets, output.ENDINGS_OF_SETS):
        if len(subsets) == 2:
            print(f"{subset}:")
        batches = list(loading.batches_from(args, loaded, subset))
        by_subset[subset] = measure(loaded, batches, metrics)
        show(by_subset[subset], pictures, ending)

    if len(subsets) == 1:
        results = as_results(by_subset[args.subset])
    else:
        sets = []
        for subset, scored in by_subset.items():
            sets.append({"subset": subset, **as_results(scored)})
        results = {"sets": sets, "pearson": compare(by_subset, pictures)}
    output.write(args, "ablate", results, pictures)


def measure(
    loaded: loading.Loaded, batches: scores.Batches, metrics: Sequence[str]
) -> SubsetScores:
    """Score the whole model on `batches`, and each experiment on each head."""

    def score() -> dict[str, float]:
        return scores.score(loaded, batches, metrics)

    attentions = attentions_of(loaded.model)
    whole = score()
    shown = [f"{scores.METRICS[metric]} {whole[metric]:.4f}" for metric in metrics]
    print(f"baseline: {', '.join(shown)}")
    ablated = {}
    for experiment in EXPERIMENTS:
        progress = partial(tqdm, desc=experiment, unit="head", disable=None, leave=False)
        ablated[experiment] = ablations(attentions, experiment, score, progress)
    return SubsetScores(whole, ablated)


def as_results(scored: SubsetScores) -> dict[str, Any]:
    """Return the content of the JSON for one set."""
    results: dict[str, Any] = {"baseline": scored.whole}
    for experiment, by_metric in scored.ablated.items():
        results[experiment] = {metric: as_json(values) for metric, values in by_metric.items()}
    return results


def show(scored: SubsetScores, pictures: dict[str, Any], ending: str) -> None:
    """Print and draw the changes from the whole model.

    Args:
        scored: the scores on one set
        pictures: where to add the pictures, by the name of the file
        ending: how these names end
    """
    for experiment, (words, _) in EXPERIMENTS.items():
        for metric, values in scored.ablated[experiment].items():
            whole = scored.whole[metric]
            changes: HeadNumbers = {}
            for name, by_stage in values.items():
                changes[name] = {stage: score - whole for stage, score in by_stage.items()}
            title = f"change of {scores.METRICS[metric]} {words}"
            worse_is_red = "RdBu_r" if metric == "loss" else "RdBu"
            pictures[f"ablate-{experiment}-{metric}{ending}"] = heat_maps(
                changes, title, worse_is_red
            )
            print(f"{experiment}: {title}\n{table(changes, '+.3f')}")


def compare(by_subset: Mapping[str, SubsetScores], pictures: dict[str, Any]) -> dict[str, Any]:
    """Print, draw and return Pearson's r of the scores on two sets.

    Args:
        by_subset: the scores, by subset
        pictures: where to add the pictures, by the name of the file

    Returns:
        r by experiment, metric and stage
    """
    first, second = by_subset.values()
    correlations: dict[str, Any] = {}
    for experiment, (words, _) in EXPERIMENTS.items():
        correlations[experiment] = {}
        for metric, values in first.ablated[experiment].items():
            r = pearson(values, second.ablated[experiment][metric])
            correlations[experiment][metric] = r
            title = f"{scores.METRICS[metric]} {words}"
            sets = " and ".join(by_subset)
            for stage, heads in shown_stages(values).items():
                print(f"Pearson's r of the {heads}, {title}, {sets}: {r[stage]:.3f}")

            shown = {}
            for subset, scored in by_subset.items():
                shown[subset] = scored.ablated[experiment][metric]
            whole = (first.whole[metric], second.whole[metric])
            pictures[f"ablate-{experiment}-{metric}-correlation"] = correlation_figure(
                shown, r, title, whole
            )
    return correlations
