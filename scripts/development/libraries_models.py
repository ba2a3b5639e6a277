"""Small random models of other people's libraries, on which `nn.mix` is tried."""

import copy
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mixhead_plugin.nn import mix

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


def first(outputs: Any) -> Tensor:
    """Return what a model gives, or the first tensor of a tuple."""
    return outputs if isinstance(outputs, Tensor) else outputs[0]


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
