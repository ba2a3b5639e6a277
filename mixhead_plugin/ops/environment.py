"""Limits of memory that a user sets in the environment."""

import math
import os


def bytes_from(variable: str, default_mib: int) -> int:
    """Return the bytes that an environment variable allows, which gives a number of MiB.

    It is read at each call, so a program may change it while it runs.

    Args:
        variable: its name
        default_mib: what counts if it is not set, or empty

    Raises:
        ValueError: if it is no finite number of at least 0
    """
    given = os.environ.get(variable) or str(default_mib)
    try:
        n_bytes = float(given) * 2**20
    except ValueError:
        n_bytes = math.nan
    if not 0 <= n_bytes < math.inf:  # NaN fails every comparison
        raise ValueError(f"{variable}={given}: must be a number of MiB, at least 0")
    return int(n_bytes)
