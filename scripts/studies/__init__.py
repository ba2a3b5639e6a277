"""Experiments: grids and their runs, the statistics of results, tables and pictures.

scripts/sweep.py and scripts/report.py are the commands.
"""
