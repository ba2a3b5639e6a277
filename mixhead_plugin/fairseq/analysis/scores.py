"""Score a model by the values that its criterion logs, or by the BLEU of its translations."""

import json
import math
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any

import torch
from fairseq.data import encoders
from fairseq.logging import metrics
from sacrebleu.metrics import BLEU

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.analysis.loading import Loaded

Batches = Sequence[dict[str, Any]]  # fairseq's samples

# The values of --metric, with their titles; the loss is better if it is lower.
METRICS = {"loss": "loss (base 2)", "accuracy": "accuracy (%)", "bleu": "BLEU"}


def add_arguments(parser: ArgumentParser) -> None:
    text = (
        "what is scored; bleu is that of --eval-bleu in training, whose eval_bleu_* "
        "--model-overrides can change"
    )
    parser.add_argument(
        "--metric", choices=sorted(METRICS), default="loss", help=f"{text} (default: loss)"
    )


def criterion_averages(loaded: Loaded, batches: Batches) -> dict[str, float]:
    """Return the values that fairseq-validate would log for `batches`, but unrounded."""
    with torch.no_grad():
        logs = [loaded.criterion(loaded.model, batch)[2] for batch in batches]
    with metrics.aggregate(new_root=True) as meters:
        type(loaded.criterion).reduce_metrics(logs)
    averages = {}
    for name, meter in meters.items():
        if hasattr(meter, "avg"):
            averages[name] = float(meter.avg)
        else:
            # Such as the accuracy of --report-accuracy, which fairseq derives from other meters.
            averages[name] = float(meters.get_smoothed_value(name))
    return averages


def score(loaded: Loaded, batches: Batches, wanted: Sequence[str]) -> dict[str, float]:
    """Return the model's scores on `batches`, by metric; refuse scores that are not finite.

    The loss is the criterion's, in bits per token for language models and translation, per sentence
    for other tasks.

    Args:
        loaded: the model
        batches: batches of fairseq, with their targets
        wanted: keys of METRICS
    """
    values: dict[str, float] = {}
    if set(wanted) != {"bleu"}:
        values = criterion_averages(loaded, batches)
    if "bleu" in wanted:
        values["bleu"] = bleu(loaded, batches)
    for metric in wanted:
        if metric not in values:
            raise OptionError(
                f"--metric {metric}: {type(loaded.criterion).__name__} does not log it; it logs "
                "loss"
            )
        if not math.isfinite(values[metric]):
            raise OptionError(
                f"{loaded.path}: its {metric} is not finite; are its parameters damaged?"
            )
    return {metric: values[metric] for metric in wanted}


def translate(loaded: Loaded, batches: Batches) -> list[list[torch.Tensor]]:
    """Return the best translation of each sentence, by batch, as tokens [length]."""
    trained_with = json.loads(getattr(loaded.cfg.task, "eval_bleu_args", None) or "{}")
    search = Namespace(**{"beam": 5, **trained_with})
    generator = loaded.task.build_generator([loaded.model], search)
    translations = []
    for batch in batches:
        hypotheses = loaded.task.inference_step(generator, [loaded.model], batch)
        translations.append([sentence[0]["tokens"] for sentence in hypotheses])
    return translations


def bleu(loaded: Loaded, batches: Batches) -> float:
    """Return the BLEU that --eval-bleu logs; refuse a model that does not translate.

    A model of several languages is refused, too, because its batches do not say into which one to
    translate.
    """
    if not translates(loaded):
        raise OptionError(f"--metric bleu: {type(loaded.task).__name__} does not translate")
    # translation_multi_simple_epoch keeps its flags in `args`, and in training it has no language.
    flags = getattr(loaded.task, "args", None)
    if getattr(flags, "target_lang", "") is None:
        raise OptionError(
            f"--metric bleu: --task {loaded.cfg.task._name} translates into several languages; "
            "must be loss"
        )
    task = loaded.cfg.task
    dictionary = loaded.task.target_dictionary
    tokenizer = "none" if getattr(task, "eval_tokenized_bleu", False) else "13a"
    remove_bpe = getattr(task, "eval_bleu_remove_bpe", None)
    detokenizer = _detokenizer(task)

    def text(tokens: torch.Tensor, unknown: str) -> str:
        words = dictionary.string(tokens.int().cpu(), remove_bpe, unk_string=unknown)
        return detokenizer.decode(words)

    # As fairseq: unknown words have different names in hypothesis and reference, and never match.
    hypotheses: list[str] = []
    references: list[str] = []
    for batch, translations in zip(batches, translate(loaded, batches), strict=True):
        for tokens in translations:
            hypotheses.append(text(tokens, "UNKNOWNTOKENINHYP"))
        for target in batch["target"]:
            references.append(text(target[target.ne(dictionary.pad())], "UNKNOWNTOKENINREF"))
    return BLEU(tokenize=tokenizer).corpus_score(hypotheses, [references]).score


def _detokenizer(task: Any) -> Any:
    """Return fairseq's tokenizer of --eval-bleu-detok, which makes plain text of tokens.

    The task itself has it only where the model was trained with --eval-bleu.

    Args:
        task: the config of the task
    """
    name = getattr(task, "eval_bleu_detok", None) or "space"  # space leaves the text as it is
    if name not in encoders.TOKENIZER_REGISTRY:
        known = ", ".join(sorted(encoders.TOKENIZER_REGISTRY))
        raise OptionError(f"--eval-bleu-detok {name}: must be one of {known}")
    settings = json.loads(getattr(task, "eval_bleu_detok_args", None) or "{}")
    return encoders.build_tokenizer(Namespace(tokenizer=name, **settings))


def translates(loaded: Loaded) -> bool:
    """Return whether a model reads one sentence and writes another."""
    return hasattr(loaded.model, "encoder") and hasattr(loaded.model, "decoder")
