"""Try the plugin's flags: each changes something, or is refused in one line that names it."""

import functools
import itertools
import re

import pytest
import torch

from mixhead_plugin.errors import OptionError, option_name
from mixhead_plugin.fairseq.options import CHOICES, FAMILIES, FLAGS, SCOPES, AttentionOptions
from mixhead_plugin.ops import IMPLEMENTATIONS, NORMALIZERS
from mixhead_plugin.parts import PARTS
from tests.covering import covering
from tests.fairseq.models.cases import command
from tests.helpers import VOCABULARY, build, shake, tokens
from tests.transformer_xl import build_xl, in_windows

MODELS = ("transformer", "transformer_lm", "roberta_base", "transformer_xl", "synthesizer_lm")

# Values of each flag; a model takes the first two.
VALUES = {
    "attention_normalizer": tuple(NORMALIZERS),
    **{option: tuple(table) for option, table in PARTS.items()},
    "mixed_features": CHOICES["mixed_features"],
    "mixing_start": CHOICES["mixing_start"],
    "mixing_rank": (2, 3),
    "head_dim": (2, 4, 5, 32),
    "value_head_dim": (2, 5, 32),
    "attention_scope": tuple(SCOPES),
    # These models are on a CPU, where no kernel of triton runs.
    "attention_impl": ("auto", *(name for name in IMPLEMENTATIONS if name != "triton")),
    "value_init_scale": (0.1, 1.0, 10.0),
    "mixing_lr_scale": (0.1, 1.0, 10.0),
    "relative_gain": (0, 1, 4),
    "heads_per_layer": ("encoder-self=3,2", "encoder-self=2:1,4:3", "cross=4:3,4"),
}
# Values that every model refuses.
WRONG = {
    "attention_normalizer": ("Softmax", ""),
    **dict.fromkeys(PARTS, ("position_wise",)),
    "mixed_features": ("vk",),
    "mixing_start": ("ones",),
    "mixing_rank": (0,),
    "head_dim": (0,),
    "value_head_dim": (0,),
    "attention_scope": ("encoder-self",),
    "attention_impl": ("cuda",),
    "value_init_scale": (0.0,),
    "mixing_lr_scale": (0.0,),
    "relative_gain": (-1,),
    "heads_per_layer": ("encoder-self=0,2", "cross"),
}

DECODERS = ("transformer_lm", "transformer_xl", "synthesizer_lm")
UNMIXED = ("fixhead", "sigsoftmax", "l2", "gated")
WITHOUT_HEAD_DIM = [family for family in FAMILIES if family != "fixhead"]
# A flag, values that are right elsewhere, and the models and families that refuse them.
REFUSED = [
    # What the flag describes is not in these families.
    ("mixed_features", ("qk", "qv", "kv", "q", "k", "v"), MODELS, FAMILIES),
    ("mixing_rank", (3,), MODELS, FAMILIES),
    ("mixing_start", ("random", "uniform"), MODELS, (*UNMIXED, "differential")),
    ("mixing_lr_scale", (0.1, 10.0), MODELS, UNMIXED),
    # It needs a head size, attentions of an encoder, and a mixing where 2 heads become 1.
    ("heads_per_layer", ("encoder-self=3,2",), MODELS, WITHOUT_HEAD_DIM),
    ("heads_per_layer", ("encoder-self=3,2",), DECODERS, ("fixhead",)),
    ("heads_per_layer", ("encoder-self=2:1,4:3", "cross=4:3,4"), MODELS, FAMILIES),
    # These attentions are not in these models.
    ("attention_scope", ("encoder", "cross"), DECODERS, FAMILIES),
    ("attention_scope", ("decoder", "decoder-self", "cross"), ("roberta_base",), FAMILIES),
    # Their scores have relative positions already, or depend on none; queries and keys are no
    # projections in a Synthesizer.
    ("relative_position", ("rotary", "t5"), ("transformer_xl", "synthesizer_lm"), FAMILIES),
    ("feature_mixing", ("heads", "shared"), ("synthesizer_lm",), FAMILIES),
]


# What a flag needs beside it in mixhead_transformer.
BESIDE = {
    "mixed_features": {"feature_mixing": "shared"},
    "mixing_rank": {"head_mixing": "low-rank"},
    "heads_per_layer": {"head_mixing": "position-independent", "head_dim": 4},
}


def test_every_flag_of_the_plugin_is_tried():
    assert set(FLAGS) == set(VALUES) == set(WRONG)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("first, second", list(itertools.combinations(FLAGS, 2)))
def test_two_flags_work_together_or_are_refused(first, second, model, monkeypatch):
    for one, other in itertools.product(VALUES[first][:3], VALUES[second][:3]):
        try:
            found = effect(model, "mixhead", monkeypatch, **{first: one, second: other})
        except OptionError as refused:
            assert re.fullmatch(r"--[a-z-]+[ :].*", str(refused))
        else:
            assert found["output"].isfinite().all()


@pytest.mark.parametrize("model", MODELS)
def test_numbers_of_the_plugins_flags_are_read_as_numbers(model):
    numbers = {"head_dim": 4, "relative_gain": 2, "value_init_scale": 0.5, "mixing_lr_scale": 2.0}
    typed = [f"{option_name(name)}={value}" for name, value in numbers.items()]
    task = "masked_lm" if model == "roberta_base" else None
    for family in FAMILIES:
        args = command(f"{family}_{model}", "--head-mixing=position-wise", *typed, task=task)
        assert {name: getattr(args, name) for name in numbers} == numbers


# ---- no flag does nothing ----------------------------------------------------------------------

SITES = {"transformer": SCOPES["all"], "roberta_base": ("encoder-self",)}


def effect(model, family, monkeypatch, **given):
    """Return what a flag may change.

    Returns:
        parameters: by name, as the model starts
        rates: what changes the learning rate of each trained parameter
        output: of the model, away from its start
        ran: the implementations that computed it
    """
    if model == "synthesizer_lm":
        given.setdefault("synthesizer", "factorized-random")
    if family == "fixhead":
        given.setdefault("head_dim", 6)
    if model == "transformer_xl":
        given.setdefault("n_head", 4)  # pairs of heads for --head-mixing differential
    build_model = build_xl if model == "transformer_xl" else build
    built = build_model(f"{family}_{model}", **given)
    parameters = {}
    rates = {}
    for name, parameter in built.named_parameters():
        parameters[name] = parameter.detach().clone()
        if parameter.requires_grad:
            rates[name] = getattr(parameter, "optim_overrides", None)

    ran = set()
    sentences = tokens(length=8)
    inputs = (sentences, None, sentences) if model == "transformer" else (sentences,)
    with monkeypatch.context() as patches, torch.no_grad():
        for name, implementation in IMPLEMENTATIONS.items():

            def run(*args, name=name, upstream=implementation.run, **settings):
                ran.add(name)
                return upstream(*args, **settings)

            patches.setitem(IMPLEMENTATIONS, name, implementation._replace(run=run))
        output, *_ = shake(built).eval()(*inputs)
    return {"parameters": parameters, "rates": rates, "output": output, "ran": ran}


def equal(left, right):
    """Tell whether two values of `effect` are equal, bit for bit."""
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if not isinstance(left, dict) or not isinstance(right, dict):
        return left == right
    if left.keys() != right.keys():
        return False
    return all(equal(value, right[name]) for name, value in left.items())


def usual_head_size(model):
    return 5 if model == "transformer_xl" else 4


def is_the_default(model, family, name, value):
    """Return True if this value is the model's documented default."""
    if name == "head_dim":
        return family != "fixhead" and value == usual_head_size(model)
    if name == "value_head_dim":
        usual = 6 if family == "fixhead" else usual_head_size(model)
        return value == usual
    if name == "attention_scope":  # the value covers all attentions of the model
        sites = SITES.get(model, ("decoder-self",))
        return set(sites) <= set(SCOPES[value])
    return value == FAMILIES[family].get(name, getattr(AttentionOptions(), name))


def is_refused(model, family, name, value):
    """Return True if a row of REFUSED says that the model refuses this value."""
    for flag, values, models, families in REFUSED:
        if flag == name and value in values and model in models and family in families:
            return True
    return False


@pytest.mark.parametrize("name", FLAGS)
def test_the_first_two_values_of_a_flag_are_taken_and_differ(name, monkeypatch):
    found = []
    for value in VALUES[name][:2]:
        flags = {**BESIDE.get(name, {}), name: value}
        found.append(effect("transformer", "mixhead", monkeypatch, **flags))
    assert not equal(*found)


@covering(name=FLAGS, model=MODELS, family=FAMILIES)
def test_every_value_of_a_flag_changes_something_unless_it_has_to_be_refused(
    name, model, family, monkeypatch
):
    plain = effect(model, family, monkeypatch)
    for value in (*VALUES[name], *WRONG[name]):
        if value in WRONG[name] or is_refused(model, family, name, value):
            with pytest.raises(OptionError) as error:
                effect(model, family, monkeypatch, **{name: value})
            assert option_name(name) in str(error.value)
            continue
        found = effect(model, family, monkeypatch, **{name: value})
        if name == "attention_impl" and value != "auto":
            assert found["ran"] == {value}
        else:
            assert equal(plain, found) == is_the_default(model, family, name, value), value


def xl_effect(**given):
    """Return what a flag of Transformer-XL may change.

    Returns:
        parameters: by name
        training, text, steps: log-probabilities in training, in evaluation, and of step-by-step
            decoding
        saved: the shapes of the tensors that wait for the backward pass
    """
    model = build_xl(**given)
    words = torch.randint(4, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(3))

    saved = []

    def remember(tensor):
        saved.append(tensor.shape)
        return tensor

    torch.manual_seed(5)  # of the dropout
    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        trained = in_windows(model.train(), words, [8, 8, 8]).detach()

    with torch.no_grad():
        text = in_windows(model.eval(), words, [8, 8, 8])
        state = {}
        steps = []
        for n in range(1, words.shape[1] + 1):
            out = model.decoder(words[:, :n], incremental_state=state)
            steps.append(model.get_normalized_probs(out, log_probs=True))
    return {
        "parameters": {name: p.detach() for name, p in model.named_parameters()},
        "training": trained,
        "text": text,
        "steps": torch.cat(steps, 1),
        "saved": saved,
    }


plain_xl_effect = functools.cache(xl_effect)
ALL = {"parameters", "training", "text", "steps", "saved"}
NO_PARAMETERS = ALL - {"parameters"}
# A flag, the flags beside it, and what it changes.
XL_CHANGES = [
    ({"n_layer": 1}, {}, ALL),
    ({"n_head": 4}, {}, ALL),
    ({"d_model": 16}, {}, ALL),
    ({"d_head": 2}, {}, ALL),
    ({"d_inner": 8}, {}, ALL),
    ({"div_val": 2}, {}, ALL),
    ({"cutoffs": [5]}, {}, ALL),
    ({"mem_len": 0}, {}, NO_PARAMETERS),
    ({"mem_len": 3}, {}, NO_PARAMETERS),
    ({"mem_len": 20}, {}, NO_PARAMETERS),
    ({"same_length": True}, {}, NO_PARAMETERS),
    ({"clamp_len": 2}, {}, {"training", "text", "steps"}),
    ({"dropout": 0.1}, {}, {"training", "saved"}),
    ({"dropatt": 0.1}, {}, {"training", "saved"}),
    ({"checkpoint_activations": True}, {}, {"saved"}),
    ({"offload_activations": True}, {}, {"saved"}),
    ({"max_target_positions": 2}, {}, {"steps"}),  # how far a step looks back
    # Documented to change nothing.
    ({"clamp_len": 0}, {}, set()),
    ({"cutoffs": [9, 20, 100000]}, {}, set()),
    ({"d_head": 2}, {"head_dim": 4}, set()),
    ({"d_head": 2}, {"arch": "fixhead_transformer_xl"}, set()),
]


@pytest.mark.parametrize("given, beside, changes", XL_CHANGES)
def test_every_flag_of_transformer_xl_changes_what_it_should(given, beside, changes):
    without = plain_xl_effect(**beside)
    found = xl_effect(**beside, **given)
    assert {part for part in found if not equal(without[part], found[part])} == changes
