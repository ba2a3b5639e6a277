"""Compute calls of one kind on this machine, and judge them by float64."""

import math
from typing import NamedTuple

import torch

from mixhead_plugin.ops import api, choice
from mixhead_plugin.ops.accuracy import (
    Draw,
    compare,
    enough_draws,
    fault_in,
    finite_draws,
    results,
    shares,
)
from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.sample_calls import (
    CallKind,
    MemoryLayout,
    SampleCall,
    layout_of,
    sample_call,
)
from mixhead_plugin.ops.triton import support

# The rows of each result that a variant is judged by. A gradient of one number, as that of a sink
# of one head, may then have 3.2 times the error of the formula, instead of twice. More rows would
# let a user of few heads wait for minutes.
ROWS = 36
# torch's own attention, 'fused', rounds more often than the formula: its bound is twice as large
OF_TORCH = 2.0


class Judged(NamedTuple):
    """A row of the report: the result of the calls of one kind.

    Attributes:
        auto: what --attention-impl auto takes
        error: its largest error, where 1 is the most that is allowed; None if it is not finite, or
            if nothing was computed
        fault: what is wrong; empty if nothing is. A kernel that fails its trial is a fault, with
            dropout too
        skipped: why nothing was computed; empty if it was
        kernels: why fused kernels are not used; empty if they are
    """

    auto: str = ""
    error: float | None = None
    fault: str = ""
    skipped: str = ""
    kernels: str = ""


def judge(kind: CallKind) -> Judged:
    """Compute calls of a kind, and compare them with float64."""
    of_query = _projected(kind.heads, kind.head_dim)
    of_value = _projected(kind.mixed_heads or kind.heads, kind.value_dim)
    laid = kind._replace(layouts=(of_query, of_query, of_value))
    judged = Judged()  # an exception leaves what is known by then
    try:
        inputs, _ = _sample(laid, 0)
        kernels, kernel_fault = _tried_kernels(inputs)
        judged = judged._replace(kernels=kernels, fault=kernel_fault)
        judged = judged._replace(auto=choice.fastest(inputs))
        error, wrong = _compared(laid, judged.auto)
        judged = judged._replace(error=error, fault=kernel_fault or wrong)
    except torch.OutOfMemoryError:
        judged = judged._replace(skipped="out of memory")
    except Exception as raised:  # goes into the report, whatever it is
        judged = judged._replace(fault=f"{type(raised).__name__}: {raised}".splitlines()[0])
    return judged


def _projected(heads: int, head_dim: int) -> MemoryLayout:
    """Return how heads [B, H, N, D] lie in memory that fairseq has projected: as [N, B, H, D]."""
    return layout_of(torch.empty(2, 1, heads, head_dim).permute(1, 2, 0, 3))


def _sample(kind: CallKind, nth: int) -> SampleCall:
    """Return the nth call of a kind, and a gradient of its output."""
    # With fewer keys, `auto` would take the formula.
    inputs, d_out = sample_call(kind, n_queries=75, n_keys=70, p=0.0, batch=1, nth=nth)
    return inputs, d_out.contiguous()  # as torch makes it behind a mask


def _tried_kernels(inputs: AttentionInputs) -> tuple[str, str]:
    """Return why fused kernels do not serve a call, and their fault; both empty if they serve."""
    unfit = support.machine_problem() or support.call_problem(inputs)
    if unfit:
        return unfit, ""
    problem = _kernel_problem(inputs)
    is_untried = problem.startswith(support.UNTRIED)
    return problem, "" if is_untried else problem


def _kernel_problem(inputs: AttentionInputs) -> str:
    """Return why the fused kernels cannot serve a call, with and without dropout."""
    from mixhead_plugin.ops.triton import verify  # imports triton

    fault = ""
    if inputs.query.is_cuda:  # the interpreter has no time for both
        fault = verify.trial_fault(inputs)
    return fault or verify.trial_fault(inputs._replace(dropout_p=0.1))


def _compared(kind: CallKind, implementation: str) -> tuple[float | None, str]:
    """Return the error and the fault of what `auto` takes for calls of a kind, as in `Judged`.

    Args:
        kind: of the calls
        implementation: what `auto` takes
    """

    def draw(nth: int) -> Draw:
        inputs, d_out = _sample(kind, nth)
        computed = results(lambda call: api.attend(call, "auto"), inputs, d_out)
        return compare(inputs, d_out, torch.ones(1, device=kind.device), computed)

    most = OF_TORCH if implementation == "fused" else 1.0
    draws = finite_draws(draw, enough_draws(kind, ROWS))
    error = None
    if draws:
        # Not `max` of Python, which may pass over NaN.
        largest = float(torch.tensor([*shares(draws).values()]).max()) / most
        if math.isfinite(largest):  # JSON has no other numbers
            error = largest
    return error, fault_in(draws, most)
