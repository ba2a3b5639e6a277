"""Define attention by its equations, in any dtype, and share helpers among the tests of modules."""

import copy

import torch

from mixhead_plugin import ops
from mixhead_plugin.fairseq.attention import MixheadAttention
from mixhead_plugin.fairseq.models.synthesizer.attention import SYNTHESIZERS, SynthesizerAttention
from mixhead_plugin.parts.gate import ATTENTION_GATES
from mixhead_plugin.parts.head_mixing import HEAD_MIXINGS, DifferentialMixing
from tests.helpers import shake

# Sizes of the calls: embedding, heads, sentences, queries and keys.
E = 16
H = 4
B = 3
NQ = 5
NK = 7
LONGEST = 10  # input of a synthesizer
OWN_SIZES = {"factorized-dense": 3, "factorized-random": 2}  # of synthesizers
KDIM = 12  # of the keys of encoder-decoder attention

# What `variant` takes. tests/ops has all normalizers: these need the largest score, the number of
# visible keys, and the length of a row.
SOME_NORMALIZERS = ["softmax", "relu2", "l2", "l2, sink"]
# Combinations of parts beside the scores and their normalizer: fields of Variant by name.
COMBINATIONS = {name: {"head_mixing": name} for name in HEAD_MIXINGS}
for _name in ATTENTION_GATES:
    if _name != "none":
        COMBINATIONS[f"gate {_name}"] = {"attention_gate": _name, "head_mixing": "position-wise"}
COMBINATIONS |= {
    "scores position-independent": {
        "score_mixing": "position-independent",
        "head_mixing": "position-independent",
    },
    "scores position-wise": {"score_mixing": "position-wise", "head_mixing": "differential"},
    "features heads": {"feature_mixing": "heads", "head_mixing": "position-wise"},
    "features shared": {
        "feature_mixing": "shared",
        "mixed_features": "qv",
        "head_mixing": "none",
    },
    "features output": {
        "feature_mixing": "output",
        "head_mixing": "low-rank",
        "mixing_rank": 3,
        "attention_gate": "head",
    },
}

# Attentions that differ in where their keys are and in what their scores know of distances.
CROSS = {"encoder_decoder_attention": True, "kdim": KDIM, "vdim": KDIM}
RELATIVE = {
    "rotary": {"relative_position": "rotary"},
    "t5": {"relative_position": "t5"},
    "gain": {"relative_gain": 3},
}
ATTENTIONS = {
    "self": {},
    **RELATIVE,
    "constant": {"add_bias_kv": True},
    "zero": {"add_zero_attn": True},
    "cross": CROSS,
}


def variant(normalizer, mixing):
    """Return the options of an entry of SOME_NORMALIZERS and one of COMBINATIONS."""
    sink = {"attention_sink": "learned"} if normalizer.endswith(", sink") else {}
    return {"normalizer": normalizer.removesuffix(", sink"), **sink, **COMBINATIONS[mixing]}


def build(kind="self", mixing="none", normalizer="softmax", **options):
    """Build a module in evaluation mode.

    Its parameters of mixing and distances are away from their start.
    """
    torch.manual_seed(3)
    options = {
        "self_attention": kind != "cross",
        "causal": kind != "cross",
        **ATTENTIONS[kind],
        **options,
    }
    module = shake(MixheadAttention(E, H, **variant(normalizer, mixing), **options))
    for child in (module.relative_position, module.relative_gain):
        if child is None:
            continue
        for parameter in child.parameters():
            torch.nn.init.normal_(parameter)
    return module.eval()


def build_synthesizer(synthesizer, mixing="none", normalizer="softmax", **options):
    torch.manual_seed(5)
    options = {**variant(normalizer, mixing), **options}
    if not SYNTHESIZERS[synthesizer].multiplies:  # it refuses to mix scores
        options.pop("score_mixing", None)
    if options.get("feature_mixing", "output") != "output":  # it has values alone to mix
        options["mixed_features"] = "v"
    return shake(
        SynthesizerAttention(E, H, LONGEST, synthesizer, OWN_SIZES.get(synthesizer), **options)
    ).eval()


def inputs(kind="self", batch=B, dtype=torch.float32):
    """Return query and key [N, B, embed_dim], and the masks of the call."""
    query = torch.randn(NQ, batch, E, dtype=dtype)
    if kind != "cross":
        return query, query, {"attn_mask": future(dtype=dtype)}
    return (
        query,
        torch.randn(NK, batch, KDIM, dtype=dtype),
        {"key_padding_mask": padding(batch), "static_kv": True},
    )


def padding(batch=B, n_keys=NK):
    mask = torch.zeros(batch, n_keys, dtype=torch.bool)
    mask[1, -2:] = True
    mask[-1, -1:] = True
    return mask


def future(n=NQ, dtype=torch.float32):
    return torch.full((n, n), float("-inf"), dtype=dtype).triu(1)


def heads(x, number=H):
    """Reshape [N, B, H * D] to [B, H, N, D]."""
    return x.unflatten(2, (number, -1)).permute(1, 2, 0, 3)


def features(module, name, x, number=H):
    """Return the mixed features [B, H, N, D] of queries, keys or values.

    The projections x are [N, B, H * D].
    """
    matrix = getattr(module.feature_mixing, name, None)
    x = heads(x, number)
    if matrix is None:
        return x
    if module.variant.feature_mixing == "heads":
        return torch.einsum("jh,bjnd->bhnd", matrix, x)
    return torch.einsum("de,bhnd->bhne", matrix, x)


def turned(x):
    """Rotate pairs of features, as complex numbers (RoPE).

    The angles grow with their position.
    """
    half = x.size(-1) // 2
    frequency = 10000.0 ** (-2 * torch.arange(half, dtype=torch.float64) / x.size(-1))
    angle = torch.arange(x.size(2))[:, None] * frequency
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.polar(
        torch.ones_like(angle), angle
    )
    return torch.cat([pairs.real, pairs.imag], -1).to(x.dtype)


def matrix(part, q, x):
    """Return M [B, Nq, H, H'] of a mixing, one query after the other.

    The queries q are [B, H, Nq, D], the inputs x [Nq, B, C].
    """
    names = dict(part.named_parameters())
    x = x.transpose(0, 1)
    if "query_weight" in names:
        return torch.einsum("bjtd,di->btji", q, part.query_weight) + part.bias
    if "left_weight" in names:
        hidden = torch.nn.functional.gelu(x @ part.hidden_weight)
        u = (hidden @ part.left_weight).unflatten(-1, (H, -1))
        v = (hidden @ part.right_weight).unflatten(-1, (H, -1))
        u = u / (u.square().mean(2, keepdim=True) + 1e-6).sqrt()
        diagonal = torch.eye(H, dtype=x.dtype) * (1 + (x @ part.diagonal_weight).tanh()[..., None])
        return diagonal + torch.einsum("btjr,btir->btji", u, v)
    if isinstance(part, DifferentialMixing):
        share = (x @ part.weight).sigmoid()
        pairs = share.new_zeros(*share.shape[:2], H, H // 2)
        for i in range(H // 2):
            pairs[..., i, i] = 1
            pairs[..., i + H // 2, i] = -share[..., i]
        return pairs
    return part.weight.expand(*x.shape[:2], -1, -1)


def mixed(part, heads, q, x):
    return heads if part is None else torch.einsum("btji,bjtk->bitk", matrix(part, q, x), heads)


def finish(module, scores, hidden, v, q, x, biases=0):
    """Mix scores [B, H, Nq, Nk], normalize, mix and project.

    Return outputs and mixed weights [H', B, Nq, Nk].
    """
    n_queries, n_keys = scores.shape[2:]
    scores = (mixed(module.score_mixing, scores, q, x) + biases).masked_fill(hidden, float("-inf"))
    if module.attention_sink is not None:
        column = module.attention_sink.weight[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column.to(scores.dtype)], -1)
    weights = ops.NORMALIZERS[module.normalizer].weights(scores)[..., :n_keys]
    if module.relative_gain is not None:
        clip = module.relative_gain.clip
        # key - query
        offsets = torch.arange(n_keys) - torch.arange(n_keys - n_queries, n_keys)[:, None]
        weights = weights * module.relative_gain.weight[:, offsets.clamp(-clip, clip) + clip]
    weights = mixed(module.head_mixing, weights, q, x)
    out = torch.einsum("bhtk,bhkd->tbhd", weights, v)
    if module.variant.feature_mixing == "output":
        out = out + torch.einsum(
            "jr,hr,tbjd->tbhd", module.feature_mixing.left, module.feature_mixing.right, out
        )
    if module.attention_gate is not None:
        gate = 2 * (x @ module.attention_gate.weight + module.attention_gate.bias).sigmoid()
        out = out * gate.unflatten(-1, (out.size(2), -1))
    return module.out_proj(out.flatten(2)), weights.transpose(0, 1)


def definition(module, query, key, hidden):
    """Compute mixhead eqs 8-12 with relative positions.

    `hidden`, bool, is broadcastable to [B, H, Nq, Nk].
    """
    q = features(module, "query", module.q_proj(query))
    k = features(module, "key", module.k_proj(key))
    v = features(module, "value", module.v_proj(key), module.num_mixed_heads)
    if module.variant.relative_position == "rotary":
        products = turned(q) @ turned(k).mT
    else:
        products = q @ k.mT
    scores = products * module.head_dim**-0.5
    biases = 0
    if module.variant.relative_position == "t5":
        offsets = torch.arange(k.size(2)) - torch.arange(q.size(2))[:, None]
        biases = module.relative_position.weight[module.relative_position.buckets(offsets)].permute(
            2, 0, 1
        )
    return finish(module, scores, hidden, v, q, query, biases)


def check_half_precision(computed, formula, module, tensors, dtype):
    """Assert that a module is exact enough in half precision.

    It may be twice as far from float64 as the formula in that dtype, in the root mean square:
    the largest error of a few hundred outputs is a matter of chance.

    Args:
        computed, formula: called with the module and the tensors; both return the output
        module: in float32
        tensors: its inputs
        dtype: of half precision
    """
    module = copy.deepcopy(module).to(dtype)
    tensors = [tensor.to(dtype) for tensor in tensors]
    exact = formula(copy.deepcopy(module).double(), *(tensor.double() for tensor in tensors))
    out = computed(module, *tensors)
    assert out.dtype == dtype
    error = (out.double() - exact).square().mean().sqrt()
    formulas_error = (formula(module, *tensors).double() - exact).square().mean().sqrt()
    assert 0 < error <= 2 * formulas_error


def decode(module, x, key=None, state=None, **options):
    """Call the module with one query at a time, as beam search does.

    Return the outputs and the state.
    """
    state = {} if state is None else state
    steps = []
    for t in range(x.size(0)):
        k = x[t : t + 1] if key is None else key
        arguments = {
            "incremental_state": state,
            "need_weights": False,
            "static_kv": key is not None,
            **options,
        }
        steps.append(module(x[t : t + 1], k, k, **arguments)[0])
    return torch.cat(steps), state


class StepByStep(torch.nn.Module):
    """Decode inside TorchScript, because only there its dictionaries can be changed in place."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x: torch.Tensor, key: torch.Tensor | None):
        state: dict[str, dict[str, torch.Tensor | None]] = {}
        steps: list[torch.Tensor] = []
        for t in range(x.size(0)):
            step = x[t : t + 1]
            k = step if key is None else key
            steps.append(
                self.attention(
                    step,
                    k,
                    k,
                    incremental_state=state,
                    need_weights=False,
                    static_kv=key is not None,
                )[0]
            )
        return torch.cat(steps)
