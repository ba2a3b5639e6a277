"""Load a checkpoint of the plugin or of fairseq, and batches of its data."""

import argparse
import ast
import inspect
import itertools
import textwrap
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from fairseq import checkpoint_utils, utils
from fairseq.criterions import FairseqCriterion
from fairseq.models import BaseFairseqModel, FairseqLanguageModel
from fairseq.modules import MultiheadAttention
from fairseq.tasks import FairseqTask
from omegaconf import DictConfig
from torch import nn
from tqdm import tqdm

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.analysis.output import name_of
from mixhead_plugin.fairseq.attention import MixheadAttention
from mixhead_plugin.fairseq.sites import side_of_attention

# The arguments of fairseq's attention that are attributes of the module, too.
SAME_SETTINGS = (
    "embed_dim",
    "num_heads",
    "kdim",
    "vdim",
    "add_zero_attn",
    "self_attention",
    "encoder_decoder_attention",
)
DEFAULT_MAX_TOKENS = 4096
SEED = 1


@dataclass(frozen=True)
class Loaded:
    """A trained model, its task and its config."""

    model: BaseFairseqModel  # in eval mode, on `device`; all its attentions are MixheadAttention
    task: FairseqTask
    cfg: DictConfig  # the checkpoint's, with the overrides
    name: str  # for legends
    path: str
    device: torch.device
    history: dict[str, Any]  # the checkpoint's optimizer_history and extra_state

    @cached_property
    def criterion(self) -> FairseqCriterion:
        """Return the criterion of the model's training, in eval mode."""
        return self.task.build_criterion(self.cfg.criterion).eval().to(self.device)


def add_arguments(parser: ArgumentParser, several: bool = False, batching: bool = True) -> None:
    """Add the flags for a checkpoint and its data.

    Args:
        parser: the parser of a command
        several: whether the command takes several checkpoints
        batching: whether the command takes the flags for the size and the number of batches
    """
    if several:
        parser.add_argument(
            "checkpoints", nargs="+", metavar="CHECKPOINT", help="fairseq checkpoints (.pt)"
        )
    else:
        parser.add_argument("checkpoint", metavar="CHECKPOINT", help="fairseq checkpoint (.pt)")
    parser.add_argument(
        "--data",
        metavar="DIR",
        help="binarised data (default: the folder that the checkpoint names)",
    )
    parser.add_argument("--subset", default="valid", help="set of the data (default: %(default)s)")
    if batching:
        size = parser.add_mutually_exclusive_group()
        text = f"tokens in a batch (default: {DEFAULT_MAX_TOKENS})"
        size.add_argument("--max-tokens", type=positive, metavar="N", help=text)
        size.add_argument(
            "--batch-size", type=positive, metavar="N", help="sentences in a batch, instead"
        )
        parser.add_argument(
            "--limit",
            type=positive,
            metavar="N",
            help="use N batches, drawn at random (default: all)",
        )
    parser.add_argument(
        "--cpu", action="store_true", help="compute on the CPU even where there is CUDA"
    )
    text = (
        "flags to change in the checkpoint, as fairseq-validate's: \"{'attention_impl': "
        "'reference'}\""
    )
    parser.add_argument(
        "--model-overrides", type=parse_overrides, default={}, metavar="DICT", help=text
    )
    parser.add_argument(
        "--user-dir", metavar="DIR", help="another plugin, if the checkpoint's task needs it"
    )


def positive(text: str) -> int:
    """Parse a whole number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number of at least 1")
    return int(text)


def parse_overrides(text: str) -> dict[str, Any]:
    """Parse a dict in Python's notation, for argparse, without running code."""
    try:
        return dict(**ast.literal_eval(text))  # names alone
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise argparse.ArgumentTypeError(
            f"{text}: must be a dict like \"{{'dropout': 0.1}}\""
        ) from error


def subsets_of(args: Namespace) -> list[str]:
    """Return the one or two sets of --subset; refuse others."""
    subsets = args.subset.split(",")
    if not all(subsets) or len(subsets) > 2 or len(set(subsets)) < len(subsets):
        raise OptionError(f"--subset {args.subset}: must be one set, or two different ones")
    return subsets


def load_with_subsets(args: Namespace) -> tuple[Loaded, list[str]]:
    """Load the checkpoint of a command, and the one or two sets of --subset.

    A set takes minutes or hours, so a wrong name of the second one is refused before the work on
    the first one.
    """
    subsets = subsets_of(args)
    loaded = load_from(args, args.checkpoint)
    for subset in subsets:
        load_subset(loaded, subset)
    return loaded, subsets


def load_from(args: Namespace, path: str, name: str | None = None) -> Loaded:
    """Load a checkpoint as the flags of `add_arguments` say."""
    try:
        utils.import_user_module(args)
    except FileNotFoundError as error:  # fairseq says the path alone
        raise OptionError(f"--user-dir {args.user_dir}: no such folder") from error
    return load(path, args.data, args.model_overrides, args.cpu, name)


def load(
    path: str,
    data: str | None = None,
    overrides: dict | None = None,
    cpu: bool = False,
    name: str | None = None,
) -> Loaded:
    """Load a checkpoint by fairseq's own functions.

    Args:
        path: the path of the checkpoint
        data: the folder of the model's data; None for the one that the checkpoint's config names
        overrides: values that replace those of the checkpoint's config, by name
        cpu: compute on the CPU even where there is CUDA
        name: the name of the model in legends; None for the name of the file

    Raises:
        OptionError: the checkpoint, its data or the overrides cannot be used
    """
    changes = dict(overrides or {})
    if data is not None:
        changes["data"] = data
    state = checkpoint_utils.load_checkpoint_to_cpu(path, changes)
    try:
        (model,), cfg, task = checkpoint_utils.load_model_ensemble_and_task([path], state=state)
    except FileNotFoundError as error:
        if data is None:
            raise
        raise OptionError(
            f"--data {data}: {error.filename or error}: no such file or folder"
        ) from error
    except Exception as error:
        # fairseq refuses a folder of data by a plain Exception, and a model by a RuntimeError.
        is_refusal = type(error) is Exception or isinstance(error, (RuntimeError, OptionError))
        if not is_refusal:
            raise
        raise OptionError(_refusal(error, path, data, overrides)) from error
    _replace_fairseq_attention(path, model, changes.get("attention_impl", "auto"))
    device = torch.device("cuda" if torch.cuda.is_available() and not cpu else "cpu")
    history = {key: state.get(key) for key in ("optimizer_history", "extra_state")}
    return Loaded(model.eval().to(device), task, cfg, name or name_of(path), path, device, history)


def _refusal(error: Exception, path: str, data: str | None, overrides: dict | None) -> str:
    """Return the message about a checkpoint that cannot be loaded, with the flags that it is about.

    Args:
        error: what fairseq or the plugin has raised
        path: the path of the checkpoint
        data: --data, or None
        overrides: --model-overrides, or None
    """
    text = textwrap.shorten(str(error), 400, placeholder=" ...")
    if not text.startswith(path):
        text = f"{path}: {text}"
    if overrides:
        text = f"--model-overrides {overrides}: {text}"
    if data is not None:
        text = f"--data {data}: {text}"
    return text


def batches_from(
    args: Namespace, loaded: Loaded, subset: str | None = None
) -> Iterator[dict[str, Any]]:
    """Return the batches that the flags of `add_arguments` ask for.

    Args:
        args: the flags of the command
        loaded: the model and its task
        subset: the set of the data; None for --subset
    """
    return batches(loaded, subset or args.subset, args.max_tokens, args.batch_size, args.limit)


def batches(
    loaded: Loaded,
    subset: str = "valid",
    max_tokens: int | None = None,
    batch_size: int | None = None,
    limit: int | None = None,
    shuffle: bool | None = None,
) -> Iterator[dict[str, Any]]:
    """Return the batches of a set, on the model's device.

    fairseq sorts sentences by length, so the first batches would have the shortest ones. With a
    limit, batches come in a random order, the same in each call. A task with consecutive windows of
    text keeps their order.

    Args:
        loaded: the model and its task
        subset: the set of the data
        max_tokens: the largest number of tokens in a batch; None for the default, or for no limit
            if `batch_size` is given
        batch_size: the largest number of sentences in a batch; None for no limit
        limit: the largest number of batches; None for all
        shuffle: whether the order is random; None for a random one with a `limit`
    """
    dataset = load_subset(loaded, subset)
    tokens = max_tokens
    if max_tokens is None and batch_size is None:
        tokens = DEFAULT_MAX_TOKENS
    if shuffle is None:
        shuffle = limit is not None
    try:
        epochs = loaded.task.get_batch_iterator(
            dataset=dataset,
            max_tokens=tokens,
            max_sentences=batch_size,
            max_positions=utils.resolve_max_positions(
                loaded.task.max_positions(), loaded.model.max_positions()
            ),
            ignore_invalid_inputs=True,
            required_batch_size_multiple=1,  # otherwise fairseq leaves the last sentences out
            seed=SEED,
            num_workers=0,
            disable_iterator_cache=True,
        )
        iterator = epochs.next_epoch_itr(shuffle=shuffle)
    except AssertionError as error:  # of fairseq, about a sentence that is longer than a batch
        raise OptionError(
            f"--max-tokens {tokens}: {' '.join(str(error).split())}; must be at least the longest "
            f"sentence of --subset {subset}, or use --batch-size"
        ) from error
    if len(iterator) == 0:
        raise OptionError(f"--subset {subset}: has no sentence that fits the model")
    number = len(iterator)
    if limit is not None:
        number = min(number, limit)
    some = itertools.islice(iterator, number)
    title = f"{loaded.name}: {subset}"
    progress = tqdm(some, total=number, desc=title, unit="batch", disable=None, leave=False)
    if loaded.device.type == "cuda":
        return (utils.move_to_cuda(batch, loaded.device) for batch in progress)
    return iter(progress)


def load_subset(loaded: Loaded, subset: str, flag: str = "--subset") -> Any:
    """Return the dataset of a set, which is loaded once; refuse a set that is not there.

    Args:
        loaded: the model and its task
        subset: the set of the data
        flag: the flag that names the set, for the refusal
    """
    try:
        if subset not in loaded.task.datasets:
            loaded.task.load_dataset(subset, combine=False, epoch=1, task_cfg=loaded.cfg.task)
    except (AssertionError, FileNotFoundError) as error:  # sentence_prediction raises the first
        raise OptionError(f"{flag} {subset}: {error}") from error
    return loaded.task.dataset(subset)


def forward(loaded: Loaded, net_input: dict[str, Any], alone: bool = False) -> None:
    """Pass a batch through the model.

    The projection to the vocabulary is left out where the model can do without.

    Args:
        loaded: the model
        net_input: the inputs of the model, from a batch of fairseq
        alone: whether a Transformer-XL forgets the batches before
    """
    model = loaded.model
    if alone and hasattr(model, "reset_memory"):
        model.reset_memory()
    # A language model passes its arguments on to the decoder.
    called = model.decoder.forward if isinstance(model, FairseqLanguageModel) else model.forward
    settings = {}
    if "features_only" in inspect.signature(called).parameters:
        settings["features_only"] = True
    model(**net_input, **settings)


def _replace_fairseq_attention(path: str, model: nn.Module, impl: str) -> None:
    """Replace fairseq's attentions by MixheadAttention, which computes the same and has hooks.

    Args:
        path: the path of the checkpoint, for messages
        model: the model, which is changed
        impl: --attention-impl
    """
    for parent_name, parent in list(model.named_modules()):
        for child_name, original in list(parent.named_children()):
            # MixheadAttention inherits from fairseq's class.
            if not isinstance(original, MultiheadAttention):
                continue
            if isinstance(original, MixheadAttention):
                continue
            name = f"{parent_name}.{child_name}".removeprefix(".")
            # A class that inherits from fairseq's may compute something else.
            if type(original) is not MultiheadAttention:
                raise OptionError(
                    f"{path}: {name} is of {type(original).__name__}, whose heads cannot be "
                    "studied; must be an attention of mixhead_plugin, or fairseq's "
                    "MultiheadAttention"
                )
            # So may an attention of xFormers.
            if getattr(original, "use_xformers", False):
                raise OptionError(
                    f"{path}: {name} is computed by xFormers, whose heads cannot be studied; must "
                    f"be trained without --{side_of_attention(name)}-xformers-att-config"
                )
            setattr(parent, child_name, _with_hooks(original, impl))


def _with_hooks(original: MultiheadAttention, impl: str) -> MixheadAttention:
    """Return an attention of the plugin that computes what fairseq's does in eval mode.

    --quant-noise-pq acts in training alone, so it is left out.
    """
    settings = {name: getattr(original, name) for name in SAME_SETTINGS}
    attention = MixheadAttention(
        dropout=original.dropout_module.p,
        bias=original.q_proj.bias is not None,
        add_bias_kv=original.bias_k is not None,
        impl=impl,
        **settings,
    )
    attention.load_state_dict(original.state_dict())
    return attention
