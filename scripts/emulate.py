#!/usr/bin/env python
"""Run the kernels as NVIDIA's machine code, without a GPU: tests/ptx. `--help` says how."""

import os
import sys
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)  # the kernels are compiled
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.ptx.cases import main

sys.exit(main(sys.argv[1:]))
