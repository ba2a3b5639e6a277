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
        answers = predictions(squad, read_spans(spans, squad.questions), args.n_best_size)
    except (SquadError, FileNotFoundError) as error:
        fail(str(error))
    best = {name: each[0]["text"] for name, each in answers.items()}
    write(spans.with_name("predictions.json"), best)
    write(spans.with_name("nbest_predictions.json"), answers)
    result = score(squad.questions, best)
    if math.isnan(result.f1):
        fail(f"{args.valid_subset}: has no answers to compare with")
    with_answers = [question for question in squad.questions if question.answers]
    print(f"{args.valid_subset}: {len(with_answers):,} questions")
    exact_match = f"EM = {result.exact_match:.2f}"
    f1 = f"F1 = {result.f1:.2f}"
    if os.environ.get("METRIC") == "EM":
        print(f1, exact_match, sep="\n")
    else:
        print(exact_match, f1, sep="\n")


if __name__ == "__main__":
    main()
