"""Weigh every head: I_h, the mean over the sentences of |dL/d xi_h|, for a gate xi_h = 1 on head h.

L is the loss that the model was trained with, summed over a sentence (over a window, for language models). One forward
and one backward pass per batch weigh all heads at once. Where heads mix, there are two kinds: source heads, whose
weights are mixed, and mixed heads, whose outputs go to out_proj; each is weighed.

With two sets, --subset valid,test, or --compare-data for the same set of other data, it also draws the importances on
one over those on the other, and prints Pearson's r: high if what is redundant here is redundant there.

Writes importance.{png,svg,json}, for two sets also importance-2.{png,svg} and importance-correlation.{png,svg};
`prune --importance importance.json` reads the first set.
"""

from argparse import ArgumentParser, Namespace
from typing import Any, Dict, List, NamedTuple

import torch
from fairseq.modules.checkpoint_activations import unwrap_checkpoint
from matplotlib.figure import Figure

from mixhead_plugin.analysis import figures, head_numbers, loading
from mixhead_plugin.analysis.attentions import attentions, where
from mixhead_plugin.analysis.loading import Loaded
from mixhead_plugin.analysis.weighing import NORMALISATIONS, HeadNumbers, as_points, importance, pearson
from mixhead_plugin.errors import OptionError

MARKERS = {"encoder-self": "o", "decoder-self": "s", "cross": "^"}


class Weighed(NamedTuple):
    """The importances on one set."""

    label: str
    data: str
    subset: str
    sentences: int
    weights: HeadNumbers


def add_arguments(parser: ArgumentParser) -> None:
    loading.add_arguments(parser)
    add_normalisation(parser, default="none")
    parser.add_argument("--compare-data", metavar="DIR", help="also weigh on this data, and compare")
    figures.add_arguments(parser)


def add_normalisation(parser: ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--normalize",
        choices=list(NORMALISATIONS),
        default=default,
        help="layer: divide the importances of each attention by their l2 norm, as Michel et al. do to compare heads "
        "of different layers (default: %(default)s)",
    )


def run(args: Namespace) -> None:
    loaded = loading.load_from(args, args.checkpoint)
    sets = [(loaded, subset) for subset in args.subset.split(",")]
    if args.compare_data is not None:
        compared = Namespace(**{**vars(args), "data": args.compare_data})
        other = loading.load_from(compared, args.checkpoint, data_flag="--compare-data")
        sets += [(other, subset) for _, subset in sets]
    if len(sets) > 2:
        raise OptionError(f"--subset {args.subset}: {len(sets)} sets, must be one or two with --compare-data")
    weighed = [weigh(args, model, subset) for model, subset in sets]
    weighed = _told_apart(weighed)

    shown = {w.label: NORMALISATIONS[args.normalize](w.weights) for w in weighed}
    files = []
    for i, w in enumerate(weighed):
        print(f"{w.label}: importance of each head ({w.sentences} sentences)")
        print(head_numbers.table(shown[w.label]))
        figure = head_numbers.heat_maps(loaded.model, shown[w.label], _axis_label(args.normalize))
        files += figures.save(figure, args.output, "importance" if i == 0 else f"importance-{i + 1}")
    results: Dict[str, Any] = {
        "sets": [
            {
                "label": w.label,
                "data": w.data,
                "subset": w.subset,
                "sentences": w.sentences,
                "attentions": head_numbers.as_json(w.weights),
            }
            for w in weighed
        ]
    }
    if len(weighed) == 2:
        results["pearson"] = pearson(*shown.values())
        for kind, r in results["pearson"].items():
            print(f"Pearson's r of the {head_numbers.kind_title(weighed[0].weights, kind)}: {r:.3f}")
        figure = correlation_figure(shown, results["pearson"], _axis_label(args.normalize))
        files += figures.save(figure, args.output, "importance-correlation")
    files.append(figures.save_json(args.output, "importance", args, results))
    figures.report(files)


def weigh(args: Namespace, loaded: Loaded, subset: str, subset_flag: str = "--subset") -> Weighed:
    """The importances of all heads on one set, which `subset_flag` names.

    Raises:
        OptionError: there is no such set, or an importance is not finite
    """
    loaded.model.requires_grad_(False)  # the gates' gradients alone are wanted
    unwrap_checkpoint(loaded.model)
    batches = loading.batches_from(Namespace(**{**vars(args), "subset": subset}), loaded, subset_flag)
    try:
        weights, sentences = importance(loaded.model, loaded.criterion, batches, attentions(loaded.model))
    except FloatingPointError as error:
        raise OptionError(f"{loaded.path}: {error}; are its parameters damaged?") from error
    return Weighed(subset, str(loaded.cfg.task.data), subset, sentences, weights)


def _told_apart(weighed: List[Weighed]) -> List[Weighed]:
    """Labels that name the data where the sets have one name."""
    if len({w.label for w in weighed}) == len(weighed):
        return weighed
    if len({w.data for w in weighed}) == 1:
        raise OptionError(f"--subset {','.join(w.subset for w in weighed)}: the same set twice")
    return [w._replace(label=f"{w.subset} of {w.data}") for w in weighed]


def correlation_figure(shown: Dict[str, HeadNumbers], r: Dict[str, float], label: str) -> Figure:
    """Each head's importance on one set over that on the other, a panel for each kind of head.

    Args:
        shown: the importances on two sets, by label
        r: Pearson's, by kind
        label: what they are
    """
    (left_label, left), (right_label, right) = shown.items()
    with figures.style():
        figure, axes = figures.subplots(1, len(r), (3.4, 3.2))
        for panel, kind in zip(axes[0], r):
            for i, (site, marker) in enumerate(MARKERS.items()):
                points = [_at(values, kind, site) for values in (left, right)]
                if points[0]:
                    panel.plot(
                        *points,
                        linestyle="",
                        marker=marker,
                        markersize=4,
                        alpha=0.7,
                        color=figures.COLOURS[i],
                        label=site,
                    )
            both = torch.cat([as_points(values, kind) for values in (left, right)])
            ends = [float(both.min()), float(both.max())]
            panel.plot(ends, ends, color="grey", linewidth=0.8, zorder=0)  # equally important on both
            panel.set(
                title=f"{head_numbers.kind_title(left, kind)}: r = {r[kind]:.3f}",
                xlabel=f"{label} on {left_label}",
                ylabel=f"on {right_label}",
            )
            panel.legend()
    return figure


def _at(values: HeadNumbers, kind: str, site: str) -> List[float]:
    """The numbers of one kind of head at one place."""
    return [
        number
        for name, by_kind in values.items()
        if kind in by_kind and where(name).site == site
        for number in by_kind[kind].tolist()
    ]


def _axis_label(normalize: str) -> str:
    return "importance, mean |dL/dξ|" if normalize == "none" else "importance, l2 norm 1 in each layer"
