"""'fairseq's with --head-mixing': each flag of fairseq's models does the same in the plugin's."""

import contextlib
import copy
import io
from argparse import ArgumentParser, Namespace

import pytest
import torch
from fairseq.models import ARCH_MODEL_REGISTRY, build_model

from mixhead_plugin.fairseq.repairs.dropped_scales import SCALES
from tests.fairseq.models.cases import forward, yaml
from tests.helpers import TINY, task, tokens

# Values of flags whose type alone does not give one.
VALUES = {
    **dict.fromkeys(("adaptive_softmax_cutoff", "adaptive_input_cutoff"), "5,10"),
    **dict.fromkeys(("encoder_layers_to_keep", "decoder_layers_to_keep"), "0"),
    "character_filters": "[(1, 8)]",
    "decoder_output_dim": "8",
}
# What a flag of fairseq's language model needs beside it.
CUTOFFS = {"adaptive_input_cutoff": "5,10", "adaptive_softmax_cutoff": "5,10"}
BESIDE = {
    "adaptive_input": CUTOFFS,
    "tie_adaptive_weights": {"adaptive_input": True, **CUTOFFS},
}
# Files that do not exist, and packages that are not installed.
NOT_HERE = {
    "encoder_embed_path",
    "decoder_embed_path",
    "encoder_xformers_att_config",
    "decoder_xformers_att_config",
}


def flags_of(name):
    """Yield the flags of one of fairseq's models.

    Each is a dict of the flag with values that are not its default.
    """
    model = ARCH_MODEL_REGISTRY[name]
    parser = ArgumentParser(allow_abbrev=False)
    model.add_args(parser)
    for action in parser._actions:
        if action.dest in NOT_HERE | {"help"}:
            continue
        flag = action.option_strings[0]
        typed = [[flag]]  # a switch has no value
        if action.nargs != 0:
            usual = "8" if "int" in str(action.type) else "0.3"
            values = action.choices or [VALUES.get(action.dest, usual)]
            typed = [[flag, str(value)] for value in values]
        for words in typed:
            with contextlib.redirect_stderr(io.StringIO()):
                parsed = parser.parse_args(words)
            yield {action.dest: getattr(parsed, action.dest)}


def built(arch, name, flags):
    """Return a tiny model as a command builds it, or None where it cannot be built."""
    flags = {"dropout": 0.0, "attention_dropout": 0.0, **TINY[name], **flags}
    flags |= {"head_mixing": "none"} if arch.startswith("mixhead") else {}
    torch.manual_seed(1)
    try:
        # fairseq gives language models an omegaconf, in which flags can be lost; others get the
        # flags of the command.
        cfg = yaml(arch, **flags) if name == "transformer_lm" else Namespace(arch=arch, **flags)
        return build_model(cfg, task())
    except (Exception, SystemExit):
        return None


def outputs(model, training):
    torch.manual_seed(2)
    with torch.no_grad():
        return forward(model.train(training), tokens(padded=True))


def same(theirs, ours):
    """Return whether two models have the same parameters, and equal outputs with equal ones."""
    if shapes(theirs) != shapes(ours):
        return False
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for training in (False, True):
        if not torch.allclose(outputs(ours, training), outputs(theirs, training), atol=1e-5):
            return False
    return True


def shapes(model):
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


# The plugin's attention draws its dropout in another order. In training it takes the noise of
# --quant-noise-pq, which fairseq's self-attention passes by: docs/models.md.
RANDOM = {"attention_dropout", "quant_noise_pq"}


# fairseq builds no model of these. Base layers need workers, and its transformer, which gets a list
# of layers to keep, splits it as text.
CANNOT_BE_BUILT = {
    "transformer_lm": {"base_layers"},
    "transformer": {"base_layers", "encoder_layers_to_keep", "decoder_layers_to_keep"},
    "roberta_base": set(),
}


@pytest.mark.parametrize("name", TINY)
def test_each_flag_does_the_same_in_both_models(name):
    tried = list(flags_of(name))
    assert len(tried) > 20
    not_built = set()  # by neither of the two
    different = set()
    for flags in tried:
        (flag,) = flags
        if name == "transformer_lm":
            flags = {**BESIDE.get(flag, {}), **flags}
        theirs = built(name, name, flags)
        ours = built(f"mixhead_{name}", name, flags)
        if theirs is None and ours is None:
            not_built.add(flag)
        elif theirs is None or ours is None or not same(theirs, ours):
            different.add(flag)
    assert not_built == CANNOT_BE_BUILT[name]
    expected = set(RANDOM)
    if name == "transformer_lm":  # repairs/dropped_scales.py refuses to train with a scale
        expected |= set(SCALES)
    if name == "roberta_base":  # models/roberta.py refuses fairseq's own way to prune
        expected |= {"mha_heads_to_keep", "mha_reg_scale_factor"}
    assert different == expected
