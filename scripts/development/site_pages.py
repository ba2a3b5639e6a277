#!/usr/bin/env python
"""Collect the pages of the site: the documents of this checkout, and the files that they link to.

Everything keeps its place, so `docs/install.md` may link to `../examples/README.md` on the site as
it does in the repository. scripts/docs.sh builds the site from the folder that this fills.

The pages are written for CommonMark, which GitHub renders. The site's Python-Markdown reads some of
it in another way: it wants four spaces where CommonMark wants two, and takes a line that happens to
begin with '32. ' for the 32nd item of a list. So pages are formatted anew, without such places.
"""

import argparse
import re
from pathlib import Path

import mdformat

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("docs", "examples", "mixhead_plugin", "results", "scripts", "tests")
FENCED = re.compile(r"(?ms)^```.*?^```$")
# [text](target), ![text](target), and pictures in HTML.
LINK = re.compile(r"""\]\(([^)\s]+)\)|(?:src|srcset|href)=["']([^"'\s]+)["']""")


def documents() -> list[Path]:
    """Return the Markdown files of the project."""
    pages = [*ROOT.glob("*.md")]
    for folder in FOLDERS:
        pages += (ROOT / folder).rglob("*.md")
    return sorted(pages)


def linked_files(document: Path) -> list[Path]:
    """Return the files of this checkout that a document links to or shows."""
    files = []
    for in_markdown, in_html in LINK.findall(FENCED.sub("", document.read_text())):
        target = (in_markdown or in_html).partition("#")[0]
        path = (document.parent / target).resolve()
        if target and path.is_relative_to(ROOT) and path.is_file():
            files.append(path)
    return files


def for_python_markdown(text: str) -> str:
    """Return the text of a page so that Python-Markdown makes of it what CommonMark does."""
    if "\n::: " in text:  # the lists of functions, which mdformat would break
        return text
    options = {"wrap": "no", "number": True}
    return mdformat.text(text, options=options, extensions={"mkdocs", "tables"})


def collect(folder: Path) -> None:
    """Bring a folder up to date with the pages and with what they link to."""
    files = set(documents())
    for document in documents():
        files.update(linked_files(document))

    wanted = {folder / file.relative_to(ROOT): file for file in files}
    for copy in folder.rglob("*"):
        if copy.is_file() and copy not in wanted:
            copy.unlink()
    for copy, file in wanted.items():
        # Only what has changed, because `serve` looks at times.
        if copy.exists() and copy.stat().st_mtime >= file.stat().st_mtime:
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".md":
            copy.write_text(for_python_markdown(file.read_text()))
        else:
            copy.write_bytes(file.read_bytes())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="anything else in it is deleted")
    collect(parser.parse_args().folder)
