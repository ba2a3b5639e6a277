"""The checks of `nn.mix` on one model of somebody else.

With position-wise mixing, these are tried:

- start: a mixed model gives the outputs of the plain one.
- moved: after M has moved, it gives the outputs of the plain model with `defined` in place of
  F.scaled_dot_product_attention.
- masks: like moved, with the model's own argument that hides keys.
- trained: every tensor of the mixing gets the gradient that it gets by `defined`, in training mode.
- dropout: like moved, with all weights dropped; with half of them, the outputs are random.
- cached: token by token, with the library's own cache, gives the full pass.
- loaded: a state dict, in a model that is built anew, gives the same outputs.
- saved whole: `torch.save` of the model does.
- deepcopy: a copy does.
- autocast: in bfloat16, it gives about the outputs of float32.
- checkpoints: activation checkpointing gives the same gradients. It is the library's own; if it has
  none, torch's `apply_activation_checkpointing` of each attention.
- compiled: `torch.compile(fullgraph=True)` gives the same outputs.
- exported: `torch.export` does.

A number is the largest difference, divided by the largest number. A text is the error that was
raised; it begins with `UNMIXED` where the plain model raises one, too.
"""

import contextlib
import copy
import importlib.metadata
import io
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from benchmarks.steps import one_line
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)

from development.libraries_models import Case, first
from development.libraries_results import UNMIXED
from mixhead_plugin.nn import load, mixing_parameters


class Tried(NamedTuple):
    """A model, and what the checks compare it with."""

    case: Case
    plain: nn.Module
    model: nn.Module  # mixed; M has moved
    expected: Tensor  # its outputs


def attentions_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, "head_mixing")]


# The definition


def defined(modules: Iterable[nn.Module]) -> Callable[..., Tensor]:
    """Return scaled_dot_product_attention by its formula, each call with M of the next module."""
    following = iter(modules)

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        part: Any = next(following).head_mixing
        group = query.size(1) // key.size(1)
        key = key.repeat_interleave(group, 1)
        value = value.repeat_interleave(group, 1)
        scores = query @ key.mT * (query.size(3) ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[2:], dtype=torch.bool).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        mixing = torch.einsum("bjnd,di->bnji", query, part.query_weight) + part.bias
        mixed = torch.einsum("bnji,bjnk->bink", mixing, scores.softmax(-1))
        return F.dropout(mixed, dropout_p) @ value

    return attention


@contextlib.contextmanager
def in_place_of_the_function(other: Callable[..., Tensor]) -> Iterator[None]:
    """Let every module of Python that has the function have another one; some import it by name."""
    function = F.scaled_dot_product_attention
    name = function.__name__
    places = [module for module in sys.modules.values() if vars(module).get(name) is function]
    fast = torch.backends.mha.get_fastpath_enabled()
    for module in places:
        setattr(module, name, other)
    torch.backends.mha.set_fastpath_enabled(False)  # it would not call the function
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module in places:
            setattr(module, name, function)


def by_formula(tried: Tried, plain: nn.Module, **more: Any) -> Tensor:
    """Return the outputs of a plain model with `defined`, and M of the mixed model."""
    order: list[nn.Module] = []
    hooks = [
        module.register_forward_pre_hook(lambda module, args: order.append(module))
        for module in attentions_of(tried.model)
    ]
    tried.case.call(tried.model, **more)
    for hook in hooks:
        hook.remove()
    with in_place_of_the_function(defined(order)):
        return tried.case.call(plain, **more)


def difference(outputs: Tensor, expected: Tensor) -> float:
    return float((outputs - expected).abs().max() / expected.abs().max())


def move(model: nn.Module) -> None:
    """Move the mixing away from the identity."""
    numbers = torch.Generator().manual_seed(1)
    for parameter in mixing_parameters(model).values():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=numbers)


# The checks against the plain model. None: the model has no such thing.


def _start(tried: Tried) -> float:
    before = tried.case.call(tried.plain)
    return difference(tried.case.call(tried.case.mixed(tried.plain)), before)


def _moved(tried: Tried) -> float:
    assert not torch.allclose(tried.expected, tried.case.call(tried.plain)), "no effect"
    return difference(tried.expected, by_formula(tried, tried.plain))


def _masks(tried: Tried) -> float | None:
    hides = tried.case.hides
    if hides is None:
        return None
    hidden = tried.case.call(tried.model, **hides)
    assert not torch.allclose(hidden, tried.expected), "the mask has no effect"
    return difference(hidden, by_formula(tried, tried.plain, **hides))


@torch.enable_grad()
def _trained(tried: Tried) -> float:
    parameters = list(mixing_parameters(tried.model).values())
    plain = copy.deepcopy(tried.plain).train()
    tried.model.train()
    gradients_of_mixed = torch.autograd.grad(loss(tried.case.call(tried.model)), parameters)
    expected = torch.autograd.grad(loss(by_formula(tried, plain)), parameters)
    tried.model.eval()
    return max(map(difference, gradients_of_mixed, expected))


def loss(outputs: Tensor) -> Tensor:
    """Return a number that depends on each output in another way."""
    weights = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(2))
    return (outputs * weights.to(outputs.dtype)).sum()


def _dropout(tried: Tried) -> float | None:
    case = tried.case
    if not case.drops:
        return None

    def dropping(probability: float) -> nn.Module:
        model = case.mixed(case.made(probability))
        move(model)
        return model.train()

    half = dropping(0.5)
    assert not torch.allclose(case.call(half, seed=1), case.call(half, seed=2)), "drops nothing"
    return difference(case.call(dropping(1.0)), by_formula(tried, case.made(1.0).train()))


# The checks of a model against itself, which the plain model has to pass, too


def _cached(tried: Tried) -> float | None:
    if tried.case.steps is None:
        return None
    return difference(tried.case.steps(tried.model), tried.expected)


def _loaded(tried: Tried) -> float:
    state = through_file(tried.model.state_dict(), weights_only=True)
    return difference(tried.case.call(load(tried.case.made(), state)), tried.expected)


def _saved_whole(tried: Tried) -> float:
    again = through_file(tried.model, weights_only=False)
    return difference(tried.case.call(again), tried.expected)


def through_file(something: Any, weights_only: bool) -> Any:
    file = io.BytesIO()
    torch.save(something, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def _deepcopy(tried: Tried) -> float:
    return difference(tried.case.call(copy.deepcopy(tried.model)), tried.expected)


def _autocast(tried: Tried) -> float:
    model = copy.deepcopy(tried.model).float()
    exact = tried.case.call(model)
    with torch.autocast("cpu", torch.bfloat16):
        rounded_outputs = tried.case.call(model).float()
    assert not torch.equal(rounded_outputs, exact), "autocast has no effect"
    return difference(rounded_outputs, exact)


@torch.enable_grad()
def _checkpoints(tried: Tried) -> float:
    model: Any = copy.deepcopy(tried.model).train()
    expected = gradients(tried.case, model)

    attentions = attentions_of(model)
    if hasattr(model, "set_grad_checkpointing"):
        model.set_grad_checkpointing()
    elif hasattr(model, "enable_gradient_checkpointing"):
        model.enable_gradient_checkpointing()
    else:
        apply_activation_checkpointing(model, check_fn=lambda module: module in attentions)

    calls: list[nn.Module] = []
    for module in attentions:
        module.register_forward_pre_hook(lambda module, args: calls.append(module))
    again = gradients(tried.case, model)
    assert len(calls) == 2 * len(attentions), "attentions were not computed again"
    return max(map(difference, again, expected))


def gradients(case: Case, model: nn.Module) -> list[Tensor]:
    """Return those of the parameters that have any."""
    model.zero_grad()
    loss(case.call(model)).backward()
    all_gradients = [parameter.grad for parameter in model.parameters()]
    return [grad.clone() for grad in all_gradients if grad is not None and grad.any()]


def _compiled(tried: Tried) -> float:
    torch._dynamo.reset()
    model = copy.deepcopy(tried.model)
    program: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    return difference(first(program(**tried.case.arguments)), tried.expected)


def _exported(tried: Tried) -> float:
    program = torch.export.export(tried.model, (), tried.case.arguments).module()
    return difference(first(program(**tried.case.arguments)), tried.expected)


Check = Callable[[Tried], float | None]
AGAINST_PLAIN: dict[str, Check] = {
    "start": _start,
    "moved": _moved,
    "masks": _masks,
    "trained": _trained,
    "dropout": _dropout,
}
AGAINST_ITSELF: dict[str, Check] = {
    "cached": _cached,
    "loaded": _loaded,
    "saved whole": _saved_whole,
    "deepcopy": _deepcopy,
    "autocast": _autocast,
    "checkpoints": _checkpoints,
    "compiled": _compiled,
    "exported": _exported,
}
CHECKS = AGAINST_PLAIN | AGAINST_ITSELF


@torch.no_grad()
def row(case: Case, checks: Iterable[str] = CHECKS) -> dict[str, Any]:
    """Return what was found for one model."""
    plain = case.made()
    model = case.mixed(plain)
    move(model)
    tried = Tried(case, plain, model, case.call(model))
    results: dict[str, Any] = {
        "library": case.library,
        "version": "" if "/" in case.library else importlib.metadata.version(case.library),
        "model": case.name,
        "attentions": len(attentions_of(model)),
    }
    for name in checks:
        try:
            results[name] = rounded(CHECKS[name](tried))
        except Exception as error:  # what it was stands in the results
            results[name] = without_mixing(tried, name) + one_line(error)
    return results


def without_mixing(tried: Tried, name: str) -> str:
    """Return `UNMIXED` if the plain model does not pass a check either."""
    if name not in AGAINST_ITSELF:
        return ""
    try:
        CHECKS[name](tried._replace(model=tried.plain, expected=tried.case.call(tried.plain)))
    except Exception:
        return UNMIXED
    return ""


def rounded(number: float | None) -> float | None:
    return None if number is None else float(f"{number:.0e}")
