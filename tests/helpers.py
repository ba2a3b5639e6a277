"""Provide small models, tasks and data to the tests."""

import importlib
import io
import logging
import sys
from argparse import Namespace
from types import SimpleNamespace
from unittest import mock

import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from fairseq.models import build_model

import mixhead_plugin
from mixhead_plugin.fairseq.attention import MixheadAttention
from mixhead_plugin.parts import PARTS

mixhead_plugin.register()

VOCABULARY = 29


def dictionary() -> Dictionary:
    words = Dictionary()
    for i in range(VOCABULARY - len(words)):
        words.add_symbol(f"w{i}")
    return words


def task() -> SimpleNamespace:
    words = dictionary()
    return SimpleNamespace(
        source_dictionary=words, target_dictionary=words, max_positions=lambda: 64
    )


ENCODER = dict(
    encoder_embed_dim=16, encoder_ffn_embed_dim=24, encoder_layers=2, encoder_attention_heads=4
)
# Sizes by the name of fairseq's model; a longer name stands before its beginning.
TINY = {
    "transformer_lm": {
        "decoder_embed_dim": 16,
        "decoder_ffn_embed_dim": 24,
        "decoder_input_dim": 16,
        "decoder_output_dim": 16,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "tokens_per_sample": 32,
        "max_target_positions": 64,
    },
    "transformer": {**ENCODER, "decoder_layers": 2, "decoder_attention_heads": 4},
    "roberta_base": {**ENCODER, "max_positions": 64, "tokens_per_sample": 64},
}

# Models that fairseq lacks
OWN = {
    "gau_lm": {
        "decoder_embed_dim": 16,
        "decoder_layers": 2,
        "gau_query_dim": 6,
        "tokens_per_sample": 32,
        "max_target_positions": 64,
    },
    "gau_roberta": {
        "encoder_embed_dim": 16,
        "encoder_layers": 2,
        "gau_query_dim": 6,
        "max_positions": 64,
        "tokens_per_sample": 64,
    },
    "synthesizer_lm": TINY["transformer_lm"],
    "bert_base": TINY["roberta_base"],
}


def build(arch: str, seed: int = 1, **flags):
    """Return a tiny model of `arch` from fairseq's factory.

    It has no dropout unless `flags` say so.
    """
    # The first name that fits: "transformer_lm" stands before "transformer".
    sizes = {**OWN, **TINY}
    name = next(name for name in sizes if name.removesuffix("_base") in arch)
    settings = {"dropout": 0.0, "attention_dropout": 0.0, **sizes[name], **flags}
    args = Namespace(arch=arch, **settings)
    torch.manual_seed(seed)
    return build_model(args, task())


def shake(model: torch.nn.Module, size: float = 0.3) -> torch.nn.Module:
    """Move the parts of PARTS and the gains away from where they start.

    There nothing would be tested.
    """
    generator = torch.Generator().manual_seed(7)
    for module in model.modules():
        if not isinstance(module, MixheadAttention):
            continue
        for name in ("relative_gain", *PARTS):
            part = getattr(module, name)
            if part is None:
                continue
            for parameter in part.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.data.add_(size * noise.to(parameter))
    return model


def tokens(batch: int = 3, length: int = 7, padded: bool = False) -> torch.Tensor:
    """Return random sentences; with `padded`, of different lengths, padded on the right."""
    words = dictionary()
    sentences = torch.randint(words.nspecial, VOCABULARY, (batch, length))
    if padded:
        for i in range(1, batch):
            sentences[i, length - i :] = words.pad()
    return sentences


def run_here(command, *arguments):
    """Run a command of fairseq in this process and return its log.

    This saves most of a command's time: the registration of the plugin. tests/test_commands.py
    starts the commands. This process has threads, so it forks no workers for the data.
    """
    cli = importlib.import_module(
        f"fairseq_cli.{command.removeprefix('fairseq-').replace('-', '_')}"
    )
    log = logging.StreamHandler(io.StringIO())
    root = logging.getLogger()
    log.setFormatter(logging.Formatter("%(asctime)s | %(levelname)s | %(name)s | %(message)s"))
    level = root.level
    disabled = root.manager.disable
    root.setLevel(logging.INFO)
    logging.disable(logging.NOTSET)
    root.addHandler(log)
    logging.getLogger("fairseq").setLevel(logging.NOTSET)  # the analysis' command silences it
    # fairseq remembers the best checkpoint of a process, and would write none that is worse than
    # another training's.
    vars(checkpoint_utils.save_checkpoint).pop("best", None)
    try:
        with (
            mock.patch.object(sys, "argv", [command, *map(str, arguments), "--num-workers", "0"]),
            # fairseq-validate removes pytest's handlers and ours
            mock.patch.object(cli, "reset_logging", create=True),
        ):
            cli.cli_main()
    finally:
        root.removeHandler(log)
        root.setLevel(level)
        logging.disable(disabled)
    return log.stream.getvalue()
