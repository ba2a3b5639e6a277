"""Write a pre-trained model without its optimizer: `python -m bert.pretraining.export CHECKPOINT FOLDER`."""

import sys
from pathlib import Path
from shutil import copyfile

from bert.pretraining.begin import PIECES
from common.archives import complete
from common.errors import failing

fail = failing("export")


def export(checkpoint: Path, folder: Path) -> None:
    """Write model.pt, dict.txt and vocab.txt to `folder`; replace an earlier one."""
    folders = (checkpoint.parent, checkpoint.parent.parent)  # SAVE is above the folder of a phase
    pieces = next((path for path in folders if all((path / name).is_file() for name in PIECES)), None)
    if pieces is None:
        fail(f"{checkpoint}: has no {' and '.join(PIECES)} beside it or above; train.sh keeps them in SAVE")
    import bert
    import torch
    from fairseq import checkpoint_utils
    from fairseq.data import Dictionary

    bert.register()
    state = checkpoint_utils.load_checkpoint_to_cpu(str(checkpoint))
    symbols = len(Dictionary.load(str(pieces / "dict.txt"))) + 1  # <mask>
    own = len(state["model"].get("encoder.sentence_encoder.embed_tokens.weight", ()))
    if own != symbols:
        fail(f"{checkpoint}: has {own:,} embeddings, {pieces}/dict.txt needs {symbols:,}; must be a BERT of this text")
    state.pop("last_optimizer_state", None)
    with complete(folder) as unfinished:
        unfinished.mkdir()
        torch.save(state, unfinished / "model.pt")
        for name in PIECES:
            copyfile(pieces / name, unfinished / name)
    print(f"{folder}: of {checkpoint}")


if __name__ == "__main__":
    export(*map(Path, sys.argv[1:]))
