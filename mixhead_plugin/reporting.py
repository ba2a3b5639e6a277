"""What fairseq's exceptions say to who has typed a command: one line for what is known to be the input's fault."""

import builtins
import re
import sys
from typing import Any, Callable, Iterator, NamedTuple, Optional, Tuple, Type

from mixhead_plugin import untrusted
from mixhead_plugin.errors import CheckpointError, OptionError


class Failure(NamedTuple):
    """A known one."""

    kind: Type[BaseException]
    pattern: str  # what the exception's text begins with
    line: Callable[["re.Match[str]", BaseException], str]
    covered: bool = False  # by what fairseq raises while it handles this one


def _checkpoint(text: str) -> str:
    """`text` behind the name of the checkpoint that was read last, unless it has the name already."""
    path = untrusted.last_checkpoint
    return text if path is None or text.startswith(path) else f"{path}: {text}"


def _other_tensors(match: "re.Match[str]", error: BaseException) -> str:
    """torch's list of all tensors that do not fit, as the first of them."""
    text = str(error)
    size = re.search(r"size mismatch for (\S+): .*?Size\(\[([\d, ]*)\]\).*?Size\(\[([\d, ]*)\]\)", text, re.DOTALL)
    if size is None or re.search("(Missing|Unexpected) key", text):  # of other modules, whatever the sizes are
        first = next((line.strip() for line in text.splitlines()[1:] if line.strip()), text)
        return _checkpoint(f"is of another model: {first[:200]}; use the --arch and the flags it was trained with")
    name, (theirs, ours) = size[1], (size[i].split(", ") for i in (2, 3))
    if len(theirs) == len(ours) == 2 and theirs[1:] == ours[1:] and VOCABULARY.search(name):
        return _checkpoint(
            f"was trained with a dictionary of {theirs[0]} symbols, that of the data has {ours[0]}; must be the data "
            f"that it was trained on, or data prepared with its dictionaries ({name})"
        )
    return _checkpoint(
        f"is of another model: {name} has the shape [{', '.join(theirs)}], here [{', '.join(ours)}]; use the --arch "
        "and the flags it was trained with"
    )


VOCABULARY = re.compile(r"embed_tokens|output_projection|lm_head|embed_out|word_emb")


def _unknown_task(match: "re.Match[str]", error: BaseException) -> str:
    return _checkpoint(f"its task {match[1]} is not known here; must be one that fairseq or --user-dir registers")


def _not_utf8(match: "re.Match[str]", error: BaseException) -> str:
    assert isinstance(error, UnicodeDecodeError)
    byte = error.object[error.start]
    return f"the text to read is not {error.encoding.upper()}: byte 0x{byte:02x} ({error.reason})"


def _numbers(text: str) -> str:
    """Of a size, which is a number or one for each side; a side that is not there has none."""
    return " and ".join(number for number in re.findall(r"(?<![a-z\d])\d+", text) if number != "0")


# The first that fits counts.
KNOWN: Tuple[Failure, ...] = (
    Failure(RuntimeError, r"Error\(s\) in loading state_dict for ", _other_tensors, covered=True),
    Failure(AssertionError, "Could not infer task type from .*?'_name': '([^']+)'", _unknown_task),
    Failure(
        RuntimeError,
        "Neither args nor cfg exist in state keys",
        lambda match, error: _checkpoint("has no config of a model; must be a checkpoint that fairseq-train wrote"),
    ),
    Failure(
        AssertionError,
        "(Criterion|Optimizer) does not match; .*?(\\(--reset-optimizer\\))?\\.? *(\\S+ vs \\S+)$",
        lambda match, error: _checkpoint(
            f"was trained with another --{match[1].lower()} ({match[3]}); use that one, or --reset-optimizer"
        ),
    ),
    Failure(
        ValueError,
        "loaded state dict (has a different number of parameter groups|contains a parameter group)",
        lambda match, error: _checkpoint(
            "the state of its optimizer is of other parameters; use the flags it was trained with, or --reset-optimizer"
        ),
    ),
    Failure(
        ValueError,
        "--finetune-from-model (.+) does not exist",
        lambda match, error: f"--finetune-from-model {match[1]}: no such file",
    ),
    Failure(
        OSError,
        "Model file not found: (.+)",
        lambda match, error: f"--path {match[1]}: no such file; must be a checkpoint like checkpoint_best.pt",
    ),
    Failure(
        FileNotFoundError,
        r"Dataset not found: (\S+)(?: \((.*)\))?",
        lambda match, error: f"data {match[2] or match[1]}: has no set {match[1]}; run fairseq-preprocess first",
    ),
    Failure(
        Exception,
        r"Size of sample #(\S+) is invalid \(=(.+)\) since max_positions=(\(.+?\)|[^,]+), ",
        lambda match, error: (
            f"sentence {match[1]} has {_numbers(match[2])} tokens, the model takes {_numbers(match[3])}; must be "
            "shorter, or left out by --skip-invalid-size-inputs-valid-test, or the model take more "
            "(--max-source-positions, --max-target-positions, --max-positions)"
        ),
    ),
    Failure(
        AssertionError,
        r"sentence at index (\d+) of size (\d+) exceeds max_tokens limit of (\d+)",
        lambda match, error: f"--max-tokens {match[3]}: must be at least {match[2]}, the length of sentence {match[1]}",
    ),
    Failure(
        AssertionError,
        "Source and target must contain the same number of examples",
        lambda match, error: (
            "data: source and target have different numbers of sentences; run fairseq-preprocess "
            "again on files of as many lines"
        ),
    ),
    Failure(FileExistsError, r"(?P<path>\S+dict\S*\.txt)$", lambda match, error: f"{match[1]}: is there already"),
    Failure(UnicodeDecodeError, "", _not_utf8),
    # Flags that do not go together, as fairseq finds out when it builds what they are for.
    Failure(
        Exception,
        "The dataset is empty",
        lambda match, error: (
            "data: no batch is left; sentences must not be longer than --max-tokens and the model's positions allow "
            "(--max-positions, --max-source-positions, --max-target-positions), and each set must have at least "
            "--required-batch-size-multiple of them"
        ),
    ),
    Failure(
        Exception,
        "AdaptiveLoss is not compatible with the PyTorch",
        lambda match, error: "--criterion adaptive_loss: needs --ddp-backend legacy_ddp, which is not the default",
    ),
    Failure(
        ValueError,
        "DistributedDataParallel device_ids and output_device arguments only work with",
        lambda match, error: (
            "--ddp-backend: fairseq's default, pytorch_ddp, needs GPUs; must be legacy_ddp for workers without"
        ),
    ),
    Failure(
        ValueError,
        r"Cannot use a fixed learning rate schedule with (\S+)( lr)?\.",
        lambda match, error: (
            f"--lr: must be one number with --lr-scheduler {match[1].replace('-', '_')}; several are for fixed"
        ),
    ),
    Failure(
        ValueError,
        r"Unsupported optimizer: (?:Fairseq)?(\w+)",
        lambda match, error: (
            f"--optimizer {match[1].lower()}: does not go with --memory-efficient-fp16 or --memory-efficient-bf16; "
            "must be adam, adamax, adafactor or nag, or --fp16, --bf16"
        ),
    ),
    Failure(
        ImportError,
        r".*Please install (?:the )?fairscale",
        lambda match, error: "--ddp-backend fully_sharded, --zero-sharding os: need the package fairscale",
    ),
    Failure(
        ImportError, "Please install apex to use LAMB", lambda match, error: "--optimizer lamb: needs the package apex"
    ),
    Failure(
        ValueError,
        "--cpu-offload requires --ddp-backend=fully_sharded",
        lambda match, error: "--cpu-offload: needs --ddp-backend fully_sharded",
    ),
)


def one_line(error: BaseException, of_command: bool = True) -> Optional[str]:
    """What `error`, or what has led to it, says about the input; None if it is not known to be the input's fault.

    Args:
        error: that nobody has caught
        of_command: of fairseq's or the plugin's; otherwise the plugin's own errors alone are known
    """
    told = _told(error, of_command)
    return None if told is None else " ".join(told.splitlines())  # what was typed may have several


def _told(error: BaseException, of_command: bool) -> Optional[str]:
    chain = list(_chain(error))
    for cause in chain:
        if isinstance(cause, OptionError):
            text = _last_line(str(cause))
            return _checkpoint(text) if isinstance(cause, CheckpointError) else text
        # torch tells of a process that it has started in the words of the traceback there
        told = re.search(r"^mixhead_plugin\.\w+\.(?:Option|Checkpoint)Error: (.+)\Z", str(cause).strip(), re.MULTILINE)
        if told:
            return told[1]
    if not of_command:
        return None
    meant = [*_chain(error, covered=False), *filter(None, (_of_worker(cause) for cause in chain))]
    for known in KNOWN:
        for cause in chain if known.covered else meant:
            match = re.match(known.pattern, str(cause), re.DOTALL) if isinstance(cause, known.kind) else None
            if match:
                return known.line(match, cause)
    if isinstance(error, OSError) and error.strerror and _is_asked_for(error.filename):
        return f"{error.filename}: {error.strerror}"
    return None


def _is_asked_for(path: Any) -> bool:
    """Whether the command line names a file, or a folder above it."""
    words = (word.rpartition("=")[2] for word in sys.argv[1:])
    return isinstance(path, str) and any(len(word) > 1 and path.startswith(word) for word in words)


def _of_worker(error: BaseException) -> Optional[BaseException]:
    """What was raised in a process that torch has started, of which there is the text of a traceback."""
    told = re.search(r"^-- Process \d+ terminated .*^([\w.]+): (.*)\Z", str(error).strip(), re.MULTILINE | re.DOTALL)
    if told is None:
        return None
    kind = getattr(builtins, told[1], Exception)
    # a UnicodeDecodeError takes more than its text
    return kind(told[2]) if isinstance(kind, type) and not issubclass(kind, UnicodeError) else Exception(told[2])


def _chain(error: Optional[BaseException], covered: bool = True) -> Iterator[BaseException]:
    """`error` and its causes; with those that something else was raised over if `covered`."""
    while error is not None:
        yield error
        context = error.__context__ if covered and not error.__suppress_context__ else None
        error = error.__cause__ or context


def _last_line(text: str) -> str:
    """Of an error that a worker of torch's DataLoader passes on with its traceback."""
    found = re.search(r"(?:Option|Checkpoint)Error: (.+)\Z", text.strip())
    return found[1] if found and text.startswith("Caught ") else text
