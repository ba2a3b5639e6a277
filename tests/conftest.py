"""What all tests share."""

import os

# The suite starts many small processes on few cores; threads waiting for each other cost more than they give.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
