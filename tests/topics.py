"""Write documents in a toy language, each about one topic."""

import random

from fairseq import options
from fairseq_cli import preprocess

TOPICS = {t: [f"{t}{i}" for i in range(6)] for t in ("farm", "ship", "town", "star")}


def sentence(topic, rng):
    return f"the {rng.choice(TOPICS[topic])} and the {rng.choice(TOPICS[topic])} see the {rng.choice(TOPICS[topic])}"


def binarise(texts, out, *flags):
    """Run fairseq-preprocess in this process."""
    prefixes = [part for split, path in texts.items() for part in (f"--{split}pref", str(path))]
    arguments = ["--only-source", *prefixes, "--destdir", str(out), *flags]
    preprocess.main(options.get_preprocessing_parser().parse_args(arguments))
    return out


def write_documents(folder):
    """Write a folder for --task bert_pretraining and return it."""
    rng = random.Random(0)
    for split, number in (("train", 48), ("valid", 12), ("test", 4)):
        texts = ["\n".join(sentence(t, rng) for _ in range(6)) + "\n" for t in [*TOPICS] * (number // 4)]
        (folder / split).write_text("\n".join(texts))
    return binarise({split: folder / split for split in ("train", "valid", "test")}, folder / "bin")
