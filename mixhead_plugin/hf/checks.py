"""Is an attention as its row says, and would it go on with fewer heads? A `Trial` tells.

The checks before `mix`, in the drawing of `trial.py`:

    given                                          arrived          returned     outputs
    q_proj    | head 0 | head 1 | head 2 |    -->  queries 0 1 2    0 1 2   -->  | 0 | 1 | 2 |
    kv_proj   | keys 0 1 2 | values 0 1 2 |   -->  keys 0 1 2
                                              -->  values 0 1 2

- Sizes: as many heads, of the size that the row names.
- `_comes_from`: queries depend on the features of q_proj alone, and on all of them. Keys depend on
  the first half of kv_proj, values on the second.
- `_in_order`: head 1 of the queries comes from the second block of q_proj, and so on. Some models
  norm all heads together, so that each depends a little on the others; `_within_a_head` takes that
  away.
- `_keeps_the_order`: the output projection gets head 1 as its second block.
- `_check_settings`: the attention asks its attention function for nothing that ours cannot do.

All of it is read off gradients: a feature that an output depends on has one that is not 0.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixhead_plugin.errors import warn_caller
from mixhead_plugin.hf.layouts import ROLES, FoundAttention, slices
from mixhead_plugin.hf.trial import (
    Features,
    Trial,
    call_alone,
    can_be_tried,
    random_features,
    random_like,
    with_gradients,
)
from mixhead_plugin.ops.normalizers import sink_problem
from mixhead_plugin.ops.precision import upcast
from mixhead_plugin.parts import Variant

# What an attention may give to its attention function: what `mixed_attention` takes, and what the
# mask or the model itself sees to. Anything else would be lost.
TAKEN = ("attention_mask", "scaling", "dropout", "is_causal", "position_bias", "s_aux")
HARMLESS = ("output_attentions", "sliding_window", "position_ids", "deterministic")


@with_gradients()
def check_row(attention: FoundAttention, model: nn.Module, variant: Variant) -> None:
    """Raise ValueError unless the attention is as its row says.

    Queries, keys and values have to arrive from where the row says, and outputs have to go where
    it says. `mixed_attention` has to serve all that the attention asks of it, together with the
    variant.
    """
    if not can_be_tried(attention):
        return
    widths = attention.widths(model)
    trial = call_alone(attention, model, random_features(attention, model, widths))
    if not trial.arrived and trial.problem is None:
        raise ValueError(
            f"{attention.class_name}: computes its attention itself; "
            "must call it through the AttentionInterface"
        )
    if not trial.arrived:
        problem = _first_line(trial.problem)
        raise ValueError(
            f"{attention.class_name}: must work alone, or its projections cannot be checked; "
            f"{problem}"
        )
    _check_settings(trial, variant)

    _, heads, _, size = trial.arrived["queries"].shape  # [B, H, Nq, D]
    if (heads, size) != (attention.heads, attention.head_dim):
        raise ValueError(
            f"{attention.class_name}: its queries have {heads} heads of {size}, "
            f"but its row names {attention.heads} of {attention.head_dim}"
        )
    value_size = trial.arrived["values"].size(3)  # of [B, G, Nk, Dv]
    if value_size != size:
        raise ValueError(
            f"{attention.class_name}: its values have heads of {value_size}, its queries of {size}"
        )
    for path, roles in attention.packed().items():
        for role, where in slices(roles, widths).items():
            if not _comes_from(trial, role, path, where.start, where.stop):
                raise ValueError(f"{attention.class_name}: {_wrong(path, role, roles)}")
    if _keeps_the_order(trial) is False:
        raise ValueError(_another_order(attention, "cannot be mixed"))


def _check_settings(trial: Trial, variant: Variant) -> None:
    """Raise ValueError if an attention asks for what `mixed_attention` does not do."""
    class_name = trial.attention.class_name
    for name, value in trial.settings.items():
        if name not in (*TAKEN, *HARMLESS) and value is not None:
            raise ValueError(f"{class_name}: {name} cannot be used with mixed heads")
    if trial.settings.get("s_aux") is None:
        return
    if variant.attention_sink != "none":
        raise ValueError(f"{class_name}: has sinks of its own, so attention_sink must be none")
    problem = sink_problem(variant.normalizer)
    if problem:
        raise ValueError(f"{class_name}: has sinks of its own, {problem}")


@with_gradients()
def check_outputs(attention: FoundAttention, model: nn.Module) -> None:
    """Raise ValueError if the output projection gets the heads in another order than they have.

    Warn if that cannot be seen, because the attention cannot be called alone.
    """
    if not can_be_tried(attention):
        return
    features = random_features(attention, model, attention.widths(model))
    trial = call_alone(attention, model, features)
    keeps = _keeps_the_order(trial)
    if keeps is False:
        raise ValueError(_another_order(attention, "its heads cannot be told apart"))
    if keeps is None:
        why = "does not work alone" if trial.problem else "computes them in its own way"
        warn_caller(
            f"{attention.class_name}: the order of its heads could not be checked, because it {why}"
        )


def _first_line(problem: Exception | None) -> str:
    return str(problem).partition("\n")[0]


def _another_order(attention: FoundAttention, what: str) -> str:
    output = attention.paths["output"]
    return (
        f"{attention.class_name}: {what}, {output} does not get the outputs of one head after "
        "another"
    )


def _comes_from(trial: Trial, role: str, path: str, start: int, end: int) -> bool:
    """Return whether what arrived comes from these features of this projection alone.

    Each head has to come from its own of them. It may depend on those of other heads, too, as
    behind a norm over all heads. Queries have to be of their own position, because a mixing reads
    them there; keys and values may have been convolved.
    """
    heads = trial.arrived[role][-1, :, -1]  # [H or G, D] of the last position and sentence
    gradients = _gradients(heads, list(trial.given.values()))
    by_projection = dict(zip(trial.given, gradients))
    gradient = by_projection.pop(path)  # [B, N, features]

    must_be_0 = list(by_projection.values())
    must_be_0 += [gradient[..., :start], gradient[..., end:]]  # other features
    must_be_0.append(gradient[:-1])  # other sentences
    if role == "queries":
        must_be_0.append(gradient[:, :-1])  # other positions
    if any(bool(each.any()) for each in must_be_0):
        return False
    if not gradient[-1, -1, start:end].all():
        return False

    n_heads = (end - start) // trial.attention.head_dim
    if heads.size(0) % n_heads != 0:
        return False
    # Some attentions give each key and value several times, once for each query that shares it.
    by_head = heads.unflatten(0, (n_heads, -1)).flatten(1)  # [G, repeats * D]

    def features_by_head(given: Tensor) -> Tensor:
        return given[-1, -1, start:end].unflatten(0, (n_heads, -1))  # [G, D]

    return _in_order(by_head, trial.given[path], features_by_head)


def _keeps_the_order(trial: Trial) -> bool | None:
    """Return whether the output projection gets the heads as the attention function gave them.

    None if that is not known: no output of the right size depends on what was returned.
    """
    outputs = trial.outputs
    if not isinstance(outputs, Tensor) or not outputs.requires_grad or trial.output is None:
        return None
    heads, size = trial.output
    if outputs.size(-1) != heads * size:
        return None
    last = outputs[-1, -1].unflatten(-1, (heads, size))  # [H', Dv]
    (gradient,) = _gradients(last, [trial.returned])
    if not gradient.any():
        return None

    def features_by_head(returned: Tensor) -> Tensor:
        return returned[-1].transpose(0, 1).flatten(1)  # [H', N * Dv], of any position

    return _in_order(last, trial.returned, features_by_head)


def _gradients(
    heads: Tensor, inputs: Sequence[Tensor], signs: Tensor | None = None
) -> list[Tensor]:
    """Return the gradients of a sum of all features of some heads, with random factors.

    Args:
        heads: [H, n], computed from the inputs
        inputs: the tensors to derive by
        signs: the sign of each head in the sum, [H, 1]; None for 1
    """
    factors = random_like(heads, tuple(heads.shape), seed=0)
    if signs is not None:
        factors = factors * signs
    total = (heads * factors).sum()
    if not total.requires_grad:  # they come from no projection that the row names
        return [torch.zeros_like(tensor) for tensor in inputs]
    # 0 for inputs that they do not depend on.
    gradients = torch.autograd.grad(total, inputs, retain_graph=True, materialize_grads=True)
    return list(gradients)


def _in_order(heads: Tensor, inputs: Tensor, by_part: Callable[[Tensor], Tensor]) -> bool:
    """Return whether head h comes from the h-th part of the inputs, for every h.

    Each bit of h decides a sign of the head in a sum. The gradient of the sum by the h-th part has
    this sign, too. Four heads in order:

        bit   the sum                                its gradient by parts 0 1 2 3 has the signs
        0     head 0 - head 1 + head 2 - head 3      + - + -
        1     head 0 + head 1 - head 2 - head 3      + + - -

    If head 1 came from part 2, and head 2 from part 1, the first line would end in + + - -, because
    1 and 2 differ in bit 0. Any two numbers differ in a bit, so no wrong order has all signs right.
    For H heads that takes log2 H gradients, not H.

    Args:
        heads: [H, n], computed from the inputs
        inputs: the tensor to derive by
        by_part: takes the inputs or a gradient, and returns it as [H, m], a row for each part
    """
    features = by_part(inputs.detach())
    (gradient,) = _gradients(heads, [inputs])
    reached = by_part(gradient) != 0  # some parts have features of other positions, too
    unsigned = _within_a_head(by_part(gradient), features, reached)

    numbers = torch.arange(heads.size(0), device=heads.device)[:, None]  # [H, 1]
    for bit in range((heads.size(0) - 1).bit_length()):
        signs = 1 - 2 * ((numbers >> bit) & 1)
        (gradient,) = _gradients(heads, [inputs], signs)
        signed = _within_a_head(by_part(gradient), features, reached)
        # 1 where the gradient by a part is the same as without signs, -1 where it is the opposite.
        found = (signed * unsigned).sum(1) / unsigned.square().sum(1)  # [H]
        if not ((found - signs[:, 0]).abs() < 0.5).all():  # so that NaN is no order, either
            return False
    return True


def _within_a_head(gradient: Tensor, features: Tensor, reached: Tensor) -> Tensor:
    """Return what is left of a gradient without changes of the mean and the length of each head.

    A norm over all heads, as of Olmo 2, divides by the length of all features. So head 0 depends on
    head 1 a little, but only on how long head 1 is:

        change of head 1    along its features (longer)    across them (turned)
        head 0              gets smaller                    stays

    A norm that subtracts the mean of all features depends on the mean of head 1 in the same way.
    So what is left of the gradient by head 1, across these two directions, shows nothing of head 0,
    whatever the weights of the norm are.

    Args:
        gradient: the gradient by the features of each head, [H, m]
        features: the features of each head, [H, m]
        reached: which of them matter, [H, m]
    """
    gradient = upcast(gradient)
    features = upcast(features) * reached
    number = reached.sum(1, keepdim=True)
    directions = []
    if number.min() > 2:  # else nothing would be left without both
        directions.append(reached.to(features))
        features = (features - features.sum(1, keepdim=True) / number) * reached
    if number.min() > 1:
        directions.append(features)
    for direction in directions:
        square = direction.square().sum(1, keepdim=True).clamp_min(torch.finfo(gradient.dtype).tiny)
        gradient = gradient - direction * (gradient * direction).sum(1, keepdim=True) / square
    return gradient


def _wrong(path: str, role: str, roles: Sequence[str]) -> str:
    if len(roles) == 1:
        return f"cannot be mixed, {path} does not give the {role} that its attention gets"
    needed = f"must give {', '.join(roles)} one after another, each for all heads"
    return f"{path} {needed}; with another order it cannot be mixed or pruned"


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

    features_left: Features = {}
    for path, by_role in features.items():
        features_left[path] = {
            role: _some_heads(given, fewer.kept[role], attention) for role, given in by_role.items()
        }
    # Behind mixing, queries and keys have all heads, and some attentions want as many values.
    if len(fewer.kept["keys"]) * attention.head_dim == widths["keys"]:
        of_values = features_left[attention.paths["values"]]
        missing = widths["values"] - of_values["values"].size(-1)
        of_values["values"] = F.pad(of_values["values"], (0, missing))
    trial = call_alone(attention, model, features_left, fewer.numbers, fewer.output)

    culprit = _what_needs_all_heads(whole, trial, fewer.kept, widths)
    if culprit:
        raise ValueError(
            f"{attention.class_name}: cannot be cut, because {culprit} needs all heads; "
            "ablate them, or mix them first"
        ) from trial.problem


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
