"""Weigh every head by one backward pass per batch.

The importance of head h is I_h, the mean over the sentences of |dL/d xi_h|, for a gate xi_h = 1 on
the head (Michel et al. 2019, section 4.1; the essay 'Are Sixteen Heads Really Better than One?',
'Systematic Head Pruning').

L is the loss that the model was trained with, summed over a sentence (over a window, for language
models). Where heads mix, the weights of source heads are mixed, and the outputs of mixed heads go
to out_proj; both are weighed.

To compare two sets, give --subset valid,test. The command draws the importances on one set over
those on the other, and prints Pearson's r. Figure 4 of the essay compares the scores after ablating
instead: `ablate --subset valid,test`.

Writes importance.{png,svg,json}, for two sets also importance-2.{png,svg} and
importance-correlation.{png,svg}.

Example: importance checkpoint_best.pt --subset valid
"""

from argparse import ArgumentParser, Namespace
from typing import Any

from fairseq.modules.checkpoint_activations import unwrap_checkpoint

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.analysis import loading, output
from mixhead_plugin.fairseq.analysis.adapter import attentions_of
from mixhead_plugin.fairseq.analysis.loading import Loaded
from mixhead_plugin.heads.attention import HeadNumbers, HeadsError
from mixhead_plugin.heads.correlation import correlation_figure, pearson
from mixhead_plugin.heads.importance import NORMALIZATIONS, importance
from mixhead_plugin.heads.numbers import as_json, heat_maps, shown_stages, table


def add_arguments(parser: ArgumentParser) -> None:
    loading.add_arguments(parser)
    add_normalization(parser, default="none")
    output.add_arguments(parser)


def add_normalization(parser: ArgumentParser, default: str) -> None:
    text = (
        "layer: divide the importances of each attention by their l2 norm, like Michel et al. "
        "(default: %(default)s)"
    )
    parser.add_argument("--normalize", choices=list(NORMALIZATIONS), default=default, help=text)


def run(args: Namespace) -> None:
    title = "importance: mean |dL/dξ|, the change of the loss per change of a head's gate ξ"
    if args.normalize != "none":
        title = "importance: mean |dL/dξ| of a head's gate ξ, l2 norm 1 in each layer"
    loaded, subsets = loading.load_with_subsets(args)
    results: dict[str, Any] = {"sets": []}
    pictures: dict[str, Any] = {}
    shown: dict[str, HeadNumbers] = {}
    for subset, ending in zip(subsets, output.ENDINGS_OF_SETS):
        weights, sentences = weigh(args, loaded, subset)
        shown[subset] = NORMALIZATIONS[args.normalize](weights)
        print(f"{subset}: importance of each head ({sentences} sentences)\n{table(shown[subset])}")
        pictures[f"importance{ending}"] = heat_maps(shown[subset], title)
        results["sets"].append(
            {
                "label": subset,
                "data": str(loaded.cfg.task.data),
                "subset": subset,
                "sentences": sentences,
                "attentions": as_json(weights),
            }
        )

    if len(subsets) == 2:
        first, second = shown.values()
        r = pearson(first, second)
        for stage, heads in shown_stages(first).items():
            print(f"Pearson's r of the {heads}: {r[stage]:.3f}")
        results["pearson"] = r
        pictures["importance-correlation"] = correlation_figure(shown, r, title)
    output.write(args, "importance", results, pictures)


def weigh(args: Namespace, loaded: Loaded, subset: str) -> tuple[HeadNumbers, int]:
    """Return the importance of every head on a set, and the number of its sentences."""
    loaded.model.requires_grad_(False)  # only the gates need gradients
    unwrap_checkpoint(loaded.model)  # heads that are computed again would be without their gates
    try:
        return importance(
            attentions_of(loaded.model),
            loading.batches_from(args, loaded, subset),
            lambda batch: loaded.criterion(loaded.model, batch)[0],
            lambda batch: batch["net_input"]["src_tokens"].size(0),
        )
    except HeadsError as error:
        raise OptionError(f"{loaded.path}: {error}") from error
