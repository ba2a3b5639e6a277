"""Try one attention alone: does it fit its row, and would it go on with fewer heads?

A row can be wrong in ways that names and sizes do not show: the order of queries, keys and values,
an attention that computes everything itself, a norm over all heads. So each attention is called
once before anything changes, with random features in place of what its projections give, and with
an attention function that keeps what arrives.
"""

import copy
import inspect
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from mixhead_plugin.hf.layouts import KINDS, MIXHEAD, Site, in_features
from mixhead_plugin.ops.normalizers import sink_problem
from mixhead_plugin.parts import Variant

_TRIAL = f"{MIXHEAD}_trial"
# Sentences and positions. Two different numbers, because some attentions change the order of both.
_BATCH, _LENGTH = 2, 3
# What an attention may give to its attention function: what `mixed_attention` takes, and what the
# mask or the model itself sees to. Anything else would be lost.
TAKEN = ("attention_mask", "scaling", "dropout", "is_causal", "position_bias", "s_aux")
HARMLESS = ("output_attentions", "sliding_window", "position_ids", "deterministic")


class _Ended(Exception):
    """Ends a trial where the outputs of the heads reach the output projection."""


class Trial:
    """One call of an attention alone, and what was seen of it.

    Args:
        features: what each projection gives, by its path [B, N, features]
        numbers: attributes that the attention has in this call
        output: the number of heads and of features of a head that the attention function returns
    """

    def __init__(
        self,
        site: Site,
        model: nn.Module,
        features: dict[str, Tensor],
        numbers: Mapping[str, int],
        output: tuple[int, int],
    ):
        self.site = site
        self.features = features
        self.output = output
        # What the attention function got, by kind [B, H or G, N, D], and its other arguments.
        self.arrived: dict[str, Tensor] = {}
        self.settings: dict[str, Any] = {}
        # What it returned [B, N, H', Dv].
        self.returned: Any = None
        self.outputs: Any = None  # what goes to the output projection [B, N, features]
        self.problem: Exception | None = None

        # The copy shares the projections with the attention, but not its numbers and its config.
        module = copy.copy(site.module)
        vars(module).update(numbers)
        module.config = copy.copy(module.config)
        module.config._attn_implementation_internal = _TRIAL
        vars(module)[_TRIAL] = self

        handles = [
            model.get_submodule(path).register_forward_hook(_gives(given))
            for path, given in features.items()
        ]
        reader = model.get_submodule(site.paths["output"])
        handles.append(reader.register_forward_pre_hook(self._end))

        first = model.get_submodule(site.paths["queries"])
        x = next(first.parameters()).new_zeros(_BATCH, _LENGTH, in_features(first))
        try:
            for arguments in _ways_to_call(module, x, site.head_dim):
                self._call(module, arguments)
                if self.arrived or self.problem is None:
                    break
        finally:
            for handle in handles:
                handle.remove()

    def _call(self, module: nn.Module, arguments: dict[str, Any]) -> None:
        self.problem = None
        try:
            with torch.enable_grad():
                found = module.forward(**arguments)
            self.outputs = found[0] if isinstance(found, tuple) else found
        except _Ended:
            pass
        except Exception as error:
            self.problem = error

    def _end(self, projection: nn.Module, args: tuple[Any, ...]) -> None:
        self.outputs = args[0]
        raise _Ended

    def attend(self, query: Tensor, key: Tensor, value: Tensor, settings: dict[str, Any]) -> Tensor:
        self.arrived = dict(zip(KINDS, (query, key, value)))
        self.settings = settings
        shape = query.size(0), query.size(2), *self.output
        self.returned = _random(shape, query, seed=len(KINDS)).requires_grad_()
        return self.returned.clone()  # as some attentions change it in place

    def source_of_the_last_head(self, kind: str) -> dict[str, Tensor]:
        """Return on which features of each projection the last head of what arrived depends.

        It is the head at the last position of the last sentence.

        Bool [B, N, features] for each, by its path.
        """
        found: dict[str, Tensor] = {}
        with torch.enable_grad():
            head = self.arrived[kind][-1, -1, -1]  # [D]
            total = (head * _random(head.shape, head, seed=0)).sum()
        for path, features in self.features.items():
            gradient = None
            if total.requires_grad:  # else it comes from no projection that the row names
                (gradient,) = torch.autograd.grad(
                    total, features, retain_graph=True, allow_unused=True
                )
            found[path] = torch.zeros_like(features) != 0 if gradient is None else gradient != 0
        return found

    def keeps_the_last_output(self) -> bool:
        """Return whether the last head that the function returned is the last of the projection.

        It is the last head of what the attention function returned, and the last one that the
        output projection gets.

        True, too, if that is not known: no output depends on what was returned.
        """
        outputs = self.outputs
        if not isinstance(outputs, Tensor) or not outputs.requires_grad:
            return True
        with torch.enable_grad():
            last = outputs[-1, -1, -self.output[1] :]  # [Dv]
            total = (last * _random(last.shape, last, seed=0)).sum()
        (gradient,) = torch.autograd.grad(total, self.returned, allow_unused=True)
        if gradient is None or not gradient.any():
            return True
        return bool(gradient[-1, :, -1].any(0).all())  # of any position

    def culprit(self) -> str:
        """Return the name of the module in the attention that had the problem, '' for none."""
        names = {id(module): name for name, module in self.site.module.named_modules()}
        found = ""
        if self.problem is not None:
            for frame, _ in traceback.walk_tb(self.problem.__traceback__):
                found = names.get(id(frame.f_locals.get("self")), found)
        return found


def _random(shape: Sequence[int], like: Tensor, seed: int) -> Tensor:
    # A generator of its own: whoever mixes draws the same numbers afterwards.
    numbers = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=numbers, device="cpu").to(like) + 0.5


def _random_features(
    site: Site, model: nn.Module, widths: Mapping[str, int]
) -> dict[str, dict[str, Tensor]]:
    """Return features [B, N, width] by the path of their projection, and by kind."""
    found: dict[str, dict[str, Tensor]] = {}
    for path, kinds in site.packed().items():
        weight = next(model.get_submodule(path).parameters())
        found[path] = {
            kind: _random((_BATCH, _LENGTH, widths[kind]), weight, seed=KINDS.index(kind))
            for kind in kinds
        }
    return found


def _joined(features: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return what each projection gives: the features of its kinds, one after another."""
    return {
        path: torch.cat(list(by_kind.values()), -1).requires_grad_()
        for path, by_kind in features.items()
    }


def _gives(features: Tensor) -> Any:
    # A copy, because some attentions scale it in place.
    return lambda projection, args, output: features.clone()


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    settings["attention_mask"] = attention_mask
    return vars(module)[_TRIAL].attend(query, key, value, settings), None


AttentionInterface.register(_TRIAL, _attend)


def _ways_to_call(module: nn.Module, x: Tensor, size: int) -> Iterator[dict[str, Any]]:
    """Yield arguments for a call of an attention alone, from the plainest on.

    Args:
        x: its input [1, N, C]
        size: features of a head
    """
    parameters = inspect.signature(module.forward).parameters
    first = next(iter(parameters))
    needed = [
        name
        for name, parameter in parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        and parameter.default is parameter.empty
    ]
    given: dict[str, Any] = dict.fromkeys(needed)
    if "position_ids" in parameters:
        given["position_ids"] = torch.arange(x.size(1), device=x.device)[None]

    # The input of its keys: some can do without, some have names of their own for it.
    states = [name for name in ("encoder_hidden_states", "key_value_states") if name in parameters]
    others = [name for name in needed if "mask" not in name and "position" not in name]
    for inputs in ([], states, others):
        for rotation in _rotations(x, size) if "position_embeddings" in parameters else [None]:
            rotated = {} if rotation is None else {"position_embeddings": rotation}
            yield {**given, **rotated, **dict.fromkeys([first, *inputs], x)}


def _rotations(x: Tensor, size: int) -> Iterator[Any]:
    """Yield what attentions may want to rotate by, so that nothing rotates.

    Cosine and sine: one number for all features serves attentions that rotate a part of a head,
    too, but some count features, and some have no sentences. Llama 4 has complex numbers.
    """
    for shape in ((*x.shape[:2], 1), (*x.shape[:2], size), (x.size(1), size)):
        yield x.new_ones(shape), x.new_zeros(shape)
    yield torch.ones(*x.shape[:2], size // 2, dtype=torch.complex64, device=x.device)


def _can_be_tried(site: Site) -> bool:
    # Without a config, no attention function can be put in place; MixedHeads says so. On the device
    # meta, where `from_pretrained` makes models, nothing computes: there, sizes are checked alone.
    return hasattr(site.module, "config") and not any(
        parameter.is_meta for parameter in site.module.parameters()
    )


def check_row(site: Site, model: nn.Module, variant: Variant) -> None:
    """Raise ValueError unless the attention is as its row says.

    Queries, keys and values have to arrive from where the row says. `mixed_attention` has to serve
    all that the attention asks of it, together with the variant.
    """
    if not _can_be_tried(site):
        return
    features = _joined(_random_features(site, model, site.widths(model)))
    trial = Trial(site, model, features, {}, (site.heads, site.head_dim))
    if not trial.arrived and trial.problem is None:
        raise ValueError(
            f"{site.kind}: computes its attention itself; "
            "must call it through the AttentionInterface"
        )
    if not trial.arrived:
        problem = str(trial.problem).partition("\n")[0]
        raise ValueError(
            f"{site.kind}: must work alone, or its projections cannot be checked; {problem}"
        )

    for name, value in trial.settings.items():
        if name not in (*TAKEN, *HARMLESS) and value is not None:
            raise ValueError(f"{site.kind}: {name} cannot be used with mixed heads")
    if trial.settings.get("s_aux") is not None:
        if variant.attention_sink != "none":
            raise ValueError(f"{site.kind}: has sinks of its own, so attention_sink must be none")
        if problem := sink_problem(variant.normalizer):
            raise ValueError(f"{site.kind}: has sinks of its own, {problem}")

    heads, size = trial.arrived["queries"].shape[1::2]
    if (heads, size) != (site.heads, site.head_dim):
        raise ValueError(
            f"{site.kind}: its queries have {heads} heads of {size}, "
            f"but its row names {site.heads} of {site.head_dim}"
        )
    value_size = trial.arrived["values"].size(3)
    if value_size != size:
        raise ValueError(
            f"{site.kind}: its values have heads of {value_size}, its queries of {size}"
        )
    for path, kinds in site.packed().items():
        end = 0
        for kind in kinds:
            start, end = end, end + site.widths(model)[kind]
            if not _comes_from(trial, kind, path, start, end):
                raise ValueError(f"{site.kind}: {_wrong(path, kind, kinds)}")
    if not trial.keeps_the_last_output():
        raise ValueError(
            f"{site.kind}: cannot be mixed, {site.paths['output']} does not get the outputs of one "
            "head after another"
        )


def _comes_from(trial: Trial, kind: str, path: str, start: int, end: int) -> bool:
    """Return whether what arrived comes from these features of this projection alone.

    The last head has to be the last of its kind. It may depend on the others, too, as behind a norm
    over all heads. Queries have to be of their own position, because a mixing reads them there;
    keys and values may have been convolved.
    """
    found = trial.source_of_the_last_head(kind)
    own = found.pop(path)  # [B, N, features]
    others = [*found.values(), own[..., :start], own[..., end:], own[:-1]]
    if kind == "queries":
        others.append(own[:, :-1])
    head = own[-1, -1, end - trial.site.head_dim : end]
    return bool(head.all()) and not any(each.any() for each in others)


def _wrong(path: str, kind: str, kinds: Sequence[str]) -> str:
    if len(kinds) == 1:
        return f"cannot be mixed, {path} does not give the {kind} that its attention gets"
    needed = f"must give {', '.join(kinds)} one after another, each for all heads"
    return f"{path} {needed}; with another order it cannot be mixed or pruned"


def check_fewer(
    site: Site,
    model: nn.Module,
    widths: Mapping[str, int],
    kept: Mapping[str, Sequence[int]],
    numbers: Mapping[str, int],
    output: tuple[int, int],
) -> None:
    """Raise ValueError if an attention would not go on in the same way with fewer heads.

    Args:
        widths: the present numbers of features of queries, keys and values
        kept: the heads of queries, keys and values that stay; of values, zeros may stand in place
            of the others
        numbers, output: as in Trial, with fewer heads
    """
    if not _can_be_tried(site):
        return
    features = _random_features(site, model, widths)
    whole = Trial(site, model, _joined(features), {}, output)
    fewer = {
        path: {kind: _some_heads(given, kept[kind], site) for kind, given in by_kind.items()}
        for path, by_kind in features.items()
    }
    for by_kind in fewer.values():
        # Behind mixing, queries and keys have all heads, and some attentions want as many values.
        missing = widths["values"] - by_kind["values"].size(-1) if "values" in by_kind else 0
        if missing and len(kept["keys"]) * site.head_dim == widths["keys"]:
            by_kind["values"] = F.pad(by_kind["values"], (0, missing))
    trial = Trial(site, model, _joined(fewer), numbers, output)

    right = trial.problem is None and trial.outputs.size(-1) == output[0] * output[1]
    if not (right and all(_goes_on(whole, trial, kind, kept[kind], widths) for kind in KINDS)):
        what = trial.culprit() or "its forward"
        raise ValueError(
            f"{site.kind}: cannot be cut, because {what} needs all heads; "
            "ablate them, or mix them first"
        )


def _some_heads(features: Tensor, heads: Sequence[int], site: Site) -> Tensor:
    by_head = features.unflatten(-1, (-1, site.head_dim))  # [B, N, heads, D]
    return by_head[..., heads, :].flatten(-2)


def _goes_on(
    whole: Trial, trial: Trial, kind: str, kept: Sequence[int], widths: Mapping[str, int]
) -> bool:
    """Return whether the heads that stay arrive as they did, with the same mask and sinks."""
    before, after = whole.arrived[kind], trial.arrived[kind]  # [B, heads, N, D]
    # Some attentions repeat the keys and values that several queries share.
    times = before.size(1) * before.size(3) // widths[kind]
    stay = [head * times + copy for head in kept for copy in range(times)]
    if after.size(1) < len(stay) or not torch.allclose(before[:, stay], after[:, : len(stay)]):
        return False

    queries = trial.arrived["queries"].size(1)
    for name, given in whole.settings.items():
        left = trial.settings[name]
        if not isinstance(given, Tensor) or not isinstance(left, Tensor):
            continue
        if name == "s_aux":
            if left.numel() != queries:
                return False
        # T5 makes a bias of as many heads as it has.
        elif left.shape == given.shape and not torch.allclose(left, given):
            return False
    return True
