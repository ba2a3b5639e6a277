"""Score a model without each single head, and with only one head per layer (sixteen-heads essay, figures 3 and 5).

  single  the model without this head (figure 3)
  only    the model with this head alone in its attention; all other attentions stay whole (figure 5)

The score is the criterion's loss, and with --metric also accuracy or BLEU. The numbers are the changes from the whole
model, the baseline; red is worse. Each experiment scores the model once per head: --limit saves time.

Where heads mix, source heads and mixed heads are removed, one head at a time.

Writes ablate-single-<metric>.{png,svg}, ablate-only-<metric>.{png,svg} and ablate.json.

Example: ablate checkpoint_best.pt --limit 20
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping

import torch
from tqdm import tqdm

from mixhead_plugin.analysis import loading, output, scores
from mixhead_plugin.analysis.heads import HeadNumbers, all_heads, as_json, attentions, heat_maps, table, without
from mixhead_plugin.modules.attention import MixheadAttention

EXPERIMENTS = {"single": "without this head", "only": "with this head alone in its attention"}


def add_arguments(parser: ArgumentParser) -> None:
    loading.add_arguments(parser)
    scores.add_arguments(parser)
    output.add_arguments(parser)


def run(args: Namespace) -> None:
    loaded = loading.load_from(args, args.checkpoint)
    batches = list(loading.batches_from(args, loaded))
    metrics = list(dict.fromkeys(["loss", args.metric]))

    def score() -> dict[str, float]:
        return scores.score(loaded, batches, metrics)

    baseline = score()
    print("baseline: " + ", ".join(f"{scores.METRICS[metric]} {baseline[metric]:.4f}" for metric in metrics))
    results, pictures = {"baseline": baseline}, {}
    for experiment, words in EXPERIMENTS.items():
        results[experiment] = {}
        for metric, values in ablations(attentions(loaded.model), experiment, score).items():
            changes = {n: {k: v - baseline[metric] for k, v in by_kind.items()} for n, by_kind in values.items()}
            title = f"change of {scores.METRICS[metric]} {words}"
            worse_is_red = "RdBu_r" if metric == "loss" else "RdBu"
            pictures[f"ablate-{experiment}-{metric}"] = heat_maps(changes, title, worse_is_red)
            print(f"{experiment}: {title}\n{table(changes, '+.3f')}")
            results[experiment][metric] = as_json(values)
    output.write(args, "ablate", results, pictures)


def ablations(
    found: Mapping[str, MixheadAttention], experiment: str, score: Callable[[], dict[str, float]]
) -> dict[str, HeadNumbers]:
    """Return the scores of an experiment on each head, by metric; `score` scores the model once."""
    measured: dict[str, HeadNumbers] = {}
    heads = all_heads(found)
    for head in tqdm(heads, desc=experiment, unit="head", disable=None, leave=False):
        others = [h for h in heads if h.attention == head.attention and h.kind == head.kind and h != head]
        with without(found, [head] if experiment == "single" else others):
            for metric, value in score().items():
                by_kind = measured.setdefault(metric, {}).setdefault(head.attention, {})
                before = by_kind.get(head.kind, torch.empty(0).double())
                by_kind[head.kind] = torch.cat([before, torch.tensor([value]).double()])  # heads come by their index
    return measured
