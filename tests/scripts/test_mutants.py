import ast
from pathlib import Path

import mutants

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "mixhead_plugin").rglob("*.py"))


def test_a_fault_changes_one_expression_of_its_file(tmp_path):
    source = "def f(x: int = 1):\n    return x.t() + 2 if not x else g(x, a=-1)\n"
    (tmp_path / "a.py").write_text(source)
    found = {
        mutants.broken(fault, tmp_path).decode().splitlines()[-1].strip() for fault in mutants.faults("a.py", tmp_path)
    }
    assert found >= {
        "return (x.t() - 2) if not x else g(x, a=-1)",
        "return (x) + 2 if not x else g(x, a=-1)",
        "return x.t() + (3) if not x else g(x, a=-1)",
        "return x.t() + 2 if (x) else g(x, a=-1)",
        "return x.t() + 2 if not x else (g(x))",
        "return x.t() + 2 if not x else g(x, a=(1))",
    }


def test_faults_leave_python_and_every_file_has_tests():
    for file in FILES:
        assert all((ROOT / test).exists() for test in mutants.tests_of(file)), file
        for fault in mutants.faults(file)[::20]:
            ast.parse(mutants.broken(fault, ROOT))
            assert mutants.broken(fault, ROOT) != (ROOT / file).read_bytes()
