"""Provide made-up documents for BERT's pre-training, each about one of four topics."""

import random

from tests.commands import preprocess

TOPICS = {t: [f"{t}{i}" for i in range(6)] for t in ("farm", "ship", "town", "star")}


def sentence(topic, rng):
    return (
        f"the {rng.choice(TOPICS[topic])} and the {rng.choice(TOPICS[topic])} see the "
        f"{rng.choice(TOPICS[topic])}"
    )


def write_data(folder):
    """Write a folder for --task bert_pretraining and return it."""
    rng = random.Random(0)
    for split, number in (("train", 48), ("valid", 12), ("test", 4)):
        texts = [
            "\n".join(sentence(t, rng) for _ in range(6)) + "\n" for t in [*TOPICS] * (number // 4)
        ]
        (folder / split).write_text("\n".join(texts))
    texts = {split: folder / split for split in ("train", "valid", "test")}
    return preprocess(texts, folder / "bin", "--only-source")
