"""Text for BERT's pre-training in $DATA/binary; `examples/bert_pretraining/prepare.sh`."""

import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from bert_pretraining.documents import Text, own_text, wikitext
from common.archives import Archive, complete, fail, note, obtain, sha256
from common.prepare import (
    data_folder,
    mark_unchecked,
    parser,
    preprocess,
    refuse_unchecked,
    require_files,
    start,
)
from common.pretrained import HUGGING_FACE, check_case
from common.wikitext import unpack_text
from wikitext2.prepare import WIKITEXT2

if TYPE_CHECKING:  # torch and fairseq take seconds to import, for nothing where only flags are read
    from mixhead_plugin.data.wordpiece import WordPiece

VOCABULARY = Archive("bert-base-uncased/vocab.txt", (f"{HUGGING_FACE}/vocab.txt",))
BLOCK = 100_000  # lines in memory
FEW = 10_000  # lines, for which no processes are started
SETTINGS = "settings.json"
SUMS = "sha256"  # in them, of the files of --text and --vocab
UNKNOWN = "[UNK]"
LEFT_OUT = "of them in the text"
HOLD_OUT = 1000
MOST_UNKNOWN = 0.1  # of the pieces of a text that a vocabulary fits


# ---- pieces ----------------------------------------------------------------------------------------------------------


class Cutter:
    """From a line to its pieces, separated by spaces."""

    def __init__(self, pieces: "WordPiece", unknown: Optional[str]):
        self.pieces, self.unknown = pieces, unknown

    def __call__(self, line: str) -> str:
        parts = line.split(self.unknown) if self.unknown else [line]
        return f" {UNKNOWN} ".join(" ".join(self.pieces.tokenise(part)) for part in parts).strip()


_cut: Cutter  # of a worker


def _start_worker(cutter: Cutter) -> None:
    global _cut
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started it
    _cut = cutter


def _cut_in_worker(line: str) -> str:
    return _cut(line)


def in_pieces(text: Text, cutter: Cutter, workers: int) -> Iterator[tuple[str, str]]:
    """The split and the pieces of every line; a line of which none are left is no end of a document."""
    lines = text.lines()
    with ExitStack() as stack:
        pool = None
        while block := list(islice(lines, BLOCK)):
            if pool is None and workers > 1 and len(block) > FEW:
                pool = stack.enter_context(get_context("spawn").Pool(workers, _start_worker, (cutter,)))
            texts = [line for _, line in block]
            found = pool.map(_cut_in_worker, texts, chunksize=1000) if pool else map(cutter, texts)
            yield from ((split, pieces) for (split, line), pieces in zip(block, found) if pieces or not line)


def write_pieces(text: Text, cutter: Cutter, folder: Path, workers: int) -> dict[str, dict[str, int]]:
    """A file for each split; how many documents, sentences and pieces it has, how many of these are unknown, and how
    many of those the text itself has left out."""
    kinds = ("documents", "sentences", "pieces", "unknown", LEFT_OUT)
    found = {split: dict.fromkeys(kinds, 0) for split in text.splits}

    def counted() -> Iterator[tuple[str, str]]:
        for split, line in text.lines():
            if text.unknown:
                found[split][LEFT_OUT] += line.count(text.unknown)
            yield split, line

    begun = dict.fromkeys(text.splits, False)
    with ExitStack() as stack:
        files = {split: stack.enter_context((folder / split).open("w", encoding="utf-8")) for split in text.splits}
        for split, line in in_pieces(text._replace(lines=counted), cutter, workers):
            numbers = found[split]
            numbers["documents"] += bool(line) and not begun[split]
            numbers["sentences"] += bool(line)
            numbers["pieces"] += len(line.split())
            numbers["unknown"] += line.split().count(UNKNOWN)
            begun[split] = bool(line)
            print(line, file=files[split])
    return found


def check_documents(found: dict[str, dict[str, int]], hold_out: Optional[int]) -> None:
    """End the program unless every split has what pairs are made of."""
    for split, numbers in found.items():
        said = {what: number for what, number in numbers.items() if number or what != LEFT_OUT}
        note(f"{split}: " + ", ".join(f"{number:,} {what}" for what, number in said.items()))
    few = [split for split, numbers in found.items() if numbers["documents"] < 2]
    if few and hold_out is not None:
        total = sum(numbers["documents"] for numbers in found.values())
        fail(
            f"--hold-out {hold_out}: leaves {found[few[0]]['documents']} of {total:,} documents for {few[0]}, random "
            "segments need two; an empty line ends a document"
        )
    if few:
        fail(f"{few[0]}: has {found[few[0]]['documents']} documents, random segments need two")


def check_unknown(found: dict[str, dict[str, int]], vocabulary: str) -> None:
    """End the program if the vocabulary is of another language or case than the text."""
    for split, numbers in found.items():
        pieces, unknown = (numbers[what] - numbers[LEFT_OUT] for what in ("pieces", "unknown"))
        if unknown > MOST_UNKNOWN * pieces:
            fail(
                f"{vocabulary}: {unknown:,} of the {pieces:,} pieces of {split} are unknown, must be at most "
                f"{MOST_UNKNOWN:.0%}; take a vocabulary of this language (--vocab), or --learn-vocab"
            )


# ---- the vocabulary --------------------------------------------------------------------------------------------------


def vocabulary_of(args: Any, text: Text, data: Path) -> list[str]:
    """The pieces that --vocab or --learn-vocab ask for, or else those of bert-base-uncased."""
    if args.learn_vocab is not None:
        from bert_pretraining.vocabulary import learn

        note(f"learning a vocabulary of {args.learn_vocab:,} pieces")

        def train() -> Iterator[str]:
            for split, line in text.lines():
                if split == "train":
                    yield line.replace(text.unknown, " ") if text.unknown else line

        return learn(train, args.learn_vocab, not args.cased)
    from mixhead_plugin.data.wordpiece import SPECIAL, read_vocabulary

    path = args.vocab or obtain(VOCABULARY, data)
    try:
        words = read_vocabulary(path)
    except UnicodeDecodeError as error:
        fail(f"{path}: {error}")
    if missing := sorted(SPECIAL.keys() - set(words)):
        fail(f"{path}: has no {', '.join(missing)}; must be the vocab.txt of a BERT")
    return words


def write_vocabulary(words: Sequence[str], folder: Path, cased: bool, name: str) -> None:
    """vocab.txt, and dict.txt in its order with what fairseq does not have itself; errors say `name`."""
    from mixhead_plugin.data.wordpiece import write_dictionary
    from mixhead_plugin.errors import OptionError

    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    check_case(folder, cased)
    try:
        write_dictionary(words, folder / "dict.txt", name)
    except OptionError as error:
        fail(str(error))


# ---- the command -----------------------------------------------------------------------------------------------------


def binarise(args: Any, settings: dict[str, Any], data: Path) -> None:
    """$DATA/binary, unless it is there."""
    folder = data / "binary"
    text = own_text(args.text, args.hold_out or HOLD_OUT) if args.text else None
    files = [*(args.text or ()), *([args.vocab] if args.vocab else ())]
    sums = {str(path.resolve()): sha256(path) for path in files}
    if folder.exists():
        refuse_unchecked([folder], args.any_counts)
        require_files(folder, [SETTINGS, "dict.txt", "vocab.txt"])
        made = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        for name, value in settings.items():
            if made.get(name) != value:
                fail(f"{folder}: made with {name} {made.get(name)}, not {value}; remove it, or choose another DATA")
        for path, found in sums.items():
            if made.get(SUMS, {}).get(path) != found:
                fail(f"{path}: has changed since {folder} was made of it; remove that, or choose another DATA")
        note(f"{folder} is there already")
        return
    if text is None:
        text = wikitext(unpack_text(WIKITEXT2, data, check=not args.any_counts))
    from mixhead_plugin.data.wordpiece import WordPiece

    if args.learn_vocab is not None:
        vocabulary = f"--learn-vocab {args.learn_vocab}"
    else:
        vocabulary = str(args.vocab or VOCABULARY.file)
    with complete(folder) as unfinished:
        unfinished.mkdir()
        write_vocabulary(vocabulary_of(args, text, data), unfinished, args.cased, vocabulary)
        pieces = unfinished / "pieces"
        pieces.mkdir()
        cutter = Cutter(WordPiece.from_file(unfinished / "vocab.txt", not args.cased), text.unknown)
        found = write_pieces(text, cutter, pieces, args.workers)
        check_documents(found, args.hold_out or HOLD_OUT if args.text else None)
        check_unknown(found, vocabulary)
        prefixes = {"train": "--trainpref", "valid": "--validpref", "test": "--testpref"}
        files = [word for split in text.splits for word in (prefixes[split], str(pieces / split))]
        dictionary = pieces / "dict.txt"
        (unfinished / "dict.txt").rename(dictionary)  # fairseq-preprocess writes it again
        preprocess(unfinished, args.workers, ["--only-source", "--srcdict", str(dictionary), *files])
        for path in pieces.iterdir():
            path.unlink()
        pieces.rmdir()
        (unfinished / SETTINGS).write_text(json.dumps({**settings, SUMS: sums}, indent=2) + "\n", encoding="utf-8")
        if args.any_counts:
            mark_unchecked(unfinished)
    note(f"{folder} is ready")


def main(arguments: Optional[Sequence[str]] = None) -> None:
    flags = parser("Text for BERT's pre-training, in $DATA/binary: WikiText-2, or your own")
    flags.add_argument(
        "--text",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="text of your own: one sentence a line, an empty line after each document (default: WikiText-2)",
    )
    flags.add_argument(
        "--hold-out",
        type=int,
        metavar="N",
        help=f"of --text, one of every N documents is of the validation set (default: {HOLD_OUT})",
    )
    vocabulary = flags.add_mutually_exclusive_group()
    vocabulary.add_argument(
        "--vocab", type=Path, metavar="FILE", help="the vocab.txt of a BERT (default: bert-base-uncased's)"
    )
    vocabulary.add_argument(
        "--learn-vocab", type=int, metavar="N", help="learn N pieces from the training text, all of it in memory"
    )
    flags.add_argument("--cased", action="store_true", help="keep upper case and accents")
    args = flags.parse_args(arguments)
    if args.hold_out is not None and not args.text:
        fail(f"--hold-out {args.hold_out}: needs --text; WikiText-2 has its own validation set")
    if args.hold_out is not None and args.hold_out < 2:
        fail(f"--hold-out {args.hold_out}: must be at least 2")
    if args.learn_vocab is not None and args.learn_vocab < 1:
        fail(f"--learn-vocab {args.learn_vocab}: must be a number such as 8000")
    if args.vocab and not args.vocab.is_file():
        fail(f"--vocab {args.vocab}: {'must be a file, is a folder' if args.vocab.is_dir() else 'no such file'}")
    if args.cased and not args.vocab and args.learn_vocab is None:
        fail("--cased: needs --vocab or --learn-vocab; bert-base-uncased's pieces have lower case alone")
    settings = {
        "text": [str(path.resolve()) for path in args.text] if args.text else WIKITEXT2.name,
        "hold-out": args.hold_out or HOLD_OUT if args.text else None,
        "vocabulary": str(args.vocab.resolve()) if args.vocab else args.learn_vocab or "bert-base-uncased",
        "cased": args.cased,
    }
    with data_folder() as data:
        binarise(args, settings, data)


if __name__ == "__main__":
    start(main)
