"""Try the plugin's flags: each changes something, or is refused in one line that names it."""

import functools
import itertools
import re

import pytest
import torch

from mixhead_plugin.errors import OptionError, option_name
from mixhead_plugin.fairseq.options import (
    CHOICES,
    FAMILIES,
    OPTION_NAMES,
    SCOPES,
    AttentionOptions,
)
from mixhead_plugin.ops import IMPLEMENTATIONS, NORMALIZERS, api
from mixhead_plugin.parts import PARTS
from tests.covering import covering
from tests.fairseq.models.cases import command
from tests.helpers import VOCABULARY, build, shake, tokens
from tests.xl import build_xl, in_windows

MODELS = ("transformer", "transformer_lm", "roberta_base", "transformer_xl", "synthesizer_lm")

# Values of each flag, good and bad; the first two are accepted in some combination.
VALUES = {
    "attention_normalizer": (*NORMALIZERS, "Softmax", ""),
    **{option: (*table, "position_wise") for option, table in PARTS.items()},
    "mixed_features": (*CHOICES["mixed_features"], "vk"),
    "mixing_start": (*CHOICES["mixing_start"], "ones"),
    "head_dim": (2, 4, 5, 32, 0),
    "value_head_dim": (2, 5, 32, 0),
    "attention_scope": (*SCOPES, "encoder-self"),
    "attention_impl": ("auto", *IMPLEMENTATIONS, "cuda"),
    "value_init_scale": (0.1, 1.0, 10.0, 0.0),
    "mixing_lr_scale": (0.1, 1.0, 10.0, 0.0),
    "relative_gain": (0, 1, 4, -1),
    "heads_per_layer": (
        "encoder-self=3,2",
        "encoder-self=2:1,4:3",
        "cross=4:3,4",
        "encoder-self=0,2",
        "cross",
    ),
}


def test_every_flag_of_the_plugin_is_tried():
    assert set(OPTION_NAMES) == set(VALUES)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("first, second", itertools.combinations(OPTION_NAMES, 2))
def test_two_flags_work_together_or_are_refused(first, second, model, monkeypatch):
    for chosen in itertools.product(*(VALUES[name][:3] for name in (first, second))):
        try:
            output = effect(model, "mixhead", monkeypatch, **dict(zip((first, second), chosen)))[
                "output"
            ]
        except OptionError as refused:
            assert re.fullmatch(r"--[a-z-]+[ :].*", str(refused))
        else:
            assert output.isfinite().all()


@pytest.mark.parametrize("model", MODELS)
def test_numbers_of_the_plugins_flags_are_read_as_numbers(model):
    numbers = {"head_dim": 4, "relative_gain": 2, "value_init_scale": 0.5, "mixing_lr_scale": 2.0}
    typed = [f"{option_name(name)}={value}" for name, value in numbers.items()]
    for family in FAMILIES:
        flags = ["--head-mixing", "position-wise", *typed]
        args = command(
            f"{family}_{model}", *flags, task="masked_lm" if model == "roberta_base" else None
        )
        assert {name: getattr(args, name) for name in numbers} == numbers


# ---- no flag does nothing ----------------------------------------------------------------------

SITES = {"transformer": SCOPES["all"], "roberta_base": ("encoder-self",)}


def effect(model, family, monkeypatch, **given):
    """Return what a flag may change: parameters, their learning rates, outputs, and the
    implementation that ran.
    """
    if model == "synthesizer_lm":
        given.setdefault("synthesizer", "factorized-random")
    if family == "fixhead":
        given.setdefault("head_dim", 6)
    if model == "transformer_xl":
        given.setdefault("n_head", 4)  # pairs of heads for --head-mixing differential
    built = (build_xl if model == "transformer_xl" else build)(f"{family}_{model}", **given)
    parameters = {name: p.detach().clone() for name, p in built.named_parameters()}
    rates = {
        name: getattr(p, "optim_overrides", None)
        for name, p in built.named_parameters()
        if p.requires_grad
    }
    ran = set()
    for name, implementation in api.IMPLEMENTATIONS.items():

        def run(*args, name=name, upstream=implementation.run, **settings):
            ran.add(name)
            return upstream(*args, **settings)

        monkeypatch.setitem(api.IMPLEMENTATIONS, name, implementation._replace(run=run))
    sentences = tokens(length=8)
    with torch.no_grad():
        inputs = (sentences, None, sentences) if model == "transformer" else (sentences,)
        output = shake(built).eval()(*inputs)[0]
    monkeypatch.undo()
    return {"parameters": parameters, "rates": rates, "output": output, "ran": ran}


def equal(left, right):
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(
            equal(value, right[name]) for name, value in left.items()
        )
    return torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right


def is_the_default(model, family, name, value):
    """Return True if this value is the model's documented default."""
    if name == "head_dim":
        return family != "fixhead" and value == (5 if model == "transformer_xl" else 4)
    if name == "value_head_dim":
        sizes = {"transformer_xl": 5}
        return value == (6 if family == "fixhead" else sizes.get(model, 4))
    if name == "attention_scope":  # the value covers all attentions of the model
        return set(SITES.get(model, ("decoder-self",))) <= set(SCOPES[value])
    return value == FAMILIES[family].get(name, getattr(AttentionOptions(), name))


@covering(name=OPTION_NAMES, model=MODELS, family=FAMILIES)
def test_every_value_of_a_flag_changes_something_or_is_refused(name, model, family, monkeypatch):
    plain = effect(model, family, monkeypatch)
    for value in VALUES[name]:
        try:
            found = effect(model, family, monkeypatch, **{name: value})
        except OptionError as refused:
            assert option_name(name) in str(refused)
            continue
        if name == "attention_impl" and value != "auto":
            assert found["ran"] == {value}
        else:
            assert equal(plain, found) == is_the_default(model, family, name, value), value


def xl_effect(**given):
    """Return parameters, log-probabilities in training, evaluation and step-by-step decoding, and
    saved tensors.
    """
    model = build_xl(**given)
    words = torch.randint(4, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(3))
    saved, state = [], {}
    torch.manual_seed(5)  # of the dropout
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.shape) or t, lambda t: t
    ):
        trained = in_windows(model.train(), words, [8, 8, 8]).detach()
    with torch.no_grad():
        text = in_windows(model.eval(), words, [8, 8, 8])
        decoded = [
            model.decoder(words[:, :n], incremental_state=state)
            for n in range(1, words.shape[1] + 1)
        ]
        steps = torch.cat([model.get_normalized_probs(out, log_probs=True) for out in decoded], 1)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    return {
        "parameters": parameters,
        "training": trained,
        "text": text,
        "steps": steps,
        "saved": saved,
    }


plain_xl_effect = functools.cache(xl_effect)
ALL = {"parameters", "training", "text", "steps", "saved"}
XL_CHANGES = [
    *(
        ({name: value}, {}, ALL)
        for name, value in {"n_layer": 1, "n_head": 4, "d_model": 16, "d_head": 2}.items()
    ),
    *(
        ({name: value}, {}, ALL)
        for name, value in {"d_inner": 8, "div_val": 2, "cutoffs": [5]}.items()
    ),
    *(({"mem_len": length}, {}, {"training", "text", "steps", "saved"}) for length in (0, 3, 20)),
    ({"same_length": True}, {}, {"training", "text", "steps", "saved"}),
    ({"clamp_len": 2}, {}, {"training", "text", "steps"}),
    *(({name: 0.1}, {}, {"training", "saved"}) for name in ("dropout", "dropatt")),
    *(({f"{kind}_activations": True}, {}, {"saved"}) for kind in ("checkpoint", "offload")),
    ({"max_target_positions": 2}, {}, {"steps"}),  # how far a step looks back
    # Documented to change nothing.
    ({"clamp_len": 0}, {}, set()),
    ({"cutoffs": [9, 20, 100000]}, {}, set()),
    ({"d_head": 2}, {"head_dim": 4}, set()),
    ({"d_head": 2}, {"arch": "fixhead_transformer_xl"}, set()),
]


@pytest.mark.parametrize("given, beside, changes", XL_CHANGES)
def test_every_flag_of_transformer_xl_changes_what_it_should(given, beside, changes):
    left, right = plain_xl_effect(**beside), xl_effect(**beside, **given)
    assert {part for part in left if not equal(left[part], right[part])} == changes
