"""`load` mixes a model as a state dict tells, or says what is missing."""

import io
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from mixhead_plugin.nn import MixedAttention, load, mix, mixing_parameters
from mixhead_plugin.parts import OPTIONS, record
from tests.nn.calling import Attention, C, Final, H, Mixed, Model, inputs, move


def saved(model):
    """Return the state dict of a model from a file."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.load(file)


def packed():
    return nn.Sequential(nn.MultiheadAttention(C, H))


def trained(**variant):
    return move(mix(Mixed().double(), example=(inputs(3),), **variant))


@pytest.mark.parametrize(
    "variant",
    [
        {"head_mixing": "position-wise"},
        {"head_mixing": "low-rank", "attention_gate": "head"},
        {"normalizer": "l2"},
        {"attention_sink": "zero"},
    ],
    ids=lambda variant: " ".join(variant.values()),
)
def test_a_state_dict_tells_how_a_new_model_was_mixed(variant):
    model, x = trained(**variant), inputs()
    again = load(Mixed().double(), saved(model))
    torch.testing.assert_close(again(x), model(x))
    # Also into a model that is mixed already.
    again = mix(Mixed().double(), example=(inputs(3),), **variant)
    torch.testing.assert_close(load(again, saved(model))(x), model(x))


class Counted(Mixed):
    """Saves something else beside its tensors, as torch's `get_extra_state` allows."""

    steps = 0

    def get_extra_state(self):
        return {"steps": self.steps}

    def set_extra_state(self, state):
        self.steps = state["steps"]


def test_a_module_may_save_more_than_tensors():
    model = mix(Counted().double(), "position-wise", example=(inputs(3),))
    model.steps = 3
    again = load(Counted().double(), saved(move(model)))
    assert again.steps == 3
    x = inputs()
    torch.testing.assert_close(again(x), model(x))


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*was mixed in torch.bfloat16")
def test_a_mixing_that_was_trained_in_float32_beside_half_precision_is_not_rounded():
    model = mix(Mixed().bfloat16(), "position-wise", example=(inputs(3).bfloat16(),))
    for parameter in mixing_parameters(model).values():
        parameter.data = parameter.data.float()
    x = inputs().bfloat16()
    expected = move(model)(x)
    for again in (
        load(Mixed().bfloat16(), saved(model)),
        load(
            Mixed().bfloat16(),
            dict(model.state_dict()),
            "position-wise",
            example=(inputs(3).bfloat16(),),
        ),
    ):
        for name, parameter in mixing_parameters(model).items():
            assert torch.equal(again.get_parameter(name), parameter), name
        assert torch.equal(again(x), expected)


def test_a_state_dict_without_metadata_needs_the_arguments_of_mix():
    model, x = trained(head_mixing="position-wise"), inputs()
    tensors = dict(model.state_dict())  # as a file of safetensors has them
    again = load(Mixed().double(), tensors, "position-wise", example=(inputs(3),))
    torch.testing.assert_close(again(x), model(x))


@pytest.mark.parametrize(
    "variant, name",
    [
        ({"head_mixing": "position-wise"}, "head_mixing.query_weight"),
        ({"relative_gain": 2}, "relative_gain.weight"),
        ({"normalizer": "l2"}, "q_proj.weight"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_tensors_without_metadata_that_tell_of_a_mixing_are_named(variant, name):
    mixed, plain = (nn.ModuleList([nn.MultiheadAttention(C, H)]) for _ in range(2))
    tensors = dict(mix(mixed, **variant).state_dict())
    with pytest.raises(ValueError) as refused:
        load(plain, tensors)
    assert str(refused.value) == (
        f"state_dict: has 0.{name}, but no metadata of the mixing, as in a file of safetensors or "
        "in a copy of the dict; the arguments of mix must be given, too"
    )


class Function(nn.Module):
    """Has no tensor by which a state dict could tell that it was saved."""

    def forward(self, *tensors):
        return F.scaled_dot_product_attention(*tensors)


class Apart(Attention):
    def __init__(self):
        super().__init__()
        self.function = Function()

    def attend(self, *tensors):
        return self.function(*tensors)


@pytest.mark.parametrize("kind", [Mixed, Apart])
def test_a_plain_state_dict_starts_the_mixing_anew(kind):
    plain = kind().double()
    x = inputs()
    model = move(mix(kind().double(), "position-wise", example=(inputs(3),)))
    model.load_state_dict(plain.state_dict())
    torch.testing.assert_close(model(x), plain(x))
    again = load(kind().double(), plain.state_dict(), "position-wise", example=(inputs(3),))
    torch.testing.assert_close(again(x), plain(x))


@pytest.mark.parametrize(
    "variant, missing",
    [
        ({"head_mixing": "differential"}, "head_mixing.weight"),
        ({"attention_sink": "learned"}, "attention_sink.weight"),
    ],
    ids=["differential", "sink"],
)
def test_a_part_that_always_changes_the_outputs_is_not_started_by_a_plain_state_dict(
    variant, missing
):
    plain = nn.MultiheadAttention(C, H).state_dict()
    with pytest.raises(RuntimeError, match=f'Missing key.* "{missing}"'):
        MixedAttention(C, H, **variant).load_state_dict(plain)


def test_a_part_is_not_started_anew_by_tensors_of_another_module():
    model = move(mix(Apart().double(), "position-wise", example=(inputs(3),)))
    before = model.function.head_mixing.bias.clone()
    with pytest.raises(RuntimeError, match=r"Missing key.*function\.head_mixing\.bias"):
        model.load_state_dict({"q.bias": model.q.bias})
    assert torch.equal(model.function.head_mixing.bias, before)


@pytest.mark.parametrize("kind", [Mixed, Apart])
def test_a_mixing_that_a_state_dict_may_lack_stays_and_is_among_the_missing_keys(kind):
    model = move(mix(kind().double(), "position-wise", example=(inputs(3),)))
    x = inputs()
    before = model(x)
    own = model.state_dict()
    mixing = [*mixing_parameters(model)]
    for name in mixing:
        del own[name]
    told = model.load_state_dict(own, strict=False)
    assert told.missing_keys == mixing
    assert torch.equal(model(x), before)


def test_a_state_dict_of_another_variant_is_refused():
    state = saved(trained(normalizer="l2"))
    other = mix(Mixed().double(), normalizer="sigsoftmax", example=(inputs(3),))
    with pytest.raises(RuntimeError) as refused:
        other.load_state_dict(state)
    for name in ("packed", "calling"):
        told = f"{name} was saved with normalizer l2, this module has sigsoftmax."
        assert told in str(refused.value)


def test_a_new_instance_of_a_mixed_class_refuses_what_was_mixed():
    """A program makes it by type(layer)(). No tensor tells that the state is of l2."""
    mixed = mix(Attention().double(), normalizer="l2", example=(inputs(3),))
    new = type(mixed)()
    with pytest.raises(RuntimeError, match="Attention is mixed in the state dict, must be mixed"):
        new.load_state_dict(mixed.state_dict())
    new.load_state_dict(Attention().state_dict())


def test_the_arguments_of_mix_may_be_given_beside_the_metadata():
    variant = {"head_mixing": "position-wise", "mixing_start": "random", "causal": True}
    model = mix(nn.ModuleList([nn.MultiheadAttention(C, H)]), **variant)
    again = load(nn.ModuleList([nn.MultiheadAttention(C, H)]), model.state_dict(), **variant)
    torch.testing.assert_close(dict(again.state_dict()), dict(model.state_dict()))


def test_a_model_into_which_some_tensors_did_not_fit_takes_another_state_dict():
    model, x = trained(head_mixing="position-wise"), inputs()
    state = model.state_dict()
    damaged = model.state_dict()
    del damaged["packed.out_proj.weight"]
    arguments = {"head_mixing": "position-wise", "example": (inputs(3),)}

    again = Mixed().double()
    with pytest.raises(RuntimeError, match="Missing key"):
        load(again, damaged)
    torch.testing.assert_close(load(again, state)(x), model(x))

    again = Mixed().double()
    with pytest.raises(RuntimeError, match="Missing key"):
        load(again, dict(damaged), **arguments)  # without metadata
    again.load_state_dict(dict(state))
    torch.testing.assert_close(again(x), model(x))


def test_a_file_that_is_older_than_a_field_has_its_default():
    model = nn.ModuleList([MixedAttention(C, H, head_dim=5, value_head_dim=7)])
    older = model.state_dict()
    entry = older._metadata["0"]["mixhead"]
    assert entry["variant"].pop("value_head_dim") == 7
    with pytest.raises(RuntimeError, match="0 was saved with value_head_dim 5, this module has 7"):
        model.load_state_dict(older)

    entry["variant"].pop("mixed_features")
    assert record.difference(entry, MixedAttention(C, H, head_dim=5).entry()) == ""


A_STATE = "must be a dict of tensors, as model.state_dict() or torch.load(file) returns"
UNWRAP = "torch.nn.modules.utils.consume_prefix_in_state_dict_if_present"


def compiled(model):
    return torch.compile(model, backend="eager")


def test_a_state_dict_of_a_compiled_model_loads_as_the_message_says():
    model, x = trained(head_mixing="position-wise"), inputs()
    state = compiled(model).state_dict()
    consume_prefix_in_state_dict_if_present(state, "_orig_mod.")
    torch.testing.assert_close(load(Mixed().double(), state)(x), model(x))
    # A model that is compiled, too, has the same names.
    again = load(compiled(Mixed().double()), compiled(model).state_dict())
    torch.testing.assert_close(again(x), model(x))


@pytest.mark.parametrize(
    ("made", "state", "keywords", "message"),
    [
        (
            Mixed,
            lambda: nn.Linear(1, 1).state_dict(),
            {},
            "state_dict: has no metadata of a mixing; the arguments of mix must be given, or, for "
            "a model that is plain or mixed already, load_state_dict must be used",
        ),
        (
            Mixed,
            lambda: trained(head_mixing="average").state_dict(),
            {"head_mixing": "position-wise"},
            "head_mixing position-wise: must be average, as in the state dict, at packed",
        ),
        (
            Model,
            lambda: trained(head_mixing="average").state_dict(),
            {},
            "packed: is mixed in the state dict, must be in the model, too",
        ),
        (
            lambda: nn.ModuleDict({"packed": Attention(), "calling": Attention()}),
            lambda: trained(head_mixing="average").state_dict(),
            {},
            "packed: is a Attention, must be an nn.MultiheadAttention inside of a model, as before "
            "it was mixed",
        ),
        (
            Mixed,
            lambda: "model.pt",
            {"head_mixing": "average"},
            f"state_dict 'model.pt': {A_STATE}",
        ),
        (Mixed, lambda: Path("model.pt"), {}, f"state_dict {Path('model.pt')!r}: {A_STATE}"),
        (Mixed, lambda: trained(head_mixing="average"), {}, f"state_dict is a Mixed: {A_STATE}"),
        (
            Mixed,
            lambda: {
                "optimizer": {"state": {}},
                "model": trained(head_mixing="average").state_dict(),
            },
            {},
            "state_dict: has no tensors, but a dict of tensors as 'model'; must be that dict "
            "alone, state_dict['model']",
        ),
        (
            Mixed,
            lambda: compiled(trained(head_mixing="average")).state_dict(),
            {},
            "state_dict: all its names begin with _orig_mod. of torch.compile; must be without, as "
            f"after {UNWRAP}(state_dict, '_orig_mod.')",
        ),
        (
            Mixed,
            lambda: nn.DataParallel(trained(head_mixing="average")).state_dict(),
            {"head_mixing": "average"},
            "state_dict: all its names begin with module. of DistributedDataParallel; must be "
            f"without, as after {UNWRAP}(state_dict, 'module.')",
        ),
        (
            Model,
            lambda: mix(Model().double(), "average", example=(inputs(3),)).state_dict(),
            {"causal": True},
            "causal True: must be left out, no module of the state dict was mixed with it",
        ),
        (
            lambda: trained(head_mixing="average"),
            lambda: dict(trained(head_mixing="average").state_dict()),
            {"head_mixing": "average"},
            "state_dict: has no metadata of a mixing, and the model is mixed already; must be "
            "loaded by load_state_dict",
        ),
        (
            lambda: mix(packed(), "average"),
            lambda: dict(mix(packed(), "average").state_dict()),
            {"head_mixing": "average"},
            "state_dict: has no metadata of a mixing, and the model is mixed already; must be "
            "loaded by load_state_dict",
        ),
        (
            Mixed,
            lambda: trained(head_mixing="average").state_dict(),
            {"normalizr": "l2"},
            "normalizr: is no keyword; did you mean normalizer? It must be one of "
            f"{', '.join(OPTIONS)}, example, causal",
        ),
    ],
    ids=[
        "plain",
        "other arguments",
        "another model",
        "another class",
        "name of a file",
        "path",
        "model",
        "checkpoint",
        "compiled",
        "several processes",
        "for no module",
        "mixed already",
        "mixed already, nn.MultiheadAttention",
        "misspelt",
    ],
)
def test_loading_is_refused_in_one_line(made, state, keywords, message):
    with pytest.raises(ValueError, match="must") as refused:
        load(made().double(), state(), **keywords)
    assert str(refused.value) == message


def test_a_model_stays_as_it_was_where_its_attention_cannot_be_mixed():
    model = Mixed()
    model.calling = Final()
    names = [*model.state_dict()]
    with pytest.raises(
        ValueError, match=r"^calling: is of a class that lets nobody make a subclass"
    ):
        load(model, trained(head_mixing="average").state_dict())
    assert [*model.state_dict()] == names


def test_a_state_dict_is_not_loaded_into_an_attention_that_a_tool_has_changed():
    model = nn.ModuleList([nn.MultiheadAttention(C, H)])
    state = mix(nn.ModuleList([nn.MultiheadAttention(C, H)]), "position-wise").state_dict()
    model[0].forward = model[0].forward
    with pytest.raises(ValueError, match=r"^0: has a forward of its own, which a tool has put"):
        load(model, state)
