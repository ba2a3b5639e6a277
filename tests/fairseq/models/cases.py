"""Provide models and values to the tests of the models."""

import itertools
import math
from argparse import Namespace
from types import SimpleNamespace

import torch
from fairseq import options
from fairseq.data import Dictionary
from fairseq.dataclass.initialize import add_defaults
from fairseq.models import ARCH_CONFIG_REGISTRY, build_model
from fairseq.sequence_generator import SequenceGenerator
from omegaconf import OmegaConf

from mixhead_plugin.fairseq.attention import MixheadAttention
from mixhead_plugin.fairseq.options import SCOPES
from mixhead_plugin.ops import NORMALIZERS
from mixhead_plugin.parts import PARTS
from tests.helpers import dictionary, tokens

POSITIONS = [{"relative_position": name} for name in PARTS["relative_position"]]
POSITIONS += [{"relative_gain": 3}, {"head_dim": 5, "value_head_dim": 3}]
# A scope alone changes nothing and is refused, so each has a normalizer, too.
SCOPED = [{"attention_normalizer": "l2", "attention_scope": name} for name in SCOPES]
# Every entry of every table once. The tests of the modules have all pairs.
ENTRIES = [{"attention_normalizer": name} for name in NORMALIZERS]
NEUTRAL = []  # what starts without effect
for option, table in PARTS.items():
    for value, kind in table.items():
        ENTRIES.append({"attention_normalizer": "l2", option: value})
        if kind.trained and kind.loads_without:
            NEUTRAL.append({option: value})
ENTRIES += [*SCOPED, *POSITIONS]


def shown(flags):
    """Return the name of a case in the output of pytest."""
    return "-".join(f"{name}={value}".replace(" ", "") for name, value in flags.items()) or "plain"


def attentions(model):
    return [module for module in model.modules() if isinstance(module, MixheadAttention)]


def forward(model, sentences):
    if hasattr(model, "encoder") and hasattr(model, "decoder"):
        return model(sentences, None, sentences)[0]
    return model(sentences)[0]


def step_by_step(decoder, prefix, encoder_out=None):
    """Return the logits [B, T, V] of one step after another, and the state that they leave."""
    state = {}
    logits = []
    for t in range(prefix.shape[1]):
        words = prefix[:, : t + 1]
        step, _ = decoder(words, encoder_out=encoder_out, incremental_state=state)
        logits.append(step)
    return torch.cat(logits, 1), state


def continuations(model, **search):
    """Return the hypotheses by which a beam search goes on from two prefixes.

    The prefixes have different lengths.
    """
    words = dictionary()
    generator = SequenceGenerator([model], words, beam_size=3, normalize_scores=False, **search)
    prefix = tokens(batch=2, length=3)
    prefix[1, 2:] = words.pad()
    sample = {"net_input": {"src_tokens": prefix, "src_lengths": prefix.ne(words.pad()).sum(1)}}
    found = generator.generate([model], sample, prefix_tokens=prefix, bos_token=words.eos())
    return list(itertools.chain.from_iterable(found))


def assert_scored_as_by_the_full_pass(model, hypothesis):
    target = hypothesis["tokens"][None]
    inputs = torch.cat([torch.tensor([[dictionary().eos()]]), target[:, :-1]], 1)
    log_probs = model(inputs)[0].log_softmax(-1)  # [1, T, V]
    expected = log_probs.gather(2, target[..., None])[0, :, 0]
    torch.testing.assert_close(hypothesis["positional_scores"], expected, rtol=1e-4, atol=1e-4)


def usual_task(arch):
    if "transformer_xl" in arch:
        return "truncated_bptt_lm"
    if "_lm" in arch:
        return "language_modeling"
    return "translation"


def command(arch, *flags, task=None):
    """Return what fairseq-train understands of a command line; None is the task of the model."""
    if task is None:
        task = usual_task(arch)
    required = ["data", f"--task={task}", f"--arch={arch}", "--batch-size=4"]
    return options.parse_args_and_arch(options.get_training_parser(), [*required, *flags])


def yaml(arch, **flags):
    """Return the model's config as fairseq-hydra-train completes it."""
    task = {"_name": "language_modeling", "data": "data", "tokens_per_sample": 48}
    if "transformer_xl" in arch:
        task.update(_name="truncated_bptt_lm", batch_size=4)
    model = {"_name": arch, **flags}
    cfg = OmegaConf.create({"task": task, "model": model, "common": {"tpu": False}})
    add_defaults(cfg)
    return cfg.model


# ---- real sizes --------------------------------------------------------------------------------


def dictionary_size(types):
    """Return the size of fairseq's dictionary for a corpus of `types`.

    <unk> and the end of a line are among them.
    """
    symbols = types - 2 + Dictionary().nspecial
    return math.ceil(symbols / 8) * 8  # fairseq fills it up


WIKITEXT2 = dictionary_size(33_278)
WIKITEXT103 = dictionary_size(267_735)
LM1B = dictionary_size(793_471 - 1)  # the published list of words has a start of line too


class Vocabulary:
    """A dictionary of a given size without its words."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def pad(self):
        return 1


def task_of(size):
    words = Vocabulary(size)
    return SimpleNamespace(source_dictionary=words, target_dictionary=words)


def in_real_size(arch, vocabulary, **flags):
    """Return a model of `arch` on the meta device."""
    args = Namespace(arch=arch, **{"tokens_per_sample": 512, "max_target_positions": 512, **flags})
    ARCH_CONFIG_REGISTRY[arch](args)
    with torch.device("meta"):
        return build_model(args, task_of(vocabulary))


def parameters(arch, vocabulary, **flags):
    """Return the number of parameters of the model in its real size."""
    return sum(p.numel() for p in in_real_size(arch, vocabulary, **flags).parameters())
