#!/usr/bin/env python
"""Run the notebooks from top to bottom, as Jupyter does, and keep what they print and draw.

    scripts/development/reach.sh
    .venv/bin/python scripts/development/run_notebooks.py

It needs the folder of MiniLM in notebooks/; the notebook says how to get it. What the notebooks
make lies there, too, and git ignores it.
"""

import argparse
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "notebooks"
JUPYTER = ROOT / ".venv" / "jupyter"  # its packages, which only this program needs


def run(file: Path, folder: Path) -> str:
    """Run a notebook in a folder; return its text with its new outputs.

    Raise nbclient's CellExecutionError at the first cell that fails.
    """
    sys.path.insert(0, str(JUPYTER))
    # for the kernel, a process of its own
    os.environ["PYTHONPATH"] = str(JUPYTER)
    # tqdm asks for a package that draws bars; the notebooks draw none
    os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"

    import nbclient
    import nbformat

    notebook = nbformat.read(file, as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        timeout=600,
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,  # else each run changes the file
    )
    client.execute()
    # Which Python ran it is of no interest to a reader.
    notebook.metadata["language_info"] = {"name": "python"}
    return nbformat.writes(notebook) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="such as fairseq_recipe (default: all)")
    args = parser.parse_args()
    files = {file.stem: file for file in sorted(NOTEBOOKS.glob("*.ipynb"))}
    for name in args.names:
        if name not in files:
            parser.error(f"{name}: must be among {', '.join(files)}")
    for name in args.names or files:
        file = files[name]
        began = time.monotonic()
        file.write_text(run(file, file.parent), encoding="utf-8")
        print(f"{file.name}: {time.monotonic() - began:.0f} s, {file.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
