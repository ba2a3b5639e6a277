"""Call one attention alone, with known features in place of what its projections give.

A row can be wrong in ways that names and sizes do not show: the order of queries, keys and values,
an attention that computes everything itself, a norm over all heads. `checks.py` asks a trial for
them before anything changes.
"""

import contextlib
import copy
import inspect
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from mixhead_plugin.hf.layouts import MIXHEAD, ROLES, Site, in_features

_TRIAL = f"{MIXHEAD}_trial"
# Sentences and positions. Two different numbers, because some attentions change the order of both.
_BATCH = 2
_LENGTH = 3

# Features [B, N, width] by the path of their projection, and by role.
Features = dict[str, dict[str, Tensor]]


def can_be_tried(site: Site) -> bool:
    """Return whether an attention can be called now.

    Without a config, no attention function can be put in place. On the device meta, where
    `from_pretrained` makes models, and where offloaded weights are between the calls, nothing
    computes.
    """
    on_meta = any(parameter.is_meta for parameter in site.module.parameters())
    return hasattr(site.module, "config") and not on_meta


class _Ended(Exception):
    """Ends a trial where the outputs of the heads reach the output projection."""


class Trial:
    """One call of an attention alone, and what was seen of it.

    The attention of the model is not touched, because other threads may call it: a copy is called,
    which shares its weights, and which has other modules in place of the projections.

    Args:
        site: the attention
        model: has it
        features: what each projection gives
        numbers: attributes that the attention has in this call
        output: the number of heads and of features of a head that the attention function returns;
            None for those that it gets
    """

    def __init__(
        self,
        site: Site,
        model: nn.Module,
        features: Features,
        numbers: Mapping[str, int] | None = None,
        output: tuple[int, int] | None = None,
    ):
        self.site = site
        self.output = output
        # All that a projection gives: the features of its roles, one after another.
        self.given: dict[str, Tensor] = {}
        for path, by_role in features.items():
            self.given[path] = torch.cat(list(by_role.values()), -1).requires_grad_()
        # What the attention function got, by role [B, H or G, N, D], and its other arguments.
        self.arrived: dict[str, Tensor] = {}
        self.settings: dict[str, Any] = {}
        # What it returned [B, N, H', Dv].
        self.returned: Any = None
        self.outputs: Any = None  # what goes to the output projection [B, N, features]
        self.problem: Exception | None = None

        module = self._copied(model)
        vars(module).update(numbers or {})
        projection = model.get_submodule(site.paths["queries"])
        x = _floats_of(projection).new_zeros(_BATCH, _LENGTH, in_features(projection))
        for arguments in _ways_to_call(module, x, site.head_dim):
            self._call(module, arguments)
            if self.arrived or self.problem is None:
                break

    def _copied(self, model: nn.Module) -> nn.Module:
        """Return the attention with a config that chooses `_attend`, and with its stubs."""
        module = copy.copy(self.site.module)
        module.config = copy.copy(module.config)
        module.config._attn_implementation_internal = _TRIAL
        vars(module)[_TRIAL] = self

        stubs: dict[str, Callable[..., Any]] = {}
        for path, given in self.given.items():
            # A copy, because some attentions scale it in place.
            stubs[path] = lambda *args, given=given, **kwargs: given.clone()
        stubs.setdefault(self.site.paths["output"], self._end)
        inside = f"{self.site.name}." if self.site.name else ""
        for path, forward in stubs.items():
            if path.startswith(inside):  # an output projection may be around the attention
                stub = _stub(model.get_submodule(path), forward)
                _put(module, path.removeprefix(inside), stub)
        return module

    def _call(self, module: nn.Module, arguments: dict[str, Any]) -> None:
        self.problem = None
        try:
            returned = module.forward(**arguments)
            self.outputs = returned[0] if isinstance(returned, tuple) else returned
        except _Ended:
            pass
        except Exception as error:  # any: the next way to call it may fit
            self.problem = error

    def _end(self, outputs: Tensor) -> None:
        self.outputs = outputs
        raise _Ended

    def attend(self, query: Tensor, key: Tensor, value: Tensor, settings: dict[str, Any]) -> Tensor:
        self.arrived = dict(zip(ROLES, (query, key, value)))
        self.settings = settings
        if self.output is None:
            self.output = query.size(1), value.size(3)
        shape = query.size(0), query.size(2), *self.output
        self.returned = random_like(query, shape, seed=len(ROLES)).requires_grad_()
        return self.returned.clone()  # as some attentions change it in place

    def culprit(self) -> str:
        """Return the name of the module in the attention that had the problem, '' for none."""
        if self.problem is None:
            return ""
        names = {id(module): name for name, module in self.site.module.named_modules()}
        innermost = ""
        for frame, _ in traceback.walk_tb(self.problem.__traceback__):
            innermost = names.get(id(frame.f_locals.get("self")), innermost)
        return innermost


@contextlib.contextmanager
def with_gradients() -> Iterator[None]:
    """Let trials be differentiated, whatever the caller has switched off."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def random_like(like: Tensor, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return random numbers from 0.5 to 1.5 with the device and the type of a tensor."""
    # A generator of its own: whoever mixes draws the same numbers afterwards.
    numbers = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=numbers, device="cpu").to(like) + 0.5


def random_features(site: Site, model: nn.Module, widths: Mapping[str, int]) -> Features:
    """Return features for every projection of an attention.

    Args:
        site: the attention
        model: has it
        widths: how many features queries, keys and values have
    """
    given: Features = {}
    for path, roles in site.packed().items():
        like = _floats_of(model.get_submodule(path))
        given[path] = {
            role: random_like(like, (_BATCH, _LENGTH, widths[role]), seed=ROLES.index(role))
            for role in roles
        }
    return given


def _floats_of(projection: nn.Module) -> Tensor:
    """Return a tensor with the device and the type of a projection; float32 if it is quantised."""
    for parameter in projection.parameters():
        if parameter.is_floating_point():
            return parameter
    return torch.empty(())


def _stub(projection: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """Return a module with the weights of a projection, but with another forward and no hooks."""
    # What `torch.compile` puts around a module would set attributes of the module inside.
    stub = copy.copy(getattr(projection, "_orig_mod", projection))
    own = vars(stub)
    for name in own:
        if name.endswith("_hooks") or name.endswith("_hooks_with_kwargs"):
            own[name] = OrderedDict()
    own["_compiled_call_impl"] = None
    own["forward"] = forward
    return stub


def _put(module: nn.Module, path: str, new: nn.Module) -> None:
    """Put a module inside another one, whose children others use, too."""
    name, _, rest = path.partition(".")
    if rest:
        child = copy.copy(module.get_submodule(name))
        _put(child, rest, new)
        new = child
    vars(module)["_modules"] = {**module._modules, name: new}


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


def register() -> None:
    """Let the copies of attentions find the function by its name."""
    AttentionInterface.register(_TRIAL, _attend)


def _ways_to_call(module: nn.Module, x: Tensor, size: int) -> Iterator[dict[str, Any]]:
    """Yield arguments for a call of an attention alone, from the plainest on.

    Args:
        module: the attention
        x: its input [B, N, C]
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
