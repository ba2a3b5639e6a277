"""Call one attention alone, with known features in place of what its projections give.

A row can be wrong in ways that names and sizes do not show: the order of queries, keys and values,
an attention that computes everything itself, a norm over all heads. `row_checks.py` and
`cut_checks.py` look at a trial for them before anything changes. A copy of the attention is called:

    x = 0
    |-- q_proj: a stub, gives random features ------ given["...q_proj"]
    |-- k_proj, v_proj: likewise
    |   what the attention itself does with them: norms, rotations, heads apart
    |-- attention function: `_attend` -------------- arrived["queries"], ["keys"], ["values"],
    |       gives random outputs                     settings, returned
    |   what the attention itself does with them: heads side by side
    '-- o_proj: a stub, ends the call -------------- outputs

Whoever derives `arrived` by `given`, and `outputs` by `returned`, sees which feature goes where.
"""

import contextlib
import copy
import dataclasses
import inspect
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from mixhead_plugin.hf.finding import is_inside
from mixhead_plugin.hf.layouts import MIXHEAD, ROLES, FoundAttention, in_features

_TRIAL = f"{MIXHEAD}_trial"
# Sentences and positions. Two different numbers, because some attentions change the order of both.
_BATCH = 2
_LENGTH = 3

# Features [B, N, width] by the path of their projection, and by role.
Features = dict[str, dict[str, Tensor]]


def can_be_tried(attention: FoundAttention) -> bool:
    """Return whether an attention can be called now.

    Without a config, no attention function can be put in place. On the device meta, where
    `from_pretrained` makes models, and where offloaded weights are between the calls, nothing
    computes.
    """
    on_meta = any(parameter.is_meta for parameter in attention.module.parameters())
    return hasattr(attention.module, "config") and not on_meta


class _Ended(Exception):
    """Ends a call where the outputs of the heads reach the output projection."""


@dataclasses.dataclass
class Trial:
    """What was seen of one call of an attention alone; `call_alone` makes it.

    Attributes:
        attention: the attention
        given: by path, all that a projection gave [B, N, features]: the features of its roles, one
            after another
        output: the number of heads and of features of a head that the attention function returned
        arrived: what the attention function got, by role [B, H or G, N, D]; empty if nothing has
            called it
        settings: the other arguments that it got
        returned: what it returned [B, N, H', Dv]
        outputs: what went to the output projection [B, N, features], or what the attention returned
        problem: why the call ended too early
    """

    attention: FoundAttention
    given: dict[str, Tensor]
    output: tuple[int, int] | None = None
    arrived: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    returned: Any = None
    outputs: Any = None
    problem: Exception | None = None

    def culprit(self) -> str:
        """Return the name of the module in the attention that had the problem, '' for none."""
        if self.problem is None:
            return ""
        names = {id(module): name for name, module in self.attention.module.named_modules()}
        innermost = ""
        for frame, _ in traceback.walk_tb(self.problem.__traceback__):
            innermost = names.get(id(frame.f_locals.get("self")), innermost)
        return innermost


def call_alone(
    attention: FoundAttention,
    model: nn.Module,
    features: Features,
    numbers: Mapping[str, int] | None = None,
    output: tuple[int, int] | None = None,
) -> Trial:
    """Call an attention alone, in the first way that works, and return what was seen.

    The attention of the model is not touched, because other threads may call it: a copy is called,
    which shares its weights, and which has other modules in place of the projections.

    Args:
        attention: the attention that is called
        model: the model that has it
        features: what each projection gives
        numbers: attributes that the attention has in this call
        output: the number of heads and of features of a head that the attention function returns;
            None for those that it gets
    """
    given = {}
    for path, by_role in features.items():
        given[path] = torch.cat(list(by_role.values()), -1).requires_grad_()
    trial = Trial(attention, given, output)

    module = _copy_for(trial, model)
    vars(module).update(numbers or {})
    projection = model.get_submodule(attention.paths["queries"])
    x = _floats_of(projection).new_zeros(_BATCH, _LENGTH, in_features(projection))
    for arguments in _ways_to_call(module, x, attention.head_dim):
        trial.problem = None
        try:
            returned = module.forward(**arguments)
            trial.outputs = returned[0] if isinstance(returned, tuple) else returned
        except _Ended:
            pass
        except Exception as error:  # any: the next way to call it may fit
            trial.problem = error
        if trial.arrived or trial.problem is None:
            break
    return trial


def _copy_for(trial: Trial, model: nn.Module) -> nn.Module:
    """Return a copy of the attention of a trial, which keeps in the trial what it sees."""
    attention = trial.attention
    module = _shallow_copy(attention.module)
    module.config = copy.copy(module.config)
    module.config._attn_implementation_internal = _TRIAL  # chooses `_attend`
    vars(module)[_TRIAL] = trial

    def end(outputs: Tensor) -> None:
        trial.outputs = outputs
        raise _Ended

    forwards: dict[str, Callable[..., Any]] = {}
    for path, given in trial.given.items():
        forwards[path] = _gives(given)
    # A wrong row may name one projection for both.
    forwards.setdefault(attention.paths["output"], end)
    for path, forward in forwards.items():
        if is_inside(path, attention.name):  # an output projection may be around the attention
            inner_path = path.removeprefix(attention.name).removeprefix(".")
            _put(module, inner_path, _stub(model.get_submodule(path), forward))
    return module


def _gives(features: Tensor) -> Callable[..., Tensor]:
    """Return a forward that gives the same features, whatever it is called with."""

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        return features.clone()  # because some attentions scale them in place

    return forward


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Be the attention function of a copied attention: keep what arrives, return random numbers."""
    trial: Trial = vars(module)[_TRIAL]
    trial.arrived = dict(zip(ROLES, (query, key, value)))
    trial.settings = {**settings, "attention_mask": attention_mask}
    if trial.output is None:
        trial.output = query.size(1), value.size(3)
    shape = query.size(0), query.size(2), *trial.output
    trial.returned = random_like(query, shape, seed=len(ROLES)).requires_grad_()
    return trial.returned.clone(), None  # because some attentions change it in place


def register() -> None:
    """Let the copies of attentions find `_attend` by its name."""
    AttentionInterface.register(_TRIAL, _attend)


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


def random_features(
    attention: FoundAttention, model: nn.Module, widths: Mapping[str, int]
) -> Features:
    """Return features for every projection of an attention.

    Args:
        attention: the attention that is called
        model: the model that has it
        widths: how many features queries, keys and values have
    """
    given: Features = {}
    for path, roles in attention.packed().items():
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


def _shallow_copy(module: nn.Module) -> Any:
    """Return a copy that shares all that is in a module.

    `copy.copy` pickles what a module has, which torch's parametrizations forbid, as of weight_norm.
    """
    cls = type(module)
    copied = cls.__new__(cls)
    vars(copied).update(vars(module))
    return copied


def _stub(projection: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """Return a module with the weights of a projection, but with another forward and no hooks."""
    # What `torch.compile` puts around a module would set attributes of the module inside.
    stub = _shallow_copy(getattr(projection, "_orig_mod", projection))
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
        child = _shallow_copy(module.get_submodule(name))
        _put(child, rest, new)
        new = child
    vars(module)["_modules"] = {**module._modules, name: new}


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
    rotations: list[Any] = [None]
    if "position_embeddings" in parameters:
        rotations = list(_rotations(x, size))
    for inputs in ([], states, others):
        for rotation in rotations:
            arguments = dict(given)
            if rotation is not None:
                arguments["position_embeddings"] = rotation
            for name in (first, *inputs):
                arguments[name] = x
            yield arguments


def _rotations(x: Tensor, size: int) -> Iterator[Any]:
    """Yield what attentions may want to rotate by, so that nothing rotates.

    Cosine and sine: one number for all features serves attentions that rotate a part of a head,
    too, but some count features, and some have no sentences. Llama 4 has complex numbers.
    """
    for shape in ((*x.shape[:2], 1), (*x.shape[:2], size), (x.size(1), size)):
        yield x.new_ones(shape), x.new_zeros(shape)
    yield torch.ones(*x.shape[:2], size // 2, dtype=torch.complex64, device=x.device)
