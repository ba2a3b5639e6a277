"""Check and prepare a phase of pre-training.

    python -m bert.pretraining.begin BINARY SAVE VARIANT

Copy dict.txt and vocab.txt to SAVE; refuse a SAVE with others. Refuse the second phase before the
first has ended.
"""

import os
import sys
from filecmp import cmp
from pathlib import Path
from shutil import copyfile

from common import checkpoints
from common.errors import failing

PIECES = ("dict.txt", "vocab.txt")
fail = failing("train")


def keep_pieces(binary: Path, save: Path) -> None:
    for name in PIECES:
        if not (binary / name).is_file():
            fail(f"{binary}: has no {name}; examples/bert/pretraining/prepare.sh makes it")
        if (save / name).is_file() and not cmp(binary / name, save / name, shallow=False):
            fail(
                f"SAVE={save}: {name} has other pieces than {binary / name}; choose another SAVE, "
                "or its DATA"
            )
    save.mkdir(parents=True, exist_ok=True)
    for name in PIECES:
        # several workers may begin at once
        part = save / f"{name}.{os.uname().nodename}.{os.getpid()}"
        copyfile(binary / name, part)
        part.replace(save / name)


def check_first_phase(checkpoint: Path, early: bool) -> None:
    """Print the update that the second phase begins with.

    The program ends if the first phase has not ended.
    """
    if not checkpoint.is_file():
        fail(
            f"VARIANT=512: there is no {checkpoint} to begin with; run the first phase "
            "(VARIANT=128) with this SAVE"
        )
    state = checkpoints.read(checkpoint, fail)
    try:
        updates = int(state["optimizer_history"][-1]["num_updates"])
        wanted = int(state["cfg"]["optimization"]["max_update"])
    except (LookupError, TypeError, ValueError):
        fail(f"{checkpoint}: does not say its updates; must be a checkpoint of fairseq-train")
    if updates < wanted and not early:
        fail(
            f"VARIANT=512: {checkpoint} is of update {updates:,} of {wanted:,}; EARLY=1 begins "
            "with it anyway"
        )
    print(f"train: begins with {checkpoint}, update {updates:,} of {wanted:,}", file=sys.stderr)


def main(binary: str, save: str, variant: str) -> None:
    if variant == "512" and not (Path(save) / variant / "checkpoint_last.pt").is_file():
        first = Path(save) / "128" / "checkpoint_last.pt"
        check_first_phase(first, early=os.environ.get("EARLY", "") not in ("", "0"))
    keep_pieces(Path(binary), Path(save))


if __name__ == "__main__":
    main(*sys.argv[1:])
