"""Write one HTML file that shows source heads, M and mixed heads of a model on some sentences.

The file needs no network. It holds the weights in 8 bits and M in float32, compressed. This module
needs torch alone.
"""

import base64
import ctypes
import html
import json
import string
import zlib
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mixhead_plugin.heads.attention import HeadsError, mixed_weights
from mixhead_plugin.heads.sites import Where


class ShownHeads(NamedTuple):
    """The heads of one attention on one sentence."""

    site: str  # encoder-self, decoder-self or cross
    layer: int
    source: Tensor  # P [H, Nq, Nk], before mixing
    mixing: Tensor | None = None  # M [H, H'] or [Nq, H, H']
    # A decoder's own attention may have the encoder's tokens as its first keys: fairseq's
    # --cross-self-attention.
    reads_both: bool = False


class Sentence(NamedTuple):
    """One sentence, as the model reads it.

    Attributes:
        encoder_reads: tokens; empty if the model has no encoder
        decoder_reads: tokens; empty if the model has no decoder
        decoder_predicts: the token that follows each of `decoder_reads`; fewer where one is unknown
        attentions: the heads of the model on it
    """

    encoder_reads: Sequence[str]
    decoder_reads: Sequence[str]
    decoder_predicts: Sequence[str]
    attentions: Sequence[ShownHeads]


def shown(
    where: Where, source: Tensor, mixing: Tensor | None, reads_both: bool = False
) -> ShownHeads:
    """Return the heads of an attention on the first sentence of a batch.

    Args:
        where: the position of the attention
        source: P [B, H, Nq, Nk]
        mixing: M [H, H'] or [B, Nq, H, H']; None where heads do not mix
        reads_both: whether its keys are the encoder's tokens and then the decoder's
    """
    if mixing is not None and mixing.dim() == 4:
        mixing = mixing[0]
    return ShownHeads(where.site, where.layer, source[0], mixing, reads_both)


def pack_floats(blob: bytearray, tensor: Tensor) -> dict[str, Any]:
    """Append a tensor of float32 to the blob, and return its place."""
    place = {"at": len(blob), "shape": list(tensor.shape)}
    blob += _bytes(tensor)
    return place


def pack_weights(blob: bytearray, weights: Tensor) -> dict[str, Any]:
    """Append weights [H, Nq, Nk] of float32 to the blob in 8 bits, and return their place.

    A weight is (code - zero) * step of its row, and 0 stays 0.

    The error is at most half a step: 1/510 of a row's largest weight, or 1/508 of its range if some
    are negative.
    """
    low = weights.amin(2).clamp(max=0)  # [H, Nq]
    high = weights.amax(2).clamp(min=0)
    # With a negative weight, the zero is rounded to a code, too, so one code fewer is left.
    step = (high - low) / torch.where(low < 0, 254, 255)
    step = torch.where(step > 0, step, 1)
    zero = (-low / step).round()
    codes = (weights / step[..., None]).round() + zero[..., None]
    place: dict[str, Any] = {"step": pack_floats(blob, step), "zero": pack_floats(blob, zero)}
    place["at"] = len(blob)
    place["shape"] = list(weights.shape)
    blob += _bytes(codes.to(torch.uint8))
    return place


def _bytes(tensor: Tensor) -> bytes:
    """Return the numbers of a tensor on the CPU, without numpy, which torch does not bring."""
    tensor = tensor.contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def write_page(
    file: str | PathLike[str], title: str, facts: str, sentences: Sequence[Sentence]
) -> None:
    """Write the page.

    Args:
        file: the page; folders that are missing are made
        title: names the model
        facts: a line on its attention
        sentences: what the page shows, at least one

    Raises:
        HeadsError: no sentence, a weight that is not finite, or weights of another number of tokens
            than the sentence has
    """
    if not sentences:
        raise HeadsError("a page needs at least one sentence")
    blob = bytearray()
    contents = []
    for sentence in sentences:
        for heads in sentence.attentions:
            _refuse_other_tokens(sentence, heads)
        packed_heads = [_packed(blob, heads) for heads in sentence.attentions]
        contents.append(sentence._asdict() | {"attentions": packed_heads})
    packed = base64.b64encode(zlib.compress(bytes(blob), 9, -zlib.MAX_WBITS)).decode()
    data = json.dumps({"sentences": contents, "blob": packed}, ensure_ascii=False, allow_nan=False)
    data = data.replace("<", "\\u003c")  # so that no token ends the element
    texts = {
        "title": html.escape(title),
        "facts": html.escape(facts),
        "style": _beside("page.css"),
        "script": _beside("page.js"),
        "data": data,
    }
    page = string.Template(_beside("page.html")).substitute(texts)
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_bytes(page.encode())


def _beside(name: str) -> str:
    """Return the text of a file beside this one."""
    return Path(__file__).with_name(name).read_text("utf-8")


def _packed(blob: bytearray, heads: ShownHeads) -> dict[str, Any]:
    source = heads.source.detach().cpu().float()
    _refuse_infinite(heads, source)
    packed: dict[str, Any] = {"site": heads.site, "layer": heads.layer}
    packed["reads_both"] = heads.reads_both
    packed["source"] = pack_weights(blob, source)
    if heads.mixing is not None:
        mixing = heads.mixing.detach().cpu().float()
        _refuse_infinite(heads, mixing)
        batched = mixing if mixing.dim() == 2 else mixing[None]
        mixed = mixed_weights(source[None], batched)[0]  # [H', Nq, Nk]
        packed["mixing"] = pack_floats(blob, mixing)
        packed["mixed"] = pack_weights(blob, mixed)
    return packed


def _refuse_infinite(heads: ShownHeads, tensor: Tensor) -> None:
    if not tensor.isfinite().all():
        raise HeadsError(
            f"the weights of {heads.site} {heads.layer} are not finite; are the parameters damaged?"
        )


def _refuse_other_tokens(sentence: Sentence, heads: ShownHeads) -> None:
    """Refuse weights that do not fit the tokens.

    The page names each row and column by a token, and cuts the list of weights into rows by their
    number.
    """
    queries = sentence.encoder_reads if heads.site == "encoder-self" else sentence.decoder_reads
    n_keys = len(sentence.decoder_reads if heads.site == "decoder-self" else sentence.encoder_reads)
    if heads.reads_both:
        n_keys = len(sentence.encoder_reads) + len(sentence.decoder_reads)
    expected = [len(queries), n_keys]
    found = list(heads.source.shape[1:])
    if found != expected:
        raise HeadsError(
            f"the weights of {heads.site} {heads.layer} are of {found} queries and keys; must be "
            f"{expected}, the numbers of the tokens"
        )
