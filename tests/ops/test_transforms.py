"""Each of torch's transformations is right, or is refused in words that name the implementation."""

import pytest
import torch
from torch.autograd import forward_ad

from mixhead_plugin.ops import LowRank, attention
from mixhead_plugin.ops.transforms import transformations, while_traced
from tests.covering import covering, each_once, first_of
from tests.ops import definitions

NQ, NK, D = 5, 6, 4
EXACT = ""
NO_TORCH_FUNC = (
    "impl 'blockwise' has no derivative for torch.func, only for autograd; impl 'reference' has"
)
NO_FORWARD = "impl 'blockwise' has no forward-mode derivative; impl 'reference' has"


# Each takes an attention, a function of the queries, and returns what is computed from it.


def of_square(attend):
    return lambda query: attend(query).square().sum()


def of_heads_and_positions(attend):
    """Return the sum over sentences and queries, whose Jacobian is small."""
    return lambda query: attend(query).sum((0, 2))


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


def vmap(attend):
    return lambda query: torch.vmap(attend)(torch.stack([query, query + 1]))


def gradient(attend):
    return torch.func.grad(of_square(attend))


def gradients_by_sample(attend):
    return vmap(gradient(attend))


def jacrev(attend):
    return torch.func.jacrev(of_heads_and_positions(attend))


def jvp(attend):
    return lambda query: torch.func.jvp(attend, (query,), (query.flip(2),))[1]


def jacfwd(attend):
    return torch.func.jacfwd(of_heads_and_positions(attend))


def hessian(attend):
    return torch.func.hessian(of_square(attend))


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
    "vmap": (vmap, EXACT),
    "func.grad": (gradient, NO_TORCH_FUNC),
    "gradients by sample": (gradients_by_sample, NO_TORCH_FUNC),
    "jacrev": (jacrev, NO_TORCH_FUNC),
    "jvp": (jvp, NO_FORWARD),
    "jacfwd": (jacfwd, NO_FORWARD),
    "hessian": (hessian, NO_TORCH_FUNC),
    "dual numbers": (dual_numbers, NO_FORWARD),
}
IMPLS = {
    "reference": ("reference", "matrix"),
    "blockwise": ("blockwise", "matrix"),
    "blockwise, factors": ("blockwise", "factors"),
    "auto, mixed": ("auto", "factors"),
    "auto, plain": ("auto", "none"),  # torch's own kernel
}
COMPILED = {
    "compiled whole": lambda make, attend: torch.compile(make(attend), backend="aot_eager"),
    "of a compiled attention": lambda make, attend: make(
        torch.compile(attend, backend="aot_eager")
    ),
}


def mixing_of(kind, batch=2, n_queries=NQ, dtype=torch.float32):
    """Return no mixing, an M [2, 2], or the factors of one for each query."""
    if kind == "none":
        return None
    if kind == "matrix":
        return torch.randn(2, 2, dtype=torch.float64).to(dtype)
    shapes = ((batch, n_queries, 2, 3), (batch, n_queries, 2, 3), (batch, n_queries, 2))
    return LowRank(*(torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes))


def call(impl, mixed_by, dtype, function=attention, causal=True):
    torch.manual_seed(3)
    key, value = torch.randn(2, 2, 2, NK, D, dtype=torch.float64).to(dtype)  # [B, H, Nk, D] each
    options = {"causal": causal, "mixing": mixing_of(mixed_by, dtype=dtype)}
    if function is attention:  # a definition has one implementation
        options["impl"] = impl
    return lambda query: function(query, key, value, **options)


def queries():
    return torch.randn(2, 2, NQ, D)


@covering(impl=IMPLS, what=TRANSFORMATIONS)
def test_a_transformation_is_right_or_refused_in_words_that_name_the_implementation(impl, what):
    make, refusal = TRANSFORMATIONS[what]
    must_be_right_or_refused(make(call(*IMPLS[impl], torch.float32)), impl, what, [refusal])


# Few cases, because compiling takes long.
@each_once(way=COMPILED, impl=IMPLS, what=TRANSFORMATIONS)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of the compiler, about its own tracing
def test_a_compiled_transformation_likewise(way, impl, what):
    torch._dynamo.reset()
    make, _ = TRANSFORMATIONS[what]
    run = COMPILED[way](make, call(*IMPLS[impl], torch.float32))
    # A Hessian lacks both derivatives. What the compiler traces decides which one is named.
    must_be_right_or_refused(run, impl, what, [NO_TORCH_FUNC, NO_FORWARD])


def must_be_right_or_refused(run, impl, what, messages):
    make, refusal = TRANSFORMATIONS[what]
    name, mixed_by = IMPLS[impl]
    query = queries()
    if name == "blockwise" and refusal:
        with pytest.raises(NotImplementedError) as error:
            run(query)
        assert str(error.value) in messages
        return
    exact = make(call(name, mixed_by, torch.float64, definitions.attention))(query.double())
    torch.testing.assert_close(run(query).double(), exact, rtol=1e-3, atol=1e-4)


# torch.export has no gradients, not even of operations of torch alone.
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("what", ["vmap", "jvp"])
def test_a_transformation_that_is_exported_likewise(what, impl):
    make, _ = TRANSFORMATIONS[what]
    # In forward mode it loses the values of masks, whoever makes them.
    run = make(call(*IMPLS[impl], torch.float32, causal=False))
    query = queries()

    class Exported(torch.nn.Module):
        def forward(self, query):
            return run(query)

    if impl.startswith("blockwise") and what == "jvp":
        with pytest.raises(NotImplementedError, match=NO_FORWARD):
            torch.export.export(Exported(), (query,), strict=False)
        return
    exported = torch.export.export(Exported(), (query,), strict=False).module()
    torch.testing.assert_close(exported(query), run(query))


@first_of(impl=["blockwise, factors", "auto, plain", "auto, mixed", "blockwise", "reference"])
def test_a_compiled_program_takes_lengths_that_change(impl):
    torch._dynamo.reset()
    name, mixed_by = IMPLS[impl]

    def run(query, key, mixing):
        return attention(query, key, key, mixing=mixing, causal=True, impl=name)

    compiled = torch.compile(run, backend="eager", fullgraph=True)
    for n_queries, n_keys in ((4, 40), (4, 44), (44, 44), (50, 50), (7, 9)):
        query = torch.randn(1, 2, n_queries, D)
        key = torch.randn(1, 2, n_keys, D)
        mixing = mixing_of(mixed_by, 1, n_queries)
        torch.testing.assert_close(compiled(query, key, mixing), run(query, key, mixing))


def test_tangents_that_come_after_compiling_are_refused_and_not_lost():
    torch._dynamo.reset()
    attend = torch.compile(call("auto", "factors", torch.float32), backend="eager")
    attend(queries())
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=NO_FORWARD):
        attend(forward_ad.make_dual(queries(), queries()))


@pytest.mark.parametrize("impl", ["auto, mixed", "auto, plain"])
def test_a_second_derivative_that_is_missing_names_the_implementation(impl):
    query = queries().requires_grad_()
    loss = of_square(call(*IMPLS[impl], torch.float32))(query)
    (d_query,) = torch.autograd.grad(loss, query, create_graph=True)
    told = r"^impl '\w+' .*has no second derivative.*; impl 'reference' has$"
    with pytest.raises(NotImplementedError, match=told):
        d_query.sum().backward()


def test_the_mark_for_the_compiler_is_torchs_own():
    """Its decorator would load the compiler when the package is imported."""

    def ours():
        return 1

    def torchs():
        return 1

    assert vars(while_traced(ours)) == vars(torch.compiler.assume_constant_result(torchs))
    assert vars(transformations) == vars(ours)
