"""Prepare IWSLT14 German-English.

By default lower-cased Moses tokens and 10,000 joint merges, as published; flags give variants.
"""

import re
import shutil
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from common.archives import Archive, obtain, unpack
from common.files import remove, written_whole
from common.messages import fail, note
from common.parallel_text import (
    LANGUAGES,
    SOURCE,
    SPLITS,
    TARGET,
    compare_counts,
    groups,
    joined,
    pairs_of,
    read_lines,
    read_text,
    write_lines,
)
from common.prepare import (
    UNCHECKED,
    data_folder,
    is_ready,
    mark_unchecked,
    parser,
    refuse_unchecked,
    start,
)
from common.subwords import SUBWORDS, in_subwords
from common.translation_data import TEXT, binarise, checksum, refuse_unknown_text
from iwslt14_de_en.moses import Tokenizer, is_clean, lowercase
from tqdm import tqdm

ARCHIVE = Archive("de-en.tgz", ("https://dl.fbaipublicfiles.com/fairseq/data/iwslt14/de-en.tgz",))
TRAIN = "train.tags.de-en"
TEST = (
    "IWSLT14.TED.dev2010",
    "IWSLT14.TEDX.dev2012",
    "IWSLT14.TED.tst2010",
    "IWSLT14.TED.tst2011",
    "IWSLT14.TED.tst2012",
)
MERGES = 10_000
HELD_OUT = 23  # every 23rd pair of the cleaned training text is for validation

# Sentences in the archive's files, and pairs after the published preparation.
LINES = {
    TRAIN: 174_443,
    "IWSLT14.TED.dev2010": 887,
    "IWSLT14.TEDX.dev2012": 1_165,
    "IWSLT14.TED.tst2010": 1_565,
    "IWSLT14.TED.tst2011": 1_433,
    "IWSLT14.TED.tst2012": 1_700,
}
PAIRS = {"train": 160_239, "valid": 7_283, "test": 6_750}
# fairseq's counts: subwords with ends of sentences, and types of both dictionaries.
PUBLISHED = {
    "train.de": 4_035_591,
    "train.en": 3_949_114,
    "valid.de": 182_592,
    "valid.en": 178_622,
    "test.de": 161_838,
    "test.en": 156_928,
    "dict.de": 8_848,
    "dict.en": 6_632,
}


class Pair(NamedTuple):
    """Two sentences, German and English."""

    raw: tuple[str, str]  # as in the archive
    tokens: tuple[str, str]  # Moses tokens in lower case


KINDS = Pair._fields


def file_names(name: str) -> tuple[str, str]:
    """Return the two files of TRAIN or of a member of TEST, German and English."""
    if name == TRAIN:
        return f"{name}.de", f"{name}.en"
    return f"{name}.de-en.de.xml", f"{name}.de-en.en.xml"


def training_text(lines: Sequence[str]) -> list[str]:
    """Return the sentences, titles and descriptions of a train.tags file."""
    kept = (line for line in lines if not re.search("<url>|<talkid>|<keywords>", line))
    return [re.sub("</?(title|description)>", "", line).strip() for line in kept]


def segments(lines: Sequence[str]) -> list[str]:
    """Return the sentences of an .xml file."""
    kept = (line for line in lines if "<seg id" in line)
    return [re.sub(r'<seg id="[0-9]*">|</seg>', "", line).strip() for line in kept]


class Reader:
    """Reads the pairs of an unpacked archive."""

    def __init__(self, folder: Path, lines: Mapping[str, int], any_counts: bool):
        self.folder = folder
        self.lines = lines
        self.any_counts = any_counts
        self.tokenizers = [Tokenizer(language) for language in LANGUAGES]

    def pairs(self, name: str) -> list[Pair]:
        """Return the tokenised pairs of TRAIN or of a member of TEST."""
        extract = training_text if name == TRAIN else segments
        german, english = file_names(name)
        source = extract(read_lines(self.folder / german))
        target = extract(read_lines(self.folder / english))
        raw = pairs_of(source, target, name)
        compare_counts(name, {"lines": len(raw)}, {"lines": self.lines[name]}, self.any_counts)
        progress = tqdm(raw, desc=f"tokenising {name}", unit="pair", dynamic_ncols=True)
        return [Pair(pair, self._tokens(pair, name)) for pair in progress]

    def _tokens(self, pair: tuple[str, str], name: str) -> tuple[str, str]:
        tokens = []
        for tokenizer, sentence in zip(self.tokenizers, pair):
            if name != TRAIN:  # the published preparation does this to the test set alone
                sentence = sentence.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
            tokens.append(lowercase(tokenizer(sentence)))
        return tuple(tokens)


def prepare_text(
    archive: Path,
    folder: Path,
    lines: Mapping[str, int] = LINES,
    pairs: Mapping[str, int] = PAIRS,
    any_counts: bool = False,
) -> None:
    """Write the archive's pairs to `folder`/{train,valid,test}.{raw,tokens}.{de,en}.

    Args:
        archive: de-en.tgz, or one of the same layout
        folder: appears when it is complete
        lines: expected number of lines by file
        pairs: expected number of pairs by split
        any_counts: print the numbers instead of checking them
    """
    wanted = set()
    for name in (TRAIN, *TEST):
        wanted.update(f"de-en/{file}" for file in file_names(name))
    with written_whole(folder) as unfinished:
        unpack(archive, unfinished, lambda name: name.removeprefix("./") in wanted)
        for file in sorted(wanted):
            if not (unfinished / file).exists():
                fail(f"{archive}: {file} is missing")
        reader = Reader(unfinished / "de-en", lines, any_counts)
        clean = [pair for pair in reader.pairs(TRAIN) if is_clean(*pair.tokens)]
        split = {
            "train": [pair for number, pair in enumerate(clean, 1) if number % HELD_OUT != 0],
            "valid": clean[HELD_OUT - 1 :: HELD_OUT],
            "test": list(chain.from_iterable(map(reader.pairs, TEST))),
        }
        for name, members in split.items():
            compare_counts(name, {"pairs": len(members)}, {"pairs": pairs[name]}, any_counts)
            for kind in KINDS:
                for side, language in enumerate(LANGUAGES):
                    lines_of_side = [getattr(pair, kind)[side] for pair in members]
                    write_lines(unfinished / f"{name}.{kind}.{language}", lines_of_side)
        shutil.rmtree(unfinished / "de-en")
        if any_counts:
            mark_unchecked(unfinished)


def prepare_data(
    text: Path,
    data: Path,
    subwords: str,
    vocabulary: int,
    concatenate: int,
    workers: int,
    join: bool = False,
) -> Path:
    """Write the text in subwords for fairseq, and return its folder.

    Args:
        text: the folder of `prepare_text`
        data: the folder in which `folder_name(subwords, concatenate, join)` is made
        subwords: a key of SUBWORDS
        vocabulary: the number of merges or pieces
        concatenate: about how many source subwords sentences are joined to; 0 for single sentences
        workers: processes of fairseq-preprocess
        join: whether both languages have one dictionary
    """
    folder = data / folder_name(subwords, concatenate, join)
    settings = {"--vocabulary": vocabulary}
    sources = {TEXT: checksum(text)}
    # main refuses unchecked folders
    if is_ready(folder, settings, (), any_counts=True, sources=sources):
        return folder
    is_bpe = subwords == "bpe"
    kinds = KINDS if is_bpe else ("raw",)  # of the references
    kind = "tokens" if is_bpe else "raw"  # of what is cut into subwords
    lines = read_text(text, f"{{split}}.{kind}.{{language}}")
    pieces = in_subwords(lines, subwords, data / "subwords", vocabulary)
    references = {}
    for split in ("valid", "test"):
        for kind in kinds:
            references[f"{split}.{kind}"] = read_lines(text / f"{split}.{kind}.{TARGET}")
    if concatenate:
        for split in SPLITS:
            lengths = [len(line.split()) for line in pieces[f"{split}.{SOURCE}"]]
            parts = groups(lengths, concatenate)
            pieces = concatenated(pieces, split, parts)
            references = concatenated(references, split, parts)
    # the published recipe keeps a dictionary for each language
    flags = ["--joined-dictionary"] if join or subwords == "sentencepiece" else []
    checked = not (text / UNCHECKED).exists()
    binarise(folder, pieces, references, settings | sources, workers, flags, checked)
    if (subwords, concatenate, vocabulary, join) == ("bpe", 0, MERGES, False):
        compare_with_published(folder, pieces)
    return folder


def concatenated(
    texts: Mapping[str, list[str]], split: str, parts: Sequence[range]
) -> dict[str, list[str]]:
    """Return the texts with the sentences of a split joined.

    Args:
        texts: lines by a name that begins with the split, such as train.de
        split: a member of SPLITS
        parts: the numbers of the sentences that become one line, as `groups` returns them
    """
    result = {}
    for name, lines in texts.items():
        is_of_split = name.startswith(f"{split}.")
        result[name] = joined(lines, parts) if is_of_split else lines
    return result


def folder_name(subwords: str, concatenate: int, join: bool) -> str:
    """Return the name of a folder in DATA, such as bpe, bpe-joined or sentencepiece-240.

    VARIANT of train.sh and evaluate.sh chooses one.
    """
    name = subwords
    if join and subwords == "bpe":
        name += "-joined"
    if concatenate:
        name += f"-{concatenate}"
    return name


def compare_with_published(folder: Path, pieces: Mapping[str, Sequence[str]]) -> None:
    """Print where the counts of subwords differ from the published ones. This is no error."""
    counts = {}
    for name, lines in pieces.items():
        counts[name] = sum(len(line.split()) + 1 for line in lines)
    for language in LANGUAGES:  # the file lacks four of fairseq's symbols
        counts[f"dict.{language}"] = len(read_lines(folder / f"dict.{language}.txt")) + 4
    different = [
        f"{name} {counts[name]:,} ({number:,})"
        for name, number in PUBLISHED.items()
        if counts[name] != number
    ]
    if different:
        note(f"subwords and types that differ from the published ones: {', '.join(different)}")
    else:
        note("subwords and types are the published ones")


def main(arguments: Any = None) -> None:
    flags = parser(__doc__)
    flags.add_argument(
        "--subwords", choices=SUBWORDS, default="bpe", help="(default: %(default)s, as published)"
    )
    flags.add_argument(
        "--vocabulary",
        type=int,
        default=MERGES,
        metavar="N",
        help="merges or pieces (default: %(default)s)",
    )
    flags.add_argument(
        "--concatenate",
        type=int,
        default=0,
        metavar="N",
        help="join sentences to about N source subwords, such as 240",
    )
    help_of_join = (
        "one dictionary for both languages, which train.sh --share-all-embeddings needs "
        "(sentencepiece always has it)"
    )
    flags.add_argument("--joined-dictionary", action="store_true", help=help_of_join)
    args = flags.parse_args(arguments)
    if args.vocabulary < 1:
        fail(f"--vocabulary {args.vocabulary}: must be at least 1")
    if args.concatenate < 0:
        fail(
            f"--concatenate {args.concatenate}: must be at least 1, or 0 for sentences as they are"
        )
    with data_folder() as data:
        text = data / "text"
        join = args.joined_dictionary
        folder = data / folder_name(args.subwords, args.concatenate, join)
        refuse_unchecked([text, folder], args.any_counts)
        if not text.is_dir():
            refuse_unknown_text(data)
            archive = obtain(ARCHIVE, data)
            remove(data / "subwords")  # perhaps from another text
            prepare_text(archive, text, any_counts=args.any_counts)
        prepare_data(
            text, data, args.subwords, args.vocabulary, args.concatenate, args.workers, join
        )


if __name__ == "__main__":
    start(main)
