"""Read checkpoints of fairseq-train without fairseq's own loader, which changes what it reads."""

import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from common.errors import reason_of


def read(path: Path, fail: Callable[[str], NoReturn]) -> dict[str, Any]:
    """Return the content of a checkpoint; end the program if the file is none, or is damaged.

    Args:
        path: the path of the file
        fail: a function of `common.errors.failing`, which ends the program
    """
    import torch  # takes seconds; wrong arguments are refused before

    import mixhead_plugin
    from mixhead_plugin.errors import OptionError
    from mixhead_plugin.fairseq.repairs.checkpoint_files import check_state
    from mixhead_plugin.fairseq.repairs.checksums import check_records

    mixhead_plugin.register()  # lets torch's safe loader read fairseq's checkpoints
    try:
        check_records(path)
        # What is not used, such as the optimizer's tensors, then stays in the file. torch before
        # 1.6 wrote no zip files, which cannot be mapped.
        mmap = zipfile.is_zipfile(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        check_state(str(path), state)
    except OptionError as error:  # names the file
        fail(str(error))
    except pickle.UnpicklingError:  # torch's text asks the user to trust the file
        fail(f"{path}: is no checkpoint of fairseq-train, or holds more than tensors and values")
    except Exception as error:  # a file that is no checkpoint fails in any way
        fail(f"{path}: is no checkpoint of fairseq-train ({reason_of(error)})")
    return state
