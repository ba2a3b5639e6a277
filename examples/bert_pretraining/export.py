"""A pre-trained model without its optimizer: `python -m bert_pretraining.export CHECKPOINT BINARY FOLDER`."""

import sys
from pathlib import Path
from shutil import copyfile

from common.archives import complete
from common.errors import failing

fail = failing("export")
BESIDE = ("dict.txt", "vocab.txt")


def export(checkpoint: Path, binary: Path, folder: Path) -> None:
    """Write model.pt, dict.txt and vocab.txt; an earlier `folder` is replaced."""
    if missing := [name for name in BESIDE if not (binary / name).is_file()]:
        fail(f"{binary}: has no {', '.join(missing)}; examples/bert_pretraining/prepare.sh makes them")
    # here, because it takes seconds, and the folder is looked at before
    import torch
    from fairseq import checkpoint_utils
    from fairseq.data import Dictionary

    import mixhead_plugin  # noqa: F401 (lets torch's safe loader read fairseq's checkpoints)

    state = checkpoint_utils.load_checkpoint_to_cpu(str(checkpoint))
    symbols = len(Dictionary.load(str(binary / "dict.txt"))) + 1  # <mask>
    own = len(state["model"].get("encoder.sentence_encoder.embed_tokens.weight", ()))
    if own != symbols:
        fail(f"{checkpoint}: has {own:,} embeddings, {binary}/dict.txt needs {symbols:,}; must be a BERT of this text")
    state.pop("last_optimizer_state", None)
    with complete(folder) as unfinished:
        unfinished.mkdir()
        torch.save(state, unfinished / "model.pt")
        for name in BESIDE:
            copyfile(binary / name, unfinished / name)


def main() -> None:
    checkpoint, binary, folder = map(Path, sys.argv[1:])
    export(checkpoint, binary, folder)
    print(f"{folder}: of {checkpoint}")


if __name__ == "__main__":
    main()
