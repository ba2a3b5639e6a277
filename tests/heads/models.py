"""One small model of each door, as `heads` sees it: the cases of test_adapters."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import mixhead_plugin.nn as torch_door
from mixhead_plugin.heads import cutting
from mixhead_plugin.heads.attention import Attention
from mixhead_plugin.nn.adapter import attentions_of as torch_attentions_of
from tests import helpers

HEADS = 4
DOORS = ["fairseq", "torch", "transformers"]


class Case(NamedTuple):
    """A model in float64 and evaluation mode, mixed away from the identity."""

    model: nn.Module
    find: Callable[[nn.Module], list[Attention]]
    outputs: Callable[[nn.Module], Tensor]  # of the model on one batch, [B, ...]
    output_projection: Callable[[nn.Module, str], Any]  # of the attention of this name
    head_mixing: Callable[[nn.Module, str], nn.Module | None]  # likewise
    prune: Callable[[nn.Module, dict[int, list[int]]], object]
    # the mixed weights [B, H', Nq, Nk] that each attention returns in a call on that batch
    weights: Callable[[nn.Module], list[Tensor]]


def build(door: str, variant: dict[str, str]) -> Case:
    """Return the model of a door with an attention of a variant, keywords of `parts.Variant`."""
    makers = {"fairseq": _fairseq, "torch": _torch, "transformers": _transformers}
    return makers[door](variant)


def _returned_weights(
    attentions: list[Attention], asked: dict[str, bool], call: Callable[[], object]
) -> list[Tensor]:
    """Return the weights that attentions return in a call if keywords ask them for some."""
    found = []
    handles = []
    for attention in attentions:
        module = attention.module

        def ask(module, args, kwargs):
            return args, {**kwargs, **asked}

        def keep(module, args, output):
            found.append(output[1])

        handles.append(module.register_forward_pre_hook(ask, with_kwargs=True))
        handles.append(module.register_forward_hook(keep))
    call()
    for handle in handles:
        handle.remove()
    return found


def _fairseq(variant: dict[str, str]) -> Case:
    from mixhead_plugin.fairseq.analysis.adapter import attentions_of

    sizes = {"encoder_layers": 1, "decoder_layers": 1, "head_mixing": "none"}
    model = helpers.build("mixhead_transformer", **sizes | variant)
    model = helpers.shake(model).double().eval()
    source = helpers.tokens(padded=True)

    def outputs(model: nn.Module) -> Tensor:
        lengths = source.ne(helpers.dictionary().pad()).sum(1)
        return model(source, lengths, source.roll(1, 1))[0]

    def weights(model: nn.Module) -> list[Tensor]:
        asked = {"need_head_weights": True}
        found = _returned_weights(attentions_of(model), asked, lambda: outputs(model))
        return [by_head.transpose(0, 1) for by_head in found]  # of [H', B, Nq, Nk]

    return Case(
        model,
        attentions_of,
        outputs,
        lambda model, name: model.get_submodule(name).out_proj,
        lambda model, name: model.get_submodule(name).head_mixing,
        lambda model, heads: cutting.prune(attentions_of(model), heads),
        weights,
    )


class Translator(nn.Module):
    """torch's Transformer, with words in front."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(helpers.VOCABULARY, 16)
        self.transformer = nn.Transformer(16, HEADS, 1, 1, 24, dropout=0.1, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.size(1))
        states = self.embedding(source), self.embedding(target)
        return self.transformer(*states, tgt_mask=mask.to(states[0]), tgt_is_causal=True)


def torch_model(variant: dict[str, str]) -> nn.Module:
    torch.manual_seed(1)
    model = torch_door.mix(Translator(), **{"head_mixing": "none", **variant}).double().eval()
    for parameter in torch_door.mixing_parameters(model).values():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def _torch(variant: dict[str, str]) -> Case:
    source = helpers.tokens()
    target = helpers.tokens(length=5)

    def weights(model: nn.Module) -> list[Tensor]:
        asked = {"need_weights": True, "average_attn_weights": False}
        return _returned_weights(torch_attentions_of(model), asked, lambda: model(source, target))

    return Case(
        torch_model(variant),
        torch_attentions_of,
        lambda model: model(source, target),
        lambda model, name: model.get_submodule(name).out_proj,
        lambda model, name: model.get_submodule(name).head_mixing,
        torch_door.prune,
        weights,
    )


def _transformers(variant: dict[str, str]) -> Case:
    from mixhead_plugin.hf.studied_attention import attentions_of
    from tests.hf import models

    sizes = dict.fromkeys(("num_hidden_layers", "encoder_layers", "decoder_layers"), 1)
    model, inputs = models.build("BartForConditionalGeneration", sizes, **variant)
    inputs = models.whole(model, inputs)

    def weights(model: nn.Module) -> list[Tensor]:
        found = model(**inputs, output_attentions=True)
        # one layer each, in the order of the model
        return [*found.encoder_attentions, *found.decoder_attentions, *found.cross_attentions]

    return Case(
        model,
        attentions_of,
        lambda model: model(**inputs).logits,
        lambda model, name: model.get_submodule(name).out_proj,
        lambda model, name: getattr(model.get_submodule(name), "head_mixing", None),
        models.hf.prune,
        weights,
    )
