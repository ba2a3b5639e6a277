import mutants
import pytest


def test_a_fault_changes_one_expression():
    source = "def f(x: int = 1):\n    return x.t() + 2 if not x else g(x, a=-1)\n"
    found = {text.decode().splitlines()[-1].strip() for text in mutants.faults(source.encode()).values()}
    assert found >= {
        "return (x.t() - 2) if not x else g(x, a=-1)",
        "return (x) + 2 if not x else g(x, a=-1)",
        "return x.t() + (3) if not x else g(x, a=-1)",
        "return x.t() + 2 if (x) else g(x, a=-1)",
        "return x.t() + 2 if not x else (g(x))",
        "return x.t() + 2 if not x else g(x, a=(1))",
    }


@pytest.mark.slow
def test_the_first_test_that_notices_a_fault_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "tests").mkdir()
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("LIMIT = 7\n\n\ndef f(x):\n    return x + x\n")
    test = "import package\n\ndef test_f():\n    assert package.f(3) == 6\n"
    (tmp_path / "tests" / "test_package.py").write_text(test)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    assert mutants.main(["package/__init__.py", "tests/test_package.py"]) == 1
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "1 of 2 unnoticed",
        "package/__init__.py:1:8 (8): UNNOTICED",
        "package/__init__.py:5:11 (x - x): tests/test_package.py::test_f",
    ]
