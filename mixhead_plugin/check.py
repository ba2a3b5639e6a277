"""Check attention on this machine: `kinds_to_try` against float64, and its speed.

Scores and gains that depend on a distance are not tried: see NOT_TRIED.
"""

import contextlib
import importlib.metadata
import itertools
import json
import math
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.benchmark import Timer

from mixhead_plugin.ops import NORMALIZERS, api, choice
from mixhead_plugin.ops.accuracy import (
    Draw,
    compare,
    enough_draws,
    fault_in,
    finite_draws,
    formula_weights,
    results,
    shares,
)
from mixhead_plugin.ops.call_kinds import CallKind, MemoryLayout, SampleCall, layout_of, sample_call
from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.triton import support

# The dimensions of M, of the mixings that also have a measured speed.
DIMS_OF_MIXING = {"none": 0, "position-independent": 2, "position-wise": 4}
# The fields of a `CallKind`. Where weights are mixed, `kinds_to_try` adds the dtype of the mixing.
MIXED: dict[str, dict[str, Any]] = {
    **{name: {"mixing_dim": dim} for name, dim in DIMS_OF_MIXING.items()},
    "low-rank": {"rank": 2},  # the factors of M
    # Into half as many heads, whose values have twice the size.
    "differential": {"mixing_dim": 4},
    "of scores, position-independent": {"score_mixing_dim": 2},
    "of scores, position-wise": {"score_mixing_dim": 4},
}
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"causal": True},
    "mask, padding": {"mask_dtype": torch.float32, "padding": True},
    "mask by head": {"mask_dtype": torch.float32, "mask_by": "head"},
    "sink, causal": {"sink": True, "causal": True},
}
# What no `CallKind` has, and so no variant. The tests of `ops` try it.
NOT_TRIED = (
    "scores of distances (--relative-position t5, Transformer-XL)",
    "gains of distances (--relative-gain)",
)
# The rows of each result that a variant is judged by. A gradient of one number, as that of a sink
# of one head, may then have 3.2 times the error of the formula, instead of twice. More rows would
# let a user of few heads wait for minutes.
ROWS = 36
# torch's own attention, 'fused', rounds more often than the formula: its bound is twice as large
OF_TORCH = 2.0
# One trial then takes about 4 GiB. The matrices of a position-wise mixing have the square of the
# heads.
MOST_HEADS = 256
MOST_HEAD_DIM = 1024
SPEED_SHAPE = (4, 8, 512, 64)  # B, H, N, D
PACKAGES = (
    "mixhead_plugin",
    "torch",
    "triton",
    "transformers",
    "fairseq-fixed",
    "ve-fairseq",
    "fairseq",
    "numpy",
)


def machine(device: torch.device) -> dict[str, str]:
    """Return the versions of the packages, and what is known of the device."""
    facts = {"python": platform.python_version(), "system": platform.platform()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            facts[name] = importlib.metadata.version(name)
    if device.type != "cuda":
        return {**facts, "device": f"{device}, {torch.get_num_threads()} threads"}
    known = torch.cuda.get_device_properties(device)
    facts["device"] = (
        f"{known.name}, compute capability {known.major}.{known.minor}, {known.total_memory >> 30} "
        "GiB"
    )
    tool = shutil.which("nvidia-smi")
    if tool:
        query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
        printed = subprocess.run(query, capture_output=True, text=True).stdout
        facts["driver"] = printed.split("\n")[0]  # a line for each GPU
    return {**facts, "kernels": support.machine_problem() or "can run"}


def kinds_to_try(
    device: torch.device, heads: int, head_dim: int
) -> Iterator[tuple[dict[str, str], CallKind]]:
    """Yield every kind of call by its names and as a record, but for those that NOT_TRIED names.

    Args:
        device: of the calls; on a GPU there is one more dtype
        heads: H; without the differential mixing where it is odd
        head_dim: D
    """
    dtypes = [torch.float32, torch.bfloat16]
    if device.type == "cuda":
        dtypes.append(torch.float16)
    for normalizer, mixing, mask, dtype in itertools.product(NORMALIZERS, MIXED, MASKS, dtypes):
        differential = mixing == "differential"
        if differential and heads % 2:
            continue
        if MASKS[mask].get("sink") and not NORMALIZERS[normalizer].takes_sink:
            continue
        fields = {**MIXED[mixing], **MASKS[mask]}
        if fields.get("mixing_dim") or fields.get("rank"):
            fields["mixing_dtype"] = dtype
        if differential:
            fields["mixed_heads"] = heads // 2
        value_dim = 2 * head_dim if differential else head_dim
        names = {
            "normalizer": normalizer,
            "mixing": mixing,
            "mask": mask,
            "dtype": str(dtype).removeprefix("torch."),
        }
        yield names, CallKind(normalizer, heads, head_dim, value_dim, dtype, device, **fields)


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


def _projected(heads: int, head_dim: int) -> MemoryLayout:
    """Return how heads [B, H, N, D] lie in memory that fairseq has projected: as [N, B, H, D]."""
    return layout_of(torch.empty(2, 1, heads, head_dim).permute(1, 2, 0, 3))


def _kernel_problem(inputs: AttentionInputs) -> str:
    """Return why the fused kernels cannot serve a call, with and without dropout."""
    from mixhead_plugin.ops.triton import verify  # imports triton

    fault = ""
    if inputs.query.is_cuda:  # the interpreter has no time for both
        fault = verify.trial_fault(inputs)
    return fault or verify.trial_fault(inputs._replace(dropout_p=0.1))


def speed(device: torch.device, seconds: float = 0.5) -> dict[str, float]:
    """Return milliseconds of a forward and backward pass.

    The attention has the SPEED_SHAPE, and is causal, without dropout.

    Args:
        device: where it runs
        seconds: how long each variant is measured, at least
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    batch, heads, length, head_dim = SPEED_SHAPE
    query, key, value, d_out = (
        torch.randn(SPEED_SHAPE, device=device, dtype=dtype) for _ in range(4)
    )
    matrix = torch.eye(heads, device=device, dtype=dtype)
    matrices = {
        0: None,
        2: matrix,
        4: matrix.expand(batch, length, heads, heads).contiguous(),
    }

    def torchs(call: AttentionInputs) -> Tensor:
        return F.scaled_dot_product_attention(call.query, call.key, call.value, is_causal=True)

    def formula(call: AttentionInputs) -> Tensor:
        return formula_weights(call) @ call.value

    def auto(call: AttentionInputs) -> Tensor:
        return api.attend(call, "auto")

    runs = {"torch's attention": (torchs, 0), "formula, mixing position-wise": (formula, 4)}
    for name, dim in DIMS_OF_MIXING.items():
        runs[f"auto, mixing {name}"] = (auto, dim)
    unmixed = AttentionInputs(query=query, key=key, value=value, causal=True, scale=head_dim**-0.5)
    times = {}
    for name, (attend, dim) in runs.items():
        inputs = unmixed._replace(mixing=matrices[dim])
        given = {"results": results, "attend": attend, "inputs": inputs, "d_out": d_out}
        timer = Timer(
            "results(attend, inputs, d_out)", globals=given, num_threads=torch.get_num_threads()
        )
        times[name] = 1000 * timer.blocked_autorange(min_run_time=seconds).median
    return times


def check(device: torch.device, heads: int, head_dim: int) -> dict[str, Any]:
    """Return the whole report; a row of `variants` whose `fault` is not empty is wrong."""
    rows: list[dict[str, Any]] = []
    todo = list(kinds_to_try(device, heads, head_dim))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small calls wait for more threads longer than these save
    try:
        for names, kind in todo:
            if len(rows) % 20 == 0:
                progress = f"{len(rows)} of {len(todo)} variants"
                print(f"mixhead check: {progress}", file=sys.stderr, flush=True)
            rows.append({**names, **judge(kind)._asdict()})
    finally:  # also after Ctrl-C, for a program that goes on
        torch.set_num_threads(threads)
    return {
        "machine": machine(device),
        "variants": rows,
        "not_tried": NOT_TRIED,
        "milliseconds": speed(device),
    }


def as_text(report: dict[str, Any]) -> str:
    """Return the report of `check` as it is printed."""
    rows = report["variants"]
    sections = (
        _lines_of_machine(report["machine"]),
        _lines_of_variants(rows),
        _lines_of_speed(report["milliseconds"]),
        _lines_of_refusals(rows),
        [f"Not tried: {'; '.join(report['not_tried'])}", _verdict(rows)],
    )
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _lines_of_machine(facts: dict[str, str]) -> list[str]:
    return [f"{name:16}{value}" for name, value in facts.items()]


def _lines_of_variants(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table of variants, with what its columns mean."""
    lines = [
        "auto takes: what impl 'auto' stands for; 'fused' is torch's own attention",
        "error: the largest of output and gradients against float64, as a share of what is allowed",
        _line_of_variant("normalizer", "mixing", "mask", "dtype", "auto takes", "error"),
    ]
    for row in rows:
        error = "-" if row["error"] is None else f"{row['error']:.2f}"
        line = _line_of_variant(
            row["normalizer"], row["mixing"], row["mask"], row["dtype"], row["auto"], error
        )
        if row["skipped"]:
            line += f"  skipped: {row['skipped']}"
        if row["fault"]:
            line += f"  WRONG: {row['fault']}"
        lines.append(line)
    return lines


def _line_of_variant(
    normalizer: str, mixing: str, mask: str, dtype: str, auto: str, error: str
) -> str:
    """Return a line of the table of variants; the columns of all lines have the same widths."""
    return f"{normalizer:14}{mixing:32}{mask:18}{dtype:10}{auto:11}{error:>6}"


def _lines_of_speed(times: dict[str, float]) -> list[str]:
    batch, heads, length, head_dim = SPEED_SHAPE
    shape = f"B {batch}, {heads} heads of {head_dim}, {length} positions, causal"
    lines = [f"milliseconds, forward and backward ({shape})"]
    for name, milliseconds in times.items():
        lines.append(f"{name:32}{milliseconds:8.2f}")
    return lines


def _lines_of_refusals(rows: list[dict[str, Any]]) -> list[str]:
    """Return why the kernels are not used, each reason once; nothing if they always are."""
    reasons = sorted({row["kernels"] for row in rows} - {""})
    if not reasons:
        return []
    lines = ["The kernels of impl 'triton' are not used where:"]
    for reason in reasons:
        lines.append(f"- {reason}")
    return lines


def _verdict(rows: list[dict[str, Any]]) -> str:
    wrong = sum(bool(row["fault"]) for row in rows)
    skipped = sum(bool(row["skipped"]) for row in rows)
    verdict = f"{wrong} of {len(rows)} variants are wrong"
    if skipped:
        verdict += f", {skipped} were skipped"
    return verdict


def main(device: str | None, heads: int, head_dim: int, as_json: bool) -> int:
    """Print the report; return the exit status: 1 if a result is wrong."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
        if chosen.type == "cuda":
            # The device of a tensor has a number, which "cuda" lacks; and making one shows early
            # that the device works.
            torch.cuda.set_device(torch.empty(1, device=chosen).device)
        elif chosen.type != "cpu":
            raise RuntimeError("must be cpu, cuda or cuda:1")
    except (RuntimeError, AssertionError) as error:
        sys.exit(f"mixhead check: --device {device}: {str(error).splitlines()[0]}")
    for flag, value, most in (
        ("--heads", heads, MOST_HEADS),
        ("--head-dim", head_dim, MOST_HEAD_DIM),
    ):
        if value < 1:
            sys.exit(f"mixhead check: {flag} {value}: must be at least 1")
        if value > most:
            sys.exit(
                f"mixhead check: {flag} {value}: must be at most {most}, because each trial holds "
                "all weights"
            )
    report = check(chosen, heads, head_dim)
    print(json.dumps(report, indent=1, allow_nan=False) if as_json else as_text(report))
    return int(any(row["fault"] for row in report["variants"]))
