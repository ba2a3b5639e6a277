"""Try the plugin's flags: each changes something, or is refused in one line that names it."""

import functools
import os
import random

import pytest
import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import build_model

from mixhead_plugin.errors import OptionError, option_name
from mixhead_plugin.modules.synthesizer import SYNTHESIZERS
from mixhead_plugin.ops import api
from mixhead_plugin.options import FAMILIES, OPTION_NAMES, SCOPES, AttentionOptions
from tests.covering import covering
from tests.helpers import VOCABULARY, build, shake, task, tokens
from tests.robustness.flags import ATTENTION, KINDS, draw, outcome
from tests.xl import build_xl, in_windows

# ---- combinations ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_random_combinations_train_or_are_refused(request, record_property, tmp_path):
    """Draw other combinations in every run; MIXHEAD_FLAGS_SEED repeats the draws of a seed."""
    seed = int(os.environ.get("MIXHEAD_FLAGS_SEED", random.SystemRandom().randrange(10**6)))
    record_property("MIXHEAD_FLAGS_SEED", seed)  # tests/conftest.py prints it
    found, failed = [], []
    for number in range(8 * len(KINDS)):
        drawn = draw(seed, number)
        try:
            found.append(outcome(drawn, request.getfixturevalue(drawn.kind.data), tmp_path / str(number)))
        except AssertionError as error:
            failed.append(f"draw {number}: {error}")
    assert not failed, f"MIXHEAD_FLAGS_SEED={seed}\n" + "\n\n".join(failed)
    assert set(found) == {"trained", "refused"}


# Faults that random draws have found: a combination, and the flag that must be refused or None.
FOUND = [
    ("language_model", "--arch=fixhead_transformer_lm --head-dim=4", None),  # was read as text
    ("language_model", "--arch=fixhead_transformer_lm --relative-position=rotary", None),
    ("translation", "--arch=mixhead_transformer --encoder-layers-to-keep=0", None),  # fairseq reads a list
    ("translation", "--arch=mixhead_transformer --head-dim=5 --quant-noise-pq=0.1", "--head-dim"),
    ("translation", "--arch=l2_transformer --heads-per-layer=cross=4,4;cross=2,2", "--heads-per-layer"),
    ("translation", "--arch=l2_transformer --value-init-scale=inf", "--value-init-scale"),
    ("transformer_xl", "--arch=mixhead_transformer_xl --relative-position=t5", "--relative-position"),
    ("synthesizer", "--arch=mixhead_synthesizer_lm --synthesizer-rank=2", "--synthesizer-rank"),
]


def parse(kind, *flags):
    """Return the flags as fairseq-train parses them."""
    arguments = ["data", *kind.arguments, "--criterion", kind.criterion, *flags]
    return options.parse_args_and_arch(options.get_training_parser(), arguments)


@pytest.mark.parametrize("kind, flags, refused", FOUND)
def test_what_random_combinations_have_found(kind, flags, refused):
    if refused is None:
        cfg = convert_namespace_to_omegaconf(parse(KINDS[kind], *flags.split()))
        build_model(cfg.model, task())
    else:
        with pytest.raises(OptionError, match=f"^{refused} "):
            parse(KINDS[kind], *flags.split())


def test_every_flag_of_the_plugin_is_drawn():
    assert {option_name(name) for name in OPTION_NAMES} == set(ATTENTION)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_the_plugins_flags_are_read_as_numbers(kind):
    numbers = {"head_dim": 4, "relative_gain": 2, "value_init_scale": 0.5, "mixing_lr_scale": 2.0}
    typed = [f"{option_name(name)}={value}" for name, value in numbers.items()]
    for family in FAMILIES:
        args = parse(KINDS[kind], "--arch", f"{family}_{KINDS[kind].arch}", "--head-mixing", "position-wise", *typed)
        assert {name: getattr(args, name) for name in numbers} == numbers


# ---- no flag does nothing --------------------------------------------------------------------------------------------

MODELS = ("transformer", "transformer_lm", "roberta_base", "transformer_xl", "synthesizer_lm")
SITES = {"transformer": SCOPES["all"], "roberta_base": ("encoder-self",)}
NUMBERS = {"head_dim": (2, 4, 5, 32, 0), "relative_gain": (0, 1, 4, -1)}
NUMBERS |= dict.fromkeys(("value_init_scale", "mixing_lr_scale"), (0.1, 1.0, 10.0, 0.0))


def values(name):
    return NUMBERS.get(name) or [text.replace("SIDE", "encoder") for text in ATTENTION[option_name(name)]]


def effect(model, family, monkeypatch, **given):
    """Return what a flag may change: parameters, their learning rates, outputs, and the implementation that ran."""
    if model == "synthesizer_lm":
        given.setdefault("synthesizer", "factorized-random")
    if family == "fixhead":
        given.setdefault("head_dim", 6)
    if model == "transformer_xl":
        given.setdefault("n_head", 4)  # pairs of heads for --head-mixing differential
    built = (build_xl if model == "transformer_xl" else build)(f"{family}_{model}", **given)
    parameters = {name: p.detach().clone() for name, p in built.named_parameters()}
    rates = {name: getattr(p, "optim_overrides", None) for name, p in built.named_parameters() if p.requires_grad}
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
        return left.keys() == right.keys() and all(equal(value, right[name]) for name, value in left.items())
    return torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right


def is_the_default(model, family, name, value):
    """Return True if this value is the model's documented default."""
    if name == "head_dim":
        return family != "fixhead" and value == (5 if model == "transformer_xl" else 4)
    if name == "attention_scope":  # the value covers all attentions of the model
        return set(SITES.get(model, ("decoder-self",))) <= set(SCOPES[value])
    return value == FAMILIES[family].get(name, getattr(AttentionOptions(), name))


@covering(name=OPTION_NAMES, model=MODELS, family=FAMILIES)
def test_every_value_of_a_flag_changes_something_or_is_refused(name, model, family, monkeypatch):
    plain = effect(model, family, monkeypatch)
    for value in values(name):
        try:
            found = effect(model, family, monkeypatch, **{name: value})
        except OptionError as refused:
            assert option_name(name) in str(refused)
            continue
        if name == "attention_impl" and value != "auto":
            assert found["ran"] == {value}
        else:
            assert equal(plain, found) == is_the_default(model, family, name, value), value


@pytest.mark.parametrize("name", SYNTHESIZERS)
def test_a_size_of_a_synthesizer_changes_it_or_is_refused(name):
    def shapes(**given):
        return [p.shape for p in build("mixhead_synthesizer_lm", synthesizer=name, **given).parameters()]

    own = SYNTHESIZERS[name].own_size
    for option in ("synthesizer_rank", "synthesizer_factor"):
        if own is not None and own.option == option:
            assert shapes(**{option: 1}) != shapes(**{option: 2})
        else:
            with pytest.raises(OptionError, match=f"^{option_name(option)} 1: "):
                shapes(**{option: 1})


def test_every_synthesizer_is_another_model():
    models = [build("mixhead_synthesizer_lm", synthesizer=name).state_dict(keep_vars=True) for name in SYNTHESIZERS]
    contents = [{(key, value.shape, value.requires_grad) for key, value in model.items()} for model in models]
    assert all(left != right for i, left in enumerate(contents) for right in contents[:i])


def xl_effect(**given):
    """Return parameters, log-probabilities in training, evaluation and step-by-step decoding, and saved tensors."""
    model = build_xl(**given)
    words = torch.randint(4, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(3))
    saved, state = [], {}
    torch.manual_seed(5)  # of the dropout
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        trained = in_windows(model.train(), words, [8, 8, 8]).detach()
    with torch.no_grad():
        text = in_windows(model.eval(), words, [8, 8, 8])
        decoded = [model.decoder(words[:, :n], incremental_state=state) for n in range(1, words.shape[1] + 1)]
        steps = torch.cat([model.get_normalized_probs(out, log_probs=True) for out in decoded], 1)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    return {"parameters": parameters, "training": trained, "text": text, "steps": steps, "saved": saved}


plain_xl_effect = functools.cache(xl_effect)
ALL = {"parameters", "training", "text", "steps", "saved"}
XL_CHANGES = [
    *(({name: value}, {}, ALL) for name, value in {"n_layer": 1, "n_head": 4, "d_model": 16, "d_head": 2}.items()),
    *(({name: value}, {}, ALL) for name, value in {"d_inner": 8, "div_val": 2, "cutoffs": [5]}.items()),
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
