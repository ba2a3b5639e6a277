"""Prepare text for BERT's pre-training in $DATA/binary; prepare.sh here runs this."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Optional

import numpy as np
from bert.binary import BinarySet
from bert.pretrained import HUGGING_FACE, check_case
from bert.pretraining.documents import Text, own_text, wikitext
from common.archives import Archive, obtain, sha256
from common.files import written_whole
from common.messages import fail, note
from common.prepare import data_folder, is_ready, parser, start, write_settings
from common.wikitext import unpack_text
from wikitext2.prepare import WIKITEXT2

VOCABULARY = Archive("bert-base-uncased/vocab.txt", (f"{HUGGING_FACE}/vocab.txt",))
BLOCK = 10_000  # lines that are tokenised together
HOLD_OUT = 1000
MOST_UNKNOWN = 0.1  # share of a text's pieces; with more, the vocabulary is of another language


def write_sets(text: Text, folder: Path, lowercase: bool) -> dict[str, dict[str, Any]]:
    """Write a binary set for each split; return counts of each.

    A line without pieces is left out, because an empty line would end the document.
    """
    from bert.wordpiece import wordpiece
    from fairseq.data import Dictionary

    dictionary = Dictionary.load(str(folder / "dict.txt"))
    tokeniser = wordpiece(dictionary, lowercase)
    if text.unknown:
        tokeniser.add_special_tokens([text.unknown])
    sets = {split: BinarySet(folder / split, len(dictionary)) for split in text.splits}
    counts = {
        split: Counter(documents=0, sentences=0, pieces=0, unknown=0) for split in text.splits
    }
    frequencies = {split: np.zeros(len(dictionary), dtype=np.int64) for split in text.splits}
    within = dict.fromkeys(text.splits, False)  # a document
    lines = text.lines()
    while block := list(islice(lines, BLOCK)):
        texts = [line for _, line in block]
        encodings = tokeniser.encode_batch_fast(texts, add_special_tokens=False)
        for (split, line), encoding in zip(block, encodings):
            ids = encoding.ids
            if line and not ids:
                continue
            sets[split].add([*ids, dictionary.eos()])
            np.add.at(frequencies[split], ids, 1)

            if ids:
                counts[split]["sentences"] += 1
                if not within[split]:
                    counts[split]["documents"] += 1
            within[split] = bool(ids)

            # The text's own mark for unknown words is no piece, and says nothing of the vocabulary.
            marks = line.count(text.unknown) if text.unknown else 0
            counts[split]["pieces"] += len(ids) - marks
            counts[split]["unknown"] += ids.count(dictionary.unk()) - marks

    for split, output in sets.items():
        output.close()
        numbers = [f"{number:,} {what}" for what, number in counts[split].items()]
        note(f"{split}: {', '.join(numbers)}")
    return {
        split: {**numbers, "entropy": entropy(frequencies[split])}
        for split, numbers in counts.items()
    }


def entropy(frequencies: np.ndarray) -> float:
    """Return the entropy, in bits, of pieces with these frequencies, int64 [V]."""
    shares = frequencies[frequencies > 0] / frequencies.sum()
    return float(-(shares * np.log2(shares)).sum())


def check(counts: dict[str, dict[str, Any]], hold_out: Optional[int], vocabulary: str) -> None:
    """End the program if a set has too few documents, or too many unknown pieces.

    Args:
        counts: the numbers of each set, as `write_sets` returns them
        hold_out: the value of --hold-out; None for WikiText-2, which has its own sets
        vocabulary: the name of the vocabulary in the message
    """
    for split, numbers in counts.items():
        if numbers["documents"] < 2:
            advice = ""
            if hold_out is not None:
                advice = f"; an empty line ends a document, --hold-out {hold_out} chooses"
            fail(f"{split}: has {numbers['documents']} documents, random segments need two{advice}")
        if numbers["unknown"] > MOST_UNKNOWN * numbers["pieces"]:
            fail(
                f"{vocabulary}: {numbers['unknown']:,} of the {numbers['pieces']:,} pieces of "
                f"{split} are unknown, must be at most {MOST_UNKNOWN:.0%}; take a vocabulary of "
                "this language (--vocab), or --learn-vocab"
            )


def vocabulary_of(args: Any, text: Text, data: Path) -> list[str]:
    """Return the pieces that --vocab or --learn-vocab ask for.

    By default they are those of bert-base-uncased.
    """
    if args.learn_vocab is not None:
        from bert.pretraining.vocabulary import learn

        def train() -> Iterator[str]:
            for split, line in text.lines():
                if split != "train":
                    continue
                if text.unknown:
                    line = line.replace(text.unknown, " ")
                yield line

        note(f"learning a vocabulary of {args.learn_vocab:,} pieces")
        return learn(train, args.learn_vocab, not args.cased)
    from bert.wordpiece import read_vocabulary

    return read_vocabulary(args.vocab or obtain(VOCABULARY, data))


def binarise(args: Any, data: Path) -> None:
    """Make $DATA/binary, unless it exists."""
    folder = data / "binary"
    if args.text:
        hold_out = args.hold_out or HOLD_OUT
        text = own_text(args.text, hold_out)
        text_setting = [str(path.resolve()) for path in args.text]
        files = list(args.text)
    else:
        hold_out = None
        text = None  # which is fetched below, if it is needed
        text_setting = WIKITEXT2.name
        files = []

    if args.vocab:
        vocabulary = args.vocab
        vocabulary_setting = str(args.vocab.resolve())
        files.append(args.vocab)
    elif args.learn_vocab:
        vocabulary = f"--learn-vocab {args.learn_vocab}"
        vocabulary_setting = args.learn_vocab
    else:
        vocabulary = VOCABULARY.file
        vocabulary_setting = "bert-base-uncased"

    settings = {
        "text": text_setting,
        "hold-out": hold_out,
        "vocabulary": vocabulary_setting,
        "cased": args.cased,
        "sha256": [sha256(path) for path in files],
    }
    if is_ready(folder, settings, ["dict.txt", "vocab.txt"], args.any_counts):
        return
    from bert.wordpiece import write_dictionary

    from mixhead_plugin.errors import OptionError

    if text is None:
        text = wikitext(unpack_text(WIKITEXT2, data, check=not args.any_counts))
    with written_whole(folder) as unfinished:
        unfinished.mkdir()
        try:
            words = vocabulary_of(args, text, data)
            lines = "".join(f"{word}\n" for word in words)
            (unfinished / "vocab.txt").write_text(lines, encoding="utf-8")
            write_dictionary(words, unfinished / "dict.txt", vocabulary)
        except OptionError as error:
            fail(str(error))
        check_case(unfinished, args.cased)
        counts = write_sets(text, unfinished, not args.cased)
        check(counts, hold_out, vocabulary)
        write_settings(unfinished, settings, args.any_counts, sets=counts)
    note(f"{folder} is ready")


def main(arguments: Optional[Sequence[str]] = None) -> None:
    flags = parser("Prepare text for BERT's pre-training in $DATA/binary: WikiText-2 or your own.")
    flags.add_argument(
        "--text",
        nargs="+",
        type=Path,
        metavar="FILE",
        help=(
            "text of your own: one sentence a line, an empty line after each document (default: "
            "WikiText-2)"
        ),
    )
    flags.add_argument(
        "--hold-out",
        type=int,
        metavar="N",
        help=f"one of every N documents of --text is for validation (default: {HOLD_OUT})",
    )
    vocabulary = flags.add_mutually_exclusive_group()
    vocabulary.add_argument(
        "--vocab", type=Path, metavar="FILE", help="a vocab.txt (default: bert-base-uncased's)"
    )
    vocabulary.add_argument(
        "--learn-vocab", type=int, metavar="N", help="learn N pieces from the training text"
    )
    flags.add_argument("--cased", action="store_true", help="keep upper case and accents")
    args = flags.parse_args(arguments)
    if args.hold_out is not None and not args.text:
        fail(f"--hold-out {args.hold_out}: needs --text; WikiText-2 has its own validation set")
    if args.hold_out is not None and args.hold_out < 2:
        fail(f"--hold-out {args.hold_out}: must be at least 2")
    if args.learn_vocab is not None and args.learn_vocab < 1:
        fail(f"--learn-vocab {args.learn_vocab}: must be a number such as 8000")
    if args.vocab and args.vocab.is_dir():
        fail(f"--vocab {args.vocab}: must be a file, is a folder")
    if args.vocab and not args.vocab.is_file():
        fail(f"--vocab {args.vocab}: no such file")
    if args.cased and not args.vocab and args.learn_vocab is None:
        fail(
            "--cased: needs --vocab or --learn-vocab; the pieces of bert-base-uncased are lower "
            "case"
        )
    os.environ["RAYON_NUM_THREADS"] = str(args.workers)  # of tokenizers
    with data_folder() as data:
        binarise(args, data)


if __name__ == "__main__":
    start(main)
