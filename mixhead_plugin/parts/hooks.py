"""Let others see and change the calls of an attention, as hooks of torch do with modules."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from mixhead_plugin.ops.api import attend_with_weights
from mixhead_plugin.ops.inputs import AttentionInputs

PreHook = Callable[[Any, AttentionInputs], AttentionInputs | None]
Hook = Callable[[Any, AttentionInputs, Tensor], Tensor | None]


class Hooked:
    """A mixin: an attention whose calls of `ops.attention` have hooks.

    Several can be there at once; each sees what the one before it has made. TorchScript has none,
    because it cannot call what comes later.
    """

    def init_hooks(self) -> None:
        """Make room for hooks; whoever builds the parts of an attention calls it.

        It is no __init__, because fairseq's `MixheadAttention` calls none of its mixins'.
        """
        # Ordered dicts, because a RemovableHandle wants something with weak references.
        self._attention_pre_hooks: OrderedDict[int, PreHook] = OrderedDict()
        self._attention_hooks: OrderedDict[int, Hook] = OrderedDict()

    def register_attention_pre_hook(self, hook: PreHook) -> RemovableHandle:
        """Call `hook(attention, inputs)` before each call; return a handle that removes it.

        The inputs that it returns take the place of those that it was given; None leaves them.
        """
        handle = RemovableHandle(self._attention_pre_hooks)
        self._attention_pre_hooks[handle.id] = hook
        return handle

    def register_attention_hook(self, hook: Hook) -> RemovableHandle:
        """Call `hook(attention, inputs, outputs)` after each call; return a handle that removes it.

        `inputs` are those behind the pre-hooks, and `outputs` are the outputs of the mixed heads
        [B, H', Nq, Dv]. A tensor that it returns takes their place; None leaves them.
        """
        handle = RemovableHandle(self._attention_hooks)
        self._attention_hooks[handle.id] = hook
        return handle

    def attend(
        self, inputs: AttentionInputs, impl: str, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Call `ops.attention` with all hooks.

        Return the outputs [B, H', Nq, Dv] and, where needed, the mixed weights [B, H', Nq, Nk].
        """
        # lists, because a hook may remove itself
        for pre_hook in list(self._attention_pre_hooks.values()):
            changed = pre_hook(self, inputs)
            if changed is not None:
                inputs = changed
        outputs, weights = attend_with_weights(inputs, impl, need_weights)
        for hook in list(self._attention_hooks.values()):
            replaced = hook(self, inputs, outputs)
            if replaced is not None:
                outputs = replaced
        return outputs, weights
