"""How many cores this process may use."""

import os

CORES = os.cpu_count() or 1
if hasattr(os, "sched_getaffinity"):  # not on macOS; a job of a cluster may have some cores alone
    CORES = len(os.sched_getaffinity(0))
