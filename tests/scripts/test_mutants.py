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


@pytest.mark.parametrize(("content", "number"), [("", 0), ("a = 1\n", 0), ("a = b\na = b\n", 2)])
def test_a_text_that_is_not_there_once_is_refused(content, number, tmp_path, capsys):
    (tmp_path / "module.py").write_text(content)
    with pytest.raises(SystemExit):
        mutants.broken(mutants.Fault("name", "module.py", "a = b", "a = c", ("tests",)), tmp_path)
    assert capsys.readouterr().err.endswith(f"exactly once, is there {number} times\n")


def test_an_unknown_fault_is_refused(capsys):
    with pytest.raises(SystemExit):
        mutants.main(["no-such-fault"])
    assert "no-such-fault: no such fault" in capsys.readouterr().err
