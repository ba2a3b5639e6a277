"""Try `nn.mix` on other people's models.

    scripts/development/reach.sh
    PYTHONPATH=.venv/reach .venv/bin/python scripts/development/libraries_table.py \
        > results/libraries/models.json

Every model is small and random. readme_tables.py makes the table of docs/python.md of the results.
What is tried, for position-wise mixing:

- start: a mixed model gives the outputs of the plain one.
- moved: after M has moved, it gives the outputs of the plain model with `defined` in place of
  F.scaled_dot_product_attention.
- masks: like moved, with the model's own argument that hides keys.
- trained: every tensor of the mixing gets the gradient that it gets by `defined`, in training mode.
- dropout: like moved, with all weights dropped; with half of them, the outputs are random.
- cached: token by token, with the library's own cache, gives the full pass.
- loaded: a state dict, in a model that is built anew, gives the same outputs.
- saved whole: `torch.save` of the model does.
- deepcopy: a copy does.
- autocast: in bfloat16, it gives about the outputs of float32.
- checkpoints: activation checkpointing gives the same gradients. It is the library's own; if it has
  none, torch's `apply_activation_checkpointing` of each attention.
- compiled: `torch.compile(fullgraph=True)` gives the same outputs.
- exported: `torch.export` does.

A number is the largest difference, divided by the largest number. A text is the error that was
raised; it begins with `UNMIXED` where the plain model raises one, too.
"""

import argparse
import contextlib
import copy
import importlib.metadata
import importlib.util
import io
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

# Python looks in the folder of the command alone
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from benchmarks.steps import one_line
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)

from development.libraries_results import UNMIXED
from mixhead_plugin.nn import load, mix, mixing_parameters

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


class Case(NamedTuple):
    """One model of a library."""

    name: str
    library: str  # as pip calls it; a folder of this repository has a '/'
    make: Callable[[float], nn.Module]  # gets the probability of dropping a weight of an attention
    arguments: dict[str, Any]  # of a call, by their keywords
    hides: dict[str, Any] | None = None  # further arguments, which hide keys; None: it has none
    drops: bool = False  # whether `make` can use its argument
    # token by token, [B, N, ...]; None for a model without a cache
    steps: Callable[[nn.Module], Tensor] | None = None
    calls_sdpa: bool = True  # False: it is made of nn.MultiheadAttention, and needs no example
    dtype: torch.dtype = torch.float64

    def made(self, dropout: float = 0.0) -> nn.Module:
        """Return the plain model; it has the same weights each time."""
        torch.manual_seed(0)
        return self.make(dropout).to(self.dtype).eval()

    def mixed(self, model: nn.Module) -> nn.Module:
        """Return a mixed copy of a plain model."""
        example = self.arguments if self.calls_sdpa else None
        return mix(copy.deepcopy(model), "position-wise", example=example)

    def call(self, model: nn.Module, seed: int = 0, **more: Any) -> Tensor:
        """Return the outputs of a model, which gets floats in its own type.

        Args:
            seed: of what is random in training, such as the labels that a DiT drops
            more: further arguments of the call
        """
        torch.manual_seed(seed)
        dtype = next(model.parameters()).dtype
        arguments = {**self.arguments, **more}
        for name, value in arguments.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                arguments[name] = value.to(dtype)
        return first(model(**arguments))


class Tried(NamedTuple):
    """A model, and what the checks compare it with."""

    case: Case
    plain: nn.Module
    model: nn.Module  # mixed; M has moved
    expected: Tensor  # its outputs


def first(outputs: Any) -> Tensor:
    """Return what a model gives, or the first tensor of a tuple."""
    return outputs if isinstance(outputs, Tensor) else outputs[0]


def attentions_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, "head_mixing")]


# The definition


def defined(modules: Iterable[nn.Module]) -> Callable[..., Tensor]:
    """Return scaled_dot_product_attention by its formula, each call with M of the next module."""
    following = iter(modules)

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        part: Any = next(following).head_mixing
        group = query.size(1) // key.size(1)
        key = key.repeat_interleave(group, 1)
        value = value.repeat_interleave(group, 1)
        scores = query @ key.mT * (query.size(3) ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[2:], dtype=torch.bool).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        mixing = torch.einsum("bjnd,di->bnji", query, part.query_weight) + part.bias
        mixed = torch.einsum("bnji,bjnk->bink", mixing, scores.softmax(-1))
        return F.dropout(mixed, dropout_p) @ value

    return attention


@contextlib.contextmanager
def in_place_of_the_function(other: Callable[..., Tensor]) -> Iterator[None]:
    """Let every module of Python that has the function have another one; some import it by name."""
    function = F.scaled_dot_product_attention
    name = function.__name__
    places = [module for module in sys.modules.values() if vars(module).get(name) is function]
    fast = torch.backends.mha.get_fastpath_enabled()
    for module in places:
        setattr(module, name, other)
    torch.backends.mha.set_fastpath_enabled(False)  # it would not call the function
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module in places:
            setattr(module, name, function)


def by_formula(tried: Tried, plain: nn.Module, **more: Any) -> Tensor:
    """Return the outputs of a plain model with `defined`, and M of the mixed model."""
    order: list[nn.Module] = []
    hooks = [
        module.register_forward_pre_hook(lambda module, args: order.append(module))
        for module in attentions_of(tried.model)
    ]
    tried.case.call(tried.model, **more)
    for hook in hooks:
        hook.remove()
    with in_place_of_the_function(defined(order)):
        return tried.case.call(plain, **more)


def difference(outputs: Tensor, expected: Tensor) -> float:
    return float((outputs - expected).abs().max() / expected.abs().max())


def move(model: nn.Module) -> None:
    """Move the mixing away from the identity."""
    numbers = torch.Generator().manual_seed(1)
    for parameter in mixing_parameters(model).values():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=numbers)


# The checks against the plain model. None: the model has no such thing.


def _start(tried: Tried) -> float:
    before = tried.case.call(tried.plain)
    return difference(tried.case.call(tried.case.mixed(tried.plain)), before)


def _moved(tried: Tried) -> float:
    assert not torch.allclose(tried.expected, tried.case.call(tried.plain)), "no effect"
    return difference(tried.expected, by_formula(tried, tried.plain))


def _masks(tried: Tried) -> float | None:
    hides = tried.case.hides
    if hides is None:
        return None
    hidden = tried.case.call(tried.model, **hides)
    assert not torch.allclose(hidden, tried.expected), "the mask has no effect"
    return difference(hidden, by_formula(tried, tried.plain, **hides))


@torch.enable_grad()
def _trained(tried: Tried) -> float:
    parameters = list(mixing_parameters(tried.model).values())
    plain = copy.deepcopy(tried.plain).train()
    tried.model.train()
    gradients_of_mixed = torch.autograd.grad(loss(tried.case.call(tried.model)), parameters)
    expected = torch.autograd.grad(loss(by_formula(tried, plain)), parameters)
    tried.model.eval()
    return max(map(difference, gradients_of_mixed, expected))


def loss(outputs: Tensor) -> Tensor:
    """Return a number that depends on each output in another way."""
    weights = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(2))
    return (outputs * weights.to(outputs.dtype)).sum()


def _dropout(tried: Tried) -> float | None:
    case = tried.case
    if not case.drops:
        return None

    def dropping(probability: float) -> nn.Module:
        model = case.mixed(case.made(probability))
        move(model)
        return model.train()

    half = dropping(0.5)
    assert not torch.allclose(case.call(half, seed=1), case.call(half, seed=2)), "drops nothing"
    return difference(case.call(dropping(1.0)), by_formula(tried, case.made(1.0).train()))


# The checks of a model against itself, which the plain model has to pass, too


def _cached(tried: Tried) -> float | None:
    if tried.case.steps is None:
        return None
    return difference(tried.case.steps(tried.model), tried.expected)


def _loaded(tried: Tried) -> float:
    state = through_file(tried.model.state_dict(), weights_only=True)
    return difference(tried.case.call(load(tried.case.made(), state)), tried.expected)


def _saved_whole(tried: Tried) -> float:
    again = through_file(tried.model, weights_only=False)
    return difference(tried.case.call(again), tried.expected)


def through_file(something: Any, weights_only: bool) -> Any:
    file = io.BytesIO()
    torch.save(something, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def _deepcopy(tried: Tried) -> float:
    return difference(tried.case.call(copy.deepcopy(tried.model)), tried.expected)


def _autocast(tried: Tried) -> float:
    model = copy.deepcopy(tried.model).float()
    exact = tried.case.call(model)
    with torch.autocast("cpu", torch.bfloat16):
        rounded_outputs = tried.case.call(model).float()
    assert not torch.equal(rounded_outputs, exact), "autocast has no effect"
    return difference(rounded_outputs, exact)


@torch.enable_grad()
def _checkpoints(tried: Tried) -> float:
    model: Any = copy.deepcopy(tried.model).train()
    expected = gradients(tried.case, model)

    attentions = attentions_of(model)
    if hasattr(model, "set_grad_checkpointing"):
        model.set_grad_checkpointing()
    elif hasattr(model, "enable_gradient_checkpointing"):
        model.enable_gradient_checkpointing()
    else:
        apply_activation_checkpointing(model, check_fn=lambda module: module in attentions)

    calls: list[nn.Module] = []
    for module in attentions:
        module.register_forward_pre_hook(lambda module, args: calls.append(module))
    again = gradients(tried.case, model)
    assert len(calls) == 2 * len(attentions), "attentions were not computed again"
    return max(map(difference, again, expected))


def gradients(case: Case, model: nn.Module) -> list[Tensor]:
    """Return those of the parameters that have any."""
    model.zero_grad()
    loss(case.call(model)).backward()
    all_gradients = [parameter.grad for parameter in model.parameters()]
    return [grad.clone() for grad in all_gradients if grad is not None and grad.any()]


def _compiled(tried: Tried) -> float:
    torch._dynamo.reset()
    model = copy.deepcopy(tried.model)
    program: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    return difference(first(program(**tried.case.arguments)), tried.expected)


def _exported(tried: Tried) -> float:
    program = torch.export.export(tried.model, (), tried.case.arguments).module()
    return difference(first(program(**tried.case.arguments)), tried.expected)


Check = Callable[[Tried], float | None]
AGAINST_PLAIN: dict[str, Check] = {
    "start": _start,
    "moved": _moved,
    "masks": _masks,
    "trained": _trained,
    "dropout": _dropout,
}
AGAINST_ITSELF: dict[str, Check] = {
    "cached": _cached,
    "loaded": _loaded,
    "saved whole": _saved_whole,
    "deepcopy": _deepcopy,
    "autocast": _autocast,
    "checkpoints": _checkpoints,
    "compiled": _compiled,
    "exported": _exported,
}
CHECKS = AGAINST_PLAIN | AGAINST_ITSELF


@torch.no_grad()
def row(case: Case, checks: Iterable[str] = CHECKS) -> dict[str, Any]:
    """Return what was found for one model."""
    plain = case.made()
    model = case.mixed(plain)
    move(model)
    tried = Tried(case, plain, model, case.call(model))
    results: dict[str, Any] = {
        "library": case.library,
        "version": "" if "/" in case.library else importlib.metadata.version(case.library),
        "model": case.name,
        "attentions": len(attentions_of(model)),
    }
    for name in checks:
        try:
            results[name] = rounded(CHECKS[name](tried))
        except Exception as error:  # what it was stands in the results
            results[name] = without_mixing(tried, name) + one_line(error)
    return results


def without_mixing(tried: Tried, name: str) -> str:
    """Return `UNMIXED` if the plain model does not pass a check either."""
    if name not in AGAINST_ITSELF:
        return ""
    try:
        CHECKS[name](tried._replace(model=tried.plain, expected=tried.case.call(tried.plain)))
    except Exception:
        return UNMIXED
    return ""


def rounded(number: float | None) -> float | None:
    return None if number is None else float(f"{number:.0e}")


# The models


def define_operators_of_torchvision() -> None:
    """Let torchvision be imported beside a CPU torch: give its operators names, without code."""
    spec = importlib.util.find_spec("torchvision")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent
    names = {"nms"}
    for file in (*folder.glob("*.py"), *folder.glob("ops/*.py")):
        names.update(re.findall(r"torchvision::([a-z_]+)", file.read_text()))
    library = torch.library.Library("torchvision", "DEF")
    for name in sorted(names):
        library.define(f"{name}(Tensor x) -> Tensor")
    sys.modules["torchvision._operators"] = library  # type: ignore[assignment]  # keeps them


def hidden_end(rows: int, length: int) -> Tensor:
    """Return a mask in which the last row does not see its last two tokens, bool [B, N]."""
    visible = torch.ones(rows, length, dtype=torch.bool)
    visible[-1, -2:] = False
    return visible


def of_nanogpt() -> Iterable[Case]:
    sys.path.insert(0, str(EXAMPLES))
    from nanogpt.model import GPT

    yield Case(
        "GPT",
        "examples/nanogpt",
        lambda dropout: GPT(vocabulary=50, positions=16, layers=2, heads=4, width=32),
        {"tokens": torch.randint(50, (2, 9))},
    )


def of_torchvision() -> Iterable[Case]:
    from torchvision.models import VisionTransformer

    def make(dropout: float) -> nn.Module:
        model = VisionTransformer(
            image_size=32,
            patch_size=16,
            num_layers=2,
            num_heads=4,
            hidden_dim=32,
            mlp_dim=64,
            num_classes=5,
            attention_dropout=dropout,
        )
        nn.init.normal_(model.heads.head.weight)  # starts as 0
        return model

    pixels = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    yield Case(
        "VisionTransformer", "torchvision", make, {"x": pixels}, drops=True, calls_sdpa=False
    )


def of_timm() -> Iterable[Case]:
    import timm

    sizes = {
        "vit_tiny_patch16_224": 32,
        "deit_tiny_patch16_224": 32,
        "deit3_small_patch16_224": 32,
        "eva02_tiny_patch14_224": 28,  # rotary positions
        "beit_base_patch16_224": 32,  # relative positions as a float mask
    }
    visible = hidden_end(3, 5)[:, None, None]  # 4 patches and the token of the class, [B, 1, 1, N]
    for name, size in sizes.items():
        takes_mask = not name.startswith("beit")
        yield Case(
            name,
            "timm",
            lambda dropout, name=name, size=size: timm.create_model(
                name, img_size=size, depth=2, num_classes=5, attn_drop_rate=dropout
            ),
            {"x": torch.randn(3, 3, size, size, dtype=torch.float64)},
            hides={"attn_mask": visible} if takes_mask else None,
            drops=True,
        )


def of_x_transformers() -> Iterable[Case]:
    from x_transformers import Decoder, TransformerWrapper

    words = torch.randint(50, (2, 9))

    def steps(model: Any) -> Tensor:
        outputs = []
        cache = None
        for end in range(1, 10):
            out, cache = model(words[:, :end], cache=cache, return_intermediates=True)
            outputs.append(out[:, -1:])
        return torch.cat(outputs, 1)

    options: dict[str, dict[str, Any]] = {
        "decoder": {},
        "decoder, rotary": {"rotary_pos_emb": True},
        "decoder, grouped keys": {"attn_kv_heads": 2},
    }
    for name, more in options.items():

        def make(dropout: float, more: dict[str, Any] = more) -> nn.Module:
            layers = Decoder(
                dim=32,
                depth=2,
                heads=4,
                attn_dim_head=8,
                attn_flash=True,
                attn_dropout=dropout,
                **more,
            )
            return TransformerWrapper(num_tokens=50, max_seq_len=32, attn_layers=layers)

        yield Case(
            f"{name}, attn_flash",
            "x-transformers",
            make,
            {"x": words},
            # padding at the left, because causal attention hides most of it at the right
            hides={"mask": hidden_end(2, 9).flip(1)},
            drops=True,
            steps=steps,
        )


def of_whisper() -> Iterable[Case]:
    from whisper.model import ModelDimensions, Whisper

    dims = ModelDimensions(
        n_mels=8,
        n_audio_ctx=10,
        n_audio_state=32,
        n_audio_head=4,
        n_audio_layer=2,
        n_vocab=60,
        n_text_ctx=12,
        n_text_state=32,
        n_text_head=4,
        n_text_layer=2,
    )
    sound = torch.randn(2, 8, 20)
    words = torch.randint(60, (2, 7))

    def make(dropout: float) -> nn.Module:
        model = Whisper(dims)
        nn.init.normal_(model.decoder.positional_embedding)
        return model

    def steps(model: Any) -> Tensor:
        cache, hooks = model.install_kv_cache_hooks()
        read = model.encoder(sound)
        outputs = [model.decoder(words[:, t : t + 1], read, kv_cache=cache) for t in range(7)]
        for hook in hooks:
            hook.remove()
        return torch.cat(outputs, 1)

    yield Case(
        "encoder, decoder, cross",
        "openai-whisper",
        make,
        {"mel": sound, "tokens": words},
        steps=steps,
        dtype=torch.float32,  # its layer norm takes nothing else
    )


def of_litgpt() -> Iterable[Case]:
    from litgpt import GPT, Config

    words = torch.randint(50, (2, 9))

    def steps(model: Any) -> Tensor:
        model.set_kv_cache(batch_size=2, dtype=torch.float64)
        outputs = [model(words[:, t : t + 1], torch.tensor([t])) for t in range(9)]
        model.clear_kv_cache()
        return torch.cat(outputs, 1)

    for name, groups in (("Llama-3.2-1B", 2), ("Qwen3-0.6B", 2), ("pythia-14m", 4)):
        sizes = {
            "n_layer": 2,
            "n_embd": 32,
            "n_head": 4,
            "head_size": 8,
            "n_query_groups": groups,
            "padded_vocab_size": 50,
            "block_size": 16,
            "intermediate_size": 32,
        }
        yield Case(
            f"{name}, {'grouped keys' if groups < 4 else 'all keys'}",
            "litgpt",
            lambda dropout, name=name, sizes=sizes: GPT(Config.from_name(name, **sizes)),
            {"idx": words},
            steps=steps,
        )


def of_diffusers() -> Iterable[Case]:
    from diffusers import DiTTransformer2DModel, UNet2DConditionModel

    image = torch.randn(2, 4, 8, 8, dtype=torch.float64)
    words = torch.randn(2, 5, 16, dtype=torch.float64)
    times, labels = torch.tensor([3, 30]), torch.tensor([1, 2])

    def unet(dropout: float) -> nn.Module:
        return UNet2DConditionModel(
            sample_size=8,
            layers_per_block=1,
            block_out_channels=(16, 32),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=16,
            attention_head_dim=8,
            norm_num_groups=8,
        )

    def transformer(dropout: float) -> nn.Module:
        return DiTTransformer2DModel(
            num_attention_heads=4, attention_head_dim=8, num_layers=2, sample_size=8
        )

    yield Case(
        "UNet, cross-attention",
        "diffusers",
        unet,
        {
            "sample": image,
            "timestep": times,
            "encoder_hidden_states": words,
            "return_dict": False,
        },
        hides={"encoder_attention_mask": hidden_end(2, 5)},
    )
    yield Case(
        "DiT",
        "diffusers",
        transformer,
        {
            "hidden_states": image,
            "timestep": times,
            "class_labels": labels,
            "return_dict": False,
        },
    )


LIBRARIES: dict[str, Callable[[], Iterable[Case]]] = {
    "nanogpt": of_nanogpt,
    "timm": of_timm,
    "torchvision": of_torchvision,
    "x-transformers": of_x_transformers,
    "whisper": of_whisper,
    "litgpt": of_litgpt,
    "diffusers": of_diffusers,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("libraries", nargs="*", help=f"of {', '.join(LIBRARIES)}; all by default")
    args = parser.parse_args()
    for name in args.libraries:
        if name not in LIBRARIES:
            parser.error(f"{name}: must be one of {', '.join(LIBRARIES)}")
    warnings.simplefilter("ignore")
    if args.libraries != ["nanogpt"]:
        define_operators_of_torchvision()

    results = []
    for name in args.libraries or LIBRARIES:
        torch.manual_seed(0)  # of the inputs
        for case in LIBRARIES[name]():
            results.append(row(case))
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    lines = ",\n".join(json.dumps(result) for result in results)
    version = torch.__version__.partition("+")[0]
    print(f'{{"torch": "{version}", "models": [\n{lines}\n]}}')


if __name__ == "__main__":
    main()
