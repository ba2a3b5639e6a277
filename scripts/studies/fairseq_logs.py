"""Read the logs of fairseq's commands."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# in "perplexity = 20.54", "BLEU|... = 33.5 66.1/..."
NUMBER = re.compile(r"[=:]\s+(-?\d+(?:\.\d+)?(?:e[-+]?\d+)?)\b")
# a line of fairseq-train --log-format json
PROGRESS = re.compile(r"\| INFO \| (\w+) \| (\{.*\})\s*$")
RESUMED = re.compile(r"Loaded checkpoint .* @ (\d+) updates\)")


class Progress:
    """Collects the points of a training from the lines of fairseq's log, one process after another.

    A point has the update, the tokens so far, the loss in bits a token (without label smoothing),
    and the CPU seconds so far, without start-up and validations. After an interruption, updates
    after the last checkpoint are dropped.
    """

    def __init__(self, points: Sequence[dict[str, float]]):
        self.points: list[dict[str, float]] = []
        self.before = points  # the points of earlier processes
        self.spent = 0.0  # CPU seconds of all updates
        self.cpu = 0.0  # CPU seconds of this process when a line was read last
        self.updating = False  # not at the start, nor while it validates

    def read(self, line: str, cpu: float | None) -> dict[str, float] | None:
        """Return the new point if the line has one; None otherwise.

        Args:
            line: a line of the log
            cpu: the CPU seconds of the process so far; None where the system does not tell
        """
        if resumed := RESUMED.search(line):
            self.points = [point for point in self.before if point["update"] <= int(resumed[1])]
            self.spent = self.points[-1].get("cpu_seconds", 0.0) if self.points else 0.0
        elif "Start iterating over samples" in line:
            self.before = self.points
            self.pass_time(cpu, updating=True)
        elif "begin validation on" in line:
            self.pass_time(cpu, updating=False)
        elif match := PROGRESS.search(line):
            return self.add(match[1], json.loads(match[2]), cpu)
        return None

    def pass_time(self, cpu: float | None, updating: bool) -> None:
        """Count the CPU time since the last line, if the training made updates since then.

        Args:
            cpu: the CPU seconds of the process so far; None where the system does not tell
            updating: whether the training makes updates from now on
        """
        if cpu is not None:
            if self.updating:
                self.spent += cpu - self.cpu
            self.cpu = cpu
        self.updating = updating

    def add(
        self, series: str, values: Mapping[str, Any], cpu: float | None
    ) -> dict[str, float] | None:
        """Return the new point of a line of numbers; None for a line that is none.

        Args:
            series: train_inner (every --log-interval), valid (or another set), or train (an epoch)
            values: the numbers of the line, by name
            cpu: the CPU seconds of the process so far; None where the system does not tell
        """
        is_training = series == "train_inner"
        prefix = "" if is_training else f"{series}_"
        # the mean of an epoch, or another kind of line
        if series == "train" or f"{prefix}num_updates" not in values:
            return None
        self.pass_time(cpu, updating=True)
        update = int(values[f"{prefix}num_updates"])
        point: dict[str, float] = {"update": update, "tokens": self.tokens_at(update, values)}
        if cpu is not None:
            point["cpu_seconds"] = round(self.spent, 2)

        name = "train" if is_training else series
        loss = values.get(f"{prefix}loss", "nan")
        # nll_loss is the loss without label smoothing
        point[f"{name}_loss"] = float(values.get(f"{prefix}nll_loss", loss))
        if not is_training and f"{prefix}nll_loss" in values:
            point[f"{name}_objective"] = float(loss)  # of the criterion, label smoothing included
        self.points.append(point)
        return point

    def tokens_at(self, update: int, values: Mapping[str, Any]) -> int:
        """Return the tokens so far.

        A line of a validation has no tokens an update (wpb), so it takes the mean of those before.
        """
        last = self.points[-1] if self.points else {"update": 0, "tokens": 0}
        per_update = float(values.get("wpb", 0))
        if not per_update:
            per_update = last["tokens"] / max(last["update"], 1)
        return round(last["tokens"] + (update - last["update"]) * per_update)

    def all(self) -> Sequence[dict[str, float]]:
        """Return the points.

        If this process ended before its first update, those of earlier processes.
        """
        return self.points or self.before


def last_line(log: Path) -> str:
    """Return the last line that is not empty."""
    return log.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
