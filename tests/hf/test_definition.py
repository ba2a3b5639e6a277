"""Mixed models are what their unmixed copies compute with an attention of the tests.

That attention is written here, by the equations.
"""

import copy

import pytest
import torch
import torch.nn.functional as F

from mixhead_plugin import ops
from mixhead_plugin.parts.hosted import PartsInHost
from tests.attention_equations import mixed
from tests.covering import each_once
from tests.hf.models import FEW, MODELS, QUERIES, build, hf, shake, transformers, whole

NAME = "definition"
VARIANTS = {
    "B": dict(head_mixing="position-wise"),
    "A, sink": dict(head_mixing="position-independent", attention_sink="learned", normalizer="l2"),
    "low-rank, gate": dict(head_mixing="low-rank", attention_gate="head", normalizer="sigsoftmax"),
    "V2, scores": dict(head_mixing="differential", score_mixing="position-wise"),
    "gate alone": dict(head_mixing="none", attention_gate="element", normalizer="relu2"),
}
MAPS = ("encoder_attentions", "decoder_attentions", "cross_attentions", "attentions")


def attend(
    module, query, key, value, mask, scaling=None, dropout=0.0, position_bias=None, **others
):
    """Compute attention with the parts in `module.parts`.

    `module.x` is the input of the attention [B, Nq, C].
    """
    parts = module.parts
    x = module.x
    n_keys = key.size(2)
    project = next(getattr(module, name) for name in QUERIES if hasattr(module, name))
    # GPT-2's projection gives keys and values, too, behind the queries.
    heads, size = query.shape[1::2]
    raw = project(x)[..., : heads * size].unflatten(-1, (heads, size)).transpose(1, 2)
    group = heads // key.size(1)
    key = key.repeat_interleave(group, 1)
    value = value.repeat_interleave(group, 1)
    scores = mixed(parts.score_mixing, query @ key.mT * scaling, raw, x.transpose(0, 1))
    if position_bias is not None:
        scores = scores + position_bias
    if mask is not None:  # floats, the least of their type where a key is hidden
        scores = torch.where(mask == torch.finfo(mask.dtype).min, float("-inf"), scores)
    if parts.attention_sink is not None:
        sink = parts.attention_sink.weight[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
    weights = ops.NORMALIZERS[parts.normalizer].weights(scores)[..., :n_keys]
    weights = mixed(parts.head_mixing, weights, raw, x.transpose(0, 1))
    if weights.size(1) < value.size(1):  # pairs of neighbours are the values of a mixed head
        value = torch.cat([value[:, ::2], value[:, 1::2]], -1)
    out = (F.dropout(weights, dropout) @ value).transpose(1, 2)
    if parts.attention_gate is not None:
        gate = 2 * (x @ parts.attention_gate.weight + parts.attention_gate.bias).sigmoid()
        out = out * gate.unflatten(-1, (out.size(2), -1))
    module.weights = weights
    return out, weights


transformers.AttentionInterface.register(NAME, attend)
transformers.AttentionMaskInterface.register(NAME, transformers.masking_utils.eager_mask)


def remember(module, args, kwargs):
    module.x = args[0] if args else kwargs["hidden_states"]


def defined(model, variant):
    """Return a mixed model and the unmixed one with `attend` in its place."""
    ours = shake(hf.mix(copy.deepcopy(model), **variant))
    for name, module in model.named_modules():
        host = ours.get_submodule(name)
        mixed_heads = vars(host).get(hf.MIXHEAD)
        if mixed_heads is not None:
            module.__dict__["parts"] = PartsInHost(host, mixed_heads.variant.normalizer)
            module.register_forward_pre_hook(remember, with_kwargs=True)
    model.set_attn_implementation(NAME)
    return ours, model


@each_once(name=MODELS, variant=VARIANTS, padded=[[], [0, 1], [5, 6], [6]])
def test_a_mixed_model_computes_the_definition(name, variant, padded):
    model, inputs = build(name)
    inputs["attention_mask"][1, padded] = 0
    inputs = whole(model, inputs)
    ours, theirs = defined(model, VARIANTS[variant])
    seen = slice(None)
    if "attention_mask" in inputs and not model.config.is_encoder_decoder:
        seen = inputs["attention_mask"] == 1
    with torch.no_grad():
        torch.testing.assert_close(ours(**inputs).logits[seen], theirs(**inputs).logits[seen])
        returned = [ours(**inputs, output_attentions=True)]
        # only then `transformers` takes the entry of the config
        ours.set_attn_implementation("eager")
        ours.config.output_attentions = True
        for child in ours.children():
            if hasattr(child, "config"):  # T5's have their own
                child.config.output_attentions = True
        for implementation in ("eager", hf.MIXHEAD):
            ours.set_attn_implementation(implementation)
            returned.append(ours(**inputs))

    found = hf.attentions(ours, inputs)
    for outputs in returned:
        maps = []
        for name_of_maps in MAPS:
            maps += outputs.get(name_of_maps) or ()
        assert len(found) == len(maps)
        for heads in found.values():
            # by factors, and by the matrix that is shown, sums differ in their last digits
            assert any(torch.allclose(heads.mixed, each, rtol=1e-12, atol=1e-12) for each in maps)
    mixes = VARIANTS[variant]["head_mixing"] != "none"
    for heads in found.values():
        assert heads.name
        assert (heads.mixing is not None) == mixes
        torch.testing.assert_close(heads.mixed[0], theirs.get_submodule(heads.name).weights[0])


@pytest.mark.parametrize("name", FEW[:3])  # T5 drops everything with one probability
def test_weights_are_dropped_in_training_and_only_there(name):
    others = "resid_pdrop embd_pdrop hidden_dropout_prob".split()
    weights = "attn_pdrop attention_probs_dropout_prob attention_dropout".split()
    model, inputs = build(name, {**dict.fromkeys(others, 0.0), **dict.fromkeys(weights, 1.0)})
    ours, theirs = defined(model, VARIANTS["B"])
    torch.testing.assert_close(ours(**inputs).logits, theirs(**inputs).logits)
    # all weights are 0
    torch.testing.assert_close(ours.train()(**inputs).logits, theirs.train()(**inputs).logits)
