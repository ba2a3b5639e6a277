"""The architecture of a checkpoint: `python -m lm1b.architecture CHECKPOINT`."""

import sys

import torch

import mixhead_plugin

mixhead_plugin.register()


def architecture(path: str) -> str:
    """Its name as fairseq-train or a YAML file has it; the tensors stay on the disk."""
    config = torch.load(path, map_location="cpu", weights_only=True, mmap=True)["cfg"]["model"]
    return getattr(config, "arch", None) or config["_name"]


def main() -> int:
    path = sys.argv[1]
    try:
        print(architecture(path))
    except Exception as error:  # whatever a file may hold that is no checkpoint
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        print(f"evaluate: error: {path}: is no checkpoint of fairseq-train ({reason})", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
