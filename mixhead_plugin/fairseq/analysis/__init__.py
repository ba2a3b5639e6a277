"""Look at the attention heads of a trained model, and cut some off: `python -m
mixhead_plugin.analysis <command>`.

`loading` loads a checkpoint and its data, `heads` finds attentions and masks single heads.
`figures` holds the style of all pictures, `output` writes the results. Each command is a module
with `add_arguments` and `run`.
"""
