"""Write the demo's German-English corpus.

Usage: python examples/demo/corpus.py OUTPUT_FOLDER [--seed 1] [--train 22000] [--valid 600] [--test 600]
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from german_english import generate

__all__ = ["generate", "main"]


def write(folder: Path, corpus: dict[str, list[tuple[str, str]]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split, pairs in corpus.items():
        for side, language in enumerate(("de", "en")):
            text = "".join(pair[side] + "\n" for pair in pairs)
            (folder / f"{split}.{language}").write_text(text, encoding="utf-8", newline="\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write a German-English demo corpus.")
    parser.add_argument("folder", type=Path, help="where train, valid and test go, as .de and .en")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--train", type=int, default=22000)
    parser.add_argument("--valid", type=int, default=600)
    parser.add_argument("--test", type=int, default=600)
    options = parser.parse_args(arguments)
    corpus = generate(options.seed, options.train, options.valid, options.test)
    write(options.folder, corpus)
    sizes = ", ".join(f"{len(pairs)} {split}" for split, pairs in corpus.items())
    print(f"{options.folder}: {sizes} pairs (German-English, seed {options.seed})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
