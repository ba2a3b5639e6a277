"""The run that shows which modules call the function leaves no trace in the model."""

import random
from threading import Event, Thread

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mixhead_plugin.heads.uncompiled import uncompiled
from mixhead_plugin.nn import example
from mixhead_plugin.nn.example import CallSizes
from tests.nn.calling import Attention, C, D, H, Model, inputs


class Restless(Attention):
    """Changes all that a call can change."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(C)
        self.register_buffer("steps", torch.zeros(()))
        self.average = nn.Parameter(torch.zeros(C))
        self.cache = {}
        self.seen = []

    def forward(self, x):
        self.steps += 1
        self.average.data.add_(x.mean((0, 1)))
        self.register_buffer("late", torch.ones(1))
        self.q.weight.copy_(self.q.weight + 1)
        self.cache["x"] = x
        self.seen.append(x)
        self.last = x
        self.eval()
        self.register_forward_hook(lambda *_: None)
        random.random()
        numpy.random.rand()
        x = F.dropout(x + torch.rand(()), 0.5)
        return super().forward(self.norm(x.mT).mT)


def state(model):
    """Return all that must not change, bit for bit, in comparable form."""
    tensors = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    attributes = [repr(vars(module)) for module in model.modules()]
    generators = torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state())
    return tensors, attributes, generators


@pytest.mark.parametrize("raises", [False, True], ids=["ends", "raises"])
def test_a_run_changes_nothing(raises):
    model = nn.Sequential(Restless().double())
    model[0].norm.register_forward_hook(lambda *_: None)
    before = state(model)

    def call(model):
        model(inputs(3))
        assert not torch.is_grad_enabled()
        assert not torch.backends.mha.get_fastpath_enabled()
        if raises:
            raise KeyError("mine")

    if raises:
        with pytest.raises(KeyError, match="mine"):
            example.run(model, call)
    else:
        assert example.run(model, call).calling == {model[0]: CallSizes(H, D, D, C)}
    assert state(model) == before
    assert torch.is_grad_enabled()
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("first", ["run", "study"])
def test_blocks_that_overlap_in_two_threads_leave_torch_as_it_was(first):
    """The first block begins before the second one, and ends inside of it."""
    first_runs, second_runs, first_has_ended = Event(), Event(), Event()
    seen_inside = []

    def wait(*args):
        first_runs.set()
        second_runs.wait(60)

    def first_block():
        if first == "run":
            example.run(Model().double(), wait)
        else:
            with uncompiled():  # as in `ablate`
                wait()
        first_has_ended.set()

    def is_compiled():
        """Return whether what is compiled now runs as compiled code."""
        graphs = []

        def backend(graph, tensors):
            graphs.append(graph)
            return graph

        torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(2))
        return bool(graphs)

    def call(model):
        second_runs.set()
        first_has_ended.wait(60)
        seen_inside.append((torch.backends.mha.get_fastpath_enabled(), is_compiled()))
        model(inputs(3))

    thread = Thread(target=first_block)
    thread.start()
    first_runs.wait(60)
    example.run(Model().double(), call)
    thread.join()
    assert seen_inside == [(False, False)]
    assert (torch.backends.mha.get_fastpath_enabled(), is_compiled()) == (True, True)


@pytest.mark.parametrize(
    "given",
    [(inputs(3),), {"x": inputs(3)}, lambda model: model(x=inputs(3))],
    ids=["tuple", "dict", "function"],
)
def test_an_example_may_be_given_in_three_ways(given):
    model = Model().double()
    found = example.run(model, given).calling
    assert found == dict.fromkeys(model.layers, CallSizes(H, D, D, C))


def test_the_innermost_running_module_makes_the_call():
    class Function(nn.Module):
        def forward(self, *tensors):
            return F.scaled_dot_product_attention(*tensors)

    class Outer(Attention):
        def __init__(self):
            super().__init__()
            self.inner = Function()

        def attend(self, *tensors):
            return self.inner(*tensors)

    model = Outer().double()
    # It gets queries, not the input that they are made of.
    assert example.run(model, (inputs(3),)).calling == {model.inner: CallSizes(H, D, D, None)}


@pytest.mark.parametrize("layout", ["swapped", "as long as the batch"])
def test_an_input_is_known_only_where_its_dimensions_can_be_told_apart(layout):
    class Swapped(Attention):
        def forward(self, x):
            return super().forward(x.transpose(0, 1))

    model = Swapped().double() if layout == "swapped" else Attention().double()
    found = example.run(model, (inputs(5 if layout != "swapped" else 3),))
    assert found.calling[model].embed_dim is None


def test_compiled_code_in_a_model_is_seen():
    model = Attention().double()
    model.compile(backend="eager")
    assert example.run(model, (inputs(3),)).calling[model].heads == H
