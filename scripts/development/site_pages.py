#!/usr/bin/env python
"""Collect the pages of the site: the documents of this checkout, and the files that they link to.

Everything keeps its place, so `docs/install.md` may link to `../examples/README.md` on the site as
it does in the repository. scripts/docs.sh builds the site from the folder that this makes.
"""

import argparse
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("docs", "examples", "mixhead_plugin", "results", "scripts", "tests")
FENCED = re.compile(r"(?ms)^```.*?^```$")
# [text](target), ![text](target), and pictures in HTML.
LINK = re.compile(r"""\]\(([^)\s]+)\)|(?:src|srcset|href)=["']([^"'\s]+)["']""")


def documents(root: Path = ROOT) -> list[Path]:
    """Return the Markdown files of the project."""
    found = [*root.glob("*.md")]
    for folder in FOLDERS:
        found += (root / folder).rglob("*.md")
    return sorted(found)


def linked_files(document: Path) -> list[Path]:
    """Return the files of this checkout that a document links to or shows."""
    found = []
    for in_markdown, in_html in LINK.findall(FENCED.sub("", document.read_text())):
        target = (in_markdown or in_html).partition("#")[0]
        path = (document.parent / target).resolve()
        if target and path.is_relative_to(ROOT) and path.is_file():
            found.append(path)
    return found


def collect(folder: Path) -> None:
    """Copy the pages and what they link to into a folder, which is emptied before."""
    shutil.rmtree(folder, ignore_errors=True)
    files = set(documents())
    for document in documents():
        files.update(linked_files(document))
    for file in files:
        copy = folder / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.symlink_to(file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="what was in it before is deleted")
    collect(parser.parse_args().folder)
