"""A laboratory for attention heads: `python -m mixhead_plugin.analysis <command>` on the checkpoint of any model.

`attentions` finds the attentions of a model, `loading` brings a checkpoint and its data, `figures` writes what a
command found; every command is a module of its own, with the measures as functions of tensors.
"""
