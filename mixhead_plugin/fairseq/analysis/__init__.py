"""Look at the heads of a trained model of fairseq, and cut some off.

    python -m mixhead_plugin.analysis <command>

`mixhead_plugin.heads` weighs, leaves out, cuts and draws. Here is what needs fairseq: `loading`
loads a checkpoint and its data, `adapter` finds its attentions, `scores` scores it, `smaller`
writes a checkpoint, `output` writes the results. Each command is a module with `add_arguments` and
`run`; `profile` and `compare` are parts of `prune`.
"""
