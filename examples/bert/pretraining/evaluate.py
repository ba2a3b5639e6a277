"""Read the losses of pre-training from the log of fairseq-validate.

`fairseq-validate ... | python -m bert.pretraining.evaluate DATA [FLAG OF fairseq-validate ...]`
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from common.errors import failing
from common.logs import last_numbers, pass_on
from common.prepare import SETTINGS

fail = failing("evaluate")


def sets_of(data: Path) -> dict[str, Any]:
    """Return the numbers of each set in a folder of prepare.sh; end the program without any."""
    try:
        return dict(json.loads((data / SETTINGS).read_text())["sets"])
    except (OSError, ValueError, LookupError, TypeError):
        fail(f"{data}: has no {SETTINGS} with sets; examples/bert/pretraining/prepare.sh makes it")


def main() -> None:
    arguments = argparse.ArgumentParser(prog="evaluate.sh", allow_abbrev=False)
    arguments.add_argument("data", type=Path)
    arguments.add_argument("--valid-subset", default="valid")
    args, _ = arguments.parse_known_args()
    subset = args.valid_subset
    sets = sets_of(args.data)
    if subset not in sets:
        fail(f"--valid-subset {subset}: must be one of {', '.join(sets)}")

    numbers = last_numbers(pass_on(sys.stdin), subset)
    if not numbers:
        fail("fairseq-validate has logged no losses; its messages are above")
    words = float(numbers[f"{subset}_mlm_loss"])
    pairs = float(numbers[f"{subset}_nsp_loss"])
    right = float(numbers[f"{subset}_nsp_accuracy"])
    if not math.isfinite(words + pairs):
        fail("fairseq-validate: the losses are no finite numbers")
    print(f"pieces by how often they occur in this set = {sets[subset]['entropy']:.3f} bits")
    print(f"next sentences = {right:.1f} % right, {pairs:.3f} bits")
    print(f"mlm_loss = {words:.3f}")


if __name__ == "__main__":
    main()
