"""Synthesizer: architectures `<family>_synthesizer_lm*`."""
