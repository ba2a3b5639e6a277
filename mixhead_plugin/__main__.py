"""`mixhead [path | repairs]`, also `python -m mixhead_plugin`"""

import argparse
from pathlib import Path


def main() -> None:
    """Print the folder for fairseq's --user-dir, or the table of repairs."""
    parser = argparse.ArgumentParser(prog="mixhead", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", title="commands")
    commands.add_parser("path", help="print the folder to give to fairseq's --user-dir (the default)")
    commands.add_parser("repairs", help="print which faults of fairseq are repaired, and how")
    if parser.parse_args().command == "repairs":
        from mixhead_plugin.repairs import table

        print(table())
    else:
        print(Path(__file__).resolve().parent)


if __name__ == "__main__":
    main()
