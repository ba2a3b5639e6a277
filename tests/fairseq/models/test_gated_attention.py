"""Gated attention units are their equations, in a language model and in a masked one."""

import math

import numpy as np
import pytest
import torch
from fairseq.models import ARCH_MODEL_REGISTRY, build_model
from fairseq.modules import FairseqDropout
from omegaconf import OmegaConf
from torch import nn

from mixhead_plugin.errors import CheckpointError, OptionError
from mixhead_plugin.fairseq.analysis.adapter import attentions_of
from mixhead_plugin.fairseq.models.gated_attention.unit import GatedAttentionUnit
from mixhead_plugin.ops import IMPLEMENTATIONS, NORMALIZERS
from mixhead_plugin.ops.triton import support
from mixhead_plugin.parts import PARTS
from tests.covering import each_once
from tests.fairseq.models.cases import (
    assert_scored_as_by_the_full_pass,
    command,
    continuations,
    forward,
    step_by_step,
    yaml,
)
from tests.helpers import build, dictionary, task, tokens
from tests.ops import definitions

MODELS = ("gau_lm", "gau_roberta")


def units(model):
    return [module for module in model.modules() if isinstance(module, GatedAttentionUnit)]


def shaken(arch, seed=1, **flags):
    """Return a model in float64 whose every parameter is away from its start."""
    model = build(arch, seed, **flags).double().eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data.add_(0.2 * noise)
    return model


# ---- the equations -------------------------------------------------------------------------------


def turned(x):
    """Rotate the pairs (j, j + s / 2) of rows x [B, N, s] as numbers of the complex plane."""
    half = x.shape[2] // 2
    frequencies = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * frequencies  # [N, s / 2]
    pairs = torch.complex(x[..., :half], x[..., half:])
    rotated = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([rotated.real, rotated.imag], -1)


def swish(x):
    return x / (1 + torch.exp(-x))


def weights_of(unit, h, visible):
    """Return A [B, N, N] of a unit for its normalised input h [B, N, d]."""
    z = swish(h @ unit.shared_proj.weight.T)
    q = turned(z * unit.query_affine.weight + unit.query_affine.bias)
    k = turned(z * unit.key_affine.weight + unit.key_affine.bias)
    scores = torch.einsum("bns,bms->bnm", q, k) / math.sqrt(q.shape[2])
    return definitions.weights(unit.normalizer, scores, visible)


def by_definition(unit, x, visible):
    """Return the output of a unit [B, N, d] for x [B, N, d] and visible keys [B, N, N]."""
    norm = unit.layer_norm
    h = (x - x.mean(-1, True)) / (x.var(-1, unbiased=False, keepdim=True) + norm.eps).sqrt()
    h = h * norm.weight + norm.bias
    u = swish(h @ unit.gate_proj.weight.T)
    v = swish(h @ unit.v_proj.weight.T)
    return x + (u * (weights_of(unit, h, visible) @ v)) @ unit.out_proj.weight.T


def visible_keys(padding, causal):
    """Return which keys each query sees, [B, N, N], for padded places [B, N]."""
    length = padding.shape[1]
    seen = torch.ones(length, length, dtype=torch.bool)
    if causal:
        seen = seen.tril()
    return seen & ~padding[:, None]


FUTURE = torch.full((5, 5), -math.inf, dtype=torch.float64).triu(1)


@each_once(normalizer=NORMALIZERS, arch=MODELS)
def test_a_unit_and_its_gradients_are_the_definition(normalizer, arch):
    causal = arch == "gau_lm"
    flags = {"attention_normalizer": normalizer, "gau_expansion": 2 if causal else 3}
    unit = units(shaken(arch, **flags))[0]
    x = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])

    if causal:
        found = unit(x.transpose(0, 1), self_attn_mask=FUTURE, self_attn_padding_mask=padding)[0]
    else:
        found = unit(x.transpose(0, 1), padding)
    expected = by_definition(unit, x, visible_keys(padding, causal)).transpose(0, 1)
    torch.testing.assert_close(found, expected)

    d_out = torch.randn_like(expected)
    parameters = [x, *unit.parameters()]
    torch.testing.assert_close(
        torch.autograd.grad(found, parameters, d_out),
        torch.autograd.grad(expected, parameters, d_out),
    )


@pytest.mark.parametrize("arch", MODELS)
def test_a_position_sees_itself_most_at_the_start(arch):
    sizes = {f"{ARCH_MODEL_REGISTRY[arch].side}_embed_dim": 64, "gau_query_dim": 32}
    model = build(arch, **sizes).double()
    h = torch.randn(4, 12, 64, dtype=torch.float64)
    nothing = torch.zeros(4, 12, dtype=torch.bool)
    for unit in units(model):
        assert torch.equal(unit.query_affine.weight, torch.ones(32, dtype=torch.float64))
        assert torch.equal(unit.query_affine.bias, torch.zeros(32, dtype=torch.float64))
        weights = weights_of(unit, h, visible_keys(nothing, causal=False))
        assert weights.diagonal(dim1=1, dim2=2).mean() > 3 / 12  # uniform is 1 / 12


@pytest.mark.parametrize("arch", MODELS)
def test_value_init_scale_shrinks_the_maps_of_values_and_outputs_alone(arch):
    plain = units(build(arch))[0]
    shrunk = units(build(arch, value_init_scale=0.5))[0]
    expected = dict(plain.named_parameters())
    for name in ("v_proj.weight", "out_proj.weight"):
        expected[name] = 0.5 * expected[name]
    assert expected.keys() == dict(shrunk.named_parameters()).keys()
    for name, parameter in shrunk.named_parameters():
        assert torch.equal(parameter, expected[name]), name


@pytest.mark.parametrize("arch", MODELS)
def test_a_unit_has_the_parameters_of_its_four_maps_gammas_betas_and_norm(arch):
    side = ARCH_MODEL_REGISTRY[arch].side
    d, s, expansion = 24, 10, 3
    e = expansion * d
    flags = {f"{side}_embed_dim": d, "gau_query_dim": s, "gau_expansion": expansion}
    for unit in units(build(arch, **flags)):
        norm = 2 * d
        assert sum(p.numel() for p in unit.parameters()) == d * (2 * e + s) + e * d + 4 * s + norm


def test_a_language_model_has_no_other_parameters_than_units_embeddings_and_a_last_norm():
    model = build("gau_lm", share_decoder_input_output_embed=True)
    own = {id(p) for unit in units(model) for p in unit.parameters()}
    others = [name for name, p in model.named_parameters() if id(p) not in own]
    assert others == [
        "decoder.embed_tokens.weight",
        "decoder.layer_norm.weight",
        "decoder.layer_norm.bias",
    ]


def test_a_hook_changes_what_a_unit_computes():
    unit = units(build("gau_roberta").eval())[0]
    unit.register_attention_hook(lambda unit, inputs, out: torch.zeros_like(out))
    x = torch.randn(5, 2, unit.embed_dim)
    assert torch.equal(unit(x, None), x)


# ---- decoding, masks -----------------------------------------------------------------------------


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_steps_are_the_full_pass_also_with_reordered_beams(normalizer):
    decoder = shaken("gau_lm", attention_normalizer=normalizer).decoder
    prefix = tokens(length=4)
    steps, state = step_by_step(decoder, prefix)
    torch.testing.assert_close(steps, decoder(prefix)[0])
    order = torch.tensor([2, 0, 0])
    decoder.reorder_incremental_state_scripting(state, order)
    longer = torch.cat([prefix[order], tokens(length=1)], 1)
    step = decoder(longer, incremental_state=state)[0]
    torch.testing.assert_close(step, decoder(longer)[0][:, -1:])


def test_a_sink_and_a_gain_of_distances_act_in_training_and_in_steps():
    flags = {"attention_sink": "learned", "relative_gain": 2}
    decoder = shaken("gau_lm", **flags).decoder
    plain = shaken("gau_lm").decoder
    prefix = tokens(length=6)
    full = decoder(prefix)[0]
    of_first_layer = dict(decoder.layers[0].named_parameters())
    parts = {name.partition(".")[0] for name in of_first_layer}
    assert {"attention_sink", "relative_gain"} <= parts
    assert not torch.allclose(full, plain(prefix)[0])
    torch.testing.assert_close(step_by_step(decoder, prefix)[0], full)


def test_generation_from_prefixes_of_several_lengths_scores_as_the_full_pass():
    model = build("gau_lm").eval()
    for hypothesis in continuations(model, max_len_b=8):
        assert_scored_as_by_the_full_pass(model, hypothesis)


@each_once(normalizer=NORMALIZERS, arch=MODELS)
def test_padding_order_and_later_words_change_nothing(normalizer, arch):
    model = shaken(arch, attention_normalizer=normalizer)
    sentences = tokens(padded=True)
    whole = forward(model, sentences)
    torch.testing.assert_close(forward(model, sentences.flip(0)).flip(0), whole)
    alone = sentences[2:, :5]
    torch.testing.assert_close(forward(model, alone), whole[2:, :5])
    if arch == "gau_lm":
        torch.testing.assert_close(forward(model, sentences[:, :3]), whole[:, :3])


@each_once(normalizer=NORMALIZERS, arch=MODELS)
def test_a_text_that_begins_later_in_its_row_gives_the_same(normalizer, arch):
    model = shaken(arch, attention_normalizer=normalizer)
    sentences = tokens()
    padding = torch.full((len(sentences), 2), dictionary().pad())
    later = torch.cat([padding, sentences], 1)
    expected = forward(model, sentences)
    torch.testing.assert_close(forward(model, later)[:, 2:], expected)
    if arch == "gau_lm":
        torch.testing.assert_close(step_by_step(model.decoder, later)[0][:, 2:], expected)


class Steps(nn.Module):
    """Decode step by step in TorchScript, which has no lambda."""

    def __init__(self, decoder):
        super().__init__()
        self.decoder = decoder

    def forward(self, prefix: torch.Tensor) -> torch.Tensor:
        state: dict[str, dict[str, torch.Tensor | None]] = {}
        logits: list[torch.Tensor] = []
        for t in range(prefix.size(1)):
            logits.append(
                self.decoder(prefix[:, : t + 1], encoder_out=None, incremental_state=state)[0]
            )
        return torch.cat(logits, 1)


def test_torchscript_gives_the_same_outputs_in_a_full_pass_and_in_steps():
    flags = {"attention_normalizer": "l2", "attention_sink": "learned", "relative_gain": 2}
    decoder = shaken("gau_lm", **flags, decoder_layers=1).decoder
    scripted = torch.jit.script(Steps(decoder))
    prefix = tokens(padded=True)
    torch.testing.assert_close(scripted.decoder(prefix)[0], decoder(prefix)[0])
    torch.testing.assert_close(scripted(prefix[:1]), decoder(prefix[:1])[0])


# ---- training ------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", MODELS)
def test_checkpointed_activations_give_the_same_gradients(arch):
    gradients = []
    for checkpointing in (False, True):
        flags = {"checkpoint_activations": checkpointing, "dropout": 0.1, "attention_dropout": 0.2}
        model = build(arch, **flags).train()
        torch.manual_seed(5)
        forward(model, tokens(padded=True)).square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


@pytest.mark.parametrize("arch", MODELS)
def test_autocast_leaves_gradients_in_float32(arch):
    model = build(arch).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = forward(model, tokens(padded=True))
    out.float().sum().backward()
    for unit in units(model):
        for parameter in unit.parameters():
            assert parameter.grad.dtype == torch.float32


def test_no_word_of_adaptive_inputs_is_0_where_gradients_would_grow_from_unit_to_unit():
    cutoffs = {"adaptive_input_cutoff": "10,20", "adaptive_softmax_cutoff": "10,20"}
    flags = {"adaptive_input": True, "adaptive_input_factor": 2, "decoder_layers": 8, **cutoffs}
    model = build("gau_lm", **flags)
    every_word = torch.arange(4, 29)[None]
    model(every_word)[0].square().sum().backward()
    of_bands = [band[0].weight.grad for band in model.decoder.embed_tokens.embeddings]
    assert all(grad[1].abs().sum() > 0 for grad in of_bands[1:])
    for unit in units(model):
        for parameter in unit.parameters():
            assert parameter.grad.abs().max() < 1e3


def test_every_dropout_acts_and_can_be_retained_in_generation():
    model = build("gau_lm", dropout=0.5, attention_dropout=0.5).eval()
    prefix = tokens()
    calm = model(prefix)[0]
    torch.testing.assert_close(model(prefix)[0], calm)
    for unit in units(model):
        for child in unit.children():
            if isinstance(child, FairseqDropout):
                assert child.module_name == "GatedAttentionUnit"
        unit.dropout_module.apply_during_inference = True  # the dropout of A alone
    assert not torch.allclose(model(prefix)[0], calm)


def test_quantisation_noise_reaches_the_linear_maps():
    unit = units(build("gau_lm", quant_noise_pq=0.5, quant_noise_pq_block_size=4))[0].train()
    x = torch.randn(5, 2, 16)
    assert not torch.allclose(unit(x)[0], unit(x)[0])


# The fused kernels need a GPU.
@pytest.mark.parametrize("impl", ["reference", "blockwise"])
def test_the_implementation_is_the_one_that_was_asked_for(impl, monkeypatch):
    ran = []
    upstream = IMPLEMENTATIONS[impl]
    spied = upstream._replace(run=lambda inputs: ran.append(impl) or upstream.run(inputs))
    monkeypatch.setitem(IMPLEMENTATIONS, impl, spied)
    prefix = tokens()
    found = shaken("gau_lm", attention_impl=impl)(prefix)[0]
    assert ran
    torch.testing.assert_close(found, shaken("gau_lm")(prefix)[0])


# ---- families, flags -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family, normalizer", [("", "softmax"), ("sigsoftmax_", "sigsoftmax"), ("l2_", "l2")]
)
@pytest.mark.parametrize("arch", MODELS)
def test_a_family_sets_the_normalizer_alone(family, normalizer, arch):
    own = {(unit.normalizer, unit.value_init_scale) for unit in units(build(f"{family}{arch}"))}
    assert own == {(normalizer, 1.0)}
    masked = "masked_lm" if arch == "gau_roberta" else None
    typed = command(f"{family}{arch}", task=masked)
    assert (typed.attention_normalizer, typed.value_init_scale) == (normalizer, 1.0)
    assert (typed.gau_expansion, typed.gau_query_dim) == (2, 128)


def test_a_yaml_file_gets_the_defaults():
    cfg = yaml("l2_gau_lm")
    assert (cfg.attention_normalizer, cfg.value_init_scale) == ("l2", 1.0)
    assert (cfg.decoder_layers, cfg.decoder_embed_dim, cfg.gau_query_dim) == (12, 512, 128)
    sizes = {"encoder_layers": 1, "encoder_embed_dim": 16, "max_positions": 32}
    cfg = OmegaConf.create({"_name": "l2_gau_roberta", **sizes})
    (unit,) = units(build_model(cfg, task()))
    assert (unit.normalizer, unit.value_init_scale) == ("l2", 1.0)
    assert (unit.inner_dim, unit.query_dim) == (32, 128)


@pytest.mark.parametrize("arch", MODELS)
def test_sizes_may_be_numbers_of_numpy_and_the_record_has_those_of_python(arch):
    side = ARCH_MODEL_REGISTRY[arch].side
    sizes = {f"{side}_embed_dim": 16, "gau_query_dim": 8, "gau_expansion": 3}
    model = build(arch, **{name: np.int64(size) for name, size in sizes.items()})
    for unit in units(model):
        assert (unit.record()["gau_query_dim"], unit.record()["gau_expansion"]) == (8, 3)
        assert {type(value) for value in unit.record().values()} == {int, str}


def test_families_about_several_heads_have_no_units():
    for family in ("mixhead", "fixhead", "talking_heads", "differential", "gated"):
        for arch in MODELS:
            assert f"{family}_{arch}" not in ARCH_MODEL_REGISTRY
    with pytest.raises(OptionError) as error:
        command("mixhead_gau_lm")
    assert str(error.value) == (
        "--arch mixhead_gau_lm: unknown; did you mean gau_lm or sigsoftmax_gau_lm or l2_gau_lm?"
    )


ONE_HEAD = "must be left out, a gated attention unit has one head, of --gau-query-dim"
BLOCK = (
    "must be left out, a gated attention unit is its own feed-forward block, see --gau-expansion"
)
REFUSED = {
    "--head-mixing position-wise": ONE_HEAD,
    "--score-mixing position-independent": ONE_HEAD,
    "--feature-mixing heads": ONE_HEAD,
    "--mixed-features qk": ONE_HEAD,
    "--mixing-start random": ONE_HEAD,
    "--mixing-rank 3": ONE_HEAD,
    "--mixing-lr-scale 0.5": ONE_HEAD,
    "--head-dim 8": ONE_HEAD,
    "--value-head-dim 8": "must be left out, values have the size that --gau-expansion asks for",
    "--heads-per-layer decoder-self=1,1": ONE_HEAD,
    "--decoder-attention-heads 4": ONE_HEAD,
    "--scale-heads": ONE_HEAD,
    "--attention-gate head": "must be left out, a gated attention unit has its own gate",
    "--decoder-ffn-embed-dim 64": BLOCK,
    "--activation-dropout 0.1": BLOCK,
    "--base-layers 1": BLOCK,
    "--relative-position t5": "must be left out, gated attention units have rotary positions",
    "--decoder-learned-pos": "must be left out, gated attention units have rotary positions",
    "--activation-fn gelu": "must be left out, gated attention units use swish",
    "--gau-query-dim 7": "must be even, for rotary positions",
    "--gau-query-dim 0": "must be a whole number of at least 1",
    "--decoder-embed-dim 0": "must be a whole number of at least 1",
    "--gau-expansion 0": "must be a whole number of at least 1",
    "--attention-normalizer Softmax": f"must be one of {', '.join(NORMALIZERS)}",
    "--attention-scope cross": "the model has no such attention; must be one of all, self, "
    "decoder, decoder-self",
}


@pytest.mark.parametrize("typed", REFUSED)
def test_a_flag_without_a_meaning_is_refused_before_training(typed):
    with pytest.raises(OptionError) as error:
        command("gau_lm", *typed.split())
    assert str(error.value) == f"{typed}: {REFUSED[typed]}"


@pytest.mark.parametrize(
    "typed, problem",
    [
        ("--encoder-attention-heads 4", ONE_HEAD),
        ("--encoder-ffn-embed-dim 64", BLOCK),
        ("--mha-heads-to-keep 2", ONE_HEAD),
    ],
)
def test_a_masked_model_refuses_those_of_its_encoder(typed, problem):
    with pytest.raises(OptionError) as error:
        command("gau_roberta", *typed.split(), task="masked_lm")
    assert str(error.value) == f"{typed}: {problem}"


def test_kernels_are_refused_for_values_that_are_too_large_for_them(monkeypatch):
    monkeypatch.setattr(support, "machine_problem", lambda: "")  # as with a GPU
    most = support.MAX_HEAD_DIM
    flags = ["--gau-query-dim=32", "--attention-impl=triton"]
    command("gau_lm", *flags, f"--decoder-embed-dim={most // 2}")
    with pytest.raises(OptionError) as error:
        command("gau_lm", *flags, f"--decoder-embed-dim={most}")
    assert str(error.value) == (
        f"--attention-impl triton: has no kernel for head size {2 * most}, only up to {most}; must "
        "be auto, blockwise or reference"
    )


TIED = ["--adaptive-input", "--tie-adaptive-weights", "--decoder-embed-dim=16"]


def test_tied_adaptive_weights_take_a_size_that_is_left_out_from_the_model():
    command("gau_lm", *TIED)
    command("gau_lm", *TIED, "--decoder-input-dim=16")
    command("gau_lm", *TIED, "--decoder-output-dim=16")
    with pytest.raises(OptionError) as error:
        command("gau_lm", *TIED, "--decoder-input-dim=8")
    assert str(error.value) == (
        "--decoder-input-dim 8: must be 16, as --decoder-output-dim, with --tie-adaptive-weights"
    )


def test_positions_that_the_units_have_anyway_may_be_asked_for():
    flags = ("--relative-position", "rotary", "--no-token-positional-embeddings")
    assert command("gau_lm", *flags).gau_query_dim == 128


# ---- checkpoints, analysis -----------------------------------------------------------------------


@pytest.mark.parametrize("arch", MODELS)
def test_a_checkpoint_keeps_the_outputs(arch):
    model = shaken(f"l2_{arch}")
    other = build(f"l2_{arch}", seed=2).double().eval()
    other.load_state_dict(model.state_dict())
    sentences = tokens()
    assert torch.equal(forward(other, sentences), forward(model, sentences))


@pytest.mark.parametrize(
    "flags, flag, found, wanted",
    [
        ({"attention_normalizer": "l2"}, "--attention-normalizer", "l2", "softmax"),
        ({"gau_query_dim": 8}, "--gau-query-dim", "8", "6"),
        ({"gau_expansion": 3}, "--gau-expansion", "3", "2"),
        ({"attention_sink": "zero"}, "--attention-sink", "zero", "none"),
        ({"relative_gain": 4}, "--relative-gain", "4", "0"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_a_checkpoint_of_other_units_is_refused_in_one_line(flags, flag, found, wanted):
    state = build("gau_lm", **flags).state_dict()
    with pytest.raises(CheckpointError) as error:
        build("gau_lm").load_state_dict(state)
    assert str(error.value) == (
        f"checkpoint does not fit: its decoder.layers.0 was trained with {flag} {found}, this "
        f"model with {wanted}; use {flag} {found}"
    )


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"gau_query_dim": 8}, "--gau-query-dim 8, this model with 6"),
        ({"attention_sink": "learned"}, "--attention-sink learned, this model with none"),
        ({"relative_gain": 4}, "--relative-gain 4, this model with 0"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_a_checkpoint_without_a_record_is_known_by_its_tensors(flags, message):
    state = dict(build("gau_lm", **flags).state_dict())  # as an average of several
    with pytest.raises(CheckpointError, match=message):
        build("gau_lm").load_state_dict(state)


def test_a_checkpoint_without_a_sink_is_refused_where_the_sink_is_learned():
    state = build("gau_lm").state_dict()
    for known in (state, dict(state)):
        with pytest.raises(CheckpointError, match="--attention-sink none, this model with learned"):
            build("gau_lm", attention_sink="learned").load_state_dict(known)


@pytest.mark.parametrize("known", ["with a record", "tensors alone"])
def test_a_gain_that_a_checkpoint_lacks_starts_without_effect(known):
    trained = shaken("gau_lm")
    state = trained.state_dict() if known == "with a record" else dict(trained.state_dict())
    model = build("gau_lm", seed=2, relative_gain=4).double().eval()
    model.load_state_dict(state)
    sentences = tokens()
    torch.testing.assert_close(forward(model, sentences), forward(trained, sentences))


def test_a_record_of_release_0_2_0_has_fewer_entries_and_loads():
    trained = build("l2_gau_lm", attention_sink="zero")
    state = trained.state_dict()
    for unit in ("decoder.layers.0", "decoder.layers.1"):
        record = state._metadata[unit]
        for option in PARTS.keys() - {"attention_sink"}:
            del record[option]
    model = build("l2_gau_lm", seed=2, attention_sink="zero")
    model.load_state_dict(state)
    sentences = tokens()
    assert torch.equal(forward(model, sentences), forward(trained, sentences))


def test_what_a_checkpoint_without_a_record_does_not_tell_is_warned_of(caplog):
    state = dict(build("l2_gau_lm").state_dict())
    build("gau_lm").load_state_dict(state)
    assert caplog.messages == []
    build("l2_gau_lm").load_state_dict(build("l2_gau_lm").state_dict())
    assert caplog.messages == []
    build("l2_gau_lm").load_state_dict(state)
    assert caplog.messages == [
        "the checkpoint does not say with which --attention-normalizer it was trained; from now on "
        "it is l2"
    ]


def test_a_checkpoint_of_fairseqs_layers_is_refused():
    state = build("mixhead_transformer_lm").state_dict()
    with pytest.raises(CheckpointError, match=r"^checkpoint .* decoder.layers.0 is no gated att"):
        build("gau_lm").load_state_dict(state)


def test_a_study_of_heads_finds_none():
    with pytest.raises(OptionError, match=r"^model GatedLanguageModel: has no mult"):
        attentions_of(build("gau_lm"))
