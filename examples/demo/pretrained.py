"""Train the small checkpoint of examples/demo/pretrained.

`python -m mixhead_plugin.analysis view` can show it. It translates German to English by words, and
was trained on those pairs of `corpus/` that have common words alone.
"""

import gzip
import re
import shutil
from collections import Counter
from itertools import chain
from pathlib import Path

import torch
from demo import CORPUS, LANGUAGES, PLUGIN, ROOT, SPLITS, preprocess, run

import mixhead_plugin

HERE = "examples/demo/pretrained"  # what a command at the top of the checkout finds
WORDS = 1000  # of each language
HELD_OUT = 200
FLAGS = """
    --arch mixhead_transformer --source-lang de --target-lang en --share-decoder-input-output-embed
    --encoder-layers 2 --decoder-layers 2
    --encoder-embed-dim 48 --encoder-ffn-embed-dim 96
    --encoder-attention-heads 8 --decoder-attention-heads 8
    --dropout 0.1 --criterion label_smoothed_cross_entropy --label-smoothing 0.1
    --optimizer adam --adam-betas (0.9,0.98) --clip-norm 1.0
    --lr 5e-3 --lr-scheduler inverse_sqrt --warmup-updates 300
    --max-tokens 2000 --max-update 1040 --required-batch-size-multiple 1
    --seed 1 --num-workers 0
    --no-epoch-checkpoints --log-interval 100 --validate-interval 5
""".split()


def words(language: str) -> list[list[str]]:
    """Return the sentences of the corpus in words; the first has its usual capital letter."""
    with gzip.open(CORPUS / f"{language}.gz", "rt", encoding="utf-8") as file:
        rows = [re.sub(r"([.,?!])", r" \1", line).split() for line in file]
    inside: Counter[str] = Counter()  # how often each word is not the first one
    for row in rows:
        inside.update(row[1:])
    for row in rows:
        small = row[0].lower()
        if inside[small] >= inside[row[0]]:
            row[0] = small
    return rows


def most_frequent(rows: list[list[str]]) -> set[str]:
    """Return the words that occur most often."""
    counts = Counter(chain.from_iterable(rows))
    return {word for word, _ in counts.most_common(WORDS)}


def write_text(folder: Path) -> None:
    """Write the pairs whose words are all among the most frequent ones."""
    german = words("de")
    english = words("en")
    known_german = most_frequent(german)
    known_english = most_frequent(english)
    pairs = [
        pair
        for pair in zip(german, english, strict=True)
        if known_german.issuperset(pair[0]) and known_english.issuperset(pair[1])
    ]
    parts = [pairs[: -2 * HELD_OUT], pairs[-2 * HELD_OUT : -HELD_OUT], pairs[-HELD_OUT:]]
    for split, part in zip(SPLITS, parts, strict=True):
        for language, rows in zip(LANGUAGES, zip(*part), strict=True):
            text = "".join(f"{' '.join(row)}\n" for row in rows)
            (folder / f"{split}.{language}").write_text(text, encoding="utf-8")


def shrink(trained: Path, data: Path, target: Path) -> None:
    """Write the dictionaries, and the checkpoint in half precision.

    The optimizer and local folders are left out.
    """
    mixhead_plugin.register()  # torch's safe loader then takes fairseq's classes
    state = torch.load(trained)
    cfg = state["cfg"]
    cfg["task"]["data"] = HERE
    cfg["checkpoint"]["save_dir"] = "checkpoints"
    cfg["common"]["user_dir"] = None
    # fairseq keeps all flags once more, beside those of the model.
    cfg["model"].data = HERE
    cfg["model"].save_dir = "checkpoints"
    cfg["model"].user_dir = None
    # In place, because the state dict also holds what each attention was trained with.
    for name, tensor in state["model"].items():
        state["model"][name] = tensor.half()
    state["last_optimizer_state"] = None
    target.mkdir(exist_ok=True)
    torch.save(state, target / "translator.pt")
    for name in ("dict.de.txt", "dict.en.txt"):
        (target / name).write_bytes((data / name).read_bytes())


def main() -> None:
    work = ROOT / "runs" / "demo" / "pretrained"
    data = work / "binary"
    # fairseq would go on with the checkpoint of an earlier run
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    write_text(work)
    preprocess(work, data)
    command = ["fairseq-train", str(data), f"--user-dir={PLUGIN}", f"--save-dir={work}", *FLAGS]
    run(command, work / "train.log", 1)
    shrink(work / "checkpoint_best.pt", data, ROOT / HERE)


if __name__ == "__main__":
    main()
