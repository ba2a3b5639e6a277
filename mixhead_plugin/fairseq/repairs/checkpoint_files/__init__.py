"""Refuse a checkpoint that is hostile, damaged or does not fit, in one line that names the file.

fairseq passes strings of a checkpoint's config to eval(), and loads NaN weights. Its errors rarely
name a damaged file, and never the flag that does not fit.
"""

from mixhead_plugin.fairseq.repairs.checkpoint_files.finite_weights import check_finite, is_bad
from mixhead_plugin.fairseq.repairs.checkpoint_files.other_model import (
    name_the_file_and_what_differs,
    name_the_files_and_what_differs,
)
from mixhead_plugin.fairseq.repairs.checkpoint_files.unreadable import (
    check_state,
    refuse_unreadable,
)

__all__ = [
    # for other repairs and for examples
    "check_finite",
    "check_state",
    "is_bad",
    # what replaces functions of fairseq
    "name_the_file_and_what_differs",
    "name_the_files_and_what_differs",
    "refuse_unreadable",
]
