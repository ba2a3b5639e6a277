"""Say which file does not fit the model, and in what.

fairseq's errors name neither the file nor the flag, and its error about a missing file is no
FileNotFoundError with a name.
"""

import re
import textwrap

from fairseq import checkpoint_utils
from fairseq.trainer import Trainer

from mixhead_plugin.errors import CheckpointError, OptionError
from mixhead_plugin.fairseq.replace import replaces


@replaces(Trainer, "load_checkpoint")
def name_the_file_and_what_differs(original, trainer, filename: str, *args, **kwargs):
    try:
        return original(trainer, filename, *args, **kwargs)
    except Exception as error:
        # fairseq replaces each error of a model's `load_state_dict` by its own
        refused = error.__context__
        if isinstance(refused, CheckpointError):
            raise OptionError(f"{filename}: {refused}") from error
        problem = mismatch(str(refused))
        if problem:
            raise OptionError(f"{filename}: {problem}") from error
        if re.search(r"please reset the optimizer|parameter group", str(error)):
            # fairseq asks to reset the optimizer where the loss is another one, too.
            part = "criterion" if str(error).startswith("Criterion") else "optimizer"
            raise OptionError(f"{filename}: its {part} is another one: {error}") from error
        raise


@replaces(checkpoint_utils, "load_model_ensemble_and_task")
def name_the_files_and_what_differs(original, filenames: list[str], *args, **kwargs):
    files = ":".join(filenames)  # as in --path
    try:
        return original(filenames, *args, **kwargs)
    except CheckpointError as error:
        raise OptionError(f"{files}: {error}") from error
    except RuntimeError as error:
        problem = mismatch(str(error))
        if problem:
            raise OptionError(f"{files}: {problem}") from error
        if str(error).startswith("Neither args nor cfg"):
            raise OptionError(
                f"{files}: has no config; must be a checkpoint that fairseq-train wrote, not its "
                "tensors alone"
            ) from error
        raise
    except OSError as error:
        # fairseq raises it without the name of a file, so `errors.py` would not know it
        match = re.fullmatch(r"Model file not found: (.*)", str(error))
        if match is None:
            raise
        raise FileNotFoundError(f"{match[1]}: no such file; must be a checkpoint") from error


# In torch's list of differences: the name of a tensor, its shape in the checkpoint, and in the
# model.
_SHAPE = r"torch\.Size\(\[([\d, ]*)\]\)"
_OTHER_SIZE = re.compile(
    rf"size mismatch for (\S+): copying a param with shape {_SHAPE} .*? is {_SHAPE}"
)
# Tensors with a row for each symbol of a dictionary.
_BY_SYMBOL = ("embed_tokens.weight", "output_projection.weight", "lm_head.weight", "lm_head.bias")


def mismatch(text: str) -> str:
    """Return in a few words which tensors of a checkpoint do not fit the model.

    Args:
        text: the text of an error; if it is not torch's list of differences, an empty string is
            returned
    """
    for name, shape, own_shape in _OTHER_SIZE.findall(text):
        symbols, *columns = shape.split(", ")
        own_symbols, *own_columns = own_shape.split(", ")
        if name.endswith(_BY_SYMBOL) and columns == own_columns:
            return (
                f"its dictionary is another one: the dictionary has {own_symbols} symbols, the "
                f"checkpoint's {symbols} ({name}); must be the data folder that it was trained with"
            )
    difference = re.search(r"(size mismatch for|Missing key|Unexpected key).*", text)
    if difference is None:
        return ""
    shortened = textwrap.shorten(difference[0], 200, placeholder=" ...")
    return f"is of another model; --arch and sizes must be the same: {shortened}"
