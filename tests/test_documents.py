"""Every command, flag, program, link and anchor of every document: executed, or parsed with its real flags.

A line that looks like a command and that no rule below knows fails: who adds one to a document adds a test of it.
"""

import argparse
import contextlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Callable, Iterator, NamedTuple, Optional

import grids
import pytest
import recipes
import test_recipes
from fairseq import options
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_REGISTRY

import mixhead_plugin
from mixhead_plugin.analysis.__main__ import COMMANDS as ANALYSES

ROOT = Path(mixhead_plugin.__file__).parents[1]
EXAMPLES = ROOT / "examples"

FOLDERS = ("docs", "examples", "mixhead_plugin", "scripts", "tests")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(path for name in FOLDERS for path in (ROOT / name).rglob("*.md"))])
# Documents whose indented blocks are mathematics.
FORMULAS = {"blockwise.md", "triton.md"}

# ---- what a document says --------------------------------------------------------------------------------------------

FENCED = re.compile(r"(?ms)^```(\w*)\n(.*?)^```$")
INDENTED = re.compile(r"(?m)(?:^ {4}.*\n)+")
VARIABLES = re.compile(r"(?:[A-Z_]+=\S* )*")
# A word that starts a command where it stands in a sentence.
PROGRAM = re.compile(
    r"fairseq-\S+|(?:\S*/)?python[\d.]*|[\w./]+\.(?:sh|py|sbatch)|pip|git|source|cd|export|torchrun|sbatch|srun|bash|sh"
    r"|curl|wget|sudo|apt-get|conda|docker|make|nvidia-smi|tensorboard|huggingface-cli"
)
# Names of something that would be a command with more words.
MENTIONS = {"pip install", "examples/bert/convert_bert.py", "examples/bert/convert_bert.py to-huggingface"}


class Said(NamedTuple):
    """A command or flags, and the document that says so."""

    document: Path
    text: str

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}: {self.text}"


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Language and content of the fenced and the indented blocks; an indented one has the language ''."""
    yield from FENCED.findall(text)
    yield from (("", block) for block in INDENTED.findall(FENCED.sub("", text)))


def lines(block: str) -> list[str]:
    """The commands of a block: continued lines as one, without the words beside them."""
    joined = re.sub(r"\s*\\\n\s*", " ", block).splitlines()
    return [command for line in joined if (command := re.split(r"\s+#\s|\s{3,}", line.strip())[0])]


def spans(text: str) -> list[str]:
    """What stands between backquotes in sentences and tables, in one line each."""
    prose = INDENTED.sub("", FENCED.sub("", text))
    return [" ".join(span.split()).replace("\\|", "|") for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose)]


def is_command(span: str) -> bool:
    """A program with arguments, or one that can be run from the top of the checkout as it stands."""
    words = VARIABLES.sub("", span, count=1).split()
    if not words or span in MENTIONS or not PROGRAM.fullmatch(words[0]):
        return False
    return len(words) > 1 or span != words[0] or bool(re.fullmatch(r"(?:scripts|examples)/[\w/]+\.(?:sh|py)", span))


def commands() -> Iterator[Said]:
    for document in DOCUMENTS:
        text = document.read_text()
        for language, block in blocks(text):
            if language == "diff":
                yield from (Said(document, line[1:].strip()) for line in block.splitlines() if line[0] in "+-")
            elif language not in ("python", "toml") and not (document.name in FORMULAS and not language):
                yield from (Said(document, line) for line in lines(block))
        yield from (Said(document, span) for span in spans(text) if is_command(span))


def flags() -> Iterator[Said]:
    """Flags that stand alone in a sentence or table."""
    for document in DOCUMENTS:
        for span in spans(document.read_text()):
            if VARIABLES.sub("", span, count=1).startswith("--"):
                yield Said(document, span)


COMMANDS = list(dict.fromkeys(commands()))
FLAGS = list(dict.fromkeys(flags()))

# ---- parsers ---------------------------------------------------------------------------------------------------------


class Parsed(Exception):
    """Raised where a program has read its command line; holds the parser."""


def start(
    monkeypatch: pytest.MonkeyPatch, program: str, words: list[str], *path: Path, check: bool = True
) -> argparse.ArgumentParser:
    """Start a Python program, a file or a module, as a user does; it ends when it has read its command line.

    Without `check` it ends before that, whatever arguments it demands.
    """
    known = argparse.ArgumentParser.parse_known_args
    reading = []

    def parse(self, *args, **settings):
        if reading:  # a command of a command
            return known(self, *args, **settings)
        reading.append(self)
        if check:
            _, rest = known(self, *args, **settings)
            if rest and not program.endswith("convert_bert.py"):  # hands them on to fairseq
                self.error(f"unrecognized arguments: {rest}")
        raise Parsed(self)

    before = set(sys.modules)
    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", parse)
        patch.setattr(sys, "argv", [program, *words])
        for folder in path:
            patch.syspath_prepend(folder)
        try:
            if program.endswith(".py"):
                patch.syspath_prepend((ROOT / program).parent)
                runpy.run_path(str(ROOT / program), run_name="__main__")
            else:
                runpy.run_module(program, run_name="__main__")
        except Parsed as parsed:
            return parsed.args[0]
        finally:
            for name in set(sys.modules) - before:  # figure.py is another module in another folder
                if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(EXAMPLES):
                    del sys.modules[name]
    pytest.fail(f"{program} has read no command line")


def fairseq_parser() -> argparse.ArgumentParser:
    """The flags of all of fairseq's commands, models, tasks and criteria, the plugin's among them."""
    parser = argparse.ArgumentParser(conflict_handler="resolve")
    for make in (*recipes.PARSERS.values(), options.get_preprocessing_parser):
        for action in make()._actions:
            parser._add_action(action) if action.dest != "help" else None
    registered = [*MODEL_REGISTRY.values(), *TASK_REGISTRY.values()]
    registered += [cls for registry in REGISTRIES.values() for cls in registry["registry"].values()]
    for cls in registered:
        if hasattr(cls, "add_args"):
            cls.add_args(parser)
    return parser


PREPARATIONS = [f"{path.parent.name}.prepare" for path in sorted(EXAMPLES.glob("*/prepare.py"))]
PREPARATIONS.remove("common.prepare")  # what they share
PROGRAMS = [
    "examples/demo/demo.py",
    "examples/demo/corpus.py",
    "examples/low_rank_bottleneck/run.py",
    "examples/position_probe/run.py",
    "scripts/report.py",
    "scripts/sweep.py",
    "scripts/benchmark.py",
    "examples/bert/convert_bert.py",
]
# Of hydra and pip-audit, and what ends the flags.
FOREIGN = {"--", "--config-name", "--config-dir", "--strict"}
PLACEHOLDER = re.compile(r"[A-Z]|n|\.\.\.|<.*>|FOLDER|DIR|FILE")


@pytest.fixture(scope="module")
def actions() -> dict[str, list[argparse.Action]]:
    """What every flag of every program means."""
    found = defaultdict(list)
    parsers = [fairseq_parser()]
    with pytest.MonkeyPatch.context() as patch:
        for program in [*PROGRAMS, *PREPARATIONS]:
            words = ["x.toml"] if program == "scripts/sweep.py" else []
            parsers.append(start(patch, program, words, EXAMPLES, check=False))
        for command in ANALYSES:
            parsers.append(start(patch, "mixhead_plugin.analysis", [command], check=False))
    while parsers:
        for action in parsers.pop()._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
            for name in action.option_strings:
                found[name].append(action)
    return found


def takes(action: argparse.Action, value: str) -> bool:
    """Whether a parser would take it for the flag's value."""
    if action.nargs == 0:
        return False
    try:
        value = action.type(value) if action.type is not None else value
    except (ValueError, TypeError, KeyError, argparse.ArgumentTypeError):
        return False
    return action.choices is None or value in action.choices


def problem(text: str, actions: dict[str, list[argparse.Action]]) -> Optional[str]:
    """Why no program takes these flags, of several kinds each; None if some does."""
    words = shlex.split(VARIABLES.sub("", text, count=1))
    for word, after in zip(words, [*words[1:], "--"]):
        if not word.startswith("--") or word in FOREIGN or "<" in word:
            continue
        name, _, value = word.partition("=")
        value = value or after
        if name not in actions:
            return f"no program has {name}"
        if value.startswith("--") or PLACEHOLDER.fullmatch(value):
            continue
        if not any(takes(action, value) for action in actions[name]):
            return f"{name} never takes {value}"
    return None


# ---- rules: who tests what -------------------------------------------------------------------------------------------

# What is run at a tiny size elsewhere, or cannot be run in the checkout itself, with the test that stands for it.
ELSEWHERE = {
    "git clone <this repository> mixhead && cd mixhead": None,  # bash reads it, below
    "source .venv/bin/activate": "tests/test_documents.py::test_fairseq_is_there_after_activate",
    "pip install .": "tests/test_supply.py::test_pip_installs_the_package_with_its_documents",
    "scripts/setup.sh": "tests/scripts/test_setup.py::test_a_second_run_does_nothing",
    "PYTHON=python3.12 scripts/setup.sh": "tests/scripts/test_setup.py::"
    "test_choices_are_remembered_until_others_are_made",
    "TORCH=2.11.0 scripts/setup.sh": "tests/scripts/test_setup.py::test_torch_is_what_was_asked_for",
    "scripts/test.sh": "tests/scripts/test_setup.py::test_test_sh_leaves_slow_tests_out_and_passes_the_rest_on",
    "scripts/test.sh -n 0 -m gpu": "tests/scripts/test_setup.py::"
    "test_test_sh_leaves_slow_tests_out_and_passes_the_rest_on",
    "scripts/audit.sh": "tests/test_supply.py::test_an_audit_that_could_not_ask_fails",
}


def without_variables(said: Said) -> str:
    return VARIABLES.sub("", said.text, count=1)


def of_recipes(said: Said) -> bool:
    """Parsed in tests/examples/test_recipes.py, with those that begin with another word: torchrun, sbatch."""
    return any(said.document == path and said.text == " ".join(line.split()) for path, line in test_recipes.COMMANDS)


def of_hydra(said: Said) -> bool:
    words = said.text.split()
    known = [(path, re.sub(r"\\\n\s*", " ", line).split()) for path, line in test_recipes.HYDRA_COMMANDS]
    return words[0] == "fairseq-hydra-train" and (said.document, words) in known


def of_other_scripts(said: Said) -> bool:
    """A script of a recipe beside the three that all have."""
    words = without_variables(said).split()
    return bool(re.fullmatch(r"examples/\w+/\w+\.sh", words[0])) and not test_recipes.SCRIPT.search(words[0])


def of_fairseq(said: Said) -> bool:
    return bool(re.match(r"fairseq-(?!hydra)", said.text))


def of_preparation(said: Said) -> bool:
    return without_variables(said).startswith("prepare.sh ")


def of_criterion(said: Said) -> bool:
    """A line of flags in a diff."""
    return said.text.startswith("--criterion ")


def of_python(said: Said) -> bool:
    return bool(
        re.match(r"(?:\S*/)?python |scripts/(?:demo\.sh|\w+\.py)|examples/\w+/run\.py", without_variables(said))
    )


def elsewhere(said: Said) -> bool:
    """Or variables alone, which bash reads."""
    return said.text in ELSEWHERE or bool(re.fullmatch(r"export(?: \w+=\S*)+", said.text))


RULES: list[Callable[[Said], bool]] = [
    *(
        elsewhere,
        of_recipes,
        of_hydra,
        of_other_scripts,
        of_fairseq,
        of_preparation,
        of_criterion,
        of_python,
    )
]


def under(rule: Callable[[Said], bool]) -> pytest.MarkDecorator:
    """The commands whose first rule it is."""
    chosen = [said for said in COMMANDS if next((known for known in RULES if known(said)), None) is rule]
    return pytest.mark.parametrize("said", chosen, ids=str)


def test_every_command_of_every_document_is_tested():
    assert [str(said) for said in COMMANDS if not any(rule(said) for rule in RULES)] == []
    assert len(COMMANDS) > 150 and {said.document for said in COMMANDS} >= set(test_recipes.READMES)


def test_a_command_that_is_new_would_be_found():
    text = "\n\n    fairseq-train X\n    frobnicate   now\n\n```bash\nscripts/new.sh \\\n --flag\n```\nor `pip list`\n"
    found = [line for language, block in blocks(text) for line in lines(block)]
    assert found == ["scripts/new.sh --flag", "fairseq-train X", "frobnicate"]
    assert [span for span in spans(text) if is_command(span)] == ["pip list"]
    assert not any(rule(Said(ROOT / "README.md", "frobnicate")) for rule in RULES)


def test_bash_reads_every_command():
    script = "\n".join(said.text for said in COMMANDS if not of_criterion(said))
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


class Process(NamedTuple):
    variables: frozenset[str]  # names
    words: tuple[str, ...]


class Started:
    """A plugin of pytest's: the tests that it collects, and the processes that each starts."""

    def __init__(self):
        self.tests: dict[str, pytest.Function] = {}
        self.processes: dict[str, list[Process]] = defaultdict(list)  # by test
        self.outcomes: dict[str, set[str]] = defaultdict(set)

    def pytest_collection_finish(self, session):
        self.tests = {item.nodeid: item for item in session.items}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        stock = subprocess.Popen.__init__

        def start(process, args, *more, **settings):
            variables = {**os.environ, **(settings.get("env") or {})}
            words = [args] if isinstance(args, (str, Path)) else args
            self.processes[item.nodeid].append(Process(frozenset(variables), tuple(map(str, words))))
            stock(process, args, *more, **settings)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(subprocess.Popen, "__init__", start)
            return (yield)

    def pytest_runtest_logreport(self, report):
        self.outcomes[report.nodeid].add(report.outcome)


def inner_pytest(*arguments: str) -> tuple[int, Started]:
    """pytest in this process, as nobody's suite; its status and what it has seen."""
    seen = Started()
    settings = ["-q", "-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(ROOT)]
    tests = [str(ROOT / word) if "::" in word else word for word in arguments]
    return pytest.main([*settings, *tests], plugins=[seen]), seen


TESTS_ELSEWHERE = sorted({test for test in ELSEWHERE.values() if test})


def test_what_is_tested_elsewhere_has_tests_there():
    status, seen = inner_pytest("--collect-only", *TESTS_ELSEWHERE)
    assert status == 0
    assert {name.partition("[")[0] for name in seen.tests} == set(TESTS_ELSEWHERE)
    assert [name for name, item in seen.tests.items() if item.get_closest_marker("skip")] == []


def test_a_test_that_is_not_there_would_be_found():
    status, _ = inner_pytest("--collect-only", "tests/scripts/test_setup.py::test_nothing")
    assert status == pytest.ExitCode.USAGE_ERROR


def started(command: str, process: Process) -> bool:
    """Whether it is the command's program, and the part of it that a first word chooses, with the same variables."""
    names = re.findall(r"(\w+)=", VARIABLES.match(command)[0])
    program, *arguments = VARIABLES.sub("", command, count=1).removeprefix("source ").split()
    called = [Path(word).name for text in process.words for word in text.split()]  # bash -c gets many in one
    if Path(program).name not in called or not process.variables.issuperset(names):
        return False
    after = called[called.index(Path(program).name) + 1 :]
    return not arguments or not arguments[0].isalpha() or arguments[0] in after


def test_another_program_is_not_taken_for_the_commands():
    def process(*words, variables=()):
        return Process(frozenset(variables), words)

    assert started("pip install .", process("python", "-m", "pip", "install", "--no-deps", "."))
    assert not started("pip install .", process("python", "-m", "pip", "list"))
    assert not started("scripts/setup.sh", process("/bin/true", variables=["/a/scripts/setup.sh"]))
    assert not started("TORCH=2.11.0 scripts/setup.sh", process("scripts/setup.sh", variables=["PYTORCH"]))


@pytest.mark.slow
def test_what_is_tested_elsewhere_is_started_there():
    status, seen = inner_pytest(*TESTS_ELSEWHERE)
    assert status == 0
    for command, test in ELSEWHERE.items():
        names = [name for name in seen.tests if name.partition("[")[0] == test]
        ran = [name for name in names if "skipped" not in seen.outcomes[name]]
        assert ran or test is None, f"{command}: {test} was skipped"
        for name in ran:
            assert any(started(command, process) for process in seen.processes[name]), (command, name)


def test_what_is_tested_elsewhere_is_still_said():
    assert set(ELSEWHERE) - {said.text for said in COMMANDS} == set()


def test_some_program_takes_all_flags_of_the_texts(actions):
    assert len(FLAGS) > 100
    assert {str(said): why for said in FLAGS if (why := problem(said.text, actions))} == {}


def test_flags_that_nobody_takes_are_found(actions):
    assert problem("--head-mixin none", actions) == "no program has --head-mixin"
    assert problem("--lr-scheduler nothing", actions) == "--lr-scheduler never takes nothing"
    assert problem("--jobs four", actions) == "--jobs never takes four"
    assert problem("A=b --head-mixing none --jobs N", actions) is None


@under(of_preparation)
def test_prepare_sh_takes_its_flags(said, actions, monkeypatch):
    words = [word for word in shlex.split(without_variables(said))[1:] if word != "..."]
    if not (said.document.parent / "prepare.py").exists() or len(words) == 1:  # of all recipes; a flag alone
        assert problem(shlex.join(words), actions) is None
    else:
        start(monkeypatch, f"{said.document.parent.name}.prepare", words, EXAMPLES)


@under(of_other_scripts)
def test_a_script_says_what_it_would_run(said):
    result = recipes.script(said.text, DRY_RUN=1)
    assert result.stdout.strip(), result.stderr


# Sizes and data that every training has, beside the flags in question.
TRAINING = {
    "translation": "--arch mixhead_transformer_iwslt_de_en",
    "squad": "--arch mixhead_bert_base",
    "criterion": "--arch mixhead_transformer_iwslt_de_en --task translation",
}


@under(of_fairseq)
def test_fairseq_takes_the_command(said):
    words = shlex.split(re.sub(r"\$\([^)]*\)", recipes.PLUGIN.as_posix(), said.text).replace("...", ""))
    if "--arch" not in words:
        words += TRAINING["squad" if "squad" in words else "translation"].split()
    args = recipes.parse(words)
    assert args.arch in ARCH_MODEL_REGISTRY
    assert args.data == words[1]


@under(of_criterion)
def test_fairseq_takes_the_flags_of_a_diff(said):
    args = recipes.parse(["fairseq-train", "DATA", *TRAINING["criterion"].split(), *shlex.split(said.text)])
    assert args.criterion == shlex.split(said.text)[1]


@under(of_python)
def test_the_program_takes_its_flags(said, monkeypatch, capsys):
    words = shlex.split(without_variables(said).replace(" ...", "").replace("...", ""))
    if words[:1] == ["scripts/demo.sh"]:  # ends in this
        words[0] = "examples/demo/demo.py"
    elif Path(words[0]).name == "python":
        words = words[2:] if words[1] == "-m" else words[1:]
    if words == ["mixhead_plugin"]:
        runpy.run_module("mixhead_plugin", run_name="__main__")
        assert capsys.readouterr().out == f"{recipes.PLUGIN}\n"
        return
    path = [EXAMPLES] if "PYTHONPATH=examples" in said.text else []
    for command in ANALYSES if "<command>" in words else [None]:
        chosen = [command if word == "<command>" else word for word in words]
        try:
            start(monkeypatch, chosen[0], chosen[1:], *path)
        except SystemExit as end:
            assert end.code == 0 and "--help" in chosen, capsys.readouterr().err


def test_fairseq_is_there_after_activate():
    if sys.prefix == sys.base_prefix:
        pytest.skip("no virtual environment")
    line = 'source "$0"/bin/activate && command -v fairseq-train fairseq-generate fairseq-hydra-train'
    found = subprocess.run(["bash", "-c", line, sys.prefix], capture_output=True, text=True, check=True).stdout
    assert [Path(name).parent for name in found.split()] == [Path(sys.prefix) / "bin"] * 3


# ---- programs, links and names ---------------------------------------------------------------------------------------


def of_language(language: str) -> pytest.MarkDecorator:
    found = [(path, block) for path in DOCUMENTS for kind, block in blocks(path.read_text()) if kind == language]
    return pytest.mark.parametrize("document, block", found, ids=[str(path.relative_to(ROOT)) for path, _ in found])


def test_languages_of_blocks_are_those_that_are_tested():
    kinds = {kind for path in DOCUMENTS for kind, _ in blocks(path.read_text())}
    assert kinds - {"", "bash", "sh", "diff", "python", "toml"} == set()


@of_language("python")
def test_python_runs(document, block):
    with contextlib.redirect_stdout(io.StringIO()):
        exec(block, {"__name__": "document"})


@of_language("toml")
def test_a_grid_in_a_document_is_one(document, block, tmp_path):
    tomllib.loads(block)
    (tmp_path / "grid.toml").write_text(block)
    assert grids.runs(grids.read_grid(tmp_path / "grid.toml"))


def anchors(document: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"(?m)^#+ (.*)$", FENCED.sub("", document.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_and_picture_is_there(document):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", document.read_text())):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        path = (document.parent / name).resolve() if name else document
        if not path.is_relative_to(ROOT) or not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_that_it_names_is_there(document):
    text = document.read_text()
    named = set(re.findall(r"(?<![\w/.-])(?:examples|scripts|docs|tests|mixhead_plugin)/[\w./-]*\w", text))
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
