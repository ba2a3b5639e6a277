import ast
from pathlib import Path

import mutants
import pytest

ROOT = Path(__file__).resolve().parents[2]
FAULTS = mutants.faults()


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_found_once_and_leaves_python_with_tests_to_ask(name):
    fault = FAULTS[name]
    ast.parse(mutants.broken(fault, ROOT))
    assert fault.tests and all((ROOT / test).exists() for test in fault.tests)
