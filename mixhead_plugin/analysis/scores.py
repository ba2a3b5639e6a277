"""Score a model by the values that its criterion logs, or by the BLEU of its translations."""

import json
import math
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any

import torch
from fairseq.logging import metrics
from sacrebleu.metrics import BLEU

from mixhead_plugin.analysis.loading import Loaded, positive
from mixhead_plugin.errors import OptionError

Batches = Sequence[dict[str, Any]]  # fairseq's samples

# The values of --metric, with their titles; the loss is better if it is lower.
METRICS = {"loss": "loss (base 2)", "accuracy": "accuracy (%)", "bleu": "BLEU"}


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--metric", choices=sorted(METRICS), default="loss", help="what is scored (default: loss)")
    group = parser.add_argument_group(
        "translations", "for --metric bleu and for timing; the defaults are those of --eval-bleu in training"
    )
    group.add_argument("--beam", type=positive, help="beam size (default: 5)")
    group.add_argument("--lenpen", type=float, help="length penalty (default: 1)")
    group.add_argument("--max-len-a", type=float, help="longest translation: ax + b for a source of x (default: 0)")
    group.add_argument("--max-len-b", type=int, help="b in ax + b (default: 200)")
    group.add_argument(
        "--post-process", help="how subwords become words: subword_nmt, sentencepiece, '@@ ', ... (default: they stay)"
    )
    text = "sacreBLEU's tokenizer (default: 13a; none for tokenised text)"
    group.add_argument("--bleu-tokenize", choices=sorted(BLEU.TOKENIZERS), help=text)


def criterion_averages(loaded: Loaded, batches: Batches) -> dict[str, float]:
    """Return the values that fairseq-validate would log for `batches`, but unrounded."""
    with torch.no_grad():
        logs = [loaded.criterion(loaded.model, batch)[2] for batch in batches]
    with metrics.aggregate(new_root=True) as meters:
        type(loaded.criterion).reduce_metrics(logs)
    # Some meters, such as the accuracy of --report-accuracy, have no average: fairseq derives them from other meters.
    return {
        name: float(meter.avg if hasattr(meter, "avg") else meters.get_smoothed_value(name))
        for name, meter in meters.items()
    }


def score(loaded: Loaded, batches: Batches, args: Namespace, wanted: Sequence[str]) -> dict[str, float]:
    """Return the model's scores on `batches`, by metric; refuse scores that are not finite.

    The loss is the criterion's, in bits per token for language models and translation, per sentence for other tasks.
    """
    found = criterion_averages(loaded, batches) if set(wanted) != {"bleu"} else {}
    if "bleu" in wanted:
        found["bleu"] = bleu(loaded, batches, args)
    for metric in wanted:
        if metric not in found:
            raise OptionError(f"--metric {metric}: {type(loaded.criterion).__name__} does not log it; it logs loss")
        if not math.isfinite(found[metric]):
            raise OptionError(f"{loaded.path}: its {metric} is not finite; are its parameters damaged?")
    return {metric: found[metric] for metric in wanted}


def generation_flags(loaded: Loaded, args: Namespace) -> Namespace:
    """Return the flags of fairseq's generator: the given ones, else those of --eval-bleu-args, else the defaults."""
    trained_with = json.loads(getattr(loaded.cfg.task, "eval_bleu_args", None) or "{}")
    given = {name: getattr(args, name) for name in ("beam", "lenpen", "max_len_a", "max_len_b")}
    return Namespace(**{"beam": 5, **trained_with, **{name: x for name, x in given.items() if x is not None}})


def translate(loaded: Loaded, batches: Batches, flags: Namespace) -> list[list[torch.Tensor]]:
    """Return the best translation of each sentence, by batch, as tokens [length]."""
    generator = loaded.task.build_generator([loaded.model], flags)
    found = []
    for batch in batches:
        hypotheses = loaded.task.inference_step(generator, [loaded.model], batch)
        found.append([sentence[0]["tokens"] for sentence in hypotheses])
    return found


def bleu(loaded: Loaded, batches: Batches, args: Namespace) -> float:
    if not translates(loaded):
        raise OptionError(f"--metric bleu: {type(loaded.task).__name__} does not translate")
    task = loaded.cfg.task
    post_process = args.post_process or getattr(task, "eval_bleu_remove_bpe", None)
    tokenizer = args.bleu_tokenize or ("none" if getattr(task, "eval_tokenized_bleu", False) else "13a")
    words = loaded.task.target_dictionary

    def text(tokens: torch.Tensor, unknown: str) -> str:
        # fairseq gives unknown words different names in hypothesis and reference, so that they never match.
        return words.string(tokens.int().cpu(), post_process, unk_string=unknown)

    hypotheses, references = [], []
    for batch, translations in zip(batches, translate(loaded, batches, generation_flags(loaded, args)), strict=True):
        hypotheses += [text(tokens, "UNKNOWNTOKENINHYP") for tokens in translations]
        references += [text(target[target.ne(words.pad())], "UNKNOWNTOKENINREF") for target in batch["target"]]
    return BLEU(tokenize=tokenizer).corpus_score(hypotheses, [references]).score


def translates(loaded: Loaded) -> bool:
    return hasattr(loaded.model, "encoder") and hasattr(loaded.model, "decoder")
