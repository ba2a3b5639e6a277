"""Refuse a dictionary that is empty or has a negative count.

fairseq trains and decodes with an empty dictionary, as a failed copy may leave it, and with negative counts.
"""

import os

from fairseq.data import Dictionary

from mixhead_plugin.errors import OptionError
from mixhead_plugin.repairs.replace import replaces


@replaces(Dictionary, "add_from_file")
def _add_from_file(original, dictionary: Dictionary, file) -> None:
    before = len(dictionary)
    original(dictionary, file)
    if not isinstance(file, str) or not os.path.isfile(file):  # for a path, fairseq calls this again with a file
        return
    if len(dictionary) == before:
        raise OptionError(f"{file}: has no symbols; must have a line '<symbol> <count>' for each")
    if min(dictionary.count[before:]) < 0:
        raise OptionError(f"{file}: has a count below 0")
