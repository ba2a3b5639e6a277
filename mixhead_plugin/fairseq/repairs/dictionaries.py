"""Refuse a dictionary without symbols or with a wrong line, in one line that names the file.

fairseq trains and decodes with an empty dictionary, as a failed copy may leave it. About a line
without a count, or a symbol that occurs twice, it does not say in which file. It takes counts below
0, with which it cannot draw tokens.
"""

import os
from typing import Any

from fairseq.data import Dictionary, MaskTokensDataset

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.replace import replaces


@replaces(Dictionary, "add_from_file")
def _add_from_file(original, dictionary: Dictionary, f: Any) -> None:
    # fairseq calls this with a path, and for that again with the open file
    if not isinstance(f, str) or not os.path.isfile(f):
        original(dictionary, f)
        return
    before = len(dictionary)
    try:
        original(dictionary, f)
    except Exception as error:
        number = len(dictionary) - before + 1  # each line before has added one symbol
        raise OptionError(f"{f}: {_problem(error, number)}") from error
    if len(dictionary) == before:
        raise OptionError(f"{f}: has no symbols; must have a line '<symbol> <count>' for each")


def _problem(error: Exception, number: int) -> str:
    """Return in a few words what fairseq says about line `number` of a dictionary."""
    text = " ".join(str(error).split())  # fairseq's messages have several lines
    if text.startswith("Incorrect encoding"):
        return "is not in UTF-8; must be the file that fairseq-preprocess wrote"
    if isinstance(error, ValueError):
        # "Incorrect dictionary format, expected '<token> <cnt> [flags]': " and the line
        line = text.partition("[flags]': ")[2].strip('" ')
        return f"line {number} is {line!r}; must be '<symbol> <count>'"
    if text.startswith("Duplicate word"):
        symbol = text.partition(": ")[2].partition(". Duplicate")[0]
        return (
            f"line {number} has the symbol {symbol} again; must be left out, or end with "
            "#fairseq:overwrite"
        )
    return f"line {number}: {text}"


@replaces(MaskTokensDataset, "__init__")
def _draw_by_count(
    original, masked: Any, dataset: Any, vocab: Dictionary, *args: Any, **kwargs: Any
) -> None:
    if kwargs.get("freq_weighted_replacement") and min(vocab.count) < 0:
        raise OptionError(
            "--freq-weighted-replacement: draws tokens by their counts, but the dictionary has a "
            "count below 0; must be left out"
        )
    original(masked, dataset, vocab, *args, **kwargs)
