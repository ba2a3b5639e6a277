"""Take heads away and score what is left, one experiment for each head:

  single  the model without this head alone (Michel et al. 2019, figure 3)
  only    the model with this head alone in its attention; all other attentions stay whole (figure 5)

Always on the criterion's loss, and with --metric on accuracy or BLEU too. Where heads mix, source heads, whose weights
are mixed, and mixed heads, whose outputs go to out_proj, are taken away apart. The numbers are changes against the
whole model, whose score is the baseline; red is worse. As many scorings as there are heads, twice: see --limit.

Writes ablate-single-<metric>.{png,svg}, ablate-only-<metric>.{png,svg} and ablate.json.
"""

from argparse import ArgumentParser, Namespace
from typing import Callable, Collection, Dict, List, Mapping

import torch
from tqdm import tqdm

from mixhead_plugin.analysis import figures, head_numbers, loading, scores
from mixhead_plugin.analysis.attentions import attentions
from mixhead_plugin.analysis.heads import Head, all_heads, kinds, without
from mixhead_plugin.analysis.weighing import HeadNumbers
from mixhead_plugin.modules.attention import MixheadAttention
from mixhead_plugin.modules.pruning import number_of_heads


def add_arguments(parser: ArgumentParser) -> None:
    loading.add_arguments(parser)
    scores.add_arguments(parser)
    figures.add_arguments(parser)


def single(head: Head, heads: Collection[Head]) -> List[Head]:
    """What is removed to see what is lost without `head`."""
    return [head]


def only(head: Head, heads: Collection[Head]) -> List[Head]:
    """What is removed to see whether `head` does alone in its attention, among those of its kind."""
    return [h for h in heads if h.attention == head.attention and h.kind == head.kind and h != head]


EXPERIMENTS: Dict[str, Callable[[Head, Collection[Head]], List[Head]]] = {"single": single, "only": only}

WORDS = {"single": "without this head", "only": "with this head alone in its attention"}


def run(args: Namespace) -> None:
    loaded = loading.load_from(args, args.checkpoint)
    found = attentions(loaded.model)
    batches = list(loading.batches_from(args, loaded))
    metrics = list(dict.fromkeys(["loss", args.metric]))

    def score() -> Dict[str, float]:
        return scores.score(loaded, batches, args, metrics)

    baseline = score()
    print("baseline: " + ", ".join(f"{scores.METRICS[metric].title} {baseline[metric]:.4f}" for metric in metrics))
    measured = ablations(found, score)
    results, files = {"baseline": baseline}, []
    for experiment, by_metric in measured.items():
        results[experiment] = {}
        for metric, values in by_metric.items():
            changes = {n: {k: v - baseline[metric] for k, v in by_kind.items()} for n, by_kind in values.items()}
            title = f"change of {scores.METRICS[metric].title} {WORDS[experiment]}"
            worse = "low" if scores.METRICS[metric].higher_is_better else "high"
            figure = head_numbers.heat_maps(loaded.model, changes, title, worse)
            files += figures.save(figure, args.output, f"ablate-{experiment}-{metric}")
            print(f"{experiment}: {title}")
            print(head_numbers.table(changes, "{:+.3f}"))
            results[experiment][metric] = head_numbers.as_json(values)
    files.append(figures.save_json(args.output, "ablate", args, results))
    figures.report(files)


def ablations(
    found: Mapping[str, MixheadAttention], score: Callable[[], Dict[str, float]]
) -> Dict[str, Dict[str, HeadNumbers]]:
    """What `score` gives when single heads are gone, or alone.

    Args:
        found: the attentions, by name
        score: the scores of the model as it is when called, by metric

    Returns:
        by experiment, then by metric, the score for each head, [H] float64
    """
    heads = all_heads(found)
    measured: Dict[str, Dict[str, HeadNumbers]] = {experiment: {} for experiment in EXPERIMENTS}
    with tqdm(total=len(heads) * len(EXPERIMENTS), unit="head", disable=None, leave=False) as progress:
        for experiment, removal in EXPERIMENTS.items():
            for head in heads:
                progress.set_description(f"{experiment}: {head.attention}")
                with without(found, removal(head, heads)):
                    for metric, value in score().items():
                        values = measured[experiment].setdefault(metric, _blank(found))
                        values[head.attention][head.kind][head.index] = value
                progress.update()
    return measured


def _blank(found: Mapping[str, MixheadAttention]) -> HeadNumbers:
    return {
        name: {kind: torch.zeros(number_of_heads(attention, kind), dtype=torch.float64) for kind in kinds(attention)}
        for name, attention in found.items()
    }
