"""Prepare the One Billion Word benchmark (Chelba et al. 2013) for fairseq.

It is made in words and in 32,768 subwords.

After an interruption the next run continues with the shard that was unfinished. A process holds one
block of a shard in memory, or the vocabulary.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from common.archives import Archive, check_counts, obtain, unpack
from common.errors import reason_of
from common.files import remove, written_whole
from common.messages import fail, note
from common.prepare import (
    SETTINGS,
    data_folder,
    ending_at_once,
    mark_unchecked,
    parser,
    read_settings,
    refuse_other_settings,
    refuse_unchecked,
    start,
    write_settings,
)
from lm1b.shards import (
    Coding,
    Encoder,
    Symbols,
    add_counts,
    binarise_shards,
    blocks,
    count_shards,
    join,
    lines_of,
    piece_encoder,
    word_encoder,
)

ARCHIVE = Archive(
    "1-billion-word-language-modeling-benchmark-r13output.tar.gz",
    tuple(
        f"{scheme}://www.statmt.org/lm-benchmark/1-billion-word-language-modeling-benchmark-r13output.tar.gz"
        for scheme in ("https", "http")
    ),
    # tensorflow/datasets, url_checksums/lm1b.txt
    "01ba60381110baf7f189dfd2b8374de371e8c9a340835793f190bdae9e90a34e",
)
TRAINING = re.compile(r"(?:.*/)?training-monolingual\.tokenized\.shuffled/news\.en-\d{5}-of-\d{5}")
HELD_OUT = re.compile(
    r"(?:.*/)?heldout-monolingual\.tokenized\.shuffled/news\.en\.heldout-\d{5}-of-\d{5}"
)

# The benchmark's README has 159,658 words for held-out shard 0, 446 of them unknown, and 165,560
# for shard 1; an end of line counts as a word. tensorflow/lingvo has their 6,075 and 6,206
# sentences, as test and validation set. Many papers have the numbers of the training set; the
# README's 829,250,940 include both ends of each sentence.
PUBLISHED = {
    "training set": {"shards": 99, "lines": 30_301_028, "tokens": 768_648_884, "types": 2_425_337},
    "held-out set": {"shards": 50, "lines": 306_688},
    "valid": {"lines": 6_206, "tokens": 165_560 - 6_206},
    "test": {"lines": 6_075, "tokens": 159_658 - 6_075},
}
VOCABULARY = 793_471  # published; the unknown word and both ends of a sentence are among them
UNKNOWN_IN_TEST = 446
LEAST_COUNT = 3
SUBWORDS = 1 << 15
SAMPLE = 1_000_000


class Text(NamedTuple):
    """The files of the corpus, in order."""

    training: list[Path]
    held_out: list[Path]

    @property
    def sets(self) -> dict[str, list[Path]]:
        """Return the files of each of fairseq's sets; `heldout` includes `valid` and `test`."""
        return {
            "train": self.training,
            "valid": self.held_out[1:2],
            "test": self.held_out[:1],
            "heldout": self.held_out,
        }


def unpacked(data: Path) -> Text:
    """Return the text; unpack the archive if that was not done."""
    folder = data / "text"
    if not folder.is_dir():
        archive = obtain(ARCHIVE, data)
        for made in ("counts", "word.parts", "subword.parts"):  # perhaps from another text
            remove(data / made)
        with written_whole(folder) as unfinished:
            unpack(archive, unfinished, is_shard)

    training = []
    held_out = []
    for path in sorted(folder.rglob("news.en*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_file():
            continue
        if TRAINING.fullmatch(name):
            training.append(path)
        if HELD_OUT.fullmatch(name):
            held_out.append(path)
    if not training or len(held_out) < 2:
        fail(
            f"{folder}: has {len(training)} training and {len(held_out)} held-out shards, must "
            "have at least 1 and 2; remove it to unpack the archive again"
        )
    return Text(training, held_out)


def is_shard(name: str) -> bool:
    """Tell whether a file of the archive belongs to the corpus."""
    return bool(TRAINING.fullmatch(name) or HELD_OUT.fullmatch(name))


def counted(
    text: Text, data: Path, workers: int, expected: Mapping[str, Mapping[str, int]]
) -> Counter[bytes]:
    """Return how often each word of the training set occurs.

    The program ends unless all counts are as `expected`.

    Args:
        text: the files
        data: the folder DATA, which keeps the counts of each shard
        workers: processes at a time
        expected: numbers of shards, lines and tokens, by the name of the set; {} for any
    """
    held_out = {path: _lines_and_tokens(path) for path in text.held_out}
    for name, files in text.sets.items():
        if name == "train":
            continue
        counts = {
            "shards": len(files),
            "lines": sum(held_out[path]["lines"] for path in files),
            "tokens": sum(held_out[path]["tokens"] for path in files),
        }
        title = "held-out set" if name == "heldout" else name
        _check_or_remove_text(data, title, counts, expected)

    # The number of files comes first, because counting takes minutes.
    counts = {"shards": len(text.training)}
    _check_or_remove_text(data, "training set", counts, expected)
    of_words, words = add_counts(count_shards(text.training, data / "counts", workers))
    _check_or_remove_text(data, "training set", {**counts, **of_words}, expected)
    return words


def _check_or_remove_text(
    data: Path, name: str, found: Mapping[str, int], expected: Mapping[str, Mapping[str, int]]
) -> None:
    """Print the counts of a set. If they are wrong, remove the text and end the program.

    The next run then unpacks the archive again.

    Args:
        data: the folder DATA
        name: the name of the set, a key of `expected`
        found: the counts
        expected: the right counts, by set; a set or a count that it lacks is not checked
    """
    numbers = [f"{number:,} {what}" for what, number in found.items()]
    note(f"{name}: {', '.join(numbers)}")
    wanted = {what: number for what, number in expected.get(name, {}).items() if what in found}
    if any(found[what] != number for what, number in wanted.items()):
        remove(data / "text")
        remove(data / "counts")
    check_counts(f"{ARCHIVE.file}, {name}", found, wanted)


def _lines_and_tokens(path: Path) -> dict[str, int]:
    counts = {"lines": 0, "tokens": 0}
    for block in blocks(path):
        counts["lines"] += len(lines_of(block))
        counts["tokens"] += len(block.split())
    return counts


# ---- words -------------------------------------------------------------------------------------


def prepare_words(
    data: Path, text: Text, words: Counter[bytes], workers: int, checked: bool
) -> None:
    """Make DATA/word.

    The dictionary has the words that occur at least three times, the most frequent first.
    """
    from fairseq.data import Dictionary

    parts = data / "word.parts"
    dictionary = Dictionary()
    # cannot be words of the dictionary
    reserved = {dictionary[i].encode() for i in range(dictionary.nspecial)}
    try:
        for word, number in words.items():
            if number >= LEAST_COUNT and word not in reserved:
                dictionary.add_symbol(word.decode("utf-8"), number)
    except UnicodeDecodeError as error:
        fail(f"{data / 'text'}: the training set is not UTF-8, {word!r} ({error.reason})")
    size = len(dictionary)
    dictionary.finalize()  # sorted; filled up to a multiple of 8
    parts.mkdir(exist_ok=True)
    with written_whole(parts / "dict.txt") as file:
        dictionary.save(str(file))
    note(f"{size - dictionary.nspecial:,} words occur at least {LEAST_COUNT} times")
    if checked:
        note(f"published: {VOCABULARY - 3:,}, and 3 symbols")
    totals = _binarise(
        data / "word",
        text,
        workers,
        checked,
        dictionary,
        make=word_encoder,
        source=parts / "dict.txt",
        kept=["dict.txt"],
    )
    test = totals["test"]
    note(f"test: {test['unknown']:,} of {test['tokens']:,} tokens are unknown words")
    if checked:
        note(f"published: {UNKNOWN_IN_TEST:,}")


# ---- subwords ----------------------------------------------------------------------------------


def prepare_subwords(
    data: Path, text: Text, workers: int, size: int, sample: int, checked: bool
) -> None:
    """Make DATA/subword by sentencepiece's byte-pair encoding, learned on a sample.

    No word is unknown.
    """
    from fairseq.data import Dictionary
    from sentencepiece import SentencePieceProcessor

    parts = data / "subword.parts"
    model = parts / "sentencepiece.model"
    settings = {"--subwords": size, "--sample": sample}
    is_of_these_flags = (parts / SETTINGS).exists() and read_settings(parts) == settings
    if not is_of_these_flags:
        remove(parts)  # of another run, or of an older version, which recorded no flags
        number = sum(1 for _ in _sample(text.training, sample))
        note(f"sentencepiece learns {size:,} subwords from {number:,} sentences")
        learnt = _learn(text.training, sample, size)
        with written_whole(parts) as unfinished:
            unfinished.mkdir()
            (unfinished / model.name).write_bytes(learnt)
            write_settings(unfinished, settings, any_counts=False)
    pieces = SentencePieceProcessor(model_file=str(model))
    dictionary = Dictionary()
    for i in range(len(pieces)):
        if not pieces.is_control(i) and not pieces.is_unknown(i):
            dictionary.add_symbol(pieces.id_to_piece(i))
    with written_whole(parts / "dict.txt") as file:
        dictionary.save(str(file))
    _binarise(
        data / "subword",
        text,
        workers,
        checked,
        dictionary,
        make=piece_encoder,
        source=model,
        kept=["dict.txt", model.name, SETTINGS],
    )


def _learn(shards: Sequence[Path], sample: int, size: int) -> bytes:
    from sentencepiece import SentencePieceTrainer

    model = BytesIO()
    try:
        with ending_at_once():
            SentencePieceTrainer.train(
                sentence_iterator=_sample(shards, sample),
                model_writer=model,
                model_type="bpe",
                vocab_size=size,
                pad_id=3,  # so that no piece looks like one of fairseq's own symbols
                byte_fallback=True,  # for characters that the sample lacks
                character_coverage=0.9999,
                # the likelihood must be that of the original text
                normalization_rule_name="identity",
                # fixed: with another number the sums differ by rounding, and so may the pieces
                num_threads=4,
                minloglevel=1,
            )
    except RuntimeError as error:
        fail(
            f"--subwords {size}: sentencepiece cannot learn as many from this text "
            f"({reason_of(error)})"
        )
    return model.getvalue()


def _sample(shards: Sequence[Path], number: int) -> Iterator[str]:
    """Yield the first sentences of every shard. The corpus is shuffled.

    Each shard gives as many, so in all there are `number` or a few more: 18 if 10 are asked for and
    there are 9 shards. Shards that are too short give what they have.
    """
    each = -(-number // len(shards))  # rounded up
    for shard in shards:
        with shard.open("rb") as file:
            for line in islice(file, each):
                try:
                    yield line.decode("utf-8").strip()
                except UnicodeDecodeError as error:
                    fail(f"{shard}: is not UTF-8 ({error.reason})")


# ---- both --------------------------------------------------------------------------------------


def _binarise(
    folder: Path,
    text: Text,
    workers: int,
    checked: bool,
    dictionary: Any,
    make: Callable[[Path, Symbols], Encoder],
    source: Path,
    kept: Sequence[str],
) -> dict[str, dict[str, int]]:
    """Make a folder of binary sets, and remove that of their parts; return the counts of each set.

    Beside the sets it has statistics.json for evaluate.sh, which counts words as the benchmark
    does: an end of line is one.

    Args:
        folder: DATA/word or DATA/subword
        text: the files
        workers: processes at a time
        checked: whether the counts of the text were checked
        dictionary: fairseq's, of the words or pieces
        make: `word_encoder` or `piece_encoder`
        source: the file that `make` reads; each shard gets a folder beside it
        kept: files beside `source` that the folder gets, too
    """
    from fairseq.data.indexed_dataset import best_fitting_int_dtype

    parts = source.parent
    symbols = Symbols(dictionary.nspecial, dictionary.unk(), dictionary.eos())
    dtype = best_fitting_int_dtype(len(dictionary))
    coding = Coding(make, source, symbols, dtype)
    shards = [*text.held_out, *text.training]
    binarise_shards(f"{folder.name}s to numbers", shards, parts, workers, coding)
    totals = {}
    with written_whole(folder) as unfinished:
        unfinished.mkdir()
        for name, files in text.sets.items():
            totals[name] = join([parts / file.name for file in files], unfinished / name, dtype)
            if name != "train":
                totals[name]["words"] = sum(sum(_lines_and_tokens(file).values()) for file in files)
        for name in kept:
            (unfinished / name).write_bytes((parts / name).read_bytes())
        (unfinished / "statistics.json").write_text(json.dumps(totals, indent=2) + "\n")
        if not checked:
            mark_unchecked(unfinished)
    remove(parts)
    return totals


def _refuse_another_size(dictionary: Path, size: int) -> None:
    if dictionary.exists():
        lines = len(dictionary.read_text(encoding="utf-8").split("\n")) - 1
        present = lines + 4  # the symbols that fairseq adds
        if present != size:
            fail(
                f"--subwords {size}: {dictionary.parent} has {present}; remove it, or choose "
                "another folder as DATA"
            )


def _refuse_another_sample(folder: Path, sample: int) -> None:
    """End the program if DATA/subword was learnt on a sample of another size.

    An older version did not record it, and its folder is taken as it is.
    """
    if (folder / SETTINGS).exists():
        refuse_other_settings(folder, read_settings(folder), {"--sample": sample})


def main(
    arguments: Sequence[str] | None = None, expected: Mapping[str, Mapping[str, int]] = PUBLISHED
) -> int:
    flags = parser(__doc__.splitlines()[0])
    flags.add_argument(
        "--form", choices=("word", "subword", "both"), default="both", help="what to prepare"
    )
    flags.add_argument(
        "--subwords",
        type=int,
        default=SUBWORDS,
        metavar="N",
        help="size of the subword dictionary (%(default)s)",
    )
    flags.add_argument(
        "--sample",
        type=int,
        default=SAMPLE,
        metavar="N",
        help="sentences to learn subwords from, at least (%(default)s)",
    )
    options = flags.parse_args(arguments)
    for name in ("subwords", "sample", "workers"):
        if getattr(options, name) < 1:
            fail(f"--{name} {getattr(options, name)}: must be at least 1")
    wanted = ["word", "subword"] if options.form == "both" else [options.form]
    with data_folder() as data:
        refuse_unchecked([data / form for form in wanted], options.any_counts)
        if "subword" in wanted:
            _refuse_another_size(data / "subword" / "dict.txt", options.subwords)
            _refuse_another_sample(data / "subword", options.sample)
        wanted = [form for form in wanted if not (data / form).is_dir()]
        if wanted:
            try:
                text = unpacked(data)
                words = counted(text, data, options.workers, {} if options.any_counts else expected)
                if "word" in wanted:
                    prepare_words(data, text, words, options.workers, not options.any_counts)
                del words  # half a gigabyte
                if "subword" in wanted:
                    subwords = (options.subwords, options.sample)
                    prepare_subwords(data, text, options.workers, *subwords, not options.any_counts)
            except OSError as error:  # such as a full disk
                fail(f"{error.filename or data}: {error.strerror or error}")
        note(f"{data}: complete")
    return 0


if __name__ == "__main__":
    start(main)
