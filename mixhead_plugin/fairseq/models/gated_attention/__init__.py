"""Gated attention units, which fairseq lacks."""
