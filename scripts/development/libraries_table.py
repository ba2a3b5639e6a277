"""Try `nn.mix` on other people's models, and print the table of docs/python.md.

    scripts/development/reach.sh
    PYTHONPATH=.venv/reach .venv/bin/python scripts/development/libraries_table.py

Every model is small and random. What is tried, for position-wise mixing:

- found: how many attentions the example shows.
- start: a mixed model gives the outputs of the plain one.
- moved: after M has moved, it gives the outputs of the plain model with `defined` in place of
  F.scaled_dot_product_attention.
- cached: token by token, with the library's own cache, gives the full pass.
- loaded: a state dict, in a model that is built anew, gives the same outputs.
- compiled: `torch.compile(fullgraph=True)` gives the same outputs.

A number is the largest difference, divided by the largest output.
"""

import contextlib
import copy
import importlib.metadata
import importlib.util
import io
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixhead_plugin.nn import load, mix, mixing_parameters

HEADER = ("model", "attentions", "start", "moved", "cached", "loaded", "compiled")


class Case(NamedTuple):
    """One model of a library."""

    name: str
    library: str  # as pip calls it
    make: Callable[[], nn.Module]
    call: Callable[[nn.Module], Tensor]
    # token by token, [B, N, ...]; None for a model without a cache
    steps: Callable[[nn.Module], Tensor] | None = None
    dtype: torch.dtype = torch.float64


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
        return torch.einsum("bnji,bjnk,bikd->bind", mixing, scores.softmax(-1), value)

    return attention


@contextlib.contextmanager
def in_place_of_the_function(other: Callable[..., Tensor]) -> Iterator[None]:
    """Let every module of Python that has the function have another one; some import it by name."""
    own = F.scaled_dot_product_attention
    name = own.__name__
    places = [module for module in sys.modules.values() if vars(module).get(name) is own]
    for module in places:
        setattr(module, name, other)
    try:
        yield
    finally:
        for module in places:
            setattr(module, name, own)


def difference(found: Tensor, expected: Tensor) -> str:
    return f"{float((found - expected).abs().max() / expected.abs().max()):.0e}"


def move(model: nn.Module) -> None:
    """Move the mixing away from the identity."""
    numbers = torch.Generator().manual_seed(1)
    for parameter in mixing_parameters(model).values():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=numbers)


def row(case: Case) -> tuple[str, ...]:
    """Return what was found for one model."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        return case.make().to(case.dtype).eval()

    plain = made()
    before = case.call(plain)
    model = mix(copy.deepcopy(plain), "position-wise", example=case.call)
    start = difference(case.call(model), before)

    move(model)
    moved = case.call(model)
    assert not torch.allclose(moved, before)
    mixed = [module for module in model.modules() if hasattr(module, "head_mixing")]
    order: list[nn.Module] = []
    hooks = [m.register_forward_pre_hook(lambda m, args: order.append(m)) for m in mixed]
    case.call(model)
    for hook in hooks:
        hook.remove()
    with in_place_of_the_function(defined(order)):
        by_formula = difference(moved, case.call(plain))

    cached = "" if case.steps is None else difference(case.steps(model), moved)

    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = difference(case.call(load(made(), torch.load(file))), moved)

    torch._dynamo.reset()
    fresh = load(made(), model.state_dict())
    compiled = difference(
        case.call(torch.compile(fresh, fullgraph=True, backend="aot_eager")), moved
    )
    return case.name, str(len(mixed)), start, by_formula, cached, loaded, compiled


def define_operators_of_torchvision() -> None:
    """Let torchvision be imported beside a CPU torch: give its operators names, without code."""
    found = importlib.util.find_spec("torchvision")
    assert found is not None and found.origin is not None
    folder = Path(found.origin).parent
    names = {"nms"}
    for file in (*folder.glob("*.py"), *folder.glob("ops/*.py")):
        names.update(re.findall(r"torchvision::([a-z_]+)", file.read_text()))
    library = torch.library.Library("torchvision", "DEF")
    for name in sorted(names):
        library.define(f"{name}(Tensor x) -> Tensor")
    sys.modules["torchvision._operators"] = library  # type: ignore[assignment]  # keeps them


def of_timm() -> Iterable[Case]:
    import timm

    sizes = {
        "vit_tiny_patch16_224": 32,
        "deit3_small_patch16_224": 32,
        "eva02_tiny_patch14_224": 28,  # rotary positions
        "beit_base_patch16_224": 32,  # relative positions as a float mask
    }
    for name, size in sizes.items():
        pixels = torch.randn(3, 3, size, size, dtype=torch.float64)
        yield Case(
            name,
            "timm",
            lambda name=name, size=size: timm.create_model(
                name, img_size=size, depth=2, num_classes=5
            ),
            lambda model, pixels=pixels: model(pixels),
        )


def of_x_transformers() -> Iterable[Case]:
    from x_transformers import Decoder, TransformerWrapper

    words = torch.randint(50, (2, 9))

    def steps(model: Any) -> Tensor:
        found = []
        cache = None
        for end in range(1, 10):
            out, cache = model(words[:, :end], cache=cache, return_intermediates=True)
            found.append(out[:, -1:])
        return torch.cat(found, 1)

    options: dict[str, dict[str, Any]] = {
        "decoder": {},
        "decoder, rotary": {"rotary_pos_emb": True},
        "decoder, grouped keys": {"attn_kv_heads": 2},
    }
    for name, more in options.items():
        yield Case(
            f"{name}, attn_flash",
            "x-transformers",
            lambda more=more: TransformerWrapper(
                num_tokens=50,
                max_seq_len=32,
                attn_layers=Decoder(
                    dim=32, depth=2, heads=4, attn_dim_head=8, attn_flash=True, **more
                ),
            ),
            lambda model: model(words),
            steps,
        )


def of_whisper() -> Iterable[Case]:
    from whisper.model import ModelDimensions, Whisper

    dims = ModelDimensions(8, 10, 32, 4, 2, 60, 12, 32, 4, 2)
    sound = torch.randn(2, 8, 20)
    words = torch.randint(60, (2, 7))

    def make() -> nn.Module:
        model = Whisper(dims)
        nn.init.normal_(model.decoder.positional_embedding)
        return model

    def steps(model: Any) -> Tensor:
        cache, hooks = model.install_kv_cache_hooks()
        read = model.encoder(sound)
        found = [model.decoder(words[:, t : t + 1], read, kv_cache=cache) for t in range(7)]
        for hook in hooks:
            hook.remove()
        return torch.cat(found, 1)

    yield Case(
        "encoder, decoder, cross",
        "openai-whisper",
        make,
        lambda model: model(sound, words),
        steps,
        torch.float32,  # its layer norm takes nothing else
    )


def of_litgpt() -> Iterable[Case]:
    from litgpt import GPT, Config

    words = torch.randint(50, (2, 9))

    def steps(model: Any) -> Tensor:
        model.set_kv_cache(batch_size=2, dtype=torch.float64)
        found = [model(words[:, t : t + 1], torch.tensor([t])) for t in range(9)]
        model.clear_kv_cache()
        return torch.cat(found, 1)

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
            lambda name=name, sizes=sizes: GPT(Config.from_name(name, **sizes)),
            lambda model: model(words),
            steps,
        )


def of_diffusers() -> Iterable[Case]:
    from diffusers import DiTTransformer2DModel, UNet2DConditionModel

    image = torch.randn(2, 4, 8, 8, dtype=torch.float64)
    words = torch.randn(2, 5, 16, dtype=torch.float64)
    times, labels = torch.tensor([3, 30]), torch.tensor([1, 2])

    def unet() -> nn.Module:
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

    def transformer() -> nn.Module:
        return DiTTransformer2DModel(
            num_attention_heads=4, attention_head_dim=8, num_layers=2, sample_size=8
        )

    yield Case(
        "UNet, cross-attention",
        "diffusers",
        unet,
        lambda model: model(image, times, words).sample,
    )
    yield Case("DiT", "diffusers", transformer, lambda model: model(image, times, labels).sample)


def main() -> None:
    warnings.simplefilter("ignore")
    define_operators_of_torchvision()
    print(f"| library | {' | '.join(HEADER)} |")
    print(f"|{' --- |' * (len(HEADER) + 1)}")
    for cases in (of_timm, of_x_transformers, of_whisper, of_litgpt, of_diffusers):
        for case in cases():
            version = importlib.metadata.version(case.library)
            with torch.no_grad():
                print(f"| {case.library} {version} | {' | '.join(row(case))} |", flush=True)
    print(f"torch {torch.__version__}", file=sys.stderr)


if __name__ == "__main__":
    main()
