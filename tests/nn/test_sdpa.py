"""A module that calls F.scaled_dot_product_attention computes this call with mixed heads."""

import copy
import io
import os
import pickle
import time
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils.checkpoint import checkpoint

from mixhead_plugin.nn import mix, mixing_parameters, unmix
from mixhead_plugin.parts import PARTS
from tests.nn.calling import Attention, B, D, H, Model, N, defined, inputs, move

LONGER = 7
CAUSAL = torch.ones(N, N, dtype=torch.bool).tril()
PADDING = torch.tensor([[True] * N, [True, True, True, False, False]])[:, None, None]  # [B,1,1,N]
FLOATS = torch.linspace(-1, 1, B * H * N * N, dtype=torch.float64).view(B, H, N, N)
# of N queries and LONGER keys: torch counts the first query from the first key
UPPER = torch.ones(N, LONGER, dtype=torch.bool).tril()
LOWER = torch.ones(N, LONGER, dtype=torch.bool).tril(LONGER - N)

# By the id of a case: the arguments of `Attention`, and what `defined` gets.
CALLS = {
    "plain": ({}, {}),
    "causal": ({"is_causal": True}, {"visible": CAUSAL}),
    "bool mask": ({"attn_mask": CAUSAL}, {"visible": CAUSAL}),
    "padding": ({"attn_mask": PADDING}, {"visible": PADDING}),
    "float mask": ({"attn_mask": FLOATS}, {"added": FLOATS}),
    "scale": ({"scale": 0.7}, {"scale": 0.7}),
    "grouped": ({"key_heads": 2, "enable_gqa": True}, {}),
    "repeated by hand": ({"key_heads": 2, "repeat": True}, {}),
    "one head for all": ({"key_heads": 1}, {}),
    "larger values": ({"value_dim": 5}, {}),
    "cross": ({}, {"memory": LONGER}),
    "cross, causal": ({"is_causal": True}, {"memory": LONGER, "visible": UPPER}),
    "cross, upper left": (
        {"attn_mask": causal_upper_left(N, LONGER)},
        {"memory": LONGER, "visible": UPPER},
    ),
    "cross, lower right": (
        {"attn_mask": causal_lower_right(N, LONGER)},
        {"memory": LONGER, "visible": LOWER},
    ),
}


# Where the outputs do not stay at the start.
ANOTHER_START = ("random", "average", "differential", "relu2", "learned")


def mixed(attention=Attention, head_mixing="position-wise", **keywords):
    """Return a mixed model in float64 whose mixing has moved."""
    model = Model(attention, **keywords).double()
    return move(mix(model, head_mixing, example=(inputs(3),)))


@pytest.mark.parametrize("call", CALLS)
def test_outputs_stay_at_the_start_and_are_the_definition_after_the_mixing_has_moved(call):
    keywords, expected = CALLS[call]
    expected = dict(expected)
    attention = Attention(**keywords).double()
    x = inputs()
    memory = expected.pop("memory", None)
    memory = None if memory is None else inputs(B, memory) + 1
    before = attention(x, memory)

    mix(attention, "position-wise", example=lambda model: model(x, memory))
    torch.testing.assert_close(attention(x, memory), before)
    move(attention)
    found = attention(x, memory)
    torch.testing.assert_close(found, defined(attention, x, memory, **expected))
    assert not torch.allclose(found, before)


@pytest.mark.parametrize("head_mixing", ["position-wise", "differential", "low-rank"])
def test_queries_of_one_sentence_serve_all(head_mixing):
    """As those of a layer that pools by learned queries."""
    attention = Attention().double()
    x = inputs(1)
    memory = inputs(B, LONGER) + 1
    example = inputs(1)
    move(mix(attention, head_mixing, example=lambda model: model(example, memory)))
    found = attention(x, memory)
    torch.testing.assert_close(found, attention(x.expand(B, -1, -1), memory))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("head_mixing", value) for value in PARTS["head_mixing"] if value != "none"),
        ("score_mixing", "position-wise"),
        ("feature_mixing", "output"),
        ("attention_gate", "element"),
        ("attention_sink", "learned"),
        ("normalizer", "relu2"),
    ],
)
def test_every_part_acts_and_each_of_its_numbers_learns(option, value):
    model = Model(is_causal=True).double()
    x = inputs()
    plain = model(x)
    mix(model, example=(inputs(3),), **{option: value})
    assert torch.allclose(model(x), plain) == (value not in ANOTHER_START)

    move(model)
    model(x).square().sum().backward()
    parameters = mixing_parameters(model)
    assert bool(parameters) == (value not in ("random", "average", "relu2"))
    for name, parameter in parameters.items():
        assert parameter.grad.abs().sum() > 0, name


def test_a_mixed_head_of_two_has_the_neighbouring_values():
    """M[j, i] = 1 for j = i and -sigmoid(x_t w_i) for j = i + H/2; values 2 i and 2 i + 1."""
    attention = Attention().double()
    x = inputs()
    move(mix(attention, "differential", example=(inputs(3),)))
    query, key, value = attention.project(x)
    weights = (query @ key.mT * 3**-0.5).softmax(-1)  # [B, H, N, N]
    share = torch.sigmoid(x @ attention.head_mixing.weight)  # [B, N, H / 2]
    outputs = []
    for i in range(H // 2):
        pair = weights[:, i] - share[..., i : i + 1] * weights[:, i + H // 2]
        outputs += [pair @ value[:, 2 * i], pair @ value[:, 2 * i + 1]]
    torch.testing.assert_close(attention(x), attention.out(torch.cat(outputs, -1)))


@torch.no_grad()
def test_steps_with_a_cache_give_what_the_full_pass_gives():
    model = mixed()
    x = inputs()
    (attention, _) = model.layers
    full = attention(x, attn_mask=CAUSAL)
    cache = {}
    for t in range(N):
        step = attention(x[:, t : t + 1], cache=cache)
        torch.testing.assert_close(step[:, 0], full[:, t])


@torch.no_grad()
def test_what_a_mask_hides_has_no_effect():
    attention = mixed().layers[0]
    x = inputs()
    before = attention(x, attn_mask=PADDING)
    x[1, 3:] += 1
    torch.testing.assert_close(attention(x, attn_mask=PADDING)[1, :3], before[1, :3])


@torch.no_grad()
def test_a_mask_of_the_least_number_hides_from_every_normalizer():
    """relu2 divides by the number of visible keys."""
    least = torch.zeros(N, N, dtype=torch.float64)
    least.masked_fill_(~CAUSAL, torch.finfo(torch.float64).min)
    model = Model().double()
    x = inputs()
    mix(model, normalizer="relu2", example=(x,))
    torch.testing.assert_close(model(x, attn_mask=least), model(x, attn_mask=CAUSAL))


@pytest.mark.parametrize("impl", ["auto", "reference", "blockwise"])
@pytest.mark.parametrize("order", ["heads inside", "heads outside"])
def test_outputs_lie_in_memory_as_those_of_torch(order, impl):
    """Some modules put heads side by side by `view`, which works in one order alone."""

    class Ordered(Attention):
        def attend(self, query, key, value):
            if order == "heads outside":
                query = query.contiguous()
            out = F.scaled_dot_product_attention(query, key, value)
            self.strides = out.stride()
            return out

    attention = Ordered().double()
    x = inputs()
    attention(x)
    of_torch = attention.strides
    mix(attention, "position-wise", example=(x,), impl=impl)
    torch.testing.assert_close(attention(x), defined(attention, x))
    assert attention.strides == of_torch


def test_dropout_is_that_of_the_call():
    model = mixed()
    x = inputs()
    (attention, _) = model.layers
    torch.testing.assert_close(attention(x, dropout_p=1.0), attention.out.bias.expand(B, N, -1))
    assert not torch.allclose(attention(x, dropout_p=0.5), attention(x, dropout_p=0.5))


@torch.no_grad()
def test_autocast_computes_in_its_type_also_where_the_types_differ():
    class Rotated(Attention):
        def project(self, x, memory=None):
            query, key, value = super().project(x, memory)
            return query.float(), key.float(), value  # as after rotary positions

    x = inputs().float()
    model = move(mix(Rotated(), "position-wise", example=lambda model: model(x)))
    exact = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(x)
    assert found.dtype == torch.bfloat16
    assert (found - exact).abs().max() < 0.02 * exact.abs().max()


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_gradients_through_a_checkpoint_are_those_without(reentrant):
    model = mixed()
    x = inputs().requires_grad_()
    (attention, _) = model.layers
    expected = torch.autograd.grad(attention(x).square().sum(), [x, *attention.parameters()])
    checkpoint(attention, x, use_reentrant=reentrant).square().sum().backward()
    found = [x.grad, *(parameter.grad for parameter in attention.parameters())]
    torch.testing.assert_close(found, list(expected))


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_a_checkpoint_inside_of_the_call_is_refused(reentrant):
    """The backward pass would compute the attention again while the module does not listen."""

    class Inside(Attention):
        checkpoints = False

        def attend(self, *tensors):
            if not self.checkpoints:
                return super().attend(*tensors)
            return checkpoint(super().attend, *tensors, use_reentrant=reentrant)

    model = mixed(Inside)
    model.layers[0].checkpoints = True
    with pytest.raises(RuntimeError, match=r"^layers\.0: calls .* inside a checkpoint .* must be"):
        model.layers[0](inputs())


class CheckpointOfOnesOwn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, *tensors):
        return run(*tensors)

    @staticmethod
    def backward(ctx, *gradients):
        raise AssertionError


class WithSetupContext(torch.autograd.Function):
    """The newer style, whose forward pass has no ctx."""

    @staticmethod
    def forward(run, *tensors):
        return run(*tensors)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *gradients):
        raise AssertionError


@pytest.mark.parametrize("function", [CheckpointOfOnesOwn, WithSetupContext])
def test_a_checkpoint_of_ones_own_inside_of_the_call_is_refused_where_it_would_train(function):
    class Inside(Attention):
        def attend(self, *tensors):
            return function.apply(super().attend, *tensors)

    model = mixed(Inside)
    with pytest.raises(RuntimeError) as refused:
        model(inputs())
    assert str(refused.value) == (
        "layers.0: calls scaled_dot_product_attention inside a checkpoint or an autograd.Function "
        "of its own, whose backward pass would not mix; must be checkpointed whole"
    )
    # The attention that is called directly is another way into the same module.
    attention = model.layers[0]
    with pytest.raises(RuntimeError, match="inside a checkpoint or an"):
        attention.attend(*attention.project(inputs()))
    with torch.no_grad():
        model(inputs())


class WithoutGradients(Attention):
    def attend(self, *tensors):
        with torch.no_grad():
            return super().attend(*tensors)

    @torch.no_grad()
    def step(self, x):
        return self.forward(x)


def test_a_mixing_that_would_train_without_gradients_is_refused():
    model = mixed(WithoutGradients)
    with pytest.raises(RuntimeError) as refused:
        model(inputs())
    assert str(refused.value) == (
        "layers.0: calls scaled_dot_product_attention without gradients, as under no_grad, so its "
        "head_mixing cannot learn; must call it with them, or head_mixing must be frozen, by "
        "requires_grad_(False)"
    )
    for parameter in mixing_parameters(model).values():
        parameter.requires_grad_(False)
    model(inputs())


@pytest.mark.parametrize(
    "call",
    [
        lambda attention, x: torch.no_grad()(attention)(x),
        lambda attention, x: attention.eval()(x),
        lambda attention, x: attention.step(x),
    ],
    ids=["no_grad around the module", "eval mode", "a method to generate"],
)
def test_where_nobody_trains_a_module_may_attend_without_gradients(call):
    attention = mixed(WithoutGradients).layers[0]
    x = inputs()
    torch.testing.assert_close(call(attention, x), defined(attention, x))


def test_a_function_around_the_call_may_delete_its_arguments():
    class Deleting(Attention):
        def forward(self, x):
            return self.without(x)

        def without(self, x):
            query, key, value = self.project(x)
            del self, x
            return F.scaled_dot_product_attention(query, key, value)

    model = nn.Sequential(Deleting()).double()
    expected = model(inputs())
    mix(model, "position-wise", example=(inputs(3),))
    torch.testing.assert_close(model(inputs()), expected)


class Calling(Attention):
    """Calls another mixed module, which is beside it, before it attends itself."""

    def forward(self, x, other=None):
        return super().forward(x if other is None else other(x))


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = Calling()
        self.second = Calling()

    def forward(self, x):
        return self.first(x, self.second)


@pytest.mark.parametrize("variant", [{"head_mixing": "none"}, {"head_mixing": "position-wise"}])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_mixed_module_may_call_another_one(variant, compiled):
    """Without mixing, the inner one computes by the function that the outer one listens to."""
    x = inputs()
    model = Pair().double()
    expected = model(x)
    mix(model, example=(inputs(3),), **variant)
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    torch.testing.assert_close(run(x), expected)


def test_an_attention_inside_that_the_example_did_not_reach_is_refused_when_it_is_called():
    class SelfOrCross(Attention):
        def __init__(self):
            super().__init__()
            self.cross = Attention()

        def forward(self, x, memory=None):
            return super().forward(x) if memory is None else self.cross(x, memory)

    model = mixed(SelfOrCross)
    with pytest.raises(RuntimeError) as refused:
        model.layers[0](inputs(), inputs(length=LONGER))
    assert str(refused.value) == (
        "layers.0: Attention inside of it calls scaled_dot_product_attention, and was not mixed; "
        "must be reached by the example"
    )


@pytest.mark.parametrize(
    "variant", [{"head_mixing": "low-rank"}, {"attention_gate": "head"}], ids=str
)
def test_parts_read_the_first_parameter_of_the_module_in_whatever_order_keywords_come(variant):
    x = inputs()
    memory = inputs(length=LONGER)
    model = Model().double()
    model.layers = model.layers[:1]
    mix(model, example=lambda model: model.layers[0](x, memory), **variant)
    (attention,) = move(model).layers
    torch.testing.assert_close(attention(memory=memory, x=x), attention(x, memory))


class Scriptable(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unsqueeze(1)
        return torch.nn.functional.scaled_dot_product_attention(x, x, x).squeeze(1)


def test_torchscript_is_refused_because_it_reads_the_code_of_the_class():
    model = mix(nn.Sequential(Scriptable()), "position-wise", example=(torch.randn(2, 5, 4),))
    with pytest.raises(NotImplementedError) as refused:
        torch.jit.script(model)
    assert str(refused.value) == (
        "Scriptable: torch.jit.script would leave out the mixing; must be traced or exported"
    )


def in_a_file(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, copy.copy, lambda model: pickle.loads(pickle.dumps(model)), in_a_file],
    ids=["deepcopy", "copy", "pickle", "torch.save"],
)
def test_a_copy_of_the_whole_model_is_mixed_too(copied):
    model = mixed()
    x = inputs()
    again = copied(model)
    assert torch.equal(again(x), model(x))
    assert isinstance(again.layers[0], Attention)
    # The copy stands alone.
    if copied is not copy.copy:
        move(again.layers[0].head_mixing)
        nn.init.zeros_(again.layers[0].head_mixing.bias)
        assert not torch.allclose(again(x), model(x))


class Copied(Attention):
    """Makes its copies itself, without what it does not know."""

    def __copy__(self):
        return type(self)()

    def __deepcopy__(self, memo):
        return Copied()


class Pickled(Attention):
    """Tells pickle what it knows."""

    def __getstate__(self):
        return {"state": self.state_dict()}

    def __setstate__(self, state):
        self.__init__()
        self.load_state_dict(state["state"])


class Unpickled(Attention):
    """Takes from pickle what it knows."""

    def __setstate__(self, state):
        self.__init__()
        self.q = state["_modules"]["q"]


@pytest.mark.parametrize("kind", [Copied, Pickled, Unpickled])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_that_its_class_makes_without_the_mixing_is_refused(kind, copied):
    attention = mixed(kind).layers[0]
    with pytest.raises((copy.Error, pickle.PicklingError)) as refused:
        copied(attention)
    assert str(refused.value) == (
        f"{kind.__name__}: is copied or pickled in its own way; must be unmixed before"
    )
    # One that such a model has made of the same class, and which is not mixed, is free.
    assert isinstance(copied(type(attention)()), kind)


def test_one_instance_is_changed_and_neither_its_class_nor_torch():
    function = F.scaled_dot_product_attention
    model = mixed()
    other = Model().double()
    x = inputs()
    other.load_state_dict(model.state_dict(), strict=False)
    assert not torch.allclose(other(x), model(x))
    assert type(other.layers[0]) is Attention
    assert F.scaled_dot_product_attention is function
    attention = model.layers[0]
    assert isinstance(attention, Attention)
    assert type(attention).__name__ == "Attention"
    assert type(attention) is type(model.layers[1])


def test_a_compiled_model_has_one_graph_and_the_same_numbers_and_gradients():
    model = mixed(is_causal=True).layers[0]
    x = inputs()
    expected = model(x)
    found = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(found, expected)
    parameters = list(mixing_parameters(model).values())
    torch.testing.assert_close(
        torch.autograd.grad(found.sum(), parameters),
        torch.autograd.grad(expected.sum(), parameters),
    )


def test_a_class_that_its_library_puts_into_graphs_whole_compiles_too():
    """diffusers does so with its Attention."""

    class Whole(Attention):
        pass

    torch.compiler.allow_in_graph(Whole)
    model, x = mixed(Whole), inputs()
    found = torch.compile(model, fullgraph=True, backend="eager")(x)
    torch.testing.assert_close(found, model(x))


def test_an_exported_program_takes_other_batches_and_lengths():
    model = mixed(is_causal=True).layers[0]
    sizes = {0: torch.export.Dim("batch", max=9), 1: torch.export.Dim("length", min=2, max=99)}
    program = torch.export.export(model, (inputs(3, 6),), dynamic_shapes=(sizes,)).module()
    torch.testing.assert_close(program(inputs(2, 9)), model(inputs(2, 9)))


def test_in_data_parallel_a_model_has_the_gradients_that_it_has_alone(tmp_path):
    model = mixed()
    x = inputs()
    parameters = list(model.parameters())
    expected = torch.autograd.grad(model(x).square().sum(), parameters)
    where = f"file://{tmp_path / 'group'}"
    torch.distributed.init_process_group("gloo", init_method=where, rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(model)
        parallel(x).square().sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    torch.testing.assert_close([parameter.grad for parameter in parameters], list(expected))


def train_on_half(rank, folder):
    """Save the gradients of one of two processes, each of which has two of four sentences."""
    model = mixed()
    half = inputs(batch=4).chunk(2)[rank]
    where = f"file://{folder / 'group'}"
    torch.distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
    parallel = nn.parallel.DistributedDataParallel(model)
    parallel(half).square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.save(gradients, folder / f"{rank}.pt")
    torch.distributed.barrier()
    # Without destructors, because that of gloo's group hangs once in a while.
    os._exit(0)


@pytest.mark.slow
def test_two_processes_with_half_of_a_batch_each_have_the_gradients_of_the_whole(tmp_path):
    model = mixed()
    model(inputs(batch=4)).square().mean().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}

    workers = torch.multiprocessing.spawn(train_on_half, (tmp_path,), nprocs=2, join=False)
    try:
        until = time.monotonic() + 60
        while not workers.join(timeout=max(0, until - time.monotonic())):
            assert time.monotonic() < until, "the two processes hang"
    finally:
        for process in workers.processes:
            process.kill()
    for rank in (0, 1):
        torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt"), expected)


def test_modules_that_share_weights_have_a_mixing_each():
    model = Model().double()
    x = inputs()
    first, second = model.layers
    second.q = first.q
    move(mix(model, "position-wise", example=(inputs(3),)))
    assert second.q is first.q
    nn.init.zeros_(second.head_mixing.query_weight)
    for attention in (first, second):
        torch.testing.assert_close(attention(x), defined(attention, x))


def test_a_module_that_a_model_calls_twice_has_one_mixing():
    model = Model().double()
    x = inputs()
    model.layers = nn.ModuleList([model.layers[0]] * 2)
    move(mix(model, "position-wise", example=(inputs(3),)))
    assert len(mixing_parameters(model)) == 2
    first = x + defined(model.layers[0], x)
    torch.testing.assert_close(model(x), first + defined(model.layers[0], first))


class Stepping(Attention):
    """Has methods beside forward, which a model may call to generate."""

    def step(self, x):
        return self.forward(x)

    def without_hooks(self, x):
        return super().forward(x)

    def several(self, x):
        return self.without_hooks(x), self.without_hooks(x)

    def loop(self, x):
        return [self(x), self(x)]

    @staticmethod
    def of_all(query, key, value):
        return F.scaled_dot_product_attention(query, key, value)

    @classmethod
    def of_class(cls, *heads):
        return cls.of_all(*heads)

    def by_class(self, x):
        return self.out(self.of_class(*self.project(x)).transpose(1, 2).flatten(2))

    def stream(self, x):
        yield self.forward(x)
        yield self.step(x)
        yield self.by_class(x)


def test_other_methods_of_a_mixed_module_mix_too():
    attention = mixed(Stepping).layers[0]
    x = inputs()
    expected = defined(attention, x)
    torch.testing.assert_close(attention.step(x), expected)
    torch.testing.assert_close(attention.without_hooks(x), expected)
    torch.testing.assert_close(attention.by_class(x), expected)
    for output in (*attention.loop(x), *attention.stream(x)):
        torch.testing.assert_close(output, expected)
    with pytest.raises(RuntimeError) as refused:
        attention.several(x)
    assert str(refused.value) == (
        "layers.0: called scaled_dot_product_attention twice in one call of a method; must call it "
        "once, or the module, as self(x), each time"
    )
    attend = attention.attend(*attention.project(x))
    torch.testing.assert_close(attention.out(attend.transpose(1, 2).flatten(2)), expected)


class Changeable(Attention):
    """Calls the function as often as it is told to."""

    times = 1

    def attend(self, *tensors):
        outputs = [super(Changeable, self).attend(*tensors) for _ in range(self.times)]
        return sum(outputs, torch.zeros_like(tensors[0]))


@pytest.mark.parametrize(
    ("times", "message"),
    [
        (
            0,
            "layers.0: lost the mixing, it did not call scaled_dot_product_attention in this call "
            "(evaluation mode); must call it each time",
        ),
        (
            2,
            "layers.0: calls scaled_dot_product_attention twice in one call; must call it once, "
            "because each mixing needs a module of its own",
        ),
    ],
    ids=["fused elsewhere", "twice"],
)
def test_a_module_whose_mixing_has_not_run_once_says_so(times, message):
    model = mixed(Changeable).eval()
    model.layers[0].times = times
    with pytest.raises(RuntimeError) as refused:
        model(inputs())
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            {"query": (B, H, N, 5), "key": (B, H, N, 5)},
            "layers.0: its head_dim is 5, must be 3, as when it was mixed",
        ),
        (
            {"query": (B, 2, N, D)},
            "layers.0: its heads is 2, must be 4, as when it was mixed",
        ),
        (
            {"query": (B * H, N, D)},
            "layers.0: its query is [8, 5, 3], must be [batch, heads, positions, head size]",
        ),
    ],
    ids=["head size", "heads", "three dimensions"],
)
def test_other_sizes_than_the_mixing_was_built_for_are_refused(call, message):
    class Given(Attention):
        given: ClassVar[dict] = {}

        def attend(self, query, key, value):
            call = {"query": query, "key": key, "value": value, **self.given}
            return super().attend(**call)

    attention = mixed(Given).layers[0]
    attention.given = {name: inputs().new_zeros(shape) for name, shape in call.items()}
    with pytest.raises(ValueError, match="must be") as refused:
        attention(inputs())
    assert str(refused.value) == message


def test_a_mask_beside_is_causal_is_refused_as_torch_does():
    model = mixed(is_causal=True)
    with pytest.raises(RuntimeError, match=r"^layers\.0: attn_mask must not be given with"):
        model(inputs(), attn_mask=CAUSAL)


def test_a_part_that_reads_the_input_refuses_another_one():
    model = mixed(head_mixing="low-rank")
    message = (
        "layers.0: the first tensor that it gets is [2, 5, 12, 1], must be [2, 5, 12], which "
        "head_mixing reads"
    )

    attention = model.layers[0]
    project = attention.project
    attention.project = lambda x, memory=None: project(x[..., 0], memory)
    with pytest.raises(ValueError, match="must be") as refused:
        attention(inputs()[..., None])
    assert str(refused.value) == message


def test_without_a_mixing_that_has_moved_a_model_is_as_it_was():
    model = Model().double()
    x = inputs()
    before = model(x)
    attributes = set(vars(model.layers[0]))
    names = list(model.state_dict())
    unmix(mix(model, "position-wise", attention_gate="head", example=(inputs(3),)))
    assert torch.equal(model(x), before)
    assert type(model.layers[0]) is Attention
    assert set(vars(model.layers[0])) == attributes
    assert list(model.state_dict()) == names


def test_a_state_dict_loads_into_a_model_that_was_mixed_by_another_example():
    square = inputs(batch=4, length=4)  # the batch has as many sentences as queries
    oblong = inputs(batch=3, length=5)
    saved = move(mix(Model().double(), "position-wise", example=(square,)))
    again = mix(Model().double(), "position-wise", example=(oblong,))
    again.load_state_dict(saved.state_dict())
    torch.testing.assert_close(again(oblong), saved(oblong))
