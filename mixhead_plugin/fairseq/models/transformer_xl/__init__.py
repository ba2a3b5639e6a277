"""Transformer-XL: architectures `<family>_transformer_xl*`."""
