"""Is an attention as its row says? A `Trial` tells.

The checks before `mix`, in the drawing of `trial.py`:

    given                                          arrived          returned     outputs
    q_proj    | head 0 | head 1 | head 2 |    -->  queries 0 1 2    0 1 2   -->  | 0 | 1 | 2 |
    kv_proj   | keys 0 1 2 | values 0 1 2 |   -->  keys 0 1 2
                                              -->  values 0 1 2

- `_check_settings`: the attention asks its attention function for nothing that ours cannot do.
- `_check_sizes`: as many heads, of the size that the row names.
- `_comes_from`: queries depend on the features of q_proj alone, and on all of them. Keys depend on
  the first half of kv_proj, values on the second. `in_order`: head 1 of the queries comes from the
  second block of q_proj, and so on.
- `_keeps_the_order`: the output projection gets head 1 as its second block.

All but the sizes and settings is read off gradients: a feature that an output depends on has one
that is not 0.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from mixhead_plugin.errors import warn_caller
from mixhead_plugin.hf.head_order import gradients_of, in_order
from mixhead_plugin.hf.layouts import FoundAttention, slices
from mixhead_plugin.hf.trial import Trial, call_alone, can_be_tried, random_features, with_gradients
from mixhead_plugin.ops.normalizers import sink_problem
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

    Warn if the order of the outputs cannot be seen.
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
    _check_sizes(trial)
    for path, roles in attention.packed().items():
        for role, where in slices(roles, widths).items():
            if not _comes_from(trial, role, path, where.start, where.stop):
                raise ValueError(f"{attention.class_name}: {_wrong(path, role, roles)}")
    _check_order(trial, "cannot be mixed")


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


def _check_sizes(trial: Trial) -> None:
    """Raise ValueError unless heads have the number and the size that the row names."""
    attention = trial.attention
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


@with_gradients()
def check_outputs(attention: FoundAttention, model: nn.Module) -> None:
    """Raise ValueError if the output projection gets the heads in another order than they have.

    Warn if that cannot be seen.
    """
    if not can_be_tried(attention):
        return
    features = random_features(attention, model, attention.widths(model))
    trial = call_alone(attention, model, features)
    _check_order(trial, "its heads cannot be told apart")


def _check_order(trial: Trial, what: str) -> None:
    """Raise ValueError if the output projection gets the heads in another order than they have.

    Warn if that is not known.

    Args:
        trial: of the attention
        what: what is impossible in another order, for the message
    """
    class_name = trial.attention.class_name
    keeps = _keeps_the_order(trial)
    if keeps is None:
        why = "does not work alone" if trial.problem else "computes them in its own way"
        warn_caller(f"{class_name}: the order of its heads could not be checked, because it {why}")
    elif not keeps:
        output = trial.attention.paths["output"]
        raise ValueError(
            f"{class_name}: {what}, {output} does not get the outputs of one head after another"
        )


def _comes_from(trial: Trial, role: str, path: str, start: int, end: int) -> bool:
    """Return whether what arrived comes from these features of this projection alone.

    Each head has to come from its own of them. It may depend on those of other heads, too, as
    behind a norm over all heads. Queries have to be of their own position, because a mixing reads
    them there; keys and values may have been convolved.
    """
    heads = trial.arrived[role][-1, :, -1]  # [H or G, D] of the last position and sentence
    gradients = gradients_of(heads, list(trial.given.values()))
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

    return in_order(by_head, trial.given[path], features_by_head)


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
    (gradient,) = gradients_of(last, [trial.returned])
    if not gradient.any():
        return None

    def features_by_head(returned: Tensor) -> Tensor:
        return returned[-1].transpose(0, 1).flatten(1)  # [H', N * Dv], of any position

    return in_order(last, trial.returned, features_by_head)


def _wrong(path: str, role: str, roles: Sequence[str]) -> str:
    if len(roles) == 1:
        return f"cannot be mixed, {path} does not give the {role} that its attention gets"
    needed = f"must give {', '.join(roles)} one after another, each for all heads"
    return f"{path} {needed}; with another order it cannot be mixed or pruned"


def _first_line(problem: Exception | None) -> str:
    return str(problem).partition("\n")[0]
