"""Subwords, learnt on both languages together."""

import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import sentencepiece
from common.errors import reason_of
from common.files import written_whole
from common.messages import fail
from common.prepare import ending_at_once
from subword_nmt.apply_bpe import BPE
from subword_nmt.learn_bpe import learn_bpe
from tqdm import tqdm


class Subwords(NamedTuple):
    """A way to cut sentences into subwords."""

    suffix: str  # of the model's file
    learn: Callable[[Iterable[str], Path, int], None]  # sentences, the file to write, --vocabulary
    cutter: Callable[[Path], Callable[[str], str]]  # the file -> a sentence to its pieces


def learn_merges(sentences: Iterable[str], path: Path, size: int) -> None:
    with (
        written_whole(path) as unfinished,
        unfinished.open("w", encoding="utf-8", newline="\n") as file,
    ):
        learn_bpe(sentences, file, size)


def merger(path: Path) -> Callable[[str], str]:
    with path.open(encoding="utf-8", newline="\n") as file:
        return BPE(file).process_line


def learn_pieces(sentences: Iterable[str], path: Path, size: int) -> None:
    model = io.BytesIO()
    try:
        with ending_at_once():
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(sentences),
                model_writer=model,
                vocab_size=size,
                character_coverage=1.0,
                # fixed: with another number the sums differ by rounding, and so may the pieces
                num_threads=4,
                minloglevel=2,
            )
    except RuntimeError as error:
        reason = re.sub(r"^.*\] ", "", reason_of(error))
        fail(
            f"--vocabulary {size}: sentencepiece cannot learn so many pieces from this text "
            f"({reason.rstrip('. ')})"
        )
    with written_whole(path) as unfinished:
        unfinished.write_bytes(model.getvalue())


def piecer(path: Path) -> Callable[[str], str]:
    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return lambda line: " ".join(model.encode(line, out_type=str))


SUBWORDS = {
    "bpe": Subwords("codes", learn_merges, merger),
    "sentencepiece": Subwords("model", learn_pieces, piecer),
}


def in_subwords(
    text: Mapping[str, Sequence[str]], kind: str, folder: Path, vocabulary: int
) -> dict[str, list[str]]:
    """Return every text in subwords. Learn them from the texts train.* unless an earlier run did.

    Args:
        text: lines by "train.de", "train.en", "valid.de", ...
        kind: a key of SUBWORDS
        folder: the folder of the model, <kind>-<vocabulary>.<suffix>
        vocabulary: the number of merges (bpe) or pieces (sentencepiece)
    """
    subwords = SUBWORDS[kind]
    path = folder / f"{kind}-{vocabulary}.{subwords.suffix}"
    if not path.exists():
        languages = sorted(name for name in text if name.startswith("train."))
        train = list(chain.from_iterable(text[name] for name in languages))
        subwords.learn(train, path, vocabulary)

    cutter = subwords.cutter(path)
    pieces = {}
    for name, lines in text.items():
        progress = tqdm(lines, desc=f"cutting {name}", unit="line", dynamic_ncols=True)
        pieces[name] = [cutter(line) for line in progress]
    return pieces
