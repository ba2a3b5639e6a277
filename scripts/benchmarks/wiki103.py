"""The training step of WikiText-103 with adaptive inputs, `transformer_lm_wiki103`, by fairseq's own trainer.

What fairseq-train does for one update, on a batch that stays: forward and backward pass, adaptive loss, gradients
clipped, Nesterov's momentum on parameters in float32. Words are drawn as Zipf has it, for the adaptive softmax is fast
where they are frequent.
"""

import copy
import shlex
import tempfile
import warnings
from argparse import Namespace
from typing import Any, Dict, Iterator, List, Tuple

import torch
from torch import Tensor

from benchmarks.cases import FAILED, Contender, Level, Row, Shape, one_line, triton_problem, unmeasured
from benchmarks.checks import Wrong
from benchmarks.measuring import measure, rows_of
from benchmarks.modules import shake

ARCH = "transformer_lm_wiki103"
MIXED = "--head-mixing position-independent"
VARIANTS = {
    "fairseq": "",
    "mixhead_plugin: Mixhead B, triton": "--attention-impl triton",
    "mixhead_plugin: Mixhead A, triton": f"{MIXED} --attention-impl triton",
    "mixhead_plugin: Mixhead B": "",
    "mixhead_plugin: Mixhead A": MIXED,
}
_RECIPE = (
    "--task language_modeling --criterion adaptive_loss --ddp-backend legacy_ddp --optimizer nag --clip-norm 0.1 "
    "--lr 0.0001 --lr-scheduler fixed"
)
_ATTEMPTS = 20  # to find the scale of the loss in float16


def config_of(name: str, options: Namespace, dtype: str, folder: str) -> Any:
    from fairseq import options as fairseq_options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    import mixhead_plugin  # noqa: F401  (registers the architectures)

    arch = ARCH if name == "fairseq" else f"mixhead_{ARCH}"
    folder = shlex.quote(folder)
    flags = f"{folder} --save-dir {folder} --tokens-per-sample {options.step_tokens}"
    flags = f"{flags} --arch {arch} {_RECIPE} {VARIANTS[name]} {options.step_flags}"
    parser = fairseq_options.get_training_parser()
    args = fairseq_options.parse_args_and_arch(parser, shlex.split(flags))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Hydra's, of what fairseq does
        cfg = convert_namespace_to_omegaconf(args)
    # Not by flags: on the command line --bf16 means a TPU to fairseq.
    cfg.common.fp16, cfg.common.bf16 = dtype == "float16", dtype == "bfloat16"
    cfg.common.cpu = options.device == "cpu"
    return cfg


def task_of(cfg: Any, n_words: int) -> Any:
    from fairseq.data import Dictionary
    from fairseq.tasks.language_modeling import LanguageModelingTask

    words = Dictionary()
    for i in range(n_words - len(words)):
        words.add_symbol(f"w{i}")
    return LanguageModelingTask(cfg.task, words)


def batch_of(task: Any, sentences: int, length: int) -> Dict[str, Any]:
    first = task.dictionary.nspecial
    ranks = torch.arange(1, len(task.dictionary) - first + 1, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    drawn = torch.multinomial(1 / ranks, sentences * (length + 1), replacement=True, generator=generator)
    words = first + drawn.view(sentences, length + 1)
    return {
        "id": torch.arange(sentences),
        "nsentences": sentences,
        "ntokens": sentences * length,
        "net_input": {
            "src_tokens": words[:, :-1].contiguous(),
            "src_lengths": torch.full((sentences,), length),
        },
        "target": words[:, 1:].contiguous(),
    }


def _problem(name: str, device: str, dtype: str) -> str:
    if device == "cpu" and dtype == "float16":
        return "fairseq trains in float16 on a GPU alone"
    return triton_problem(device) if name.endswith(", triton") else ""


def trainings(options: Namespace, dtype: str, folder: str) -> Tuple[Level, Shape]:
    """An update by each variant in that dtype, and the sizes of its attention"""
    from fairseq.trainer import Trainer

    warnings.filterwarnings("ignore", ".*torch.cuda.amp", FutureWarning)  # fairseq calls it at every step
    stock = config_of("fairseq", options, dtype, folder)
    heads = stock.model.decoder_attention_heads
    shape = Shape(options.step_batch, heads, options.step_tokens, stock.model.decoder_embed_dim // heads)
    contenders, reasons = {}, {}
    for name in VARIANTS:
        if reason := _problem(name, options.device, dtype):
            reasons[name] = reason
            continue
        cfg = stock if name == "fairseq" else config_of(name, options, dtype, folder)
        torch.manual_seed(1)
        try:
            task = task_of(cfg, options.vocabulary)
            model, criterion = task.build_model(cfg.model), task.build_criterion(cfg.criterion)
            shake(model)
            if name != "fairseq":
                check(name, model, criterion, batch_of(task, 1, options.step_tokens), options.device, dtype)
            trainer = Trainer(cfg, task, model, criterion)
            contender = _contender(name, trainer, batch_of(task, options.step_batch, options.step_tokens))
            contenders[name] = contender
        except Wrong as error:
            reasons[name] = FAILED + str(error)
        except torch.OutOfMemoryError as error:
            reasons[name] = one_line(error)
        model = criterion = trainer = None
        if options.device == "cuda":
            torch.cuda.empty_cache()  # of what the check needed, or of what failed
    return Level(contenders, reasons), shape


def _contender(name: str, trainer: Any, batch: Dict[str, Any]) -> Contender:
    def updates() -> bool:
        """Whether there was an update: where gradients overflow in float16, there is none"""
        before = trainer.get_num_updates()
        trainer.train_step([batch], raise_oom=True)
        return trainer.get_num_updates() > before

    def full() -> None:
        if not updates():
            raise Wrong(f"{name}: a training step had no update, its gradients overflowed; its time says nothing")

    in_a_row = 0
    for _ in range(_ATTEMPTS):
        in_a_row = in_a_row + 1 if updates() else 0
        if in_a_row == 2:
            return Contender(full)
    raise Wrong(f"{name}: no two updates in a row in {_ATTEMPTS} steps, its gradients overflow; nothing is timed")


def check(name: str, model: torch.nn.Module, criterion: Any, sample: Dict[str, Any], device: str, dtype: str) -> None:
    """Loss and gradients of one sentence: against `reference` in float32, at most twice the error of `reference` in the
    same dtype, as lengths of vectors, and rounding."""
    from fairseq import utils

    from mixhead_plugin.modules.attention import MixheadAttention

    if device == "cuda":
        sample = utils.move_to_cuda(sample)

    def found(impl: str, dtype: torch.dtype) -> List[Tensor]:
        # a copy: rounding to a smaller dtype cannot be taken back
        of_dtype = copy.deepcopy(model).to(device, dtype).eval()
        for module in of_dtype.modules():
            if isinstance(module, MixheadAttention):
                module.impl = impl
        loss, *_ = criterion(of_dtype, sample)
        # a band of the vocabulary may have no word in the sentence
        gradients = torch.autograd.grad(loss, list(of_dtype.parameters()), allow_unused=True, materialize_grads=True)
        return [loss.detach().float(), torch.cat([gradient.flatten() for gradient in gradients]).float()]

    (chosen,) = {module.impl for module in model.modules() if isinstance(module, MixheadAttention)}
    exact = found("reference", torch.float32)
    own = getattr(torch, dtype)
    got, formula = found(chosen, own), found("reference", own)
    for part, value, by_formula, right in zip(("loss", "gradient of the parameters"), got, formula, exact):
        error, allowed = (value - right).norm(), 2 * (by_formula - right).norm() + torch.finfo(own).eps * right.norm()
        if own == torch.float32:  # what it is compared to is no better
            allowed = 1e-3 * right.norm()
        if not error <= allowed:
            raise Wrong(f"{name}: {part} is wrong by {error:.2g}, {allowed:.2g} is allowed; nothing is timed")


def tables(options: Namespace) -> Iterator[List[Row]]:
    for dtype in options.step_dtypes:
        with tempfile.TemporaryDirectory() as folder:  # where fairseq would leave what it has when it crashes
            (contenders, reasons), shape = trainings(options, dtype, folder)
            times = measure(contenders, options.rounds, options.device, f"wiki103, {dtype}")
        rows = rows_of("wiki103", shape, times, dict.fromkeys(contenders, "fairseq"))
        for row in rows:
            row["tokens_per_second"] = 1e3 * shape.batch * shape.length / row["p50_ms"]
        yield [{**row, "dtype": dtype} for row in rows + unmeasured("wiki103", shape, reasons)]
        del contenders, times
        if options.device == "cuda":
            torch.cuda.empty_cache()
