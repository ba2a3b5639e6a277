"""The door for fairseq: what --user-dir registers, and the commands that study its models.

How `--head-mixing position-wise` comes from the command line to the kernel:

1. `options.py` makes a dataclass with one flag for each field of `parts.Variant`, so the field
   `head_mixing` becomes --head-mixing. `AttentionOptions` adds the flags of a whole model.
2. `models/families.py` hands these flags to fairseq's parser, and completes and checks what comes
   back. The checks make a `Variant` too.
3. `layers.py` overrides fairseq's `build_self_attention` and `build_encoder_attention`. It asks
   `AttentionOptions.attention_arguments` for the `Variant` of its site, and builds a
   `MixheadAttention`. This Variant is the one that is kept; those of the checks are thrown away.
4. `Assembly.add_parts` (`parts/assembly.py`) looks up the row
   `PARTS["head_mixing"]["position-wise"]`, and builds its part as the child `self.head_mixing`.
5. `MixheadAttention.forward` (`attention.py`) projects queries, keys and values, with
   `Assembly.queries`, `keys` and `values`. `CachedAttention` (`cache.py`) adds the keys of earlier
   steps.
6. `Assembly.inputs_of` calls the parts. `self.head_mixing` computes M from the unscaled queries.
   The result is an `AttentionInputs`, all that a kernel needs.
7. `Hooked.attend` (`parts/hooks.py`) calls the hooks, such as a gate on a head, and `ops/api.py`.
   --attention-impl names `ops/reference.py`, `ops/blockwise` or `ops/triton`. With `auto`,
   `ops/choice.py` chooses among them, or takes `ops/fused.py`: torch's own kernels, for plain
   softmax alone.
8. `Assembly.mix_and_gate_outputs` mixes and scales the outputs of heads, and `out_proj` makes one
   vector of them.
"""
