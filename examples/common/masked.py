"""Read the perplexity of masked words from the log of fairseq-validate.

`fairseq-validate ... --log-format json | python -m common.masked [FLAG OF fairseq-validate ...]`
"""

import argparse
import math
import sys

from common.errors import failing
from common.logs import last_numbers, pass_on

fail = failing("evaluate")


def main() -> None:
    """Pass the log on to stderr, then print the perplexity."""
    arguments = argparse.ArgumentParser(prog="evaluate.sh", allow_abbrev=False)
    arguments.add_argument("--valid-subset", default="valid")
    args, _ = arguments.parse_known_args()
    subset = args.valid_subset

    numbers = last_numbers(pass_on(sys.stdin), subset)
    if not numbers:
        fail("fairseq-validate has logged no loss; its messages are above")
    loss = float(numbers[f"{subset}_loss"])  # in bits a masked word
    if not math.isfinite(loss):
        fail(f"fairseq-validate: the loss is {loss}")
    print(f"perplexity = {2**loss:.3f}")


if __name__ == "__main__":
    main()
