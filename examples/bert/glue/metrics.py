"""GLUE's metrics, in percent."""

import warnings
from collections.abc import Sequence

import numpy
from bert.glue.tasks import Task
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

METRICS = {
    "accuracy": accuracy_score,
    "F1": lambda gold, predicted: f1_score(gold, predicted, pos_label=1, zero_division=0),
    "Matthews correlation": matthews_corrcoef,
    "Pearson correlation": lambda gold, predicted: pearsonr(gold, predicted)[0],
    "Spearman correlation": lambda gold, predicted: spearmanr(gold, predicted)[0],
}


def measure(task: Task, gold: Sequence[float], predicted: Sequence[float]) -> dict[str, float]:
    """Return the metrics of a task by name, the papers' last.

    A correlation that does not exist is nan.

    Args:
        task: names the metrics
        gold, predicted: classes as numbers of `task.labels`, or similarities
    """
    if len(gold) < 2:
        return dict.fromkeys(task.metrics, float("nan"))
    pair = (numpy.asarray(gold), numpy.asarray(predicted))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of constant predictions
        return {name: 100 * float(METRICS[name](*pair)) for name in task.metrics}
