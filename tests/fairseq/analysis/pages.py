"""Take the weights of the heads from a model's own attention, as a page should show them."""

from functools import partial

import torch

from mixhead_plugin.fairseq.analysis.adapter import attentions_of
from mixhead_plugin.heads.sites import where


def by_definition(loaded, net_input):
    """Return P, M and mixed weights of the first sentence, by site and layer.

    They are computed by `reference_with_weights`.
    """
    found = {}
    hooks = []

    def see(name, attention, args, kwargs, output):
        if name not in found:
            found[name] = mixings = []
            call = {**kwargs, "need_head_weights": True}
            mixed = attention(*args, **call)[1][:, 0]  # [H', Nq, Nk]
            if attention.head_mixing is None:
                found[name] = (mixed, None, mixed)
                return
            copied = torch.eye(attention.num_heads).split(attention.num_mixed_heads, 1)
            source = []
            for heads in copied:
                with attention.head_mixing.register_forward_hook(
                    lambda part, x, m, c=heads: mixings.append(m) or c
                ):
                    source.append(attention(*args, **call)[1][:, 0])
            mixing = mixings[0] if mixings[0].dim() == 2 else mixings[0][0]
            found[name] = (torch.cat(source), mixing.detach(), mixed)

    for attention in attentions_of(loaded.model):
        hook = partial(see, attention.name)
        hooks.append(attention.module.register_forward_hook(hook, with_kwargs=True))
    with torch.no_grad():
        loaded.model(**net_input)
    for hook in hooks:
        hook.remove()
    return {tuple(where(name)): arrays for name, arrays in found.items()}
