"""Compute the negative log-likelihood of the references from the output of fairseq-generate --score-reference.

`python -m common.likelihood DATA RESULTS [FLAG OF fairseq-generate ...]`: RESULTS is its --results-path, unless the
flags name another. Every token counts once, the end of the sentence too; nothing is smoothed.
"""

import argparse
import math
from collections.abc import Iterable
from pathlib import Path

from common.errors import failing
from common.parallel_text import TARGET, read_lines

fail = failing("evaluate")


def nats_a_token(output: Iterable[str], sentences: int) -> float:
    """Return the mean over all tokens of the corpus; fairseq prints their log-likelihoods in bits.

    Raises:
        ValueError: the output does not score each of the `sentences` once
    """
    scores = {}
    for line in output:
        name, tab, numbers = line.partition("\t")
        if tab and name.startswith("P-"):
            scores[int(name[2:])] = [float(number) for number in numbers.split()]
    if sorted(scores) != list(range(sentences)):
        raise ValueError(f"scores of {len(scores):,} sentences, must be {sentences:,}")
    return -math.log(2) * math.fsum(map(math.fsum, scores.values())) / sum(map(len, scores.values()))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m common.likelihood", description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--gen-subset", default="test")
    parser.add_argument("--results-path", type=Path)
    args = parser.parse_known_args()[0]
    sentences = len(read_lines(args.data / "reference" / f"{args.gen_subset}.raw.{TARGET}"))
    try:
        with (args.results_path or args.results).joinpath(f"generate-{args.gen_subset}.txt").open() as output:
            value = nats_a_token(output, sentences)
    except (OSError, ValueError) as error:
        fail(str(error))
    print(f"nats a token = {value:.5f}")


if __name__ == "__main__":
    main()
