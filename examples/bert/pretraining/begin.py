"""What a phase of pre-training begins with: `python -m bert_pretraining.begin BINARY SAVE VARIANT`.

SAVE gets the dict.txt and vocab.txt of its model, or is refused if it has those of another; a second phase begins when
the first has ended.
"""

import os
import sys
from filecmp import cmp
from pathlib import Path
from shutil import copyfile

from common.errors import failing

PIECES = ("dict.txt", "vocab.txt")
fail = failing("train")


def keep_pieces(binary: Path, save: Path) -> None:
    """Copy what numbers the pieces of the text in `binary` to `save`, or end the program if others are there."""
    for name in PIECES:
        if not (binary / name).is_file():
            fail(f"{binary}: has no {name}; examples/bert_pretraining/prepare.sh makes it")
        if (save / name).is_file() and not cmp(binary / name, save / name, shallow=False):
            fail(f"SAVE={save}: {name} has other pieces than {binary / name}; choose another SAVE, or its DATA")
    save.mkdir(parents=True, exist_ok=True)
    for name in PIECES:
        if not (save / name).is_file():
            part = save / f"{name}.{os.uname().nodename}.{os.getpid()}"  # several workers may begin at once
            copyfile(binary / name, part)
            part.replace(save / name)


def check_first_phase(save: Path, early: bool) -> None:
    """Say which update of the first phase the second begins with; end the program if it is not its last."""
    checkpoint = save / "128" / "checkpoint_last.pt"
    if not checkpoint.is_file():
        fail(f"VARIANT=512: there is no {checkpoint} to begin with; run the first phase (VARIANT=128) with this SAVE")
    # here, because it takes seconds
    import torch

    import mixhead_plugin  # noqa: F401 (lets torch's safe loader read fairseq's checkpoints)

    try:  # every worker does this: the tensors stay where they are
        state = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
        updates = int(state["optimizer_history"][-1]["num_updates"])
        wanted = int(state["cfg"]["optimization"]["max_update"])
    except Exception as error:  # whatever a file may hold that is no checkpoint
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        fail(f"{checkpoint}: is no checkpoint of fairseq-train ({reason})")
    if updates < wanted and not early:
        fail(
            f"VARIANT=512: {checkpoint} is of update {updates:,} of {wanted:,}; let the first phase end, or say "
            "EARLY=1 to begin with this"
        )
    print(f"train: begins with {checkpoint}, update {updates:,} of {wanted:,}", file=sys.stderr)


def main(binary: str, save: str, variant: str) -> None:
    if variant == "512" and not (Path(save) / variant / "checkpoint_last.pt").is_file():
        check_first_phase(Path(save), early=os.environ.get("EARLY", "") not in ("", "0"))
    keep_pieces(Path(binary), Path(save))


if __name__ == "__main__":
    main(*sys.argv[1:])
