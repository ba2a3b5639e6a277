"""Read the perplexity of masked words from the log of fairseq-validate.

`fairseq-validate ... --log-format json | python -m common.masked [FLAG OF fairseq-validate ...]`
"""

import argparse
import json
import math
import re
import sys

from common.errors import failing

fail = failing("evaluate")


def main() -> None:
    """Pass the log on to stderr, then print the perplexity."""
    arguments = argparse.ArgumentParser(prog="evaluate.sh", allow_abbrev=False)
    arguments.add_argument("--valid-subset", default="valid")
    args, _ = arguments.parse_known_args()

    found = {}
    for line in sys.stdin:
        print(line, end="", file=sys.stderr, flush=True)
        match = re.search(rf"\| {re.escape(args.valid_subset)} \| (\{{.*\}})", line)
        if match:
            found = json.loads(match[1])
    if not found:
        fail("fairseq-validate has logged no loss; its messages are above")
    loss = float(found[f"{args.valid_subset}_loss"])  # in bits a masked word
    if not math.isfinite(loss):
        fail(f"fairseq-validate: the loss is {loss}")
    print(f"perplexity = {2**loss:.3f}")


if __name__ == "__main__":
    main()
