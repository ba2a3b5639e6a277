import ast
from pathlib import Path

import mutants

ROOT = Path(__file__).resolve().parents[2]
FAULTS = mutants.faults()


def test_every_fault_is_found_once_and_leaves_python_with_tests_to_ask():
    for name, fault in FAULTS.items():
        ast.parse(mutants.broken(fault, ROOT))
        assert fault.tests and all((ROOT / test).exists() for test in fault.tests), name
