"""The adapter of the attentions that this package builds: fairseq's and torch's.

Where heads mix, source heads and mixed heads are cut apart. A source head j has rows of q_proj and
k_proj and a row of M. A mixed head i has rows of v_proj, columns of out_proj and a column of M.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from mixhead_plugin.heads.attention import HeadsError
from mixhead_plugin.heads.choosing import KeptHeads, kept_by
from mixhead_plugin.heads.cutting import cutting_problem, replace
from mixhead_plugin.heads.hooked_attention import HookedAttention
from mixhead_plugin.parts import Assembly, Axis, entries_of_heads

# The parameters of every attention of ours, and their dimensions that shrink with the heads.
PARAMETERS: dict[str, tuple[Axis, ...]] = {
    "q_proj.weight": (Axis(0, "source", size="head_dim"),),
    "q_proj.bias": (Axis(0, "source", size="head_dim"),),
    "k_proj.weight": (Axis(0, "source", size="head_dim"),),
    "k_proj.bias": (Axis(0, "source", size="head_dim"),),
    "v_proj.weight": (Axis(0, "mixed", size="value_dim"),),
    "v_proj.bias": (Axis(0, "mixed", size="value_dim"),),
    "bias_k": (Axis(2, "source", size="head_dim"),),
    "bias_v": (Axis(2, "mixed", size="value_dim"),),
    "out_proj.weight": (Axis(1, "mixed", size="value_dim"),),
    "out_proj.bias": (),
    "relative_gain.weight": (Axis(0, "source"),),
}


class AssemblyAttention(HookedAttention):
    """The adapter of one module, a `heads.Attention`."""

    def __init__(self, name: str, module: Assembly):
        super().__init__(name, module)
        self.module = module

    @property
    def heads(self) -> dict[str, int]:
        if self.module.head_mixing is None:
            return {"mixed": self.module.num_mixed_heads}
        return {"source": self.module.num_heads, "mixed": self.module.num_mixed_heads}

    def cut_problem(self, heads: Sequence[int]) -> str:
        parts = self.module.variant.part_kinds()
        return cutting_problem(parts, len(heads), self.heads["mixed"]) or self._unknown_tensor()

    def cut(self, heads: Mapping[str, Sequence[int]]) -> None:
        kept = kept_by(self, heads)
        for name, tensor in self.smaller(kept).items():
            path, _, entry = name.rpartition(".")
            replace(self.module.get_submodule(path), entry, tensor)
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            projection = getattr(self.module, name)
            projection.out_features, projection.in_features = projection.weight.shape
        module: Any = self.module
        module.num_heads = len(kept.source)
        module.num_mixed_heads = len(kept.mixed)

    def smaller(self, kept: KeptHeads) -> dict[str, Tensor]:
        """Return the parameters and buffers of the module with only the heads of `kept`.

        Raise HeadsError where every head needs all heads, or where it is not known which entries of
        a tensor belong to which head.
        """
        gone = [head for head in range(self.heads["mixed"]) if head not in kept.mixed]
        problem = self.cut_problem(gone)
        if problem:
            raise HeadsError(f"{self.name}: {problem}")

        axes = self._axes()
        sizes = {"head_dim": self.module.head_dim, "value_dim": self.module.value_dim}
        smaller = {}
        for name, tensor in self.module.state_dict().items():
            smaller[name] = entries_of_heads(tensor, axes[name], kept._asdict(), sizes).clone()
        return smaller

    def _axes(self) -> dict[str, tuple[Axis, ...]]:
        """Return the dimensions that shrink with the heads, for each tensor that is known."""
        axes = dict(PARAMETERS)
        for option, row in self.module.variant.part_kinds().items():
            for entry, axes_of_entry in row.parameters.items():
                axes[f"{option}.{entry}"] = axes_of_entry
        return axes

    def _unknown_tensor(self) -> str:
        """Return why a tensor that is not known forbids to cut heads; empty if there is none.

        An adapter may have brought it, or a class of its own.
        """
        axes = self._axes()
        for name in self.module.state_dict():
            if name not in axes:
                owner = type(self.module).__name__
                return f"cannot be cut, its {name} belongs to {owner}; its heads can only be masked"
        return ""
