"""Every command of a document parses with its program's flags.

Every link holds, and every Python program runs.

tests/examples/test_recipes.py parses the commands of the recipes; test_readme.py runs the programs
of README.md.
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
from pathlib import Path

import pytest
import recipes
from fairseq.dataclass.initialize import hydra_init
from fairseq.models import ARCH_MODEL_REGISTRY
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "examples", "mixhead_plugin", "results", "scripts")
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(path for name in FOLDERS for path in (ROOT / name).rglob("*.md"))]
)
# Pages beside tests, whose commands their own tests run.
LINKED = [*DOCUMENTS, *sorted((ROOT / "tests").rglob("*.md"))]
FENCED = re.compile(r"(?ms)^```(\w*)\n(.*?)^```$")
INDENTED = re.compile(r"(?m)(?:^ {4}.*\n)+")
VARIABLES = re.compile(r"(?:[A-Z_]+=\S* )*")
# A file that a page tells the reader to write, by its path. test_extending.py does so.
WRITTEN = re.compile(r"(?m)^```py\n# (\S+)$")
# A folder of the reader's own, which a page tells to write; it is not in the checkout.
OWN_USER_DIR = re.compile(r"--user-dir (?!mixhead_plugin\b)\w+(?= |$)")
FIELD = re.compile(r"`(\+*model\.\w+=[\w-]+)`")
PROGRAM = re.compile(
    r"fairseq-\S+|mixhead|(?:\S*/)?python[\d.]*|(?:scripts|examples)/\S+\.(?:sh|py)"
)


def blocks(document):
    """Return language and content of the fenced and the indented blocks."""
    text = document.read_text()
    return [
        *FENCED.findall(text),
        *(("", block) for block in INDENTED.findall(FENCED.sub("", text))),
    ]


def commands():
    """Return (document, command) for each line of a block that starts a program.

    The program is of the project or of fairseq.
    """
    found = []
    for document in DOCUMENTS:
        for language, block in blocks(document):
            if language in ("python", "py", "toml", "bibtex", "text"):
                continue
            if language == "diff":
                block = "\n".join(re.findall(r"(?m)^\+(.*)$", block))
            for line in re.sub(r"\s*\\\n\s*", " ", block).splitlines():
                command = re.split(r"\s+#\s|\s{3,}", line.strip())[0]
                if command and PROGRAM.fullmatch(VARIABLES.sub("", command, count=1).split(" ")[0]):
                    found.append((document, command))
    return list(dict.fromkeys(found))


COMMANDS = commands()


def of(kind):
    chosen = [
        (document, command)
        for document, command in COMMANDS
        if kind(VARIABLES.sub("", command, count=1))
    ]
    assert chosen
    names = [f"{document.relative_to(ROOT)}: {command}" for document, command in chosen]
    return pytest.mark.parametrize("command", [command for _, command in chosen], ids=names)


def is_python(command):
    return bool(
        re.match(r"mixhead |(?:\S*/)?python|(?:scripts|examples)/\S+\.py|scripts/demo\.sh", command)
        and not is_hydra(command)
    )


def is_hydra(command):
    return command.startswith(("fairseq-hydra-train", "mixhead hydra-train"))


def test_bash_reads_every_command():
    script = "\n".join(command for _, command in COMMANDS)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@of(lambda command: re.match("fairseq-(?!hydra)", command) and not OWN_USER_DIR.search(command))
def test_fairseq_takes_the_command(command):
    command = VARIABLES.sub("", command, count=1)
    words = shlex.split(
        re.sub(r"\$\([^)]*\)", recipes.PLUGIN.as_posix(), command).replace("...", "")
    )
    if words[0] == "fairseq-train" and "--arch" not in words:
        words += ["--arch", "mixhead_transformer_iwslt_de_en"]
    parsed = recipes.parse(words)
    assert words[0] != "fairseq-train" or parsed.arch in ARCH_MODEL_REGISTRY


def composed(*words):
    """Let Hydra make a config from the words of a command; raise if it cannot."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config-dir", default=str(ROOT / "examples" / "demo"))
    parser.add_argument("--config-name", default="lm")
    args, overrides = parser.parse_known_args(words)
    hydra_init()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(ROOT / args.config_dir), version_base="1.1"):
        return compose(args.config_name, overrides)


@of(is_hydra)
def test_hydra_takes_the_command(command):
    words = shlex.split(
        re.sub(r"\$\([^)]*\)", recipes.PLUGIN.as_posix(), command).replace("$PWD", str(ROOT))
    )
    first = 2 if words[0] == "mixhead" else 1
    # Hydra trains in a folder of its own, so a path must not depend on the folder.
    assert composed(*words[first:]).task.data.startswith("/")


def test_hydra_takes_the_fields_that_are_named():
    named = [
        (document, field) for document in DOCUMENTS for field in FIELD.findall(document.read_text())
    ]
    assert len(named) > 2
    for _, field in named:
        composed(field)


class Parsed(Exception):
    """A program has read its command line."""


@of(is_python)
def test_the_program_takes_its_flags(command, monkeypatch):
    """Start it as a user does; it ends when it has read its command line."""
    words = shlex.split(VARIABLES.sub("", command, count=1).replace("...", ""))
    assert not words[0].endswith((".py", ".sh")) or os.access(ROOT / words[0], os.X_OK)
    if words[0] == "scripts/demo.sh":
        words[0] = "examples/demo/demo.py"
    if words[0] == "mixhead":
        words = ["-m", "mixhead_plugin", *words[1:]]
    if "python" in Path(words[0]).name:
        del words[0]
    if words[0] == "-c":
        compile(words[1], "-c", "exec")
        return
    module = None
    if words[0] == "-m":
        module = words[1]
        del words[0]
    program = words.pop(0)
    known = argparse.ArgumentParser.parse_known_args
    reading = []

    def parse(self, *args, **settings):
        if reading:  # a command of a command
            return known(self, *args, **settings)
        reading.append(self)
        _, rest = known(self, *args, **settings)
        # these hand them on to fairseq
        if rest and not program.endswith(("convert_bert.py", "sweep.py")):
            self.error(f"unrecognized arguments: {rest}")
        raise Parsed

    before = set(sys.modules)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse)
    monkeypatch.setattr(sys, "argv", [program, *words])
    try:
        if module:
            runpy.run_module(module, run_name="__main__")
        else:
            monkeypatch.syspath_prepend((ROOT / program).parent)
            runpy.run_path(str(ROOT / program), run_name="__main__")
    except Parsed:
        return
    except SystemExit as end:
        assert not end.code and ("--help" in words or module == "mixhead_plugin")
    finally:
        for name in set(sys.modules) - before:  # figure.py is another module in another folder
            if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(
                ROOT / "examples"
            ):
                del sys.modules[name]


WITH_PROGRAMS = [
    path for path in DOCUMENTS if "```python" in path.read_text() and path != ROOT / "README.md"
]


@pytest.mark.parametrize("path", WITH_PROGRAMS, ids=str)
def test_python_runs(path):
    names = {"__name__": "document"}  # a block goes on from those before it
    with contextlib.redirect_stdout(io.StringIO()):
        for block in [block for kind, block in blocks(path) if kind == "python"]:
            exec(block, names)


def anchors(document):
    """Return the anchors of its headings, as GitHub makes them."""
    headings = re.findall(r"(?m)^#+ (.*)$", FENCED.sub("", document.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def missing_from(document):
    """Return the links and the names of files of a document that lead nowhere."""
    text = document.read_text()
    broken = []
    links = re.findall(r'\]\(([^)\s]+)\)|(?:src|srcset|href)="([^"]+)"', FENCED.sub("", text))
    for target in map("".join, links):
        name, _, anchor = target.partition("#")
        path = (document.parent / name).resolve() if name else document
        inside = path.is_relative_to(ROOT) and path.exists()
        if not re.match("https?://", target) and not (
            inside and (not anchor or anchor in anchors(path))
        ):
            broken.append(target)
    named = set(
        re.findall(r"(?<![\w/.-])(?:examples|scripts|docs|tests|mixhead_plugin)/[\w./-]*\w", text)
    )
    named -= set(WRITTEN.findall(text))
    return broken + [name for name in sorted(named) if not (ROOT / name).exists()]


def test_every_link_and_file_is_there():
    missing = {str(document): missing_from(document) for document in LINKED}
    assert {name: found for name, found in missing.items() if found} == {}
