"""How good a model is: what its criterion says of a set, or the BLEU of what it translates."""

import argparse
import json
import math
from argparse import ArgumentParser, Namespace
from typing import Any, Dict, List, NamedTuple, Sequence

import torch
from fairseq.logging import metrics

from mixhead_plugin.analysis.loading import Loaded, positive
from mixhead_plugin.errors import OptionError

Batches = Sequence[Dict[str, Any]]  # fairseq's samples


class Metric(NamedTuple):
    """One entry of the flag ``--metric``."""

    higher_is_better: bool
    title: str


METRICS = {
    "loss": Metric(False, "loss (base 2)"),
    "accuracy": Metric(True, "accuracy (%)"),
    "bleu": Metric(True, "BLEU"),
}


def add_arguments(parser: ArgumentParser) -> None:
    """--metric and what BLEU needs to know."""
    parser.add_argument("--metric", choices=sorted(METRICS), default="loss", help="what is scored (default: loss)")
    group = parser.add_argument_group(
        "translations", "for --metric bleu and for timing; by default what --eval-bleu used in training"
    )
    group.add_argument("--beam", type=positive, help="beam size (default: 5)")
    group.add_argument("--lenpen", type=float, help="length penalty (default: 1)")
    group.add_argument("--max-len-a", type=float, help="longest translation: ax + b for a source of x (default: 0)")
    group.add_argument("--max-len-b", type=int, help="b in ax + b (default: 200)")
    group.add_argument(
        "--post-process", help="how subwords become words: subword_nmt, sentencepiece, '@@ ', ... (default: they stay)"
    )
    group.add_argument(
        "--bleu-tokenize", type=tokenizer, help="sacreBLEU's tokenizer (default: 13a; none for tokenised text)"
    )


def tokenizer(text: str) -> str:
    """argparse's type of one of sacreBLEU's tokenizers."""
    from sacrebleu.metrics import BLEU

    if text not in BLEU.TOKENIZERS:
        raise argparse.ArgumentTypeError(f"{text}: must be one of {', '.join(BLEU.TOKENIZERS)}")
    return text


def criterion_averages(loaded: Loaded, batches: Batches) -> Dict[str, float]:
    """What the model's criterion logs of `batches`, as fairseq-validate would, but unrounded: loss, accuracy, ..."""
    logs: List[Dict[str, Any]] = []
    with torch.no_grad():
        for batch in batches:
            logs.append(loaded.criterion(loaded.model, batch)[2])
    with metrics.aggregate(new_root=True) as meters:
        type(loaded.criterion).reduce_metrics(logs)
    # a derived meter, such as the accuracy of --report-accuracy, has no average but a function of the other meters
    return {
        name: float(meter.avg if hasattr(meter, "avg") else meters.get_smoothed_value(name))
        for name, meter in meters.items()
    }


def score(loaded: Loaded, batches: Batches, args: Namespace, metrics: Sequence[str]) -> Dict[str, float]:
    """The model's scores on `batches`.

    The loss is the criterion's, base 2, for each token of language models and translations, else for each sentence;
    the accuracy in percent; BLEU by beam search.

    Args:
        loaded: the model
        batches: fairseq's samples, with targets
        args: the flags of `add_arguments`
        metrics: keys of METRICS

    Raises:
        OptionError: a metric that this model does not have, or a score that is not finite
    """
    found: Dict[str, float] = {}
    averages = criterion_averages(loaded, batches) if set(metrics) - {"bleu"} else {}
    for metric in metrics:
        if metric == "bleu":
            found[metric] = bleu(loaded, batches, args)
        elif metric in averages:
            found[metric] = averages[metric]
        else:
            raise OptionError(
                f"--metric {metric}: {type(loaded.criterion).__name__} does not log it; must be {_possible(loaded)}"
            )
        if not math.isfinite(found[metric]):
            raise OptionError(f"{loaded.path}: its {metric} is not finite; are its parameters damaged?")
    return found


def generation_flags(loaded: Loaded, args: Namespace) -> Namespace:
    """Flags of fairseq's generator: those of the command, else those of the training's --eval-bleu, else fairseq's."""
    trained_with = json.loads(getattr(loaded.cfg.task, "eval_bleu_args", None) or "{}")
    flags = {"beam": 5, **trained_with}
    given = {name: getattr(args, name) for name in ("beam", "lenpen", "max_len_a", "max_len_b")}
    flags.update({name: value for name, value in given.items() if value is not None})
    return Namespace(**flags)


def translate(loaded: Loaded, batches: Batches, flags: Namespace) -> List[List[torch.Tensor]]:
    """The best translation of each sentence, by batch, as tokens [length]."""
    generator = loaded.task.build_generator([loaded.model], flags)
    found = []
    for batch in batches:
        hypotheses = loaded.task.inference_step(generator, [loaded.model], batch)
        found.append([sentence[0]["tokens"] for sentence in hypotheses])
    return found


def bleu(loaded: Loaded, batches: Batches, args: Namespace) -> float:
    """sacreBLEU of the translations by beam search."""
    import sacrebleu

    if not translates(loaded):
        raise OptionError(
            f"--metric bleu: {type(loaded.task).__name__} does not translate; must be {_possible(loaded)}"
        )
    task = loaded.cfg.task
    post_process = args.post_process or getattr(task, "eval_bleu_remove_bpe", None)
    tokenize = args.bleu_tokenize or ("none" if getattr(task, "eval_tokenized_bleu", False) else "13a")
    words = loaded.task.target_dictionary

    def text(tokens: torch.Tensor, unknown: str) -> str:
        # an unknown word matches no other: the names differ, as in fairseq
        return words.string(tokens.int().cpu(), post_process, unk_string=unknown)

    hypotheses, references = [], []
    for batch, translations in zip(batches, translate(loaded, batches, generation_flags(loaded, args))):
        for tokens, target in zip(translations, batch["target"]):
            hypotheses.append(text(tokens, "UNKNOWNTOKENINHYP"))
            references.append(text(target[target.ne(words.pad())], "UNKNOWNTOKENINREF"))
    return sacrebleu.corpus_bleu(hypotheses, [references], tokenize=tokenize).score


def _possible(loaded: Loaded) -> str:
    classifier = bool(getattr(loaded.model, "classification_heads", None))  # empty for a masked language model
    return "loss" + (" or bleu" if translates(loaded) else " or accuracy" if classifier else "")


def translates(loaded: Loaded) -> bool:
    """Whether there is something to search for with a beam, and a reference to compare it with."""
    return hasattr(loaded.model, "encoder") and hasattr(loaded.model, "decoder")
