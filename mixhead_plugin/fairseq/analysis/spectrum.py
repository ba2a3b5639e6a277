"""Show how many dimensions the attention matrices have.

spectrum (mixhead figures 1 and 3): the matrix of a head on a window of n tokens has n singular
values s_1 >= s_2 >= ... The curves are (s_1 + ... + s_k) / (s_1 + ... + s_n) over k, means over
heads and windows, after the mixing: thin for a layer, bold for the mean of the layers. A curve near
the upper left corner means a low rank.

effective_rank (Roy and Vetterli 2007): exp(-sum_k p_k ln p_k) with p_k = s_k / sum s, of each head.
It is n if all singular values are equal, and 1 if only one is not 0. Where heads mix, the source
heads stand beside the mixed ones.

log_and_heads: above the singular values of log P minus the mean of each row, of which softmax gives
at most D. Hidden, zero and negative weights have no logarithm, so causal attention is left out.
Below the effective rank of the rows {P_j[t]} over the heads j, a mean over the tokens t. M is
linear and adds no row outside their span.

A window is the first --length tokens of a sentence (of a block, for language models), on both sides
of a translation. Shorter sentences are left out. Checkpoints are only comparable on the same data.

Example: spectrum plain/best.pt mixhead/best.pt --labels fairseq,Mixhead --length 128
"""

import itertools
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator

import numpy as np
from torch import Tensor

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.analysis import loading, output
from mixhead_plugin.fairseq.analysis.adapter import attentions_of
from mixhead_plugin.fairseq.analysis.loading import Loaded
from mixhead_plugin.fairseq.padding import target_dictionary
from mixhead_plugin.heads import figures
from mixhead_plugin.heads.attention import HeadsError
from mixhead_plugin.heads.spectrum import NOTE, Measured, Spectra, as_json
from mixhead_plugin.heads.spectrum_figures import draw_curves, draw_logs, draw_ranks
from mixhead_plugin.heads.views import watched


def usual_length(loaded: Loaded, subset: str) -> int:
    """Return the median length of the sentences; of a translation, the shorter side counts."""
    dataset = loading.load_subset(loaded, subset)
    if not hasattr(dataset, "size"):  # the windows of --task truncated_bptt_lm
        return int(loaded.cfg.task.tokens_per_sample)
    lengths = []
    for i in range(len(dataset)):
        # a number, or those of both sides
        lengths.append(min(np.atleast_1d(dataset.size(i))))
    return int(np.median(lengths))


def windows(loaded: Loaded, subset: str, length: int) -> Iterator[dict[str, Tensor]]:
    """Yield the inputs of one window after another, from random places of the set."""
    pads = {
        "src_tokens": loaded.task.source_dictionary.pad(),
        "prev_output_tokens": target_dictionary(loaded.task).pad(),
    }
    # One sentence a batch, because sentences of one batch would have similar lengths.
    for batch in loading.batches(loaded, subset, batch_size=1, shuffle=True):
        net_input = batch["net_input"]
        tokens = {}
        for name, pad in pads.items():
            if name in net_input:
                row = net_input[name][:1]
                tokens[name] = row[row.ne(pad)][None, :length]  # [1, length]
        if all(row.shape[1] == length for row in tokens.values()):
            if "src_lengths" in net_input:
                tokens["src_lengths"] = net_input["src_lengths"][:1].clamp(max=length)
            yield tokens


def measure(loaded: Loaded, args: Namespace, length: int) -> list[Measured]:
    """Return the spectra of the heads of a model and, if heads mix, those of its source heads."""
    spectra = Spectra()
    number = 0
    attentions = attentions_of(loaded.model)
    with watched(attentions, lambda attention, heads: spectra.add(attention.name, heads)):
        for inputs in itertools.islice(windows(loaded, args.subset, length), args.windows):
            number += 1
            try:
                loading.forward(loaded, inputs, alone=True)
            except HeadsError as error:
                raise OptionError(f"{loaded.path}: {error}") from error
    if not number:
        usual = usual_length(loaded, args.subset)
        raise OptionError(
            f"--length {length}: no sentence of {args.subset} is that long; the median is {usual}"
        )
    return spectra.means(loaded.name, number)


def add_arguments(parser: ArgumentParser) -> None:
    loading.add_arguments(parser, several=True, batching=False)
    output.add_arguments(parser, labels=True)
    text = "tokens in a window (default: the median length in the set)"
    parser.add_argument("--length", type=loading.positive, metavar="N", help=text)
    text = "largest number of windows (default: %(default)s)"
    parser.add_argument("--windows", type=loading.positive, default=16, metavar="N", help=text)


def run(args: Namespace) -> None:
    labels = output.labels(args, [output.name_of(path) for path in args.checkpoints])
    measured: list[Measured] = []
    length = args.length
    for path, label in zip(args.checkpoints, labels, strict=True):
        loaded = loading.load_from(args, path, label)
        length = length or usual_length(loaded, args.subset)
        measured += measure(loaded, args, length)
    print(f"windows of {length} tokens from {args.subset}, --windows {args.windows} at most")
    for m in measured:
        for site in m.spectra:
            print(
                f"{m.label}: {site}: mean effective rank {m.mean_rank(site):.2f} of {length}, "
                f"windows: {m.windows}"
            )
    results = {"length": length, "models": {m.label: as_json(m) for m in measured}}
    if any(m.source for m in measured):
        print(NOTE)
        results["note"] = NOTE
    with figures.style():
        pictures = {"spectrum": draw_curves([m for m in measured if not m.source], length)}
        pictures["effective_rank"] = draw_ranks(measured)
        pictures["log_and_heads"] = draw_logs(measured)
    output.write(args, "spectrum", results, pictures)
