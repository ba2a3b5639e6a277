"""Read perplexity per subword and per word from the log of fairseq-eval-lm, for evaluate.sh."""

import json
import sys
from pathlib import Path

from common.perplexity import Counts, Perplexity, Unknown, main


def statistics(data: Path, subset: str) -> Counts:
    """Return the counts of a set that prepare.sh kept."""
    path = data / "statistics.json"
    try:
        counts = dict(json.loads(path.read_text()))
    except FileNotFoundError:
        raise Unknown(f"{path} is missing; run examples/lm1b/prepare.sh") from None
    except (ValueError, TypeError):
        raise Unknown(f"{path}: is not made by examples/lm1b/prepare.sh") from None
    if "words" not in counts.get(subset, {}):
        sets = [name for name, numbers in counts.items() if "words" in numbers]
        raise Unknown(f"--gen-subset {subset}: must be one of {', '.join(sets)}")
    return Counts(counts[subset]["tokens"], counts[subset]["words"])


def report(data: Path, subset: str, counts: Counts, result: Perplexity) -> list[str]:
    words = f"{counts.words:,} words, ends of line included"
    per_word = f"perplexity per word = {result.word:.2f}"
    if data.name != "subword":
        return [f"{subset}: {words}", per_word]
    pieces = f"{subset}: {counts.tokens:,} subwords, {words}"
    return [pieces, f"perplexity per subword = {result.token:.2f}", per_word]


if __name__ == "__main__":
    sys.exit(main(statistics, report))
