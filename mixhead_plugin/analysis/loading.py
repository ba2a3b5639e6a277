"""Brings the checkpoint of a plugin or stock architecture, and batches of its data, as fairseq-validate would."""

import argparse
import ast
import inspect
import itertools
import os
import re
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Dict, Iterator, Optional, Set, Tuple

import torch
from fairseq import checkpoint_utils, tasks, utils
from fairseq.criterions import FairseqCriterion
from fairseq.dataclass.utils import overwrite_args_by_name
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY, FairseqLanguageModel
from fairseq.modules import MultiheadAttention
from fairseq.tasks import FairseqTask
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import nn
from tqdm import tqdm

from mixhead_plugin.errors import OptionError
from mixhead_plugin.modules.attention import MixheadAttention
from mixhead_plugin.options import OPTION_NAMES, STOCK_MODEL, AttentionOptions, model_options

DEFAULT_MAX_TOKENS = 4096
SEED = 1


@dataclass(frozen=True)
class Loaded:
    """A trained model and what belongs to it."""

    model: nn.Module  # in eval mode, on `device`; all its attentions are MixheadAttention
    task: FairseqTask
    cfg: DictConfig  # the checkpoint's, with the overrides; cfg.model is that of the plugin's architecture
    name: str  # for legends
    path: str
    device: torch.device
    converted: bool  # whether the checkpoint is of a stock architecture

    @cached_property
    def criterion(self) -> FairseqCriterion:
        """The criterion that the model was trained with, in eval mode."""
        return self.task.build_criterion(self.cfg.criterion).eval().to(self.device)


def add_arguments(parser: ArgumentParser, several: bool = False, batching: bool = True) -> None:
    """The flags that all commands on checkpoints share.

    Args:
        parser: they are added to it
        several: take one or more checkpoints, `args.checkpoints`, instead of `args.checkpoint`
        batching: also those that say how large the batches are and how many
    """
    if several:
        parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help="fairseq checkpoints (.pt)")
    else:
        parser.add_argument("checkpoint", metavar="CHECKPOINT", help="fairseq checkpoint (.pt)")
    parser.add_argument("--data", metavar="DIR", help="binarised data (default: the folder that the checkpoint names)")
    parser.add_argument("--subset", default="valid", help="which set of it (default: %(default)s)")
    if batching:
        size = parser.add_mutually_exclusive_group()
        size.add_argument(
            "--max-tokens", type=positive, metavar="N", help=f"tokens in a batch (default: {DEFAULT_MAX_TOKENS})"
        )
        size.add_argument("--batch-size", type=positive, metavar="N", help="sentences in a batch, instead")
        parser.add_argument("--limit", type=positive, metavar="N", help="use N batches, drawn at random (default: all)")
    parser.add_argument("--cpu", action="store_true", help="compute on the CPU even where there is CUDA")
    parser.add_argument(
        "--model-overrides",
        type=overrides,
        default={},
        metavar="DICT",
        help="flags to change in the checkpoint, as fairseq-validate's: \"{'attention_impl': 'reference'}\"",
    )
    parser.add_argument("--user-dir", metavar="DIR", help="another plugin, if the checkpoint's task needs it")


def positive(text: str) -> int:
    """argparse's type of a whole number of at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number of at least 1")
    return int(text)


def overrides(text: str) -> Dict[str, Any]:
    """argparse's type of a dict in Python's notation; nothing in it is run."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        value = None
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise argparse.ArgumentTypeError(f"{text}: must be a dict like \"{{'attention_impl': 'reference'}}\"")
    return value


def load_from(args: Namespace, path: str, name: Optional[str] = None, data_flag: str = "--data") -> Loaded:
    """`load` with the flags of `add_arguments`; `data_flag` is what gave `args.data`."""
    if args.user_dir is not None:
        if not os.path.isdir(args.user_dir):
            raise OptionError(f"--user-dir {args.user_dir}: no such folder")
        utils.import_user_module(args)
    return load(path, data=args.data, overrides=args.model_overrides, cpu=args.cpu, name=name, data_flag=data_flag)


def batches_from(args: Namespace, loaded: Loaded, subset_flag: str = "--subset") -> Iterator[Dict[str, Any]]:
    """`batches` with the flags of `add_arguments`; `subset_flag` is what gave `args.subset`."""
    sizes = {"max_tokens": args.max_tokens, "batch_size": args.batch_size}
    return batches(loaded, args.subset, **sizes, limit=args.limit, subset_flag=subset_flag)


def load(
    path: str,
    data: Optional[str] = None,
    overrides: Optional[Dict[str, Any]] = None,
    cpu: bool = False,
    name: Optional[str] = None,
    data_flag: str = "--data",
) -> Loaded:
    """Load a checkpoint; one of a stock architecture into the plugin's of the same sizes, where it computes the same.

    Args:
        path: a file written by fairseq-train
        data: replaces the data folder that the checkpoint names
        overrides: replace other values of its config
        cpu: do not use CUDA
        name: for legends; by default made from the path
        data_flag: what a user gave `data` by

    Raises:
        OptionError: the file, its model, its task or its data folder cannot be used
    """
    state = _read(path)
    cfg = state["cfg"]
    _override(cfg, {**(overrides or {}), **({} if data is None else {"data": data})})
    _check_task(path, cfg, data, data_flag)
    task = _set_up(path, cfg, data, data_flag)
    converted = _to_plugin(path, cfg)
    state["args"] = None  # of an old checkpoint; `cfg` has them all
    try:
        (model,), cfg, task = checkpoint_utils.load_model_ensemble_and_task([path], task=task, state=state)
    except OptionError as error:
        raise OptionError(f"{path}: {error}") from error
    except Exception as error:  # whatever fairseq finds wrong with a config or with tensors
        cause = error.__cause__ or error
        sizes = _other_vocabulary(cause, task)
        if sizes is not None:
            blamed = _data_of(path, cfg, data, data_flag)
            raise OptionError(
                f"{blamed}: its dictionary has {sizes[1]} symbols, that of {path} has {sizes[0]}; must be the data "
                "that the model was trained on, or data prepared with its dictionaries"
            ) from error
        raise OptionError(f"{path}: its model cannot be built: {_first_line(cause)}") from error
    device = torch.device("cuda" if torch.cuda.is_available() and not cpu else "cpu")
    _replace_stock_attention(model)
    return Loaded(model.eval().to(device), task, cfg, name or _name(path), path, device, converted)


def batches(
    loaded: Loaded,
    subset: str = "valid",
    *,
    max_tokens: Optional[int] = None,
    batch_size: Optional[int] = None,
    limit: Optional[int] = None,
    shuffle: Optional[bool] = None,
    description: Optional[str] = None,
    bar: bool = True,
    subset_flag: str = "--subset",
) -> Iterator[Dict[str, Any]]:
    """The batches of a set on the model's device, with a progress bar on a terminal.

    Args:
        loaded: whose data, task and device
        subset: as the files are called: valid, test, ...
        max_tokens: in one batch; if there is no `batch_size` either 4096, or as many as the longest sentence has
        batch_size: sentences in one batch
        limit: as many batches at most
        shuffle: in random order, the same each time; by default if there is a limit, because fairseq sorts by length
            and the first batches are its shortest sentences. A task whose windows go on from each other keeps them so.
        description: left of the progress bar
        bar: whether to show one
        subset_flag: what a user gave `subset` by

    Raises:
        OptionError: there is no such set, nothing in it fits the model, or a sentence has more than `max_tokens`
    """
    dataset = load_subset(loaded, subset, subset_flag)
    max_positions = utils.resolve_max_positions(loaded.task.max_positions(), loaded.model.max_positions())
    in_random_order = shuffle if shuffle is not None else limit is not None

    def iterate(tokens: Optional[int]) -> Any:
        iterator = loaded.task.get_batch_iterator(
            dataset=dataset,
            max_tokens=tokens,
            max_sentences=batch_size,
            max_positions=max_positions,
            ignore_invalid_inputs=True,
            required_batch_size_multiple=1,  # otherwise fairseq leaves the last sentences out
            seed=SEED,
            num_workers=0,
            disable_iterator_cache=True,
        )
        return iterator.next_epoch_itr(shuffle=in_random_order)

    tokens = DEFAULT_MAX_TOKENS if max_tokens is None and batch_size is None else max_tokens
    try:
        iterator = iterate(tokens)
    except AssertionError as error:  # what fairseq says of a sentence that no batch can hold
        indices = loaded.task.filter_indices_by_size(dataset.ordered_indices(), dataset, max_positions, True)
        longest = max((int(dataset.num_tokens(i)) for i in indices), default=0)
        if tokens is None or longest <= tokens:
            raise
        if max_tokens is not None:
            raise OptionError(
                f"--max-tokens {max_tokens}: must be at least {longest}, the longest sentence or window of {subset}"
            ) from error
        iterator = iterate(longest)
    if len(iterator) == 0:
        raise OptionError(f"{subset_flag} {subset}: has no sentence that fits the model")
    number = len(iterator) if limit is None else min(limit, len(iterator))
    progress = tqdm(
        itertools.islice(iterator, number),
        total=number,
        desc=description or f"{loaded.name}: {subset}",
        unit="batch",
        disable=None if bar else True,  # None: where there is no terminal
        leave=False,
    )
    return (utils.move_to_cuda(b, loaded.device) if loaded.device.type == "cuda" else b for b in progress)


def load_subset(loaded: Loaded, subset: str, subset_flag: str = "--subset") -> Any:
    """The set as the task's dataset; `subset_flag` is what named it.

    Raises:
        OptionError: there is no such set
    """
    task = loaded.task
    if subset not in task.datasets:
        try:
            task.load_dataset(subset, combine=False, epoch=1, task_cfg=loaded.cfg.task)
        except (OSError, KeyError) as error:
            raise OptionError(f"{subset_flag} {subset}: not in {loaded.cfg.task.get('data')}") from error
    return task.dataset(subset)


def forward(loaded: Loaded, net_input: Dict[str, Any]) -> None:
    """Pass a batch through the model for what its attentions do, not for what it says.

    The projection to the vocabulary is left out, where the model can: it may take more memory than all the rest.
    """
    model = loaded.model
    called = model.decoder.forward if isinstance(model, FairseqLanguageModel) else model.forward
    settings = {"features_only": True} if "features_only" in inspect.signature(called).parameters else {}
    model(**net_input, **settings)


# ---- steps of `load` -------------------------------------------------------------------------------------------------


def _read(path: str) -> Dict[str, Any]:
    """Load the file by torch's safe loader, with the refusals of the repair `checkpoint_files`."""
    if not os.path.isfile(path):
        hint = "is a folder; give a file like checkpoint_best.pt in it" if os.path.isdir(path) else "no such file"
        raise OptionError(f"{path}: {hint}")
    state = checkpoint_utils.load_checkpoint_to_cpu(path)
    if not isinstance(state.get("cfg"), DictConfig) or not {"model", "task"} <= set(state["cfg"]):
        raise OptionError(f"{path}: not a checkpoint that fairseq-train wrote: no config of a model and a task")
    return state


def _override(cfg: DictConfig, values: Dict[str, Any]) -> None:
    known = _names(OmegaConf.to_container(cfg, resolve=False)) | set(OPTION_NAMES)
    for name in values:
        if name not in known:
            raise OptionError(f"--model-overrides {name}: no flag of this checkpoint")
    overwrite_args_by_name(cfg, values)
    model = cfg.model
    with open_dict(cfg):
        for name in set(values) & set(OPTION_NAMES):  # that a stock checkpoint lacks
            setattr(model, name, values[name])


def _names(config: Any) -> Set[str]:
    """Of all values in a plain config, at any depth."""
    values = vars(config) if isinstance(config, Namespace) else config
    return set(values).union(*map(_names, values.values())) if isinstance(values, dict) else set()


def _check_task(path: str, cfg: DictConfig, data: Optional[str], data_flag: str) -> None:
    name = cfg.task.get("_name") if isinstance(cfg.task, DictConfig) else getattr(cfg.task, "task", None)
    if name not in tasks.TASK_REGISTRY:
        raise OptionError(f"{path}: its task {name} is not known here; give the plugin that has it by --user-dir")
    folder = _folder(cfg)
    if isinstance(folder, str) and not os.path.isdir(folder.split(os.pathsep)[0]):
        if data is not None:
            raise OptionError(f"{data_flag} {data}: no such folder")
        raise OptionError(f"{path}: its data folder {folder} is not here; say by --data where it is")


def _folder(cfg: DictConfig) -> Any:
    return cfg.task.get("data") if isinstance(cfg.task, DictConfig) else getattr(cfg.task, "data", None)


def _data_of(path: str, cfg: DictConfig, data: Optional[str], data_flag: str) -> str:
    """What to call the data in a refusal."""
    return f"{data_flag} {data}" if data is not None else f"{path}: its data folder {_folder(cfg)}"


def _set_up(path: str, cfg: DictConfig, data: Optional[str], data_flag: str) -> FairseqTask:
    """The task, which reads the dictionaries."""
    try:
        return tasks.setup_task(cfg.task, from_checkpoint=True)
    except OptionError:
        raise
    except Exception as error:  # tasks raise anything
        blamed = _data_of(path, cfg, data, data_flag)
        raise OptionError(f"{blamed}: is not the data of this checkpoint's task: {_first_line(error)}") from error


def _other_vocabulary(error: BaseException, task: FairseqTask) -> Optional[Tuple[int, int]]:
    """The number of symbols in the checkpoint and in the data, if tensors do not fit because they differ."""
    try:
        given = {len(d) for d in (task.source_dictionary, task.target_dictionary) if d is not None}
    except NotImplementedError:  # a task of --user-dir without them
        return None
    pattern = r"shape torch\.Size\(\[(\d+)[^\n]*current model is torch\.Size\(\[(\d+)"
    for trained, here in re.findall(pattern, str(error)):
        if int(here) in given and trained != here:
            return int(trained), int(here)
    return None


def _to_plugin(path: str, cfg: DictConfig) -> bool:
    """Whether the model that `cfg` describes is a stock one; it then becomes the plugin's of the same sizes."""
    if model_options(cfg.model) not in (STOCK_MODEL, None):
        return False
    model = cfg.model
    arch = getattr(model, "arch", None) or getattr(model, "_name", None)
    counterpart = f"mixhead_{arch}"
    if counterpart not in ARCH_MODEL_REGISTRY and counterpart not in MODEL_REGISTRY:
        raise OptionError(f"{path}: its model {arch} has no counterpart in mixhead_plugin")
    with open_dict(cfg):
        for name in ("arch", "_name"):
            if getattr(model, name, None) is not None:
                setattr(model, name, counterpart)
        defaults = AttentionOptions()
        for name in OPTION_NAMES:
            if getattr(model, name, None) is None:
                setattr(model, name, getattr(defaults, name))
    return True


def _replace_stock_attention(model: nn.Module) -> None:
    """Make MixheadAttention also of what --attention-scope left to fairseq's own, so that it can be watched."""
    for parent in list(model.modules()):
        for name, stock in list(parent.named_children()):
            if isinstance(stock, MultiheadAttention) and not isinstance(stock, MixheadAttention):
                attention = MixheadAttention(
                    stock.embed_dim,
                    stock.num_heads,
                    kdim=stock.kdim,
                    vdim=stock.vdim,
                    dropout=stock.dropout_module.p,
                    bias=stock.q_proj.bias is not None,
                    add_bias_kv=stock.bias_k is not None,
                    add_zero_attn=stock.add_zero_attn,
                    self_attention=stock.self_attention,
                    encoder_decoder_attention=stock.encoder_decoder_attention,
                )
                attention.load_state_dict(stock.state_dict())
                setattr(parent, name, attention)


def _name(path: str) -> str:
    """What tells a checkpoint from others: its folder, if fairseq gave the file one of its usual names."""
    file = Path(path)
    folder = file.resolve().parent.name
    usual = file.stem in ("checkpoint_best", "checkpoint_last", "model")
    return folder if usual and folder else file.stem


def _first_line(error: BaseException) -> str:
    """The first lines of an error that say something, as one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:300] or type(error).__name__
