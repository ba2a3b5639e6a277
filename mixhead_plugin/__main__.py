"""`python -m mixhead_plugin` prints the folder to give to fairseq's --user-dir."""

from pathlib import Path

print(Path(__file__).resolve().parent)
