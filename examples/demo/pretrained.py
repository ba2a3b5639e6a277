"""Train the small checkpoint of examples/demo/pretrained, which `python -m mixhead_plugin.analysis
view` can show.

It translates German to English by words, on those pairs of `corpus/` that have common words alone.
"""

import gzip
import re
from collections import Counter
from pathlib import Path

import torch
from demo import CORPUS, PLUGIN, ROOT, SPLITS, preprocess, run

import mixhead_plugin

HERE = "examples/demo/pretrained"  # what a command at the top of the checkout finds
WORDS = 1000  # of each language
HELD_OUT = 200
FLAGS = """
    --arch mixhead_transformer --source-lang de --target-lang en --share-decoder-input-output-embed
    --encoder-layers 2 --decoder-layers 2 --encoder-embed-dim 48 --encoder-ffn-embed-dim 96
    --encoder-attention-heads 8 --decoder-attention-heads 8 --dropout 0.1 --criterion
    label_smoothed_cross_entropy --label-smoothing 0.1 --optimizer adam --adam-betas (0.9,0.98) --lr
    5e-3 --lr-scheduler inverse_sqrt --warmup-updates 300 --clip-norm 1.0 --max-tokens 2000
    --max-update 1040 --seed 1 --num-workers 0 --no-epoch-checkpoints --log-interval 100
    --validate-interval 5 --required-batch-size-multiple 1
""".split()


def words(language: str) -> list[list[str]]:
    """Return the sentences of the corpus in words; the first has its usual capital letter."""
    with gzip.open(CORPUS / f"{language}.gz", "rt", encoding="utf-8") as file:
        rows = [re.sub(r"([.,?!])", r" \1", line).split() for line in file]
    inside = Counter(word for row in rows for word in row[1:])
    for row in rows:
        row[0] = row[0].lower() if inside[row[0].lower()] >= inside[row[0]] else row[0]
    return rows


def write_text(folder: Path) -> None:
    """Write the pairs whose words are all among the most frequent ones."""
    sides = {language: words(language) for language in ("de", "en")}
    common = {
        language: {
            word for word, _ in Counter(word for row in rows for word in row).most_common(WORDS)
        }
        for language, rows in sides.items()
    }
    fits = [
        i for i in range(len(sides["de"])) if all(common[x].issuperset(sides[x][i]) for x in sides)
    ]
    parts = fits[: -2 * HELD_OUT], fits[-2 * HELD_OUT : -HELD_OUT], fits[-HELD_OUT:]
    for split, part in zip(SPLITS, parts, strict=True):
        for language, rows in sides.items():
            text = "".join(" ".join(rows[i]) + "\n" for i in part)
            (folder / f"{split}.{language}").write_text(text, encoding="utf-8")


def shrink(trained: Path, data: Path, target: Path) -> None:
    """Write the dictionaries, and the checkpoint in half precision without the optimizer and
    without local folders.
    """
    mixhead_plugin.register()  # torch's safe loader then takes fairseq's classes
    state = torch.load(trained)
    cfg = state["cfg"]
    for part, name, value in (
        ("task", "data", HERE),
        ("checkpoint", "save_dir", "checkpoints"),
        ("common", "user_dir", None),
    ):
        cfg[part][name] = value
        setattr(cfg["model"], name, value)
    state["model"] = {name: tensor.half() for name, tensor in state["model"].items()}
    state["last_optimizer_state"] = None
    target.mkdir(exist_ok=True)
    torch.save(state, target / "translator.pt")
    for name in ("dict.de.txt", "dict.en.txt"):
        (target / name).write_bytes((data / name).read_bytes())


def main() -> None:
    work = ROOT / "runs" / "demo" / "pretrained"
    data = work / "binary"
    work.mkdir(parents=True)
    write_text(work)
    preprocess(work, data)
    command = [
        "fairseq-train",
        str(data),
        "--user-dir",
        str(PLUGIN),
        "--save-dir",
        str(work),
        *FLAGS,
    ]
    run(command, work / "train.log", 1)
    shrink(work / "checkpoint_best.pt", data, ROOT / HERE)


if __name__ == "__main__":
    main()
