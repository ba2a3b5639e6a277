"""Refuse --write-checkpoints-asynchronously without the package iopath.

fairseq logs that --write-checkpoints-asynchronously needs iopath. It then ends with status 0 without training.
"""

from importlib.util import find_spec

from fairseq.distributed import utils

from mixhead_plugin.errors import OptionError
from mixhead_plugin.repairs.replace import replaces


@replaces(utils, "call_main")
def _call_main(original, cfg, main, **kwargs) -> None:
    if cfg.checkpoint.write_checkpoints_asynchronously and find_spec("iopath") is None:
        raise OptionError("--write-checkpoints-asynchronously: needs the package iopath, or must be left out")
    original(cfg, main, **kwargs)
