"""Benchmark one update of a language model, and beam search.

The update is one of fairseq's trainer, the beam search one of its generator.
"""

import copy
import functools
import shlex
import sys
import warnings
from typing import Any

import torch
from fairseq import options, utils
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.tasks.translation import TranslationTask
from fairseq.trainer import Trainer

import mixhead_plugin
from benchmarks.measure import Case, end_if_wrong, fault_of, shake
from mixhead_plugin.fairseq.attention import MixheadAttention

mixhead_plugin.register_names()
VARIANTS = {
    "fairseq": "",
    "softmax": "--head-mixing none",
    "Mixhead A": "--head-mixing position-independent",
    "Mixhead B": "",
    "Mixhead B, orthogonal penalty": "--orthogonal-weight 0.01",
    "Mixhead B, rank penalty": "--orthogonal-weight 0 --rank-weight 0.01",
}
SMALL = """transformer_lm --decoder-layers 4 --decoder-embed-dim 512 --decoder-ffn-embed-dim 2048
    --decoder-attention-heads 8 --attention-dropout 0.1 --share-decoder-input-output-embed"""
LARGE = "transformer_lm_wiki103"
TRANSLATION = "transformer"  # 6+6 layers, d 512, 8 heads
TRAINING = (
    "--task language_modeling --optimizer adam --clip-norm 0.1 --lr 0.0001 --ddp-backend legacy_ddp"
)


def config(name: str, arch: str, flags: str, device: str, dtype: str) -> Any:
    """Return the config that fairseq-train makes from the flags, for a variant."""
    warnings.simplefilter("ignore")  # fairseq and Hydra call deprecated functions
    prefix = "" if name == "fairseq" else "mixhead_"
    words = shlex.split(f"no-data --arch {prefix}{arch} {TRAINING} {flags} {VARIANTS[name]}")
    cfg = convert_namespace_to_omegaconf(
        options.parse_args_and_arch(options.get_training_parser(), words)
    )
    cfg.common.bf16 = dtype == "bfloat16"  # not by a flag: fairseq treats --bf16 as a TPU request
    cfg.common.cpu = device == "cpu"
    return cfg


def dictionary_of(words: int) -> Dictionary:
    dictionary = Dictionary()
    for i in range(words - len(dictionary)):
        dictionary.add_symbol(f"w{i}")
    return dictionary


def batch_of(dictionary: Dictionary, sentences: int, length: int, seed: int = 1) -> dict[str, Any]:
    """Return a batch of words drawn by Zipf's law.

    An adaptive softmax is faster for frequent words.
    """
    ranks = torch.arange(1, len(dictionary) - dictionary.nspecial + 1, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.multinomial(
        1 / ranks, sentences * (length + 1), replacement=True, generator=generator
    )
    drawn = dictionary.nspecial + drawn.view(sentences, length + 1)
    source = {
        "src_tokens": drawn[:, :-1].contiguous(),
        "src_lengths": torch.full((sentences,), length),
    }
    counts = {"id": torch.arange(sentences), "nsentences": sentences, "ntokens": sentences * length}
    return {**counts, "net_input": source, "target": drawn[:, 1:].contiguous()}


def trainer_of(
    name: str, arch: str, dictionary: Dictionary, length: int, device: str, dtype: str
) -> Trainer:
    """Return fairseq's trainer of a language model of a variant.

    All start from the same weights.
    """
    cfg = config(
        name, arch, f"--criterion cross_entropy --tokens-per-sample {length}", device, dtype
    )
    torch.manual_seed(1)
    task = LanguageModelingTask(cfg.task, dictionary)
    return Trainer(cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion))


def case(arch: str, vocabulary: int, batch: int, length: int, device: str, dtype: str) -> Case:
    """Return an update by each variant; loss and gradients of one sentence are checked."""
    dictionary = dictionary_of(vocabulary)
    contenders = {}
    for name in VARIANTS:
        criterion = "adaptive_loss" if arch == LARGE else "cross_entropy"
        if "penalty" in name:
            criterion = f"orthogonal_{criterion}"
        cfg = config(
            name, arch, f"--criterion {criterion} --tokens-per-sample {length}", device, dtype
        )
        torch.manual_seed(1)
        task = LanguageModelingTask(cfg.task, dictionary)
        model = task.build_model(cfg.model)
        loss = task.build_criterion(cfg.criterion)
        shake(model)
        if name != "fairseq":
            check_update(name, model, loss, batch_of(dictionary, 1, length), device, dtype)
        trainer = Trainer(cfg, task, model, loss)
        contenders[name] = functools.partial(
            trainer.train_step, [batch_of(dictionary, batch, length)], raise_oom=True
        )
    size = f"{arch.split()[0]}, batch {batch}, length {length}"
    return Case("training", size, contenders, "softmax")


def search(device: str, dtype: str, sentences: int = 16, length: int = 25, beam: int = 5) -> Case:
    """Return a beam search by each variant.

    From the same seed, before M moves, each must find fairseq's words.
    """
    dictionary = dictionary_of(4000)
    contenders = {}
    expected = None
    sample = {"net_input": batch_of(dictionary, sentences, length)["net_input"]}
    sample = utils.move_to_cuda(sample) if device == "cuda" else sample
    for name in ("fairseq", "softmax", "Mixhead A", "Mixhead B"):
        cfg = config(
            name, TRANSLATION, "--task translation --criterion cross_entropy", device, dtype
        )
        torch.manual_seed(1)
        model = TranslationTask(cfg.task, dictionary, dictionary).build_model(cfg.model)
        model.to(device, getattr(torch, dtype)).eval()
        generator = SequenceGenerator(
            [model], dictionary, beam_size=beam, max_len_b=length, min_len=length
        )
        found = [sentence[0]["tokens"].tolist() for sentence in generator.generate([model], sample)]
        expected = expected or found
        if dtype == "float32" and found != expected:
            sys.exit(f"{name}: the beam search found other words than fairseq's; nothing is timed")
        shake(model)
        contenders[name] = functools.partial(generator.generate, [model], sample)
    size = f"{TRANSLATION.split()[0]}, batch {sentences}, length {length}, beam {beam}"
    return Case("decoding", size, contenders, "softmax")


def check_update(
    name: str, model: Any, criterion: Any, sample: dict[str, Any], device: str, dtype: str
) -> None:
    """Allow twice the error (as a norm) that `reference` has in the same dtype.

    In float32, allow a thousandth.
    """
    sample = utils.move_to_cuda(sample) if device == "cuda" else sample

    def found(impl: str, dtype: torch.dtype) -> list[torch.Tensor]:
        copied = copy.deepcopy(model).to(device, dtype).eval()
        for module in copied.modules():
            if isinstance(module, MixheadAttention):
                module.impl = impl
        loss, *_ = criterion(copied, sample)
        gradients = torch.autograd.grad(
            loss, list(copied.parameters()), allow_unused=True, materialize_grads=True
        )
        return [
            loss.detach().float(),
            torch.cat([gradient.flatten() for gradient in gradients]).float(),
        ]

    own = getattr(torch, dtype)
    rounding = 1e-3 if own == torch.float32 else torch.finfo(own).eps
    results = found("auto", own), found("reference", own), found("reference", torch.float32)
    end_if_wrong(fault_of(name, ("loss", "gradient"), *results, norm=2, rounding=rounding))
