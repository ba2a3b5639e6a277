"""Would an attention go on in the same way with fewer heads?

It is called alone twice: with the features of all heads, and with those of the heads that stay.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixhead_plugin.hf.layouts import ROLES, FoundAttention
from mixhead_plugin.hf.trial import (
    Features,
    Trial,
    call_alone,
    can_be_tried,
    random_features,
    with_gradients,
)


class FewerHeads(NamedTuple):
    """The sizes of an attention from which heads are to be cut.

    Attributes:
        kept: the numbers of the heads that stay, by field of Layout: queries, keys and values. Of
            values, zeros may stand in place of the others
        numbers: the attributes of the attention that count its heads, with their new values
        output: the number of heads and of features of a head that the attention function returns
    """

    kept: Mapping[str, Sequence[int]]
    numbers: Mapping[str, int]
    output: tuple[int, int]


@with_gradients()
def check_fewer(
    attention: FoundAttention, model: nn.Module, widths: Mapping[str, int], fewer: FewerHeads
) -> None:
    """Raise ValueError if an attention would not go on in the same way with fewer heads.

    Args:
        attention: the attention with all heads
        model: the model that has it
        widths: the present numbers of features of queries, keys and values
        fewer: what it would be
    """
    if not can_be_tried(attention):
        return
    features = random_features(attention, model, widths)
    whole = call_alone(attention, model, features, output=fewer.output)
    left = _features_left(attention, features, widths, fewer.kept)
    trial = call_alone(attention, model, left, fewer.numbers, fewer.output)

    culprit = _what_needs_all_heads(whole, trial, fewer.kept, widths)
    if culprit:
        raise ValueError(
            f"{attention.class_name}: cannot be cut, because {culprit} needs all heads; "
            "ablate them, or mix them first"
        ) from trial.problem


def _features_left(
    attention: FoundAttention,
    features: Features,
    widths: Mapping[str, int],
    kept: Mapping[str, Sequence[int]],
) -> Features:
    """Return the features of the heads that stay, where `features` are those of all heads."""
    left: Features = {}
    for path, by_role in features.items():
        left[path] = {}
        for role, given in by_role.items():
            left[path][role] = _some_heads(given, kept[role], attention)
    # Behind mixing, queries and keys have all heads, and some attentions want as many values.
    if len(kept["keys"]) * attention.head_dim == widths["keys"]:
        of_values = left[attention.paths["values"]]
        missing = widths["values"] - of_values["values"].size(-1)
        of_values["values"] = F.pad(of_values["values"], (0, missing))
    return left


def _what_needs_all_heads(
    whole: Trial, trial: Trial, kept: Mapping[str, Sequence[int]], widths: Mapping[str, int]
) -> str:
    """Return the module inside an attention that needs all heads, or 'its forward'; '' for none.

    Args:
        whole: the trial of the attention with all heads
        trial: the trial of the attention with fewer heads
        kept: the heads that stay, as in `FewerHeads`
        widths: the numbers of features of all heads, as in `check_fewer`
    """
    if trial.problem is not None:
        return trial.culprit() or "its forward"
    assert trial.output is not None  # `check_fewer` has given it
    heads, size = trial.output
    if trial.outputs.size(-1) != heads * size:
        return "its forward"  # the output projection would get other features
    for role in ROLES:
        if not _heads_arrive(whole, trial, role, kept[role], widths):
            return "its forward"
    if not _same_settings(whole, trial):
        return "its forward"
    return ""


def _some_heads(features: Tensor, heads: Sequence[int], attention: FoundAttention) -> Tensor:
    by_head = features.unflatten(-1, (-1, attention.head_dim))  # [B, N, heads, D]
    return by_head[..., heads, :].flatten(-2)


def _heads_arrive(
    whole: Trial, trial: Trial, role: str, kept: Sequence[int], widths: Mapping[str, int]
) -> bool:
    """Return whether the queries, keys or values of the heads that stay arrive as they did."""
    before = whole.arrived[role]  # [B, heads, N, D]
    after = trial.arrived[role]
    # Some attentions give each key and value several times, once for each query that shares it.
    repeats = before.size(1) * before.size(3) // widths[role]
    stay: list[int] = []
    for head in kept:
        stay += range(head * repeats, (head + 1) * repeats)
    if after.size(1) < len(stay):
        return False
    return torch.allclose(before[:, stay], after[:, : len(stay)])


def _same_settings(whole: Trial, trial: Trial) -> bool:
    """Return whether the attention function gets the same mask, and a sink for each head."""
    n_queries = trial.arrived["queries"].size(1)
    for name, setting_before in whole.settings.items():
        setting_after = trial.settings[name]
        if not isinstance(setting_before, Tensor) or not isinstance(setting_after, Tensor):
            continue
        if name == "s_aux":  # a sink for each head
            if setting_after.numel() != n_queries:
                return False
        # T5 makes a bias of as many heads as it has.
        elif setting_after.shape == setting_before.shape and not torch.allclose(
            setting_after, setting_before
        ):
            return False
    return True
