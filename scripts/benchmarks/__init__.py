"""The cases of scripts/benchmark.py, how they are checked and measured, and what scripts/emulate.py
counts.
"""
