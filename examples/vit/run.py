#!/usr/bin/env python
"""Train timm's Vision Transformer on small digits, without mixing and with it.

    examples/vit/run.py                two trainings, about a minute on one core
    examples/vit/run.py --heads 16     heads of 4 numbers

The images are the 1,797 handwritten digits that come with scikit-learn: 8 x 8 pixels. The last line
has the accuracy on the last 500, which training never sees.
"""

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.errors import failing
from common.side_by_side import check, check_finite, check_heads, compare, parser, share_of_rate

from mixhead_plugin.nn import mix, parameter_groups

METRIC = "test accuracy, %"
LIBRARIES = ("timm", "scikit-learn")  # whose versions the numbers depend on
HELD_OUT = 500
BATCH = 64
LAYERS = 4
WIDTH = 64

fail = failing("vit")


def digits() -> tuple[Tensor, Tensor]:
    """Return images [N, 1, 8, 8], from 0 to 1, and the digit that each shows [N]."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        fail("the digits come with scikit-learn: pip install scikit-learn")
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    return images, torch.tensor(data.target)


def vision_transformer(heads: int) -> nn.Module:
    """Return timm's ViT for 16 patches of 2 x 2 pixels, with random weights."""
    try:
        import timm
    except ImportError:
        fail("the model is timm's: pip install timm")
    return timm.create_model(
        "vit_tiny_patch16_224",
        img_size=8,
        patch_size=2,
        in_chans=1,
        num_classes=10,
        embed_dim=WIDTH,
        depth=LAYERS,
        num_heads=heads,
    )


def train(mixing: str, seed: int, args: Namespace) -> float:
    """Train one model; return its accuracy on the digits that were held out."""
    images, labels = digits()
    seen = len(images) - HELD_OUT

    torch.manual_seed(seed)
    model = vision_transformer(args.heads)
    if mixing != "none":
        mix(model, mixing, example=(images[:2],))
    optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.05), lr=args.lr)

    model.train()
    draw = torch.Generator().manual_seed(seed)
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * share_of_rate(step, args.steps)
        rows = torch.randint(seen, (BATCH,), generator=draw)
        loss = F.cross_entropy(model(images[rows]), labels[rows])
        check_finite(f"the loss of step {step + 1}", loss, fail)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    model.eval()
    with torch.no_grad():
        scores = model(images[seen:])
    check_finite("a score of a digit", scores, fail)
    return 100 * float((scores.argmax(1) == labels[seen:]).float().mean())


def main(words: Sequence[str] | None = None) -> None:
    flags = parser(__doc__, steps=500, rate=3e-3)
    flags.add_argument("--heads", type=int, default=8, help="(default: %(default)s)")
    args = flags.parse_args(words)
    check(args, fail)
    if args.heads < 1 or WIDTH % args.heads:
        fail(f"--heads {args.heads}: must divide {WIDTH}, the width of the model")
    check_heads(args.mixing, args.heads, WIDTH, fail)
    compare(METRIC, train, args, fail, LIBRARIES)


if __name__ == "__main__":
    main()
