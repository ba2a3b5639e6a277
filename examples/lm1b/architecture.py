"""Print the architecture of a checkpoint: `python -m lm1b.architecture CHECKPOINT`."""

import sys
from pathlib import Path

from common import checkpoints
from common.errors import failing

fail = failing("evaluate")


def architecture(path: Path) -> str:
    """Return the name from the command line or the YAML file."""
    cfg = checkpoints.read(path, fail).get("cfg")
    if cfg is None:
        fail(f"{path}: has no config of a model; must be of fairseq-train 0.10 or later")
    model = cfg["model"]
    return getattr(model, "arch", None) or model["_name"]


if __name__ == "__main__":
    print(architecture(Path(sys.argv[1])))
