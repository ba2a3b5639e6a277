"""Test torch's transformations: each is right, or is refused in one line that names the
implementation.
"""

import pytest
import torch
from torch.autograd import forward_ad

from mixhead_plugin.ops import attention
from mixhead_plugin.ops.transforms import transformations, while_traced
from tests.covering import covering
from tests.ops import definitions

NQ, NK, D = 5, 6, 4
EXACT = ""
NO_TORCH_FUNC = (
    "impl 'blockwise' has no derivative for torch.func, only for autograd; impl 'reference' has"
)
NO_FORWARD = "impl 'blockwise' has no forward-mode derivative; impl 'reference' has"


def of_square(attend):
    return lambda query: attend(query).square().sum()


def backward(attend):
    def run(query):
        query = query.detach().requires_grad_()
        return torch.autograd.grad(of_square(attend)(query), query)[0]

    return run


def batched_gradients(attend):
    def run(query):
        query = query.detach().requires_grad_()
        out = attend(query)
        d_outs = torch.stack([out.detach(), out.detach().flip(2)])
        return torch.autograd.grad(out, query, d_outs, is_grads_batched=True)[0]

    return run


def in_place(attend):
    def run(query):
        query = query.detach().requires_grad_()
        out = attend(query)
        out += 1.0
        out.mul_(2.0)
        return torch.autograd.grad(out.square().sum(), query)[0]

    return run


def dual_numbers(attend):
    def run(query):
        with forward_ad.dual_level():
            out = attend(forward_ad.make_dual(query, query.flip(2)))
            return forward_ad.unpack_dual(out).tangent

    return run


# What each computes from an attention, and what blockwise says to it.
TRANSFORMATIONS = {
    "backward": (backward, EXACT),
    "in-place": (in_place, EXACT),
    "batched gradients": (batched_gradients, EXACT),
    "vmap": (lambda f: lambda q: torch.vmap(f)(torch.stack([q, q + 1])), EXACT),
    "func.grad": (lambda f: torch.func.grad(of_square(f)), NO_TORCH_FUNC),
    "gradients by sample": (
        lambda f: lambda q: torch.vmap(torch.func.grad(of_square(f)))(torch.stack([q, q + 1])),
        NO_TORCH_FUNC,
    ),
    "jacrev": (lambda f: torch.func.jacrev(lambda q: f(q).sum((0, 2))), NO_TORCH_FUNC),
    "jvp": (lambda f: lambda q: torch.func.jvp(f, (q,), (q.flip(2),))[1], NO_FORWARD),
    "jacfwd": (lambda f: torch.func.jacfwd(lambda q: f(q).sum((0, 2))), NO_FORWARD),
    "hessian": (lambda f: torch.func.hessian(of_square(f)), NO_TORCH_FUNC),
    "dual numbers": (dual_numbers, NO_FORWARD),
}
IMPLS = {
    "reference": ("reference", True),
    "blockwise": ("blockwise", True),
    "auto, mixed": ("auto", True),
    "auto, plain": ("auto", False),  # torch's own kernel
}
WAYS = {
    "eager": lambda make, attend: make(attend),
    # compiled whole, and compiled inside
    "compiled": lambda make, attend: torch.compile(make(attend), backend="aot_eager"),
    "of compiled": lambda make, attend: make(torch.compile(attend, backend="aot_eager")),
}


def call(impl, mixes, dtype, function=attention, causal=True):
    torch.manual_seed(3)
    key, value = torch.randn(2, 2, 2, NK, D, dtype=torch.float64).to(dtype)
    mixing = torch.randn(2, 2, dtype=torch.float64).to(dtype) if mixes else None
    options = {"impl": impl} if function is attention else {}
    return lambda query: function(query, key, value, mixing=mixing, causal=causal, **options)


def queries():
    return torch.randn(2, 2, NQ, D)


@covering(way=WAYS, impl=IMPLS, what=TRANSFORMATIONS)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of the compiler, about its own tracing
def test_a_transformation_is_right_or_refused_in_words_that_name_the_implementation(
    way, impl, what
):
    torch._dynamo.reset()
    make, refusal = TRANSFORMATIONS[what]
    name, mixes = IMPLS[impl]
    query, run = queries(), WAYS[way](make, call(name, mixes, torch.float32))
    if name == "blockwise" and refusal:
        with pytest.raises(NotImplementedError) as error:
            run(query)
        assert str(error.value) in (NO_TORCH_FUNC, NO_FORWARD)
        return
    exact = make(call(name, mixes, torch.float64, definitions.attention))(query.double())
    torch.testing.assert_close(run(query).double(), exact, rtol=1e-3, atol=1e-4)


# torch.export has no gradients, not even of operations of torch alone.
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("what", ["vmap", "jvp"])
def test_a_transformation_that_is_exported_likewise(what, impl):
    # In forward mode it loses the values of masks, whoever makes them.
    run = TRANSFORMATIONS[what][0](call(*IMPLS[impl], torch.float32, causal=False))
    query = queries()

    class Exported(torch.nn.Module):
        def forward(self, query):
            return run(query)

    if impl == "blockwise" and what == "jvp":
        with pytest.raises(NotImplementedError, match=NO_FORWARD):
            torch.export.export(Exported(), (query,), strict=False)
        return
    exported = torch.export.export(Exported(), (query,), strict=False).module()
    torch.testing.assert_close(exported(query), run(query))


@pytest.mark.parametrize("impl", IMPLS)
def test_a_compiled_program_takes_lengths_that_change(impl):
    torch._dynamo.reset()
    name, mixes = IMPLS[impl]
    mixing = torch.randn(2, 2) if mixes else None

    def run(query, key):
        return attention(query, key, key, mixing=mixing, causal=True, impl=name)

    compiled = torch.compile(run, backend="eager", fullgraph=True)
    for n_queries, n_keys in ((4, 40), (4, 44), (44, 44), (50, 50), (7, 9)):
        query, key = torch.randn(1, 2, n_queries, D), torch.randn(1, 2, n_keys, D)
        torch.testing.assert_close(compiled(query, key), run(query, key))


def test_tangents_that_come_after_compiling_are_refused_and_not_lost():
    torch._dynamo.reset()
    attend = torch.compile(call("auto", True, torch.float32), backend="eager")
    attend(queries())
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=NO_FORWARD):
        attend(forward_ad.make_dual(queries(), queries()))


@pytest.mark.parametrize("impl", ["auto, mixed", "auto, plain"])
def test_a_second_derivative_that_is_missing_names_the_implementation(impl):
    query = queries().requires_grad_()
    (d_query,) = torch.autograd.grad(
        of_square(call(*IMPLS[impl], torch.float32))(query), query, create_graph=True
    )
    with pytest.raises(
        NotImplementedError,
        match=r"^impl '\w+' .*has no second derivative.*; impl 'reference' has$",
    ):
        d_query.sum().backward()


def test_the_mark_for_the_compiler_is_torchs_own():
    """Its decorator would load the compiler when the package is imported."""

    def ours():
        return 1

    def torchs():
        return 1

    assert vars(while_traced(ours)) == vars(torch.compiler.assume_constant_result(torchs))
    assert vars(transformations) == vars(ours)
