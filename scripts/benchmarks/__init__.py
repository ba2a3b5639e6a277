"""The cases of scripts/benchmark.py, and how they are checked and measured."""
