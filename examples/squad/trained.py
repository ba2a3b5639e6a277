"""Refuse a checkpoint that was never trained to answer: `python -m squad.trained CHECKPOINT`.

fairseq-validate would give it a head for answers that is random, and score that.
"""

import sys

from fairseq import checkpoint_utils

HEAD = "encoder.lm_head.out_proj.weight"


def main(path: str) -> int:
    if HEAD in checkpoint_utils.load_checkpoint_to_cpu(path)["model"]:
        return 0
    print(f"evaluate: error: {path}: has no head for answers; examples/squad/train.sh trains one", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
