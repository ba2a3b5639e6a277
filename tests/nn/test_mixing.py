"""`mix` finds every attention or says why not, and `unmix` removes what it did."""

import collections
import functools
import gc
import inspect
import itertools
import sys
import types
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.utils import parametrize

import mixhead_plugin.nn as door
from mixhead_plugin.nn import (
    MixedAttention,
    load,
    mix,
    mixing_parameters,
    parameter_groups,
    unmix,
)
from mixhead_plugin.parts import OPTIONS
from tests.nn.calling import Attention, C, Final, H, Mixed, Model, inputs, move


def test_both_kinds_of_attention_are_mixed_under_the_same_names():
    model, x = Mixed().double(), inputs()
    before = model(x)
    assert mix(model, "position-wise", example=(inputs(3),)) is model
    torch.testing.assert_close(model(x), before)
    assert list(mixing_parameters(model)) == [
        f"{name}.head_mixing.{part}"
        for name in ("packed", "calling")
        for part in ("query_weight", "bias")
    ]
    mixing = parameter_groups(model, 0.1)[-1]
    assert len(mixing["params"]) == 4
    assert mixing["weight_decay"] == 0


def test_parts_have_the_type_and_the_mode_of_their_module():
    model = Model().double().eval()
    mix(model, "position-wise", example=(inputs(3),))
    part = model.layers[0].head_mixing
    assert part.bias.dtype == torch.float64
    assert not part.training


def test_random_mixings_differ_and_the_generator_stays():
    model, x = Model().double(), inputs(3)
    model.packed = nn.ModuleList([nn.MultiheadAttention(C, H) for _ in range(2)]).double()
    state = torch.get_rng_state()
    mix(model, "random", example=(x,))
    mixings = [part.head_mixing.weight for part in (*model.layers, *model.packed)]
    for first, second in itertools.combinations(mixings, 2):
        assert not torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("change", ["refuse", "unmix", "load"])
def test_the_generator_stays(change):
    plain, mixed = (nn.ModuleList([nn.MultiheadAttention(C, H)]) for _ in range(2))
    mix(mixed, "position-wise")
    state = torch.get_rng_state()
    if change == "refuse":
        with pytest.raises(ValueError, match="head_dim 5: must be"):
            mix(plain, "average", head_dim=5)
    elif change == "unmix":
        unmix(mixed)
    else:
        load(plain, mixed.state_dict())
    assert torch.equal(torch.get_rng_state(), state)


class Functional(nn.Module):
    def forward(self, x):
        one = torch.eye(C).to(x)
        out, _ = F.multi_head_attention_forward(
            x,
            x,
            x,
            embed_dim_to_check=C,
            num_heads=H,
            in_proj_weight=one.repeat(3, 1),
            in_proj_bias=None,
            bias_k=None,
            bias_v=None,
            add_zero_attn=False,
            dropout_p=0.0,
            out_proj_weight=one,
            out_proj_bias=None,
            need_weights=False,
        )
        return out


class Twice(Attention):
    def attend(self, *tensors):
        return super().attend(*tensors) + super().attend(*tensors)


class Nested(Attention):
    def __init__(self):
        super().__init__()
        self.inner = Attention()

    def forward(self, x):
        return super().forward(self.inner(x))


class AroundTorchs(Attention):
    def __init__(self):
        super().__init__()
        self.packed = nn.MultiheadAttention(C, H, batch_first=True)

    def forward(self, x):
        x = super().forward(x)
        return self.packed(x, x, x)[0]


class Flat(Attention):
    def attend(self, *tensors):
        heads = [tensor.flatten(0, 1) for tensor in tensors]
        return super().attend(*heads).unflatten(0, (-1, H))


class OneQuery(Attention):
    def attend(self, query, *tensors):
        return super().attend(query[:, :1], *tensors)


class Changing(nn.Module):
    """One module that is called with other numbers of heads."""

    def __init__(self):
        super().__init__()
        self.function = Plain()

    def forward(self, x):
        for heads in (2, 4):
            split = x.unflatten(2, (heads, -1)).transpose(1, 2)  # [B, heads, N, C / heads]
            x = self.function(split).transpose(1, 2).flatten(2)
        return x


class Plain(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


class Subclass(nn.MultiheadAttention):
    pass


def patched(model):
    model.forward = model.forward
    return model


def weight_normed():
    model = nn.MultiheadAttention(C, H)
    nn.utils.parametrizations.weight_norm(model.out_proj)
    return model


def changed(change):
    """Return a model with an attention of torch that a tool has changed."""
    model = nn.Sequential(nn.MultiheadAttention(C, H))
    change(model[0])
    return model


class Scaled(Attention):
    """Has a tensor of its own beside its projections."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def attend(self, *tensors):
        return super().attend(*tensors) * self.factor


def parametrized(attention):
    parametrize.register_parametrization(attention, "factor", nn.Tanh())
    return attention


def keeping(keep):
    """Return a model that has what `keep` makes of its attention as an attribute, too."""
    model = nn.Sequential(nn.MultiheadAttention(C, H))
    model.kept = keep(model[0])
    return model


class Quantised(nn.Parameter):
    pass


KEPT = "0: is kept as kept, too, which would go on without the change; must not be kept there"


class Slots:
    __slots__ = ("attention",)

    def __init__(self, attention):
        self.attention = attention


# What a model may keep of an attention, beside the module that is its child.
KEEPING = {
    "a list in a dict": lambda attention: {"all": [attention]},
    "a queue": lambda attention: collections.deque([attention]),
    "an object": lambda attention: types.SimpleNamespace(inner=attention),
    "an object with slots": Slots,
    "another module": lambda attention: [nn.Sequential(attention)],
    "a closure": lambda attention: lambda x: attention(x, x, x),
    "a default": lambda attention: lambda x, attend=attention: attend(x, x, x),
    "a bound method": lambda attention: attention.forward,
    "a partial of a method": lambda attention: functools.partial(attention.forward, None),
    "an argument of a partial": lambda attention: functools.partial(print, attention),
}


@pytest.mark.parametrize("keep", KEEPING.values(), ids=list(KEEPING))
def test_an_attention_of_torch_that_the_model_keeps_elsewhere_is_refused(keep):
    model = keeping(keep)
    with pytest.raises(ValueError) as refused:
        mix(model, "average")
    assert str(refused.value) == KEPT
    assert type(model[0]) is nn.MultiheadAttention


def test_an_attention_of_torch_that_a_hook_of_the_model_keeps_is_refused():
    model = nn.Sequential(nn.MultiheadAttention(C, H))
    attention = model[0]
    model.register_forward_pre_hook(lambda module, inputs: attention(*inputs))
    with pytest.raises(ValueError, match=r"^0: is kept as _forward_pre_hooks, too"):
        mix(model, "average")


def test_what_a_program_keeps_of_an_attention_is_no_matter_of_the_model():
    x = torch.ones(2, 3, C)
    attention = nn.MultiheadAttention(C, H)
    model = nn.Sequential(attention)
    model.of_this_file = keeping  # whose globals hold everything in this file
    mix(model, "average")
    assert model[0](x, x, x)[0].shape == attention(x, x, x)[0].shape


def test_the_variables_of_a_notebook_are_no_matter_of_the_model(monkeypatch):
    """An object in the model may lead to them, as to the shell that runs the notebook."""
    model = nn.Sequential(nn.MultiheadAttention(C, H))
    notebook = types.ModuleType("notebook")
    notebook.attention = model[0]
    monkeypatch.setitem(sys.modules, "notebook", notebook)
    model.shell = types.SimpleNamespace(variables=vars(notebook))
    mix(model, "average")
    assert type(model[0]) is MixedAttention


def test_what_layers_share_is_searched_once(monkeypatch):
    """A config with a large vocabulary took minutes."""
    config = types.SimpleNamespace(names={"a word": 1}, inner=types.SimpleNamespace(size=C))
    model = nn.Sequential(*[nn.Sequential(nn.MultiheadAttention(C, H)) for _ in range(3)])
    for layer in model:
        layer.config = config
    searched = []
    referents = gc.get_referents

    def counting(*objects):
        searched.extend(map(id, objects))
        return referents(*objects)

    monkeypatch.setattr(gc, "get_referents", counting)
    mix(model, "average")
    assert searched.count(id(config)) == 1
    assert searched.count(id(config.inner)) == 1
    assert id(config.names) not in searched  # a dict of texts and numbers leads nowhere


def tied():
    model = nn.Sequential(nn.MultiheadAttention(C, H), nn.MultiheadAttention(C, H))
    model[1].in_proj_weight = model[0].in_proj_weight
    return model


class Streaming(Attention):
    def stream(self, *tensors):
        yield F.scaled_dot_product_attention(*tensors)


class Waiting(Attention):
    async def step(self, *tensors):
        return super().attend(*tensors)


class Hiding(nn.Module):
    """Keeps its attention where torch does not look for submodules."""

    def __init__(self):
        super().__init__()
        self.kept = [Attention()]

    def forward(self, x):
        return self.kept[0].to(x.dtype)(x)


def taken():
    model = Attention()
    model.head_mixing = None
    return model


SDPA = "scaled_dot_product_attention"
HEADS = torch.ones(3, 1, 2, 3, 4)  # queries, keys and values
ONE = {"head_mixing": "position-wise", "example": (inputs(3),)}

# By the law: the model, the keywords, and the message.
REFUSED = {
    "no attention, no example": (
        lambda: nn.Sequential(nn.Linear(C, C)),
        {"head_mixing": "average"},
        f"Sequential: has no nn.MultiheadAttention inside; if it calls F.{SDPA}, an example must "
        "be given, as example=(x,)",
    ),
    "no attention in the example": (
        lambda: nn.Sequential(nn.Linear(C, C)),
        ONE,
        f"Sequential: the example reached no call of F.{SDPA}, and there is no "
        "nn.MultiheadAttention inside; must have one of them",
    ),
    "an example of another kind": (
        Attention,
        {**ONE, "example": inputs(3)},
        "example is a Tensor: must be a tuple of arguments such as (x,), a dict of keywords, or a "
        "function that takes the model",
    ),
    "a misspelt example": (
        Attention,
        {"head_mixing": "position-wise", "exmaple": (inputs(3),)},
        "exmaple: is no keyword; did you mean example? It must be one of "
        f"{', '.join(OPTIONS)}, example, causal",
    ),
    "a call outside of the model": (
        Attention,
        {**ONE, "example": lambda model: F.scaled_dot_product_attention(*HEADS)},
        f"example: calls {SDPA} outside of the model; each call must be inside one of its modules",
    ),
    "a module that the model does not know": (
        lambda: nn.Sequential(Hiding()),
        ONE,
        f"0: Attention inside of it calls {SDPA}, and is no submodule of the model; must be one, "
        "as in an nn.ModuleList",
    ),
    "two calls in one module": (
        lambda: Model(Twice),
        ONE,
        f"layers.0: calls {SDPA} twice in one call; must call it once, because each mixing needs a "
        "module of its own",
    ),
    "one call inside the other": (
        lambda: nn.Sequential(Nested()),
        ONE,
        f"0: calls {SDPA}, and so does 0.inner inside of it; must be beside each other",
    ),
    "an attention of torch inside": (
        AroundTorchs,
        ONE,
        f"AroundTorchs: calls {SDPA}, and so does packed inside of it; must be beside each other",
    ),
    "heads in the batch": (
        lambda: nn.Sequential(Flat()),
        ONE,
        "0: its query is [12, 5, 3], must be [batch, heads, positions, head size]",
    ),
    "one head of queries for several of keys": (
        lambda: nn.Sequential(OneQuery()),
        ONE,
        "0: its query has 1 heads and its key has 4; must have as many, because heads of queries "
        "are mixed",
    ),
    "other heads in another call": (
        Changing,
        ONE,
        "function: is called with heads and sizes (2, 6, 6) and (4, 3, 3); must be the same in "
        "each call",
    ),
    "a lazy model": (
        lambda: nn.Sequential(nn.LazyLinear(C), Attention()),
        ONE,
        "0.weight: is lazy; the model must be called once before it is mixed",
    ),
    "a forward of the instance": (
        lambda: patched(Attention()),
        ONE,
        "Attention: has a forward of its own, which a tool has put there; must be mixed before",
    ),
    "a parametrized tensor of its own": (
        lambda: nn.Sequential(parametrized(Scaled())),
        ONE,
        "0: is parametrized (factor); must be mixed before, and parametrized afterwards",
    ),
    "a class without subclasses": (
        Final,
        ONE,
        "Final: is of a class that lets nobody make a subclass, which a mixed module must be "
        "of (no subclass)",
    ),
    "a method that is a generator": (
        Streaming,
        ONE,
        f"Streaming: its stream is a generator or async, and calls {SDPA} itself; must call the "
        "module, as self(x), which mixes",
    ),
    "an async method": (
        Waiting,
        ONE,
        f"Waiting: its step is a generator or async, and calls {SDPA} itself; must call the "
        "module, as self(x), which mixes",
    ),
    "a name that is taken": (
        taken,
        ONE,
        "Attention.head_mixing: is an attribute, must be free for the mixing",
    ),
    "a position of our own": (
        Attention,
        {**ONE, "relative_position": "rotary"},
        f"relative_position: must be left out, a module that calls {SDPA} has its own",
    ),
    "values of another size": (
        Attention,
        {**ONE, "value_head_dim": 8},
        f"value_head_dim: must be left out, a module that calls {SDPA} has its own",
    ),
    "packed values of another size": (
        lambda: nn.ModuleList([nn.MultiheadAttention(C, H)]),
        {"value_head_dim": 8},
        f"value_head_dim 8: must be {C // H} or left out, nn.MultiheadAttention has its own",
    ),
    "causal": (
        Attention,
        {**ONE, "causal": True},
        f"causal: must be left out, a module that calls {SDPA} has its own",
    ),
    "features of projections": (
        Attention,
        {**ONE, "feature_mixing": "heads"},
        f"feature_mixing heads: acts on projections, which a module that calls {SDPA} does not "
        "show; must be none or output",
    ),
    "no input to read": (
        Changing,
        {
            "head_mixing": "low-rank",
            "example": lambda model: model.function(HEADS[0]),
        },
        "head_mixing low-rank: reads the input of the queries; so the first argument of function "
        "must be it, [batch, positions, features], with another number of positions than of "
        "examples in the batch",
    ),
    "a gate without an input": (
        Changing,
        {"attention_gate": "head", "example": lambda model: model.function(HEADS[0])},
        "attention_gate head: reads the input of the queries; so the first argument of function "
        "must be it, [batch, positions, features], with another number of positions than of "
        "examples in the batch",
    ),
    "a forward of an attention of torch": (
        lambda: nn.Sequential(patched(nn.MultiheadAttention(C, H))),
        {"head_mixing": "average"},
        "0: has a forward of its own, which a tool has put there; must be mixed before",
    ),
    "a tensor of a tool": (
        lambda: nn.Sequential(weight_normed()),
        {"head_mixing": "average"},
        "0: has out_proj.parametrizations.weight.original0, which a tool has put there; must be "
        "mixed before",
    ),
    "an attention of torch that was compiled in place": (
        # as `compile` does
        lambda: changed(lambda old: setattr(old, "_compiled_call_impl", old._call_impl)),
        {"head_mixing": "average"},
        "0: has a _compiled_call_impl of its own, which a tool has put there; must be mixed before",
    ),
    "an attention of torch in compiled code": (
        lambda: nn.Sequential(torch.compile(nn.MultiheadAttention(C, H), backend="eager")),
        {"head_mixing": "average"},
        "0: is compiled, and its graph would go on with the former attention; must be compiled "
        "afterwards",
    ),
    "a name of ours": (
        lambda: changed(lambda old: setattr(old, "causal", True)),
        {"head_mixing": "average"},
        "0: has a causal of its own, which a tool has put there; must be mixed before",
    ),
    "a child without tensors": (
        lambda: changed(lambda old: setattr(old, "gate", nn.ReLU())),
        {"head_mixing": "average"},
        "0: has gate, which a tool has put there; must be mixed before",
    ),
    "a weight of another type": (
        lambda: changed(
            lambda old: setattr(old, "in_proj_weight", Quantised(old.in_proj_weight.data))
        ),
        {"head_mixing": "average"},
        "0: has a Quantised as in_proj_weight, which a tool has put there; must be mixed before",
    ),
    "outputs of another size": (
        lambda: changed(lambda old: setattr(old, "out_proj", nn.Linear(C, 7))),
        {"head_mixing": "average"},
        "0: has another out_proj, which a tool has put there; must be mixed before",
    ),
    "a hook of a gradient": (
        lambda: changed(lambda old: old.in_proj_bias.register_hook(lambda grad: grad * 2)),
        {"head_mixing": "average"},
        "0: has a hook on the gradient of in_proj_bias, which a tool has put there; must be mixed "
        "before",
    ),
    "parameters that are shared": (
        tied,
        {"head_mixing": "average"},
        "1.in_proj_weight: is 0.in_proj_weight, too; each attention must have its own parameters",
    ),
    "a subclass of torch's": (
        lambda: nn.Sequential(Subclass(C, H)),
        {"head_mixing": "average"},
        "0: is a Subclass, must be exactly nn.MultiheadAttention, or call "
        "F.scaled_dot_product_attention and be reached by an example",
    ),
    "torch's alone": (
        lambda: nn.MultiheadAttention(C, H),
        {"head_mixing": "average"},
        "MultiheadAttention: must be inside of a model, where a MixedAttention can take its place",
    ),
    "mixed already": (
        lambda: mix(Model(), "average", example=(inputs(3).float(),)),
        ONE,
        "layers.0: is mixed already; must be unmixed first",
    ),
    "wrapped by torch's FSDP": (
        lambda: nn.Sequential(type("FSDPModule", (Attention,), {"__module__": "torch.fsdp"})()),
        ONE,
        "0: is in FSDPModule, which would not share the gradients of new parameters; must be mixed "
        "before",
    ),
    "odd heads": (
        lambda: nn.Sequential(Plain()),
        {"head_mixing": "differential", "example": (torch.ones(2, 3, 4, 5),)},
        "head_mixing differential: reads the input of the queries; so the first argument of 0 must "
        "be it, [batch, positions, features], with another number of positions than of examples in "
        "the batch",
    ),
}


FUNCTIONS = [name for name in door.__all__ if inspect.isfunction(getattr(door, name))]
# Each of them, called with a model.
OF_A_MODEL = {
    "mix": lambda model: mix(model, "average"),
    "unmix": unmix,
    "load": lambda model: load(model, {}),
    "ablate": lambda model: door.ablate(model, {0: [0]}),
    "importance": lambda model: door.importance(model, [HEADS], torch.sum),
    "attentions": lambda model: door.attentions(model, HEADS),
    "prune": lambda model: door.prune(model, {0: [0]}),
    "view": lambda model: door.view(model, None, "text", "page.html"),
    "parameter_groups": lambda model: parameter_groups(model, 0.1),
    "mixing_parameters": mixing_parameters,
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    "model, given",
    [("gpt2", " 'gpt2'"), (Model, " is the class Model"), ({}, " is a dict")],
    ids=["name", "class", "state"],
)
def test_what_is_no_module_is_refused(function, model, given):
    with pytest.raises(ValueError) as refused:
        OF_A_MODEL[function](model)
    assert str(refused.value) == f"model{given}: must be a module of torch"


@pytest.mark.parametrize("law", REFUSED)
def test_what_cannot_be_mixed_is_refused_in_one_line_and_stays(law):
    made, keywords, message = REFUSED[law]
    model = made()
    if law not in ("a lazy model", "mixed already"):
        model.double()
    before = repr([vars(module) for module in model.modules()])
    with pytest.raises(ValueError, match="must") as refused:
        mix(model, **keywords)
    assert str(refused.value) == message
    assert repr([vars(module) for module in model.modules()]) == before


def test_a_model_of_transformers_is_told_of_its_own_door(monkeypatch):
    """The package need not be installed, so its class is known by its name."""
    module = types.ModuleType("transformers.modeling_utils")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    base = type("PreTrainedModel", (Model,), {"__module__": module.__name__})
    told = "PreTrainedModel: is a model of transformers, must be mixed by mixhead_plugin.hf.mix"
    with pytest.raises(ValueError, match=r"must be unmixed by mixhead_plugin\.hf\.unmix$"):
        unmix(base())
    with pytest.raises(ValueError, match=r"must be given to the functions of mixhead_plugin\.hf$"):
        door.ablate(base(), {0: [0]})
    for given in (None, (inputs(3),)):
        with pytest.raises(ValueError, match="must") as refused:
            mix(base().double(), "average", example=given)
        assert str(refused.value).startswith(told)
    # Some have attentions of torch, as SigLIP where it pools.
    model = base()
    model.pool = nn.MultiheadAttention(C, H)
    with pytest.raises(ValueError, match=f"^{told}"):
        mix(model, "average")
    assert type(model.pool) is nn.MultiheadAttention


def test_a_subclass_of_torchs_that_calls_the_function_itself_is_mixed():
    class Own(nn.MultiheadAttention):
        def forward(self, x):
            projected = F.linear(x, self.in_proj_weight).unflatten(2, (3, H, -1))
            query, key, value = projected.permute(2, 0, 3, 1, 4)  # [B, H, N, D] each
            out = F.scaled_dot_product_attention(query, key, value)
            return self.out_proj(out.transpose(1, 2).flatten(2))

    model = nn.Sequential(Own(C, H)).double()
    before = model(inputs())
    mix(model, "position-wise", example=(inputs(3),))
    assert isinstance(model[0], Own)
    torch.testing.assert_close(model(inputs()), before)
    move(model[0].head_mixing)
    assert not torch.allclose(model(inputs()), before)


def test_attentions_that_the_example_missed_are_named():
    model = Model().double()
    told = r"^Model: was mixed without layers\.1; the example did"
    with pytest.warns(UserWarning, match=told) as warned:
        mix(model, "position-wise", example=lambda model: model.layers[0](inputs(3)))
    assert warned[0].filename == __file__
    assert type(model.layers[1]) is Attention


class Flash(Attention):
    def attend(self, *tensors):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*tensors)[0]


class Math(Attention):
    def attend(self, *tensors):
        return torch._scaled_dot_product_attention_math(*tensors)[0]


class Flex(Attention):
    def attend(self, *tensors):
        return flex_attention(*tensors)


OTHERS = {
    "_scaled_dot_product_attention_math": Math,
    "flex_attention": Flex,
    "F.multi_head_attention_forward": Functional,
    "aten._scaled_dot_product_flash_attention_for_cpu": Flash,
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("function", OTHERS)
def test_attentions_by_other_functions_are_named(function):
    model = nn.Sequential(Attention(), OTHERS[function]()).double()
    with pytest.warns(UserWarning) as told:
        mix(model, "position-wise", example=(inputs(3),))
    told = [str(each.message) for each in told]
    assert [text for text in told if "mixed" in text] == [
        f"Sequential: was mixed without 1, which call {function}"
    ]


class Keeping(nn.Module):
    """Gets the function when it is made, so its forward does not name it."""

    def __init__(self):
        super().__init__()
        self.function = F.scaled_dot_product_attention


def test_without_an_example_those_whose_code_calls_the_function_are_named():
    attentions = [nn.MultiheadAttention(C, H), Attention(), Keeping()]
    model = nn.ModuleList([*attentions, nn.Linear(C, C)])
    with pytest.warns(UserWarning) as told:
        mix(model, "position-wise")
    assert [str(each.message) for each in told] == [
        f"ModuleList: was mixed without 1, 2, which call F.{SDPA}; an example must be given to "
        "mix them"
    ]


def test_a_mixing_that_half_precision_would_not_train_is_warned_of():
    """tests/parts/test_half_precision.py has the parts; here are the places that warn."""
    example = (inputs(3).bfloat16(),)
    told = "^Mixed: was mixed in torch.bfloat16, where steps below 0.002"
    with pytest.warns(UserWarning, match=told) as warned:
        mixed = mix(Mixed().bfloat16(), "position-wise", example=example)
    assert len(warned) == 1
    assert warned[0].filename == __file__

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mix(Mixed().bfloat16(), normalizer="l2", example=example)
        with torch.autocast("cpu", torch.bfloat16):
            mix(Mixed(), "position-wise", example=(inputs(3).float(),))
        # What is loaded is often only used.
        load(Mixed().bfloat16(), mixed.state_dict())
        load(Mixed().bfloat16(), dict(mixed.state_dict()), "position-wise", example=example)


EXAMPLE = (inputs(3),)


def mixed():
    return mix(Mixed().double(), "position-independent", example=EXAMPLE)


# What builds tensors of a model: the model before, and what is done with it.
BUILDING = {
    "mix": (
        lambda: Mixed().double(),
        lambda model: mix(model, "position-independent", attention_gate="head", example=EXAMPLE),
    ),
    "unmix": (mixed, unmix),
    "load": (lambda: Mixed().double(), lambda model: load(model, STATE)),
    "load_state_dict": (mixed, lambda model: model.load_state_dict(PLAIN_STATE)),
    "prune": (mixed, lambda model: door.prune(model, {"packed": [1]})),
}
STATE = mixed().state_dict()
PLAIN_STATE = Mixed().state_dict()


@pytest.mark.parametrize("function", BUILDING)
def test_what_is_built_in_inference_mode_can_be_trained(function):
    made, build = BUILDING[function]
    model = made()
    with torch.inference_mode():
        build(model)
    model(inputs()).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("function", BUILDING)
def test_what_is_built_is_where_the_model_is_whatever_the_default_device_is(function):
    made, build = BUILDING[function]
    model = made()
    with torch.device("meta"):
        build(model)
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"cpu"}
    model(inputs())


def test_a_parametrization_that_came_after_the_mixing_may_go_again():
    x = inputs()
    model = mix(nn.Sequential(Scaled()).double(), "position-wise", example=(inputs(3),))
    before = model(x)
    attention = parametrized(move(model[0]))
    moved = model(x)
    assert not torch.allclose(moved, before)
    parametrize.remove_parametrizations(attention, "factor")
    torch.testing.assert_close(model(x), moved)


def test_a_graph_is_not_recompiled_while_it_is_mixed():
    """torch.fx writes the new code over the forward of the class."""
    graph = torch.fx.symbolic_trace(Plain())
    model = move(mix(nn.Sequential(graph), "position-wise", example=(HEADS[0],)))
    expected = model(HEADS[0])
    with pytest.raises(RuntimeError) as refused:
        graph.recompile()
    assert str(refused.value) == (
        "Plain: is a mixed graph, whose new code would not mix; must be recompiled before it is "
        "mixed"
    )
    assert torch.equal(model(HEADS[0]), expected)


def test_what_a_program_has_written_on_an_attention_of_torch_stays():
    model = nn.Sequential(nn.MultiheadAttention(C, H))
    model[0].layer = 3
    model[0].out_proj.note = "last"
    model[0].in_proj_weight.factor = 0.1
    mix(model, "position-wise")
    assert model[0].layer == 3
    assert model[0].out_proj.note == "last"
    assert model[0].k_proj.weight.factor == 0.1
    unmix(model)
    assert model[0].layer == 3
    assert model[0].out_proj.note == "last"
    assert model[0].in_proj_weight.factor == 0.1


@pytest.mark.parametrize("sizes", [{}, {"kdim": 5, "vdim": 6}], ids=["packed", "apart"])
def test_parameters_of_the_same_shape_are_the_same_objects_there_and_back(sizes):
    model = nn.ModuleList([nn.MultiheadAttention(C, H, **sizes), nn.Linear(C, C)])
    model[1].weight = model[0].out_proj.weight
    before = dict(model.named_parameters(remove_duplicate=False))
    mix(model, "position-independent")
    assert model[0].out_proj.weight is model[1].weight
    assert model[0].out_proj.bias is before["0.out_proj.bias"]
    if sizes:
        assert model[0].q_proj.weight is before["0.q_proj_weight"]
    unmix(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert (parameter is before[name]) == ("in_proj" not in name), name


def test_an_attention_of_torch_whose_class_was_patched_is_refused(monkeypatch):
    model = nn.Sequential(nn.MultiheadAttention(C, H))
    monkeypatch.setattr(nn.MultiheadAttention, "forward", lambda *args, **kwargs: None)
    with pytest.raises(ValueError, match=r"^0: has another nn\.MultiheadAttention\.forward, which"):
        mix(model, "average")


def test_unmixing_gives_back_torchs_attention_and_the_class_of_the_others():
    model, x = Mixed().double(), inputs()
    model.packed.in_proj_weight.requires_grad_(False)
    model.packed.register_forward_hook(lambda module, args, output: (output[0] * 2, None))
    before, state = model(x), model.state_dict()
    assert unmix(mix(model, "position-wise", example=(inputs(3),))) is model
    torch.testing.assert_close(model(x), before)
    torch.testing.assert_close(dict(model.state_dict()), dict(state))
    assert type(model.packed) is nn.MultiheadAttention
    assert type(model.calling) is Attention
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (name != "packed.in_proj_weight")


def test_an_instance_that_was_made_from_a_mixed_one_is_mixed_again():
    model = mix(nn.Sequential(Attention()).double(), "position-wise", example=(inputs(3),))
    model.append(type(model[0])().double())
    unmix(model)
    mix(model, "position-wise", example=(inputs(3),))
    assert model[1].head_mixing is not None
    assert type(unmix(model)[1]) is Attention


@pytest.mark.parametrize("sizes", [{"kdim": 5, "vdim": 6}, {"bias": False}], ids=["apart", "plain"])
def test_unmixing_gives_back_torchs_attention_of_other_sizes(sizes):
    model = nn.ModuleList([nn.MultiheadAttention(C, H, **sizes)])
    state = model.state_dict()
    unmix(mix(model, "position-independent"))
    torch.testing.assert_close(dict(model.state_dict()), dict(state))


def mixed_and(change):
    """Return a mixed model with an attention that a tool has changed."""
    model = mix(nn.ModuleList([nn.MultiheadAttention(C, H)]), "position-wise")
    change(model[0])
    return model


@pytest.mark.parametrize("mixing", ["none", "position-independent"])
@pytest.mark.parametrize("sizes", [{}, {"vdim": 5, "bias": False}], ids=["packed", "apart"])
def test_a_pruned_attention_is_not_unmixed(sizes, mixing):
    """Its mixing is still the identity, but torch's attention has no place for fewer heads."""
    model = mix(nn.ModuleList([nn.MultiheadAttention(C, H, **sizes)]), mixing)
    door.prune(model, {0: [H - 1]})
    with pytest.raises(ValueError, match=r"^0: is pruned, and must stay as it is$"):
        unmix(model)


class Adapted(nn.Linear):
    pass


AS_TORCHS = "must be as nn.MultiheadAttention knows it"


# The message, and the model that is refused with it.
NOT_UNMIXED = {
    f"0: has a forward of its own; {AS_TORCHS}": lambda: mixed_and(patched),
    f"0: has another q_proj; {AS_TORCHS}": (
        lambda: mixed_and(lambda new: setattr(new, "q_proj", Adapted(C, C)))
    ),
    f"0: has hooks of its heads; {AS_TORCHS}": (
        lambda: mixed_and(lambda new: new.register_attention_hook(lambda *_: None))
    ),
    f"0: has v_proj.note; {AS_TORCHS}": (
        lambda: mixed_and(lambda new: setattr(new.v_proj, "note", 3))
    ),
    f"0: has hooks of k_proj; {AS_TORCHS}": (
        lambda: mixed_and(lambda new: new.k_proj.register_forward_hook(lambda *_: None))
    ),
    f"0: has a hook on the gradient of v_proj.bias; {AS_TORCHS}": (
        lambda: mixed_and(lambda new: new.v_proj.bias.register_hook(lambda grad: grad * 2))
    ),
    "0.k_proj.weight: is 0.q_proj.weight, too; each attention must have its own parameters": (
        lambda: mixed_and(lambda new: setattr(new.k_proj, "weight", new.q_proj.weight))
    ),
    "layers.0: without head_mixing its outputs would change; must stay mixed": (
        lambda: move(mix(Model().double(), "position-wise", example=(inputs(3),)))
    ),
    "layers.0: without normalizer l2 its outputs would change; must stay mixed": (
        lambda: mix(Model().double(), normalizer="l2", example=(inputs(3),))
    ),
    "0: without causal its outputs would change; must stay mixed": (
        lambda: mix(nn.ModuleList([nn.MultiheadAttention(C, H)]), "position-wise", causal=True)
    ),
    "0: without head_dim 5 its outputs would change; must stay mixed": (
        lambda: nn.ModuleList([MixedAttention(C, H, head_dim=5)])
    ),
    "0: without value_head_dim 5 its outputs would change; must stay mixed": (
        lambda: nn.ModuleList([MixedAttention(C, H, value_head_dim=5)])
    ),
    "MixedAttention: must be inside of a model, where an nn.MultiheadAttention can take its "
    "place": lambda: MixedAttention(C, H),
    "Model: has no mixing, must be mixed": Model,
    "head_mixing: is on the device meta; must have numbers, which tell whether it has an effect": (
        lambda: mixed_and(lambda new: new.to("meta"))
    ),
}


@pytest.mark.parametrize("message", NOT_UNMIXED)
def test_unmixing_is_refused_where_outputs_would_change(message):
    model = NOT_UNMIXED[message]()
    with pytest.raises(ValueError) as refused:
        unmix(model)
    assert str(refused.value) == message
