"""The demo's folder on the import path, and one small corpus for all tests of it."""

import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo"
sys.path.insert(0, str(DEMO))


@pytest.fixture(scope="session")
def splits():
    from german_english import generate

    return generate(seed=3, train=2600, valid=150, test=150)


@pytest.fixture(scope="session")
def pairs(splits):
    return [pair for part in splits.values() for pair in part]
