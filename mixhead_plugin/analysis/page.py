"""Write one HTML file that shows source heads, M and mixed heads of a model on some sentences.

The file needs no network. It holds the weights in 8 bits and M in float32, compressed. This module needs torch alone.
"""

import base64
import html
import json
import string
import zlib
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from mixhead_plugin.ops.reference import mix_heads

PARTS = ("html", "css", "js")


class Attention(NamedTuple):
    """Hold the heads of one attention on one sentence."""

    site: str  # encoder-self, decoder-self or cross
    layer: int
    source: Tensor  # P [H, Nq, Nk], before mixing
    mixing: Optional[Tensor] = None  # M [H, H'] or [Nq, H, H']


class Sentence(NamedTuple):
    """Hold one sentence, as the model reads it."""

    encoder: Sequence[str]  # tokens; empty if the model has no encoder
    decoder: Sequence[str]  # tokens that the decoder reads; empty if the model has none
    written: Sequence[str]  # the token that follows each of the decoder's, empty if unknown
    attentions: Sequence[Attention]


class Blob:
    """Collect arrays of bytes; each is found again by its place."""

    def __init__(self) -> None:
        self.content = bytearray()

    def floats(self, tensor: Tensor) -> dict[str, Any]:
        """Append a tensor in float32."""
        return self._append(tensor.float(), {})

    def weights(self, weights: Tensor) -> dict[str, Any]:
        """Append weights [H, Nq, Nk] in 8 bits; a weight is (code - zero) * step, and 0 stays 0.

        The error is at most half a step: 1/510 of a head's largest weight, or 1/508 of its range if some are negative.
        """
        weights = weights.double()
        low, high = weights.amin((1, 2)).clamp(max=0), weights.amax((1, 2)).clamp(min=0)  # [H]
        step = (high - low) / torch.where(low < 0, 254, 255)
        step = torch.where(step > 0, step, 1)
        zero = (-low / step).round()
        codes = (weights / step[:, None, None]).round() + zero[:, None, None]
        return self._append(codes.to(torch.uint8), {"step": step.tolist(), "zero": zero.tolist()})

    def _append(self, tensor: Tensor, notes: dict[str, Any]) -> dict[str, Any]:
        place = {"at": len(self.content), "shape": list(tensor.shape), **notes}
        self.content += tensor.contiguous().cpu().numpy().tobytes()
        return place

    def packed(self) -> str:
        """Return all as deflated bytes in base64."""
        return base64.b64encode(zlib.compress(bytes(self.content), 9, -zlib.MAX_WBITS)).decode()


def write_page(file: str | PathLike[str], title: str, facts: str, sentences: Sequence[Sentence]) -> None:
    """Write the page.

    Args:
        file: the HTML file
        title: the name of the model
        facts: a line on its attention, such as the head mixing and normalizer
        sentences: what to show; all of one model

    Raises:
        ValueError: a weight is not finite
    """
    blob = Blob()
    shown = [
        {
            "encoder": list(sentence.encoder),
            "decoder": list(sentence.decoder),
            "written": list(sentence.written),
            "attentions": [_attention(blob, attention) for attention in sentence.attentions],
        }
        for sentence in sentences
    ]
    data = json.dumps({"sentences": shown, "blob": blob.packed()}, ensure_ascii=False, allow_nan=False)
    template, style, script = (Path(__file__).with_name(f"page.{kind}").read_text("utf-8") for kind in PARTS)
    filled = string.Template(template).substitute(
        title=html.escape(title),
        facts=html.escape(facts),
        style=style,
        script=script,
        data=data.replace("<", "\\u003c"),  # so that no token ends the element
    )
    Path(file).write_text(filled, encoding="utf-8")


def _attention(blob: Blob, attention: Attention) -> dict[str, Any]:
    source, mixing = attention.source.detach().cpu().float(), attention.mixing
    if not source.isfinite().all() or not (mixing is None or mixing.isfinite().all()):
        raise ValueError(f"the weights of {attention.site} {attention.layer} are not finite")
    found = {"site": attention.site, "layer": attention.layer, "source": blob.weights(source)}
    if mixing is not None:
        mixing = mixing.detach().cpu().float()
        mixed = mix_heads(source[None], mixing if mixing.dim() == 2 else mixing[None])[0]  # [H', Nq, Nk]
        found |= {"mixing": blob.floats(mixing), "mixed": blob.weights(mixed)}
    return found
