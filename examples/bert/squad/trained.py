"""Refuse a checkpoint that was never trained to answer: `python -m squad.trained CHECKPOINT`.

fairseq-validate would give it a head for answers that is random, and score that.
"""

import sys

from common.errors import failing
from fairseq import checkpoint_utils

import mixhead_plugin  # noqa: F401 (lets torch's safe loader read fairseq's checkpoints)
from mixhead_plugin.errors import OptionError

HEAD = "encoder.lm_head.out_proj.weight"
fail = failing("evaluate")


def main(path: str) -> None:
    try:
        model = checkpoint_utils.load_checkpoint_to_cpu(path)["model"]
    except OptionError as error:  # it is no checkpoint
        fail(str(error))
    if HEAD not in model:
        fail(f"{path}: has no head for answers; examples/squad/train.sh trains one")


if __name__ == "__main__":
    main(sys.argv[1])
