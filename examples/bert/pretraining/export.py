"""A pre-trained model without its optimizer: `python -m bert_pretraining.export CHECKPOINT FOLDER`."""

import sys
from pathlib import Path
from shutil import copyfile

from bert_pretraining.begin import PIECES
from common.archives import complete
from common.errors import failing

fail = failing("export")


def pieces_of(checkpoint: Path) -> Path:
    """The folder with the dict.txt and vocab.txt that it was trained with: SAVE, above that of its phase."""
    for folder in (checkpoint.parent, checkpoint.parent.parent):
        if all((folder / name).is_file() for name in PIECES):
            return folder
    fail(
        f"{checkpoint}: has no {' and '.join(PIECES)} beside it or in the folder above; "
        "examples/bert_pretraining/train.sh keeps them in SAVE"
    )


def export(checkpoint: Path, folder: Path) -> None:
    """Write model.pt, dict.txt and vocab.txt; an earlier `folder` is replaced."""
    pieces = pieces_of(checkpoint)
    # here, because it takes seconds, and the folder is looked at before
    import torch
    from fairseq import checkpoint_utils
    from fairseq.data import Dictionary

    import mixhead_plugin  # noqa: F401 (lets torch's safe loader read fairseq's checkpoints)

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


def main() -> None:
    checkpoint, folder = map(Path, sys.argv[1:])
    export(checkpoint, folder)
    print(f"{folder}: of {checkpoint}")


if __name__ == "__main__":
    main()
