"""Average the last checkpoints of a training, and write average_last_NUMBER.pt beside them."""

import argparse
import re
from pathlib import Path
from typing import Any

from common import checkpoints
from common.errors import failing
from common.files import written_whole

fail = failing("average")


def last_checkpoints(folder: Path, number: int) -> list[Path]:
    """Return the last `number` checkpoints, the oldest first.

    These are checkpoints of epochs (checkpoint3.pt) or, if there are too few, of updates
    (checkpoint_1_50.pt).
    """
    kinds = {"epochs": r"checkpoint(\d+)\.pt", "updates": r"checkpoint_\d+_(\d+)\.pt"}
    there = []
    for kind, pattern in kinds.items():
        numbered = {}
        for path in folder.glob("checkpoint*.pt"):
            match = re.fullmatch(pattern, path.name)
            if match:
                numbered[int(match[1])] = path
        if len(numbered) >= number:
            return [numbered[key] for key in sorted(numbered)[-number:]]
        there.append(f"{len(numbered)} of {kind}")
    fail(
        f"AVERAGE={number}: {folder} has {' and '.join(there)}; {number} checkpoints of one kind "
        "are needed"
    )


def average(paths: list[Path], target: Path) -> None:
    """Write the last checkpoint, with the mean of all models' floating-point tensors.

    Sums are in double precision.
    """
    import torch  # takes seconds; wrong arguments are refused before

    last: dict[str, Any] = {}
    sums: dict[str, torch.Tensor] = {}
    for path in paths:
        last = checkpoints.read(path, fail)
        model = last["model"]
        if sums and model.keys() != sums.keys():
            fail(
                f"{path}: holds another model than {paths[0].name}: "
                f"{', '.join(sorted(model.keys() ^ sums.keys()))}"
            )
        for name, tensor in model.items():
            if not isinstance(tensor, torch.Tensor):
                fail(f"{path}: {name} is no tensor")
            if name in sums and sums[name].shape != tensor.shape:
                fail(
                    f"{path}: holds another model than {paths[0].name}: {name} is "
                    f"{list(tensor.shape)}"
                )
            if not tensor.is_floating_point():
                sums[name] = tensor
            elif name not in sums:
                sums[name] = tensor.double()
            else:
                sums[name] = sums[name] + tensor.double()

    for name, total in sums.items():
        if total.is_floating_point():
            sums[name] = (total / len(paths)).to(last["model"][name].dtype)
    last["model"].update(sums)  # keeps the record of flags
    last.pop("last_optimizer_state", None)  # it does not belong to the average
    torch.save(last, target)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m common.average", description=__doc__)
    parser.add_argument("folder", type=Path, help="has the checkpoints; SAVE of evaluate.sh")
    parser.add_argument("number", help="how many; AVERAGE of evaluate.sh")
    args = parser.parse_args()
    if not args.number.isdecimal() or int(args.number) < 1:
        fail(f"AVERAGE={args.number}: must be a number of checkpoints, at least 1")
    if not args.folder.is_dir():
        fail(f"SAVE={args.folder}: no such folder")

    paths = last_checkpoints(args.folder, int(args.number))
    target = args.folder / f"average_last_{args.number}.pt"
    with written_whole(target) as unfinished:
        average(paths, unfinished)
    print(f"average of {', '.join(path.name for path in paths)}: {target}")


if __name__ == "__main__":
    main()
