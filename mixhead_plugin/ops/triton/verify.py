"""Try each kind of the kernels on the device before its first use.

Small calls go forward and backward through every candidate of the tiles; `accuracy.shares`
judges their results. Compiling the kernels takes longer than the calls; triton keeps them on
disk. torch's random generators are not used.
"""

import itertools
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from mixhead_plugin.ops.accuracy import Draw, compare, enough_draws, fault_in, finite_draws
from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.sample_calls import CallKind, sample_call
from mixhead_plugin.ops.transforms import while_traced
from mixhead_plugin.ops.triton import passes, tuning
from mixhead_plugin.ops.triton.call_kinds import call_kind
from mixhead_plugin.ops.triton.calls import Call
from mixhead_plugin.ops.triton.support import UNTRIED, allows_tf32

logger = logging.getLogger(__name__)
# Numbers of queries and keys, and p of dropout. The numbers are more than those of a tile, and once
# not multiples of 16, once multiples.
SIZES = ((150, 141, 0.1), (160, 144, 0.4))
# Numbers of queries and keys, p of dropout and sentences in triton's interpreter, which takes a
# second for one such call.
INTERPRETED = ((19, 18, 0.1, 1),)
_faults: dict[CallKind, str] = {}  # of the kinds that were tried
# The kinds that a warning has named, and whether because of a trial. A kind that cannot be tried
# for now is named once, and once more if its trial finds a fault later.
_said: set[tuple[CallKind, bool]] = set()
_lock = threading.Lock()


def trial_fault(inputs: AttentionInputs) -> str:
    """Return why the kernels must not serve such a call; empty if they may.

    The first call of a kind tries it.
    """
    # As numbers, names and dtypes, which the compiler takes as constants.
    return _fault_of(*call_kind(inputs))


@while_traced
def _fault_of(*fields: Any) -> str:
    kind = CallKind(*fields)
    kind = kind._replace(tf32=kind.dtype == torch.float32 and allows_tf32())
    # Without the lock, which the trial of another kind holds for a minute or more.
    if kind in _faults:
        return _faults[kind]
    with _lock:
        if kind in _faults:  # another thread tried it in the meantime
            return _faults[kind]
        if kind.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            found = f"{UNTRIED}, while a CUDA graph is captured; run one step before"
        else:
            logger.info("impl 'triton': tries the kernels on this device for %s", kind)
            try:
                found = try_on_device(kind)
                _faults[kind] = found
            except torch.OutOfMemoryError as error:  # it may pass, so the next call tries again
                found = f"{UNTRIED}: {str(error).splitlines()[0]}"
        reason = (kind, kind in _faults)
        new = reason not in _said
        _said.add(reason)
    if found and new:
        logger.warning("impl 'triton': %s; 'auto' takes another implementation for %s", found, kind)
    return found


def try_on_device(kind: CallKind) -> str:
    """Return what the kernels of a kind do wrong on its device, or an empty string."""
    # A new thread has no inference mode, autocast, saved-tensor hooks, fake tensors or default
    # device of the caller.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_try, kind).result()


def _try(kind: CallKind) -> str:
    tuning.strip_bytes()  # a wrong MIXHEAD_STRIP_MIB is an error, and no fault of the kernels
    head_dim = max(kind.head_dim, kind.value_dim)
    on_gpu = kind.device.type == "cuda"
    with torch.cuda.device(kind.device if on_gpu else -1):
        try:
            most = tuning.most_candidates(kind.heads, head_dim, kind.dtype.itemsize)
            all_sizes = SIZES if on_gpu else INTERPRETED
            for tile_index, sizes in itertools.product(range(most), all_sizes):
                found = _fault_with(kind, sizes, tile_index)
                if found:
                    return found
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of the compiler, the driver or the device: all count
            lines = str(error).splitlines() or [""]
            return f"{type(error).__name__}: {lines[0]}"
    return ""


def _fault_with(kind: CallKind, sizes: Sequence[Any], tile_index: int) -> str:
    """Return what one candidate of each kernel does wrong; empty if nothing.

    Args:
        kind: the kind of the calls
        sizes: sizes of the calls, as further arguments of `sample_call`
        tile_index: the place of the tile in the list of each kernel
    """
    dropout_factors = torch.ones(1, device=kind.device)
    inputs, _ = sample_call(kind, *sizes)
    if inputs.dropout_p > 0:  # all draws drop the same
        not_dropped = _not_dropped(inputs, tile_index)
        share = float(not_dropped.mean())
        if not abs(share - (1 - inputs.dropout_p)) < 0.05:  # which is true of NaN
            return f"dropout keeps {share:.2f} of the weights, not {1 - inputs.dropout_p}"
        dropout_factors = not_dropped / (1 - inputs.dropout_p)

    def draw(nth: int) -> Draw:
        inputs, d_out = sample_call(kind, *sizes, nth=nth)  # type: ignore[misc]
        # Every other draw has several strips, which take other ways through the kernels that mix.
        call = Call(inputs, tile_index, poison=True, short_strips=nth % 2 == 1)
        out, statistics = passes.forward(call)
        grads = passes.backward(call, d_out, statistics, out)
        return compare(inputs, d_out, dropout_factors, {"output": out, **grads})

    draws = 1
    if kind.device.type == "cuda":
        draws = enough_draws(kind)
    return fault_in(finite_draws(draw, draws))


def _not_dropped(inputs: AttentionInputs, tile_index: int) -> Tensor:
    """Return 1 for each weight that dropout leaves, else 0: [B, H, Nq, Nk].

    The draw depends on the seed and the place alone. So a call with equal weights, and columns of
    the identity as values, returns which of these keys are left.

    Args:
        inputs: the inputs of the call
        tile_index: the place of the tile in the list of each kernel
    """
    n_keys, value_dim = inputs.value.shape[2:]
    width = max(value_dim, 1)  # of values without numbers no output could say it
    # width further columns of zeros, for the last values
    identity = torch.eye(
        n_keys, n_keys + width, dtype=inputs.value.dtype, device=inputs.value.device
    )
    equal = inputs._replace(
        query=torch.zeros_like(inputs.query),
        key=torch.zeros_like(inputs.key),
        mixing=None,
        causal=False,
        attn_mask=None,
        key_padding_mask=None,
    )
    parts = []
    for first in range(0, n_keys, width):
        columns = identity[:, first : first + width]
        value = columns.expand(*inputs.value.shape[:2], -1, -1).contiguous()
        call = Call(equal._replace(value=value), tile_index, poison=True)
        out, _ = passes.forward(call)
        parts.append(out != 0)
    return torch.cat(parts, 3)[..., :n_keys].float()
