"""The cases of scripts/benchmark.py: how they are checked, measured and counted.

scripts/emulate.py counts what their kernels execute.
"""
