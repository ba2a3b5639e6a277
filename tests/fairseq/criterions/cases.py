"""Build a tiny model, its task and batches for every orthogonal_* criterion."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import bert
import torch
from bert.model import NEXT_SENTENCE
from bert.span_head import install_span_head
from fairseq.criterions import CRITERION_DATACLASS_REGISTRY, CRITERION_REGISTRY
from torch import Tensor

from mixhead_plugin.fairseq.attention import MixheadAttention
from mixhead_plugin.parts.head_mixing import PositionWiseMixing
from tests.helpers import build, dictionary, shake, tokens

bert.register()  # its criteria have the penalties, too

PAD = dictionary().pad()


class Case(NamedTuple):
    arch: str
    flags: dict[str, Any]
    batch: Callable[[], dict[str, Any]]  # of sentences of different lengths


def lm_batch() -> dict[str, Any]:
    source = tokens(padded=True)
    target = source.roll(-1, 1).masked_fill(source == PAD, PAD)
    return batch({"src_tokens": source, "src_lengths": source.ne(PAD).sum(1)}, target)


def translation_batch() -> dict[str, Any]:
    source = tokens(length=8, padded=True)
    target = tokens(length=6, padded=True)
    net_input = {
        "src_tokens": source,
        "src_lengths": source.ne(PAD).sum(1),
        "prev_output_tokens": target,
    }
    return batch(net_input, target)


def masked_batch() -> dict[str, Any]:
    source = tokens(padded=True)
    target = source.masked_fill(torch.arange(source.shape[1]) % 3 != 1, PAD)
    return batch({"src_tokens": source, "src_lengths": source.ne(PAD).sum(1)}, target)


def sentence_batch() -> dict[str, Any]:
    source = tokens(padded=True)
    return batch(
        {"src_tokens": source, "src_lengths": source.ne(PAD).sum(1)}, torch.tensor([[0], [1], [1]])
    )


def pair_batch() -> dict[str, Any]:
    return {**masked_batch(), "next_sentence": torch.tensor([0, 1, 1])}


def span_batch() -> dict[str, Any]:
    source = tokens(padded=True)
    target = torch.tensor([[1, 3], [0, 0], [2, 2]])
    return {
        **batch({"src_tokens": source, "src_lengths": source.ne(PAD).sum(1)}, target),
        "ntokens": 18,
    }


def batch(net_input: dict[str, Tensor], target: Tensor) -> dict[str, Any]:
    sentences = target.shape[0]
    ntokens = int(target.ne(PAD).sum())
    return {"net_input": net_input, "target": target, "ntokens": ntokens, "nsentences": sentences}


# By the name of fairseq's criterion.
CASES = {
    "cross_entropy": Case("transformer_lm", {}, lm_batch),
    "label_smoothed_cross_entropy": Case("transformer", {}, translation_batch),
    "adaptive_loss": Case("transformer_lm", {"adaptive_softmax_cutoff": "8,16"}, lm_batch),
    "masked_lm": Case("roberta_base", {}, masked_batch),
    "sentence_prediction": Case("roberta_base", {}, sentence_batch),
    "bert_pretraining": Case("bert_base", {}, pair_batch),
    "squad": Case("bert_base", {}, span_batch),
}
FLAGS = {"label_smoothing": 0.1, "ddp_backend": "legacy_ddp", "sentence_avg": False, "tpu": False}


def task() -> SimpleNamespace:
    words = dictionary()
    dictionaries = {f"{side}_dictionary": words for side in ("source", "target", "label")}
    return SimpleNamespace(**dictionaries, decode=lambda sample, logits: None)


def criterion(name: str, **flags: Any) -> torch.nn.Module:
    config = CRITERION_DATACLASS_REGISTRY[name]()
    for flag, value in {**FLAGS, **flags}.items():
        if hasattr(config, flag):
            setattr(config, flag, value)
    return CRITERION_REGISTRY[name].build_criterion(config, task()).train()


def model(upstream: str, **flags: Any) -> torch.nn.Module:
    """Build the case's Mixhead model, with mixing away from the identity."""
    case = CASES[upstream]
    made = shake(build(f"mixhead_{case.arch}", **{**case.flags, **flags})).train()
    torch.manual_seed(4)
    if upstream == "sentence_prediction":
        made.register_classification_head("sentence_classification_head", num_classes=2)
    elif upstream == "bert_pretraining":
        made.register_classification_head(NEXT_SENTENCE, num_classes=2, dropout=0.0)
    elif upstream == "squad":
        install_span_head(made)
    return made


def real_queries(name: str, sample: dict[str, Any]) -> Tensor:
    """Return which queries of the attention `name` are words and no padding, bool [B, N]."""
    net_input = sample["net_input"]
    if "decoder." in name and "prev_output_tokens" in net_input:
        return net_input["prev_output_tokens"].ne(PAD)
    return net_input["src_tokens"].ne(PAD)


def mixing_of_each(
    made: torch.nn.Module, sample: dict[str, Any], run: Callable
) -> list[tuple[Tensor, Tensor]]:
    """Return M of every attention in `run()`, [B, N, H, H].

    Beside it stands the mask of its real positions, [B, N].
    """
    found = []
    handles = []
    for name, module in made.named_modules():
        if isinstance(module, MixheadAttention) and module.head_mixing is not None:
            real = real_queries(name, sample)

            def remember(
                mixing: torch.nn.Module, inputs: Any, matrix: Tensor, real: Tensor = real
            ) -> None:
                if not isinstance(mixing, PositionWiseMixing):
                    matrix = matrix.expand(*real.shape, *matrix.shape)
                found.append((matrix, real))

            handles.append(module.head_mixing.register_forward_hook(remember))
    run()
    for handle in handles:
        handle.remove()
    return found
