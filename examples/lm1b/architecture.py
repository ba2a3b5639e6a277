"""Print the architecture of a checkpoint: `python -m lm1b.architecture CHECKPOINT`."""

import sys

import torch

import mixhead_plugin

mixhead_plugin.register()


def architecture(path: str) -> str:
    """Return the name from the command line or the YAML file; do not read the tensors."""
    config = torch.load(path, map_location="cpu", weights_only=True, mmap=True)["cfg"]["model"]
    return getattr(config, "arch", None) or config["_name"]


def main() -> int:
    path = sys.argv[1]
    try:
        print(architecture(path))
    except Exception as error:  # a file that is no checkpoint fails in any way
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        print(
            f"evaluate: error: {path}: is no checkpoint of fairseq-train ({reason})",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
