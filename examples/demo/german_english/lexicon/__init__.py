"""The words: tables in plain text, one entry a line, German left of the bar and English right of it.

Forms that ``regular`` derives are left out.  English is British.
"""
