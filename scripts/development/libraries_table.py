"""Try `nn.mix` on other people's models.

    scripts/development/reach.sh
    PYTHONPATH=.venv/reach .venv/bin/python scripts/development/libraries_table.py \
        > results/libraries/models.json

Every model of libraries_models.py is small and random; libraries_checks.py says what is tried.
readme_tables.py makes the table of docs/python.md of the results.
"""

import argparse
import json
import sys
import warnings
from pathlib import Path

# Python looks in the folder of the command alone
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from development.libraries_checks import row
from development.libraries_models import LIBRARIES, define_operators_of_torchvision


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("libraries", nargs="*", help=f"of {', '.join(LIBRARIES)}; all by default")
    args = parser.parse_args()
    for name in args.libraries:
        if name not in LIBRARIES:
            parser.error(f"{name}: must be one of {', '.join(LIBRARIES)}")
    warnings.simplefilter("ignore")
    if args.libraries != ["nanogpt"]:
        define_operators_of_torchvision()

    results = []
    for name in args.libraries or LIBRARIES:
        torch.manual_seed(0)  # of the inputs
        for case in LIBRARIES[name]():
            results.append(row(case))
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    lines = ",\n".join(json.dumps(result) for result in results)
    version = torch.__version__.partition("+")[0]
    print(f'{{"torch": "{version}", "models": [\n{lines}\n]}}')


if __name__ == "__main__":
    main()
