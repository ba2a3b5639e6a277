"""The kernels as operators of torch: what they are called with, and what autograd and the compiler must know."""

from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch import Tensor

from mixhead_plugin.ops.triton import flash, heads_mixed, tuning
from mixhead_plugin.ops.triton.rows import LOG2E, spans_kernel
from mixhead_plugin.ops.triton.tuning import Tile, ceil_div, names_of, power_of_2

Launch = Tuple[int, Dict[str, Any]]  # programs, and what they take by the names of a kernel's arguments


class _Call:
    """One call of the attention: what its kernels take, by the names of their arguments."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mixing: Optional[Tensor],
        attn_mask: Optional[Tensor],
        key_padding_mask: Optional[Tensor],
        seed: Optional[Tensor],
        normalizer: str,
        causal: bool,
        dropout_p: float,
        scale: float,
    ):
        self.batch, self.heads, self.n_queries, head_dim = query.shape
        self.n_keys, value_dim = value.shape[2:]
        self.query, self.mixing, self.device = query, mixing, query.device
        self.padded_dim, self.padded_value_dim = (max(16, power_of_2(d)) for d in (head_dim, value_dim))
        mask = None if attn_mask is None else attn_mask[(None,) * (4 - attn_mask.dim())]
        if mask is not None:
            mask = _unexpanded(mask)
            mask = mask.float() if mask.dtype == torch.float64 else mask
        # Not where the head size is 0: such scores are 0 and their weights are not.
        self.nothing = 0 in (self.batch, self.heads, self.n_queries, self.n_keys, value_dim)
        self.arguments = dict(
            q=query,
            k=key,
            v=value,
            m=mixing,
            mask=mask,
            padding=None if key_padding_mask is None else key_padding_mask.view(torch.uint8),
            spans=None if self.nothing else _spans(mask),
            seed=seed,
            threshold=min(round(dropout_p * 2**32), 2**32 - 1),
            gain=1 / (1 - dropout_p) if dropout_p < 1 else 0.0,
            scale=scale * LOG2E.value,
            d_scale=scale,
            n_queries=self.n_queries,
            n_keys=self.n_keys,
            H=self.heads,
            D=head_dim,
            DP=self.padded_dim,
            DV=value_dim,
            DVP=self.padded_value_dim,
            NORMALIZER=normalizer,
            CAUSAL=causal,
            DROPOUT=dropout_p > 0,
            PRECISION="tf32" if query.dtype == torch.float32 and _allows_tf32() else "ieee",
            PER_QUERY=mixing is not None and mixing.dim() == 4,
            MASK_HEADS=mask is not None and mask.shape[1] > 1,
            **_strides("q", "bhnd", query),
            **_strides("k", "bhnd", key),
            **_strides("v", "bhnd", value),
            **_strides("m", "bhmn", mask, (self.batch, self.heads, self.n_queries, self.n_keys)),
            **_strides("p", "bn", key_padding_mask),
            **_mixing_strides("x", mixing),
        )
        masks = (key_padding_mask is not None, causal, dropout_p > 0, normalizer, self.arguments["PRECISION"])
        masks += (None if mask is None else (mask.dtype, self.arguments["MASK_HEADS"]),)
        length = power_of_2(max(self.n_queries, self.n_keys))
        mixes = None if mixing is None else (mixing.dim(), mixing.dtype)
        self.key = (query.dtype, self.heads, head_dim, value_dim, length, mixes, *masks)

    def run(self, module: Any, name: str, launch_of: Callable[[Tile], Launch]) -> Dict[str, Any]:
        """Start a kernel with the tile that suits it; `launch_of` counts the programs of one sentence."""
        kernel = getattr(module, f"{name}_kernel")
        head_dim, itemsize = max(self.padded_dim, self.padded_value_dim), self.query.element_size()
        if module is flash:
            tiles = tuning.apart(name, head_dim, itemsize)
        else:
            tiles = tuning.mixed(name, self.heads, head_dim, itemsize)

        def launch(tile: Tile) -> Dict[str, Any]:
            programs, more = launch_of(tile)
            self.start(kernel, programs, more, tile)
            return more

        return tuning.run((module.__name__, name, self.key), tiles, launch, self.device)

    def start(self, kernel: Any, programs: int, more: Dict[str, Any], tile: Tile) -> None:
        """Of the arguments and of `more` what the kernel takes; `programs` for each sentence"""
        names, _ = names_of(kernel.fn)
        given = {name: value for name, value in self.arguments.items() if name in names}
        given.update((name, value) for name, value in more.items() if name in names)
        start(kernel, self.batch * programs, given, tile)

    def forward(self) -> Tuple[Tensor, Tensor]:
        """O [B, H, Nq, Dv], and of each row its largest exponent and what normalizes it, [2, B, H, Nq]"""
        out = empty_like(self.query, self.arguments["DV"])
        rows = self.query.new_empty(2, *self.query.shape[:3], dtype=torch.float32)
        if self.nothing:
            return out.zero_(), rows.zero_()
        outputs = dict(out=out, peak=rows[0], factor=rows[1], **_strides("o", "bhnd", out))
        if self.mixing is None:
            self._one_head("forward", outputs)
            return out, rows
        self._one_head("forward", {**outputs, "v": None, "out": None})
        self._mixed("forward", outputs)
        return out, rows

    def backward(self, d_out: Tensor, rows: Tensor, out: Optional[Tensor]) -> List[Tensor]:
        """Gradients of query, key, value, then of mixing if there is one"""
        inputs = [self.arguments[name] for name in "qkvm" if self.arguments[name] is not None]
        grads = [torch.empty_like(tensor) for tensor in inputs]
        if self.nothing:
            return [grad.zero_() for grad in grads]
        d_query, d_key, d_value = grads[:3]
        given = dict(d_out=d_out, peak=rows[0], factor=rows[1], **_strides("g", "bhnd", d_out))
        queries = dict(d_q=d_query, **_strides("r", "bhnd", d_query))
        keys = dict(d_k=d_key, d_v=d_value, **_strides("r", "bhnd", d_key), **_strides("w", "bhnd", d_value))
        mask = self.arguments["mask"]
        keys["spans"] = _spans(None if mask is None else mask.transpose(2, 3))
        if self.mixing is None:
            given["delta"] = self._delta(out, d_out)
            self._one_head("query_grad", {**given, **queries})
            self._one_head("key_grad", {**given, **keys})
            return grads
        given["delta"] = self._mixing_grad(given, grads[3])
        self._mixed("query_grad", {**given, **queries})
        self._mixed("key_grad", {**given, **keys})
        return grads

    def _tiles(self, name: str, tile: Tile) -> int:
        return ceil_div(self.n_keys, tile.BN) if name == "key_grad" else ceil_div(self.n_queries, tile.BM)

    def _one_head(self, name: str, arguments: Dict[str, Any]) -> None:
        def launch_of(tile: Tile) -> Launch:
            tiles = self._tiles(name, tile)
            return self.heads * tiles, {**arguments, "n_tiles": tiles}

        self.run(flash, name, launch_of)

    def _mixed(self, name: str, arguments: Dict[str, Any]) -> None:
        def launch_of(tile: Tile) -> Launch:
            tiles, groups = self._tiles(name, tile), ceil_div(self.heads, tile.HG)
            all_heads = groups == 1 and tile.HC == tile.HG
            # A tile that is used both ways round is not fetched ahead by the compiler: it takes two that each are.
            twice = tile.stages > 1 and self.heads <= tile.HC and (all_heads or name == "query_grad")
            counts = dict(n_tiles=tiles, n_groups=groups)
            return tiles * groups, {**arguments, **counts, "ALL_HEADS": all_heads, "TWICE": twice}

        self.run(heads_mixed, name, launch_of)

    def _delta(self, out: Tensor, d_out: Tensor) -> Tensor:
        delta = torch.empty(self.batch, self.heads, self.n_queries, dtype=torch.float32, device=self.device)
        tile = Tile(64, 16, 4, 1)
        tiles = self._tiles("delta", tile)
        given = dict(out=out, d_out=d_out, delta=delta, n_tiles=tiles)
        given.update(**_strides("o", "bhnd", out), **_strides("g", "bhnd", d_out))
        self.start(flash.delta_kernel, self.heads * tiles, given, tile)
        return delta

    def _mixing_grad(self, given: Dict[str, Any], d_mixing: Tensor) -> Tensor:
        """delta [B, H, Nq]; dM into `d_mixing`, of mixing's shape"""

        def launch_of(tile: Tile) -> Launch:
            tiles = self._tiles("mixing_grad", tile)
            groups, chunks = ceil_div(self.heads, tile.HG), ceil_div(self.heads, tile.HC)
            rows = (self.batch, self.heads, self.n_queries)
            delta = torch.empty(groups, *rows, dtype=torch.float32, device=self.device)
            d_m = d_mixing
            if d_mixing.dim() == 2:
                shape = (self.batch, tiles, self.heads, self.heads)
                d_m = torch.empty(shape, dtype=torch.float32, device=self.device)
            counts = dict(n_tiles=tiles, n_groups=groups, n_chunks=chunks)
            more = dict(delta=delta, s_db=delta.stride(0), d_m=d_m, **_mixing_strides("y", d_m))
            return tiles * chunks * groups, {**given, **counts, **more}

        found = self.run(heads_mixed, "mixing_grad", launch_of)
        if d_mixing.dim() == 2:
            d_mixing.copy_(found["d_m"].sum((0, 1)))
        delta = found["delta"]
        return delta[0] if len(delta) == 1 else delta.sum(0)


def _allows_tf32() -> bool:
    matmul = torch.backends.cuda.matmul
    # Newer torch has another switch for it, and refuses to tell of the old one when that was used.
    return matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32


def start(kernel: Any, programs: int, arguments: Dict[str, Any], tile: Tile) -> None:
    """Every kernel starts here."""
    kernel[(programs,)](**arguments, **tile.options(kernel))


def _strides(
    letter: str, dims: str, tensor: Optional[Tensor], shape: Optional[Tuple[int, ...]] = None
) -> Dict[str, int]:
    """s_qb, s_qh, ... of a tensor; 0 where it is broadcast to `shape`"""
    strides = [0] * len(dims) if tensor is None else tensor.stride() if shape is None else tensor.expand(shape).stride()
    return {f"s_{letter}{dim}": stride for dim, stride in zip(dims, strides)}


def _mixing_strides(letter: str, mixing: Optional[Tensor]) -> Dict[str, int]:
    if mixing is not None and mixing.dim() == 2:
        return {f"s_{letter}b": 0, f"s_{letter}n": 0, **_strides(letter, "ji", mixing)}
    return _strides(letter, "bnji", mixing)


def _unexpanded(mask: Tensor) -> Tensor:
    """One of what an expanded mask repeats: it is read once, and tells that sentences or heads share it."""
    return mask[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in mask.stride())]


def _spans(mask: Optional[Tensor]) -> Optional[Tensor]:
    """Of each query, from which key to which the mask hides none and from which to which it is not 0, int32 [Nq, 4]

    Of a transposed mask the queries of each key. fairseq passes causality as a mask of floats; with this it skips the
    tiles that causality skips and is read only at the diagonal, and nothing waits for the device. None for masks that
    differ by sentence or head, where looking through all may cost more than it saves, and for broadcast ones.
    """
    if mask is None or mask.shape[:2] != (1, 1) or 1 in mask.shape[2:]:
        return None
    rows, n = mask.shape[2:]
    spans = torch.empty(rows, 4, dtype=torch.int32, device=mask.device)
    tile = Tile(16, 256, 4, 1)
    strides = dict(s_m=mask.stride(2), s_n=mask.stride(3))
    start(spans_kernel, ceil_div(rows, tile.BM), dict(mask=mask, spans=spans, rows=rows, n=n, **strides), tile)
    return spans


def empty_like(query: Tensor, size: int) -> Tensor:
    """[B, H, Nq, size] in memory in the order of `query`, so that reshaping it needs no copy"""
    order = sorted(range(4), key=query.stride, reverse=True)
    shape = [*query.shape[:3], size]
    return query.new_empty([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(4)])


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixing: Optional[Tensor],
    attn_mask: Optional[Tensor],
    key_padding_mask: Optional[Tensor],
    seed: Optional[Tensor],
    normalizer: str,
    causal: bool,
    dropout_p: float,
    scale: float,
) -> Tuple[Tensor, Tensor]:
    with torch.cuda.device_of(query):
        return _Call(
            query, key, value, mixing, attn_mask, key_padding_mask, seed, normalizer, causal, dropout_p, scale
        ).forward()


def _forward_fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tuple[Tensor, Tensor]:
    return empty_like(query, value.shape[3]), query.new_empty(2, *query.shape[:3], dtype=torch.float32)


def _backward(
    d_output: Tensor,
    rows: Tensor,
    output: Optional[Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixing: Optional[Tensor],
    attn_mask: Optional[Tensor],
    key_padding_mask: Optional[Tensor],
    seed: Optional[Tensor],
    normalizer: str,
    causal: bool,
    dropout_p: float,
    scale: float,
) -> List[Tensor]:
    with torch.cuda.device_of(query):
        return _Call(
            query, key, value, mixing, attn_mask, key_padding_mask, seed, normalizer, causal, dropout_p, scale
        ).backward(d_output, rows, output)


def _backward_fake(
    d_output: Tensor,
    rows: Tensor,
    output: Optional[Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixing: Optional[Tensor],
    *rest: Any,
) -> List[Tensor]:
    return [torch.empty_like(tensor) for tensor in (query, key, value, mixing) if tensor is not None]


def _save(ctx: Any, inputs: Tuple[Any, ...], output: Tuple[Tensor, Tensor]) -> None:
    out, rows = output
    mixes = inputs[3] is not None  # then delta comes from dM, not from the output
    ctx.save_for_backward(rows, None if mixes else out, *inputs[:7])
    ctx.options = inputs[7:]
    ctx.mark_non_differentiable(rows)
    ctx.set_materialize_grads(False)  # or zeros would be made for them


def _differentiate(ctx: Any, d_output: Tensor, d_rows: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
    if d_output is None:
        return (None,) * 11
    saved = ctx.saved_tensors  # once: activation checkpointing computes them when asked, and hands them out once
    grads = torch.ops.mixhead_plugin.triton_backward(d_output, *saved, *ctx.options)
    return (*grads[:3], grads[3] if len(grads) > 3 else None, *[None] * 7)


def _no_second_derivative(ctx: Any, *d_grads: Any) -> None:
    raise NotImplementedError("impl 'triton' has no second derivative; impl 'reference' has")


def _register(name: str, function: Callable[..., Any], fake: Callable[..., Any]) -> None:
    # As in blockwise.py: torch.library.custom_op would load the compiler at its first call.
    torch.library.define(name, torch.library.infer_schema(function, mutates_args=()))
    torch.library.impl(name, "default", function)
    torch.library.register_fake(name, fake)


_register("mixhead_plugin::triton", _forward, _forward_fake)
_register("mixhead_plugin::triton_backward", _backward, _backward_fake)
torch.library.register_autograd("mixhead_plugin::triton", _differentiate, setup_context=_save)
torch.library.register_autograd("mixhead_plugin::triton_backward", _no_second_derivative)
