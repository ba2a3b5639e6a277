"""GLUE's metrics, in percent."""

import warnings
from collections.abc import Callable, Sequence

import numpy
from glue.tasks import Task
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import f1_score, matthews_corrcoef


def accuracy(gold: numpy.ndarray, predicted: numpy.ndarray) -> float:
    return float((gold == predicted).mean())


def f1(gold: numpy.ndarray, predicted: numpy.ndarray) -> float:
    """Of class 1, the duplicates and paraphrases."""
    return float(f1_score(gold, predicted, pos_label=1, zero_division=0))


def matthews(gold: numpy.ndarray, predicted: numpy.ndarray) -> float:
    return float(matthews_corrcoef(gold, predicted))


def pearson(gold: numpy.ndarray, predicted: numpy.ndarray) -> float:
    return _correlation(pearsonr, gold, predicted)


def spearman(gold: numpy.ndarray, predicted: numpy.ndarray) -> float:
    return _correlation(spearmanr, gold, predicted)


def _correlation(function: Callable, gold: numpy.ndarray, predicted: numpy.ndarray) -> float:
    """nan where there is none, because all are the same; the caller says so."""
    if len(gold) < 2:
        return float("nan")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(function(gold, predicted)[0])


METRICS: dict[str, Callable[[numpy.ndarray, numpy.ndarray], float]] = {
    "accuracy": accuracy,
    "F1": f1,
    "Matthews correlation": matthews,
    "Pearson correlation": pearson,
    "Spearman correlation": spearman,
}


def measure(task: Task, gold: Sequence[float], predicted: Sequence[float]) -> dict[str, float]:
    """The metrics of a task by name, in its order.

    Args:
        gold, predicted: classes as numbers of `task.labels`, or similarities
    """
    pair = numpy.asarray(gold), numpy.asarray(predicted)
    return {name: 100 * METRICS[name](*pair) for name in task.metrics}
