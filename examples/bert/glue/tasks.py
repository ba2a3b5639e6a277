"""The nine tasks of GLUE (Wang et al., 2019), and the diagnostic set that goes with MNLI."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, Optional

from common.archives import Archive

URL = "https://dl.fbaipublicfiles.com"
HIGHEST = 5.0  # of a similarity of STS-B, the lowest being 0


class Task(NamedTuple):
    """What its files are like, and how it is measured."""

    archives: tuple[Archive, ...]  # a single .zip, or the files themselves
    files: Mapping[str, str]  # fairseq's name of a set -> name in the archive
    counts: Mapping[str, range]  # of the examples of a set, as published
    texts: tuple[str, ...]  # one column or two
    label: str  # its column, which the test sets lack
    labels: tuple[str, ...]  # as the files and the evaluation server write them; none: a similarity
    metrics: tuple[str, ...]  # the last is the papers'
    predictions: Mapping[str, str]  # set without labels -> file for the evaluation server
    header: Optional[tuple[str, ...]] = None  # of the labelled files, where they have no line for it

    @property
    def classes(self) -> int:
        """What --num-classes must be."""
        return len(self.labels) or 1


def archive(name: str, sha256: str) -> tuple[Archive, ...]:
    return (Archive(name, (f"{URL}/glue/data/{name}",), sha256),)


def files(folder: str) -> dict[str, str]:
    return {"train": f"{folder}/train.tsv", "valid": f"{folder}/dev.tsv", "test": f"{folder}/test.tsv"}


def counts(train: int, valid: int, test: int) -> dict[str, range]:
    return {name: exactly(number) for name, number in (("train", train), ("valid", valid), ("test", test))}


def exactly(number: int) -> range:
    return range(number, number + 1)


PAIR = ("sentence1", "sentence2")
BINARY = ("0", "1")
ENTAILMENT = ("entailment", "not_entailment")

# The sums are those of tensorflow/datasets and huggingface/datasets.
TASKS: Mapping[str, Task] = MappingProxyType(
    {
        "CoLA": Task(
            archive("CoLA.zip", "f212fcd832b8f7b435fb991f101abf89f96b933ab400603bf198960dfc32cbff"),
            files("CoLA"),
            counts(8_551, 1_043, 1_063),
            ("sentence",),
            "label",
            BINARY,
            ("accuracy", "Matthews correlation"),
            {"test": "CoLA.tsv"},
            header=("source", "label", "note", "sentence"),
        ),
        "SST-2": Task(
            archive("SST-2.zip", "d67e16fb55739c1b32cdce9877596db1c127dc322d93c082281f64057c16deaa"),
            files("SST-2"),
            counts(67_349, 872, 1_821),
            ("sentence",),
            "label",
            BINARY,
            ("accuracy",),
            {"test": "SST-2.tsv"},
        ),
        "MRPC": Task(
            (
                Archive(
                    "msr_paraphrase_train.txt",
                    (f"{URL}/senteval/senteval_data/msr_paraphrase_train.txt",),
                    "60a9b09084528f0673eedee2b69cb941920f0b8cd0eeccefc464a98768457f89",
                ),
                Archive(
                    "msr_paraphrase_test.txt",
                    (f"{URL}/senteval/senteval_data/msr_paraphrase_test.txt",),
                    "a04e271090879aaba6423d65b94950c089298587d9c084bf9cd7439bd785f784",
                ),
                *archive("mrpc_dev_ids.tsv", "971d7767d81b997fd9060ade0ec23c4fc31cbb226a55d1bd4a1bac474eb81dc7"),
            ),
            # the training file has the validation set in it, which mrpc_dev_ids.tsv tells apart
            {
                "train": "msr_paraphrase_train.txt",
                "valid": "msr_paraphrase_train.txt",
                "test": "msr_paraphrase_test.txt",
            },
            counts(3_668, 408, 1_725),
            ("#1 String", "#2 String"),
            "Quality",
            BINARY,
            ("accuracy", "F1"),
            {"test": "MRPC.tsv"},
        ),
        "STS-B": Task(
            archive("STS-B.zip", "e60a6393de5a8b5b9bac5020a1554b54e3691f9d600b775bd131e613ac179c85"),
            files("STS-B"),
            counts(5_749, 1_500, 1_379),
            PAIR,
            "score",
            (),
            ("Pearson correlation", "Spearman correlation"),
            {"test": "STS-B.tsv"},
        ),
        "QQP": Task(
            archive("QQP-clean.zip", "40e7c862c04eb26ee04b67fd900e76c45c6ba8e6d8fab4f8f1f8072a1a3fbae0"),
            files("QQP"),
            # Quora published 404,290 pairs; how many of them a reader finds in train.tsv depends on what it makes of
            # the broken rows, of which huggingface/datasets finds 14
            {**counts(0, 40_430, 390_965), "train": range(363_846, 404_290 - 40_430 + 1)},
            ("question1", "question2"),
            "is_duplicate",
            BINARY,
            ("accuracy", "F1"),
            {"test": "QQP.tsv"},
        ),
        "MNLI": Task(
            (
                *archive("MNLI.zip", "e7c1d896d26ed6caf700110645df426cc2d8ebf02a5ab743d5a5c68ac1c83633"),
                *archive("AX.tsv", "0e13510b1bb14436ff7e2ee82338f0efb0133ecf2e73507a697dc210db3f05fd"),
            ),
            {
                "train": "MNLI/train.tsv",
                "valid": "MNLI/dev_matched.tsv",
                "valid1": "MNLI/dev_mismatched.tsv",
                "test": "MNLI/test_matched.tsv",
                "test1": "MNLI/test_mismatched.tsv",
                "diagnostic": "AX.tsv",
            },
            {
                **counts(392_702, 9_815, 9_796),
                "valid1": exactly(9_832),
                "test1": exactly(9_847),
                "diagnostic": exactly(1_104),
            },
            PAIR,
            "gold_label",
            ("contradiction", "entailment", "neutral"),
            ("accuracy",),
            {"test": "MNLI-m.tsv", "test1": "MNLI-mm.tsv", "diagnostic": "AX.tsv"},
        ),
        "QNLI": Task(
            archive("QNLIv2.zip", "e634e78627a29adaecd4f955359b22bf5e70f2cbd93b493f2d624138a0c0e5f5"),
            files("QNLI"),
            counts(104_743, 5_463, 5_463),
            ("question", "sentence"),
            "label",
            ENTAILMENT,
            ("accuracy",),
            {"test": "QNLI.tsv"},
        ),
        "RTE": Task(
            archive("RTE.zip", "6bf86de103ecd335f3441bd43574d23fef87ecc695977a63b82d5efb206556ee"),
            files("RTE"),
            counts(2_490, 277, 3_000),
            PAIR,
            "label",
            ENTAILMENT,
            ("accuracy",),
            {"test": "RTE.tsv"},
        ),
        "WNLI": Task(
            archive("WNLI.zip", "ae0e8e4d16f4d46d4a0a566ec7ecceccfd3fbfaa4a7a4b4e02848c0f2561ac46"),
            files("WNLI"),
            counts(635, 71, 146),
            PAIR,
            "label",
            BINARY,
            ("accuracy",),
            {"test": "WNLI.tsv"},
        ),
    }
)
