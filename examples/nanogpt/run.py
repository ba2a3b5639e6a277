#!/usr/bin/env python
"""Train a model built like nanoGPT on letters, without mixing and with it.

    examples/nanogpt/run.py                  two trainings, about a minute and a half on one core
    examples/nanogpt/run.py --heads 32       heads of 4 numbers
    examples/nanogpt/run.py --text input.txt

The text is the English side of the demo's corpus, or your own. The last line has the loss on the
last 5 % of it, which training never sees.
"""

import gzip
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.errors import failing
from common.side_by_side import check, check_finite, check_heads, compare, parser, share_of_rate
from nanogpt.model import GPT

from mixhead_plugin.nn import mix, parameter_groups

CORPUS = Path(__file__).resolve().parents[1] / "demo" / "corpus" / "en.gz"
METRIC = "test loss, nats a letter"
LETTERS = 64  # of a row of a batch
BATCH = 32
EVALUATED = 64  # rows of a batch that is only evaluated

fail = failing("nanogpt")


def read(file: Path) -> Tensor:
    """Return the letters of a text as numbers [N]."""
    try:
        text = file.read_bytes()
        if file == CORPUS:
            text = gzip.decompress(text)
        letters = text.decode("utf-8")
    except OSError as error:
        fail(f"--text {file}: cannot be read ({error.strerror})")
    except UnicodeDecodeError as error:
        fail(f"--text {file}: must be UTF-8, and is not at byte {error.start:,}")
    if len(letters) < 100 * LETTERS:
        fail(f"--text {file}: has {len(letters):,} letters; must have {100 * LETTERS:,} at least")
    numbers = {letter: number for number, letter in enumerate(sorted(set(letters)))}
    return torch.tensor([numbers[letter] for letter in letters])


def train(mixing: str, seed: int, args: Namespace) -> float:
    """Train one model; return its loss on the end of the text."""
    text = read(args.text)
    held_out = len(text) // 20
    seen, test = text[:-held_out], text[-held_out:]

    torch.manual_seed(seed)
    model = GPT(int(text.max()) + 1, LETTERS, args.layers, args.heads, args.width)
    if mixing != "none":
        mix(model, mixing, example=(seen[None, :LETTERS],))
    optimizer = torch.optim.AdamW(
        parameter_groups(model, weight_decay=0.1), lr=args.lr, betas=(0.9, 0.99)
    )

    draw = torch.Generator().manual_seed(seed)
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * share_of_rate(step, args.steps)
        starts = torch.randint(len(seen) - LETTERS, (BATCH, 1), generator=draw)
        loss = model.loss(seen[starts + torch.arange(LETTERS + 1)])
        check_finite(f"the loss of step {step + 1}", loss, fail)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return evaluate(model, test)


@torch.no_grad()
def evaluate(model: GPT, test: Tensor) -> float:
    """Return the mean loss over the rows of a text."""
    rows = test.unfold(0, LETTERS + 1, LETTERS)  # [rows, LETTERS + 1]
    losses = [float(model.loss(batch)) * len(batch) for batch in rows.split(EVALUATED)]
    return sum(losses) / len(rows)


def main(words: Sequence[str] | None = None) -> None:
    flags = parser(__doc__, steps=150, rate=3e-3)
    flags.add_argument("--layers", type=int, default=4, help="(default: %(default)s)")
    flags.add_argument("--heads", type=int, default=8, help="(default: %(default)s)")
    flags.add_argument("--width", type=int, default=128, help="(default: %(default)s)")
    text = "a text of your own (default: the demo's corpus)"
    flags.add_argument("--text", type=Path, default=CORPUS, metavar="FILE", help=text)
    args = flags.parse_args(words)
    check(args, fail)
    for name in ("layers", "heads", "width"):
        if getattr(args, name) < 1:
            fail(f"--{name} {getattr(args, name)}: must be at least 1")
    if args.width % args.heads:
        fail(f"--heads {args.heads}: must divide --width {args.width}")
    check_heads(args.mixing, args.heads, args.width, fail)
    read(args.text)  # a text that cannot be used ends the program here
    compare(METRIC, train, args, fail, inputs=("text",))


if __name__ == "__main__":
    main()
