"""The part `gpt`: a training step of nanoGPT's GPT-2, as it is and mixed by `nn.mix`."""

import functools
import time
from collections.abc import Iterator

from benchmarks import nanogpt
from benchmarks.gpu.settings import Settings, synchronize
from benchmarks.measure import Case, measure
from benchmarks.steps import Row

NAMES = ("torch's attention, not mixed", "Mixhead A", "Mixhead B")
BATCH = 16  # texts of an update


def sizes_of(settings: Settings) -> nanogpt.Sizes:
    if settings.quick:
        return nanogpt.Sizes(2, vocabulary=65, positions=16, layers=1, heads=2, width=32)
    return nanogpt.SIZES["GPT-2"]._replace(batch=BATCH)


def first_update(settings: Settings, step: str) -> Iterator[Row]:
    """Train a contender of one layer for one update, which compiles what it needs."""
    sizes = sizes_of(settings)._replace(layers=1)
    tokens = nanogpt.tokens_of(sizes).to(settings.device)
    nanogpt.stepping(step, sizes, settings.device)(tokens)
    yield {"name": step}


def gpt(settings: Settings, step: str) -> Iterator[Row]:
    """Yield times and memory of an update, with AdamW, without dropout, in bfloat16 on a GPU."""
    sizes = sizes_of(settings)
    tokens = nanogpt.tokens_of(sizes).to(settings.device)
    contenders = {}
    for name in NAMES:
        update = functools.partial(nanogpt.stepping(name, sizes, settings.device), tokens)
        began = time.monotonic()
        update()
        synchronize(settings)
        yield {"name": name, "first_update_seconds": time.monotonic() - began}
        contenders[name] = update
    shown = f"{sizes.layers} layers, {sizes.heads} heads, {sizes.batch} x {sizes.positions} tokens"
    case = Case("gpt", shown, contenders)
    for row in measure(case, 2 if settings.quick else 10, settings.device):
        yield {key: row[key] for key in row if key != "case"}
