"""Compute exact match and F1 from the file of fairseq-validate --nbest-file.

`python -m bert.squad.evaluate DATA SPANS [FLAG ...]` takes the flags of fairseq-validate, and reads
--nbest-file, --valid-subset and --n-best-size. Beside SPANS it writes nbest_predictions.json and,
for the official evaluation, predictions.json.
"""

import argparse
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

from bert.answers import predictions, read_spans
from bert.squad_data import SquadError, read_squad, score
from common.errors import failing

fail = failing("evaluate")


def write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(f"predictions: {path}")


def main(arguments: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(prog="evaluate.sh", allow_abbrev=False)
    parser.add_argument("data", type=Path)
    parser.add_argument("spans", type=Path)
    parser.add_argument("--nbest-file", type=Path)
    parser.add_argument("--valid-subset", default="valid")
    parser.add_argument("--n-best-size", type=int, default=20)
    args, _ = parser.parse_known_args(arguments)
    spans = args.nbest_file or args.spans
    try:
        squad = read_squad(args.data / f"{args.valid_subset}.json")
        found = predictions(squad, read_spans(spans, squad.questions), args.n_best_size)
    except (SquadError, FileNotFoundError) as error:
        fail(str(error))
    best = {name: answers[0]["text"] for name, answers in found.items()}
    write(spans.with_name("predictions.json"), best)
    write(spans.with_name("nbest_predictions.json"), found)
    result = score(squad.questions, best)
    if math.isnan(result.f1):
        fail(f"{args.valid_subset}: has no answers to compare with")
    print(
        f"{args.valid_subset}: {sum(bool(question.answers) for question in squad.questions):,} "
        "questions"
    )
    numbers = {"EM": result.exact_match, "F1": result.f1}
    last = os.environ.get("METRIC", "F1")
    for name in sorted(numbers, key=last.__eq__):
        print(f"{name} = {numbers[name]:.2f}")


if __name__ == "__main__":
    main()
