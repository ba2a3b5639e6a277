"""The few repairs that fairseq needs on current Python, torch and NumPy, each with its reason.

Those of the whole process are applied by `import mixhead_plugin`, those of one task or command line by the model that
needs them.
"""

import argparse
import collections
import contextlib
import functools
import logging
import math
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import types
import typing
import weakref
from importlib.util import find_spec
from traceback import print_exception
from types import TracebackType
from typing import Any, Dict, List, Optional, Tuple, Type

import numpy as np
import omegaconf
import torch
from fairseq import binarizer, checkpoint_utils, file_chunker_utils, models, options
from fairseq.data import dictionary, indexed_dataset, iterators
from fairseq.distributed import utils as distributed
from fairseq.file_io import PathManager
from fairseq.logging import metrics
from fairseq.nan_detector import NanDetector
from fairseq.optim.lr_scheduler import reduce_lr_on_plateau
from fairseq.trainer import Trainer

from mixhead_plugin import overrides, reporting, saving, untrusted
from mixhead_plugin.errors import CheckpointError, OptionError

logger = logging.getLogger(__name__)

TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")  # fairseq goes by them if all are there
SLURM = ("SLURM_JOB_NODELIST", "SLURM_NNODES", "SLURM_NTASKS_PER_NODE", "SLURM_NTASKS")


def allow_fairseq_checkpoints() -> None:
    """torch >= 2.6 loads tensors and plain containers only; name the other plain classes of fairseq's checkpoints.

    Loading stays safe: a checkpoint that carries code is refused as before.
    """
    if not hasattr(torch.serialization, "add_safe_globals"):  # torch < 2.4 has no such list
        return
    numpy_core = np._core if hasattr(np, "_core") else np.core
    torch.serialization.add_safe_globals(
        [
            argparse.Namespace,
            collections.defaultdict,
            typing.Any,
            dict,
            list,
            int,
            float,
            omegaconf.DictConfig,
            omegaconf.ListConfig,
            omegaconf.base.ContainerMetadata,
            omegaconf.base.Metadata,
            omegaconf.nodes.AnyNode,
            # the BLEU that --eval-bleu keeps with a checkpoint is a NumPy number
            numpy_core.multiarray.scalar,
            numpy_core.multiarray._reconstruct,
            np.ndarray,
            np.dtype,
            type(np.dtype(np.float64)),
            type(np.dtype(np.int64)),
            # what a checkpoint's tensors become while the first worker sends it to the others
            distributed._TensorPlaceholder,
        ]
    )


def restore_numpy_long() -> None:
    """fairseq's token blocks (--sample-break-mode eos) and length filters ask for np.compat.long, gone with NumPy 2."""
    if not hasattr(np, "compat"):
        np.compat = types.SimpleNamespace(long=int)


def train_in_bf16_without_tpu(args: argparse.Namespace) -> None:
    """fairseq takes --bf16 for a wish to train on a TPU and then looks for none but that; changes `args` in place."""
    if getattr(args, "bf16", False) and find_spec("torch_xla") is None:
        args.tpu = False


def report_option_errors_in_one_line() -> None:
    """fairseq's commands end every exception in a traceback; what a user got wrong deserves its one line instead.

    That is an OptionError, or, where a command of fairseq runs, one of `reporting.KNOWN`. What is unknown keeps its
    traceback, and MIXHEAD_TRACEBACK=1 shows that of everything.
    """
    previous = sys.excepthook

    def hook(kind: Type[BaseException], error: BaseException, traceback: Optional[TracebackType]) -> None:
        line = reporting.one_line(error, _is_command())
        if line is None or os.environ.get("MIXHEAD_TRACEBACK") == "1":
            previous(kind, error, traceback)
        if line is not None:
            print(f"{argparse.ArgumentParser().prog}: error: {line}", file=sys.stderr)

    sys.excepthook = hook


def _is_command() -> bool:
    """Whether this process is a command of fairseq or of the plugin, and not somebody's program that imports it."""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    return "fairseq_cli" in sys.modules or (main is not None and main.name.startswith("mixhead_plugin."))


def report_errors_of_hydra_jobs_in_one_line() -> None:
    """fairseq-hydra-train shows exceptions in hydra's way, parts of the traceback, and asks no `sys.excepthook`.

    HYDRA_FULL_ERROR=1 still shows the whole traceback, and the line after it. The exit status is 1 in every case.
    """
    from hydra.core import utils

    stock = getattr(utils.JobReturn, "return_value", None)
    if not isinstance(stock, property):  # hydra < 1.1, where a job raises by itself
        return

    def return_value(job: Any) -> Any:
        line = reporting.one_line(job._return_value) if job.status == utils.JobStatus.FAILED else None
        if line is None:
            return stock.fget(job)
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            print_exception(job._return_value)
        print(f"{argparse.ArgumentParser().prog}: error: {line}", file=sys.stderr)
        raise SystemExit(1)

    utils.JobReturn.return_value = property(return_value, stock.fset)


def evaluate_arithmetic_alone() -> None:
    """fairseq passes strings of flags, and so of a checkpoint's config, to eval(): no code, numbers and strings alone.

    A global of that name hides Python's own in every module of fairseq, all models, tasks and criteria among them.
    """

    def evaluate(text: Any, *scopes: Any) -> Any:
        if isinstance(text, (str, bytes)) and not untrusted.is_arithmetic(text):
            raise OptionError(f"{text!r}: must be of numbers and strings alone, such as [(512, 3)] * 2")
        return eval(text, {"__builtins__": {}}, {})

    for name, module in list(sys.modules.items()):
        if module is not None and (name == "fairseq" or name.startswith("fairseq.")):
            vars(module)["eval"] = evaluate


def check_checkpoints() -> None:
    """Refuse a checkpoint that cannot be right by its name; see `untrusted.load_checkpoint`."""
    checkpoint_utils.load_checkpoint_to_cpu = _around(
        checkpoint_utils.load_checkpoint_to_cpu, untrusted.load_checkpoint
    )


def check_model_overrides() -> None:
    """fairseq finds out from the checkpoint, whose fault it then seems to be, or not at all."""

    def parse(stock: Any, *args: Any, **settings: Any) -> Any:
        parsed = stock(*args, **settings)
        flags = parsed[0] if isinstance(parsed, tuple) else parsed
        # fairseq-validate parses its flags twice, the second time without defaults
        if hasattr(flags, "model_overrides") and hasattr(flags, "path"):
            of_models = [flags.path, getattr(flags, "lm_path", None)]
            overrides.check(flags.model_overrides, [p for given in of_models if given for p in given.split(os.pathsep)])
        return parsed

    options.parse_args_and_arch = _around(options.parse_args_and_arch, parse)


def check_model_is_known() -> None:
    """fairseq's words on a model that nobody has registered fail themselves, over the braces of its config.

    It is a checkpoint's, or, where none was read, that of fairseq-hydra-train's user.
    """

    def build_model(stock: Any, cfg: Any, *args: Any, **settings: Any) -> Any:
        name = getattr(cfg, "_name", None) or getattr(cfg, "arch", None)
        if name and name not in models.ARCH_MODEL_REGISTRY and name not in models.MODEL_DATACLASS_REGISTRY:
            valid = "must be one that fairseq or --user-dir registers"
            if untrusted.last_checkpoint is None:
                raise OptionError(f"model._name {name} (--arch): is not known here; {valid}")
            raise CheckpointError(f"its model {name} is not known here; {valid}")
        return stock(cfg, *args, **settings)

    models.build_model = _around(models.build_model, build_model)


def check_checkpoint_is_there() -> None:
    """fairseq-train takes a --restore-file that is not there for the wish to start from random weights."""

    def load_checkpoint(stock: Any, cfg: Any, trainer: Any, **settings: Any) -> Any:
        suffix = getattr(trainer, "checkpoint_suffix", None) or ""
        last = os.path.join(cfg.save_dir, f"checkpoint_last{suffix}.pt")
        for flag in ("restore_file", "finetune_from_model"):
            path = getattr(cfg, flag, None)
            if path is None or path == "checkpoint_last.pt" or "://" in path:
                continue
            if flag == "finetune_from_model" and os.path.isfile(last):  # not its turn any more
                continue
            if os.path.abspath(path) == os.path.abspath(last):  # of a job that is started again and again
                continue
            if not any(os.path.isfile(name) for name in (path, path.replace(".pt", f"{suffix}.pt"))):
                what = "is a folder" if os.path.isdir(path) else "no such file"
                raise OptionError(f"--{flag.replace('_', '-')} {path}: {what}; must be a checkpoint")
        if os.path.isdir(last):
            raise OptionError(f"{last}: is a folder; must be a checkpoint, or not there")
        return stock(cfg, trainer, **settings)

    checkpoint_utils.load_checkpoint = _around(checkpoint_utils.load_checkpoint, load_checkpoint)


def check_dictionaries() -> None:
    """fairseq names neither the file nor the line, and takes an empty dictionary and counts below 0."""
    dictionary.Dictionary.add_from_file = _around(dictionary.Dictionary.add_from_file, untrusted.load_dictionary)


def check_binarised_data() -> None:
    """fairseq computes with data whose files do not belong together until a batch needs what is not there."""

    def make_dataset(stock: Any, path: str, impl: str, *args: Any, **settings: Any) -> Any:
        words = settings.get("dictionary", args[1] if len(args) > 1 else None)
        if impl != "raw":
            untrusted.check_binarised(path, None if words is None else len(words))
        return stock(path, impl, *args, **settings)

    indexed_dataset.make_dataset = _around(indexed_dataset.make_dataset, make_dataset)


def name_text_that_is_not_utf8() -> None:
    """fairseq-preprocess tells the byte's place in a buffer, or of a 'negative seek position', but not the file."""

    def close(stock: Any, chunk: Any, kind: Any, error: Any, traceback: Any) -> Any:
        stock(chunk, kind, error, traceback)
        if isinstance(error, UnicodeDecodeError) or "negative seek" in str(error):
            raise OptionError(f"{chunk.path}: is not UTF-8") from None

    def find_offsets(stock: Any, path: str, number: int) -> List[int]:
        try:
            return stock(path, number)
        except ValueError:  # of a byte, or the search for the beginning of its character that leaves the file
            raise OptionError(f"{path}: is not UTF-8") from None

    file_chunker_utils.Chunker.__exit__ = _around(file_chunker_utils.Chunker.__exit__, close)
    for module in (dictionary, binarizer):
        module.find_offsets = _around(module.find_offsets, find_offsets)


def write_whole_checkpoints() -> None:
    """A killed or failed fairseq-train must not leave part of a file under the name of a checkpoint.

    fairseq copies each checkpoint onto checkpoint_best.pt and checkpoint_last.pt, of which a kill in the midst leaves
    part; what it writes itself it renames before it is on the disk, after an error with the rest of the first attempt
    in front.
    """

    def save(stock: Any, state: Any, filename: str, async_write: bool = False) -> None:
        if async_write or not PathManager.supports_rename(filename):
            stock(state, filename, async_write=async_write)
        else:
            saving.save(state, filename)

    def copy(stock: Any, source: str, target: str, overwrite: bool = False) -> Any:
        if any(PathManager.path_requires_pathmanager(path) for path in (source, target)):
            return stock(source, target, overwrite)
        saving.copy(source, target)
        return target

    def save_checkpoint(stock: Any, cfg: Any, *args: Any, **settings: Any) -> Any:
        try:
            return stock(cfg, *args, **settings)
        except OSError as error:  # of the folder: it is gone and cannot be made, or an old checkpoint not removed
            if error.filename is None or not os.path.abspath(error.filename).startswith(os.path.abspath(cfg.save_dir)):
                raise
            raise OptionError(f"--save-dir {cfg.save_dir}: {error.filename}: {error.strerror}") from error

    checkpoint_utils.torch_persistent_save = _around(checkpoint_utils.torch_persistent_save, save)
    checkpoint_utils.save_checkpoint = _around(checkpoint_utils.save_checkpoint, save_checkpoint)
    PathManager.copy = staticmethod(_around(PathManager.copy, copy))


def check_save_dir() -> None:
    """fairseq shows a folder that cannot be written to as a traceback, and removes a user's file named `dummy`."""

    def verify(stock: Any, save_dir: str) -> None:
        saving.check_folder(save_dir)

    checkpoint_utils.verify_checkpoint_directory = _around(checkpoint_utils.verify_checkpoint_directory, verify)


def name_checkpoints_to_go_on_from() -> None:
    """Of a training whose checkpoint does not load, or is not there although others are."""

    def load_checkpoint(stock: Any, trainer: Any, filename: str, *args: Any, **settings: Any) -> Any:
        saves = trainer.data_parallel_rank == 0
        if saves and os.path.dirname(filename) == trainer.cfg.checkpoint.save_dir.rstrip("/"):
            saving.warn_of_a_new_start(filename)
        try:
            return stock(trainer, filename, *args, **settings)
        except CheckpointError:  # of another model
            raise
        except OptionError as error:
            raise saving.name_another(filename, error) from error

    Trainer.load_checkpoint = _around(Trainer.load_checkpoint, load_checkpoint)


def resume_with_the_same_batches() -> None:
    """fairseq makes the batches of all epochs in the first one that a process sees, seeded by its number.

    A training resumed in a later epoch had other batches than before, and the place in them that was reached in the
    old ones: sentences of the epoch were seen twice or not at all. Now it makes those of the first epoch, too.
    """

    def get_train_iterator(stock: Any, trainer: Any, epoch: int, *args: Any, **settings: Any) -> Any:
        # data in shards are loaded for each epoch, and some tasks make batches for each
        anew = settings.get("disable_iterator_cache") or getattr(trainer.task.cfg, "rebuild_batches", False)
        anew = anew or trainer.cfg.dataset.update_epoch_batch_itr
        if epoch > 1 and not args and not anew and settings.get("load_dataset", True):
            stock(trainer, 1, **settings)
            settings["load_dataset"] = False
        return stock(trainer, epoch, *args, **settings)

    Trainer.get_train_iterator = _around(Trainer.get_train_iterator, get_train_iterator)


def tell_data_workers_the_epoch() -> None:
    """fairseq's data workers (--num-workers) keep a copy of the data set as it was in their first epoch.

    So masked_lm masked the same words in every epoch, and others in a training that was resumed.
    """

    def next_epoch_itr(stock: Any, epochs: Any, *args: Any, set_dataset_epoch: bool = True, **settings: Any) -> Any:
        if set_dataset_epoch and epochs.next_epoch_idx != epochs.epoch:
            epochs.dataloader = None  # a new one has new workers
        return stock(epochs, *args, set_dataset_epoch=set_dataset_epoch, **settings)

    iterators.EpochBatchIterator.next_epoch_itr = _around(iterators.EpochBatchIterator.next_epoch_itr, next_epoch_itr)


def resume_at_the_end_of_an_epoch() -> None:
    """What fairseq does or has counted after it has saved a checkpoint, or forgets when it loads one.

    - The loss of the validation goes to the learning-rate schedule after the checkpoint of an epoch is saved, and
      reduce_lr_on_plateau saves not how many losses in a row were bad.
    - --patience starts to count anew.
    - The mean of losses over --log-interval updates that has begun before the end of an epoch.
    - One more update is made of a training that has reached its --max-update, each time that it is started again; and
      an epoch of one that --patience has ended.
    """

    def save_checkpoint(stock: Any, trainer: Any, filename: str, extra_state: Dict[str, Any]) -> Any:
        counted = {k: v for k, v in vars(_should_stop_early()).items() if k in ("best", "num_runs")}
        return stock(trainer, filename, {**extra_state, "early_stop": counted} if counted else extra_state)

    def load_checkpoint(stock: Any, cfg: Any, trainer: Any, **settings: Any) -> Any:
        state, epochs = stock(cfg, trainer, **settings)
        if not isinstance(trainer, Trainer):  # of another program, with loops of its own
            return state, epochs
        if state is None or trainer.get_num_updates() == 0 or cfg.reset_dataloader:  # begins as a new training
            return state, epochs
        place = state["train_iterator"]
        if place["iterations_in_epoch"] == 0 and place["epoch"] > 1 and not cfg.reset_lr_scheduler:
            trainer.lr_step(place["epoch"] - 1)  # the number that reduce_lr_on_plateau counts on from
            trainer.lr_step(place["epoch"] - 1, state.get("val_loss"))
        if place["iterations_in_epoch"] == 0 and "train_inner" in state.get("metrics", {}) and not cfg.reset_meters:
            metrics.load_state_dict({"train_inner": state["metrics"]["train_inner"]})
        if not cfg.reset_meters:
            vars(_should_stop_early()).update(state.get("early_stop", {}))
        limit, patience = trainer.cfg.optimization.max_update, cfg.patience
        hours = trainer.cfg.optimization.stop_time_hours
        if 0 < limit <= trainer.get_num_updates():
            reason = f"--max-update {limit} is reached"
        elif 0 < patience <= getattr(_should_stop_early(), "num_runs", 0):
            reason = f"--patience {patience} is used up"
        elif 0 < hours < trainer.cumulative_training_time() / 3600:
            reason = f"--stop-time-hours {hours} are over"
        else:
            return state, epochs
        logger.info(f"nothing to train: {reason}")
        trainer.cfg.optimization.max_epoch = -1  # fairseq asks for it after the checkpoint is loaded
        return state, epochs

    def plateau_state(stock: Any, schedule: Any) -> Dict[str, Any]:
        counted = schedule.lr_scheduler
        return {**stock(schedule), "bad": counted.num_bad_epochs, "cooldown": counted.cooldown_counter}

    def load_plateau_state(stock: Any, schedule: Any, state: Dict[str, Any]) -> None:
        stock(schedule, state)
        schedule.lr_scheduler.num_bad_epochs = state.get("bad", 0)
        schedule.lr_scheduler.cooldown_counter = state.get("cooldown", 0)

    Trainer.save_checkpoint = _around(Trainer.save_checkpoint, save_checkpoint)
    checkpoint_utils.load_checkpoint = _around(checkpoint_utils.load_checkpoint, load_checkpoint)
    plateau = reduce_lr_on_plateau.ReduceLROnPlateauLRSchedule
    plateau.state_dict = _around(plateau.state_dict, plateau_state)
    plateau.load_state_dict = _around(plateau.load_state_dict, load_plateau_state)


def _should_stop_early() -> Any:
    """fairseq's function that counts for --patience, in its attributes; of a command that trains."""
    modules = (sys.modules.get(name) for name in ("__main__", "fairseq_cli.train"))  # `python -m` has the first alone
    found = (getattr(module, "should_stop_early", None) for module in modules)
    return next((function for function in found if function is not None), types.SimpleNamespace())


def refuse_to_start_no_worker() -> None:
    """fairseq starts a worker for each GPU: without one it ends at once, its exit status 0 and nothing trained.

    Of a worker that torchrun has started it divides the number by that of GPUs; without them it needs no device.
    """

    def call_main(stock: Any, cfg: Any, main: Any, **settings: Any) -> None:
        workers = cfg.distributed_training
        if workers.distributed_world_size > 1 and not cfg.common.tpu and torch.cuda.device_count() == 0:
            _start_without_gpus(workers)
        stock(cfg, main, **settings)

    distributed.call_main = _around(distributed.call_main, call_main)


def _start_without_gpus(workers: Any) -> None:
    """Set in `workers`, the config of distributed training, what torchrun or Slurm say of this one.

    Raises:
        OptionError: neither has started it, nor its user
    """
    number = workers.distributed_world_size
    if workers.distributed_init_method is None:
        if all(name in os.environ for name in TORCHRUN):
            rank, number = _number("RANK", least=0), _number("WORLD_SIZE", least=1)
            if rank >= number:
                raise OptionError(f"RANK {rank}: must be below WORLD_SIZE {number}")
            workers.distributed_init_method, workers.distributed_no_spawn = "env://", True
            workers.distributed_world_size, workers.distributed_rank = number, rank
        elif workers.distributed_port > 0:  # without which fairseq does not ask Slurm
            try:
                distributed._infer_slurm_init(workers, None)
            except (AssertionError, TypeError, ValueError, subprocess.CalledProcessError) as error:
                said = ", ".join(f"{name} {os.environ[name]}" for name in SLURM if name in os.environ)
                raise OptionError(
                    f"--distributed-world-size {number}: does not fit what Slurm says ({said}); must be nodes x tasks "
                    "per node"
                ) from error
    if workers.distributed_init_method is None or not workers.distributed_no_spawn:
        missing = [name for name in TORCHRUN if name not in os.environ]
        some = len(missing) < len(TORCHRUN) and workers.distributed_init_method is None
        raise OptionError(
            f"--distributed-world-size {number}: no GPU to start a worker for; without GPUs start each by torchrun"
            f"{' (not set: ' + ', '.join(missing) + ')' if some else ''}, or by --distributed-no-spawn "
            "--distributed-rank --distributed-init-method tcp://HOST:PORT (with --distributed-backend gloo)"
        )
    if workers.distributed_backend == "nccl":
        raise OptionError("--distributed-backend nccl: needs GPUs; must be gloo without them")


def _number(name: str, least: int) -> int:
    """Of a variable of the environment."""
    text = os.environ[name]
    if not text.isdecimal() or int(text) < least:
        raise OptionError(f"{name} {text!r}: must be a number of at least {least}")
    return int(text)


def refuse_to_train_apart() -> None:
    """fairseq asks torchrun's variables only if --distributed-world-size, the GPUs of one machine, is more than 1.

    With one GPU on each machine, or none, every worker trained alone, all into the same --save-dir.
    """

    def call_main(stock: Any, cfg: Any, main: Any, **settings: Any) -> None:
        workers = cfg.distributed_training
        alone = workers.distributed_world_size == 1 and workers.distributed_init_method is None
        trains = cfg.common_eval.path is None  # what is trained; several may well evaluate it
        if alone and trains and all(name in os.environ for name in TORCHRUN) and _number("WORLD_SIZE", least=1) > 1:
            number = os.environ["WORLD_SIZE"]
            raise OptionError(
                f"--distributed-world-size 1: torchrun has started {number} workers (WORLD_SIZE), each of which would "
                f"train alone into --save-dir {cfg.checkpoint.save_dir}; must be {number}, or RANK and WORLD_SIZE not "
                "be set"
            )
        stock(cfg, main, **settings)

    distributed.call_main = _around(distributed.call_main, call_main)


def refuse_to_write_asynchronously_without_iopath() -> None:
    """fairseq logs that the package is missing, and ends with the exit status 0 and nothing trained."""

    def call_main(stock: Any, cfg: Any, main: Any, **settings: Any) -> None:
        if cfg.checkpoint.write_checkpoints_asynchronously and find_spec("iopath") is None:
            raise OptionError("--write-checkpoints-asynchronously: needs the package iopath, or must be left out")
        stock(cfg, main, **settings)

    distributed.call_main = _around(distributed.call_main, call_main)


def refuse_to_save_a_diverged_model() -> None:
    """fairseq looks for NaN in the gradients, before a step; what the step has made of the parameters it would save.

    And where the loss of a validation was NaN nothing would ever count as better: no more checkpoint_best.pt.
    Sharded models (--ddp-backend fully_sharded) are saved without that look at their parameters and that loss.
    """

    def save_checkpoint(stock: Any, cfg: Any, trainer: Any, epochs: Any, loss: Optional[float]) -> Any:
        # of sharded parameters each worker sees its own, and would leave the others waiting
        if cfg.no_save or trainer.is_fsdp:
            return stock(cfg, trainer, epochs, loss)
        tensors = trainer.model.state_dict().items()  # what would be refused when it is loaded
        bad = next((name for name, tensor in tensors if untrusted.is_bad(name, tensor)), None)
        if bad is not None:
            raise OptionError(
                f"the model has NaN or infinite parameters after update {trainer.get_num_updates()}, the first is "
                f"{bad}, and is not saved; a smaller --lr or --clip-norm may help"
                f"{saving.advice(os.path.join(cfg.save_dir, 'checkpoint_last.pt'))}"
            )
        if loss is not None and math.isnan(loss):
            logger.warning(f"--best-checkpoint-metric {cfg.best_checkpoint_metric}: is NaN, which is not the best")
            loss = None
        return stock(cfg, trainer, epochs, loss)

    checkpoint_utils.save_checkpoint = _around(checkpoint_utils.save_checkpoint, save_checkpoint)


def find_nan_in_models_of_dicts() -> None:
    """fairseq's search for the module that gave the first NaN fails itself where one returns a dict, as encoders do.

    torch's hook on the gradients of a module takes no dict of lists. It ended in a StopIteration, of which nobody could
    tell that gradients were NaN; here the hooks are on the tensors.
    """

    def add_hooks(stock: Any, detector: NanDetector, module: torch.nn.Module) -> None:
        stock(detector, module)
        if detector.backward:
            detector.bhooks.pop().remove()
            detector.bhooks.append(module.register_forward_hook(functools.partial(watch, detector)))

    def watch(detector: NanDetector, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            if output.requires_grad:
                output.register_hook(lambda gradient: detector.bhook_fn(module, None, gradient))
        elif isinstance(output, (dict, list, tuple)):
            for part in output.values() if isinstance(output, dict) else output:
                watch(detector, module, inputs, part)

    NanDetector.add_hooks = _around(NanDetector.add_hooks, add_hooks)


class _Abandoned(BaseException):
    """No Exception, which fairseq's thread would put into its queue."""


class _Abandonable(queue.Queue):
    """Ends the thread that fills it once nobody takes anything more."""

    abandoned = False

    def put(self, item: Any, block: bool = True, timeout: Optional[float] = None) -> None:
        with self.not_full:
            while not self.abandoned and self._qsize() >= self.maxsize > 0:
                self.not_full.wait()
            if self.abandoned:
                raise _Abandoned
            self._put(item)
            self.unfinished_tasks += 1
            self.not_empty.notify()

    def abandon(self) -> None:
        with self.not_full:
            self.abandoned = True
            self.queue.clear()
            # for who comes back to it
            self.queue.append(RuntimeError("this validation was given up when the next one began"))
            self.not_full.notify_all()
            self.not_empty.notify_all()


def stop_reading_ahead_where_validation_stops() -> None:
    """fairseq's thread that reads ahead waits for ever where --max-valid-steps ends a validation before the set ends.

    Each such validation left a thread, its data workers and some 40 open files behind, until the system gives no more.
    """

    def create_consumer(stock: Any, buffered: Any) -> None:
        buffered._queue = _Abandonable(buffered._queue.maxsize)
        weakref.finalize(buffered, buffered._queue.abandon).atexit = False
        stock(buffered)

    def get_valid_iterator(stock: Any, trainer: Any, *args: Any, **settings: Any) -> Any:
        # The validation before is over. What it read from is not collected: the thread has the data loader, which may
        # lead back to it.
        last = getattr(getattr(trainer, "_validated", None), "_cur_epoch_itr", None)
        waiting = getattr(getattr(last, "_itr", None), "_queue", None)
        if isinstance(waiting, _Abandonable):
            waiting.abandon()
        trainer._validated = stock(trainer, *args, **settings)
        return trainer._validated

    def read(stock: Any, thread: Any) -> None:
        with contextlib.suppress(_Abandoned):
            stock(thread)

    buffered = iterators.BufferedIterator
    iterators.BackgroundConsumer.run = _around(iterators.BackgroundConsumer.run, read)
    buffered._create_consumer = _around(buffered._create_consumer, create_consumer)
    Trainer.get_valid_iterator = _around(Trainer.get_valid_iterator, get_valid_iterator)


def end_with_the_parent() -> None:
    """torch has the system send SIGINT to the workers of a parent that is gone; a shell's `&` has them ignore it.

    They went on without it, wrote checkpoints and kept the GPUs.
    """
    in_worker = multiprocessing.parent_process() is not None and torch.distributed.is_initialized()
    if in_worker and signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _around(stock: Any, function: Any) -> Any:
    """`function` in the place of `stock`, which it gets as its first argument."""

    @functools.wraps(stock)
    def checked(*args: Any, **settings: Any) -> Any:
        return function(stock, *args, **settings)

    return checked


def set_up_from_checkpoints(task: Type[Any]) -> None:
    """Let fairseq-validate set up truncated_bptt_lm, given as `task`: its class takes no `from_checkpoint`.

    A checkpoint also has the worker and number of workers of its training, which are not those of the validation.
    """

    def setup_task(cls: Type[Any], cfg: Any, from_checkpoint: bool = False, **kwargs: Any) -> Any:
        if from_checkpoint:
            cfg.data_parallel_rank = cfg.data_parallel_size = None  # found out by the task
        return cls(cfg, **kwargs)

    task.setup_task = classmethod(setup_task)


class _NumberedWindows:
    """Collates a window of text as the task does, and lets the model know which one it is."""

    def __init__(self, collate: Any):
        self.collate = collate

    def __call__(self, items: List[Tuple[int, List[torch.Tensor]]]) -> Dict[str, Any]:
        sample = self.collate(items)
        ((number, rows),) = items
        # fairseq-interactive asks for the lengths
        sample["net_input"].update(window=int(number), src_lengths=torch.tensor([len(row) for row in rows]))
        return sample


def number_windows(task: Any) -> None:
    """Let batches of this one task say in `net_input` which window of its text they are.

    fairseq's truncated_bptt_lm has that number beside `net_input` alone, where no model sees it. A model with a memory
    could not know where a text begins: the memory of one epoch, or set, would go on into the next.
    """
    if isinstance(task._collate_fn, _NumberedWindows):  # several models may share a task
        return
    task._collate_fn = _NumberedWindows(task._collate_fn)
    stock = task.eval_lm_dataloader

    def eval_lm_dataloader(dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """Refuses what fairseq-eval-lm takes for a perplexity of 1: a text of fewer windows than rows."""
        if len(dataset) == 0:
            raise OptionError(
                f"--batch-size {task.cfg.batch_size}: the text has {len(dataset.data)} windows of --tokens-per-sample "
                f"{task.cfg.tokens_per_sample} and each row needs one; must be at most as many"
            )
        left_out = len(dataset.data) - len(dataset) * task.cfg.batch_size
        if left_out:
            logger.warning(f"the last {left_out} windows fill no row and are left out; --batch-size 1 takes all")
        return stock(dataset, *args, **kwargs)

    task.eval_lm_dataloader = eval_lm_dataloader


def refuse_longer_inputs(task: Any, max_length: int) -> None:
    """Let fairseq-eval-lm refuse what is too long: it would leave it out of the perplexity, with a warning.

    Blocks of 1024 tokens are its default. Nothing else calls this method of the task.
    """
    stock = getattr(task, "eval_lm_dataloader", None)
    if stock is None:
        return

    def eval_lm_dataloader(dataset: Any, *args: Any, **kwargs: Any) -> Any:
        longest = int(np.max(dataset.sizes)) + bool(getattr(task.args, "add_bos_token", False))
        if longest > max_length:
            raise OptionError(
                f"--tokens-per-sample {task.args.tokens_per_sample}: the data have an input of {longest} tokens, the "
                f"--synthesizer has scores for {max_length}; use at most as many, and no --sample-break-mode eos if "
                "sentences are longer"
            )
        return stock(dataset, *args, **kwargs)

    task.eval_lm_dataloader = eval_lm_dataloader


def apply() -> None:
    allow_fairseq_checkpoints()
    restore_numpy_long()
    report_option_errors_in_one_line()
    report_errors_of_hydra_jobs_in_one_line()
    evaluate_arithmetic_alone()
    check_checkpoints()
    check_checkpoint_is_there()
    check_model_overrides()
    check_model_is_known()
    check_dictionaries()
    check_binarised_data()
    name_text_that_is_not_utf8()
    write_whole_checkpoints()
    check_save_dir()
    name_checkpoints_to_go_on_from()
    resume_with_the_same_batches()
    tell_data_workers_the_epoch()
    resume_at_the_end_of_an_epoch()
    refuse_to_start_no_worker()
    refuse_to_train_apart()
    refuse_to_write_asynchronously_without_iopath()
    end_with_the_parent()
    refuse_to_save_a_diverged_model()
    find_nan_in_models_of_dicts()
    stop_reading_ahead_where_validation_stops()
