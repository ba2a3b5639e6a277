"""`mixhead check`: compare attention on this machine with float64, and measure its speed.

`command.py` has the command, `variants.py` which calls are tried, and `judging.py` how.
"""
