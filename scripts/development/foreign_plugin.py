"""A plugin of pytest: models of another library's tests get mixed heads.

`foreign_tests.py` sets its two variables.

torch:         `nn.MultiheadAttention` is `MixedAttention`.
transformers:  each model is mixed when its outermost `__init__` ends.
peft:          `from_pretrained` gives a small random model of the class that the name tells,
               because there is no hub here; then it is mixed.
"""

import functools
import importlib
import os
from typing import Any

LIBRARY = os.environ["FOREIGN_LIBRARY"]
MIXING = os.environ["FOREIGN_MIXING"]

# What the tests of PEFT ask the hub for: a word in the name of the model, and the config of a small
# one.
SMALL = {
    "opt": (
        "OPTConfig",
        dict(hidden_size=16, ffn_dim=32, word_embed_proj_dim=16, num_attention_heads=4),
    ),
    "gpt2": ("GPT2Config", dict(n_embd=32, n_head=4, n_layer=2, n_positions=512)),
    "llama": (
        "LlamaConfig",
        dict(hidden_size=16, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2),
    ),
    "mistral": ("MistralConfig", dict(hidden_size=16, intermediate_size=32, num_attention_heads=4)),
    "qwen2": ("Qwen2Config", dict(hidden_size=16, intermediate_size=32, num_attention_heads=4)),
    "bart": ("BartConfig", dict(d_model=16, encoder_ffn_dim=32, decoder_ffn_dim=32)),
    "t5": ("T5Config", dict(d_model=16, d_ff=32, d_kv=4, num_heads=4, decoder_start_token_id=0)),
    "roberta": ("RobertaConfig", dict(hidden_size=16, intermediate_size=32, num_attention_heads=4)),
    "bert": ("BertConfig", dict(hidden_size=16, intermediate_size=32, num_attention_heads=4)),
}


def pytest_configure() -> None:
    if LIBRARY == "torch" and MIXING:
        _mix_torch()
    if LIBRARY == "transformers" and MIXING:
        _mix_when_built()
    if LIBRARY == "peft":
        _build_instead_of_loading()


def _mix_torch() -> None:
    import torch

    from mixhead_plugin.nn import MixedAttention

    mixed = functools.partialmethod(MixedAttention.__init__, head_mixing=MIXING)
    kind = type("MultiheadAttention", (MixedAttention,), {"__init__": mixed})
    for module in (
        torch.nn,
        torch.nn.modules,
        torch.nn.modules.activation,
        torch.nn.modules.transformer,
    ):
        vars(module)["MultiheadAttention"] = kind


def _mix(model: Any) -> Any:
    """Mix a model whose attentions the door serves; leave any other as it is."""
    from mixhead_plugin import hf

    try:
        return hf.mix(model, MIXING)
    except ValueError as refusal:
        print(f"not mixed: {refusal}")
        return model


def _mix_when_built() -> None:
    from transformers import PreTrainedModel

    depth = 0

    def wrap(kind: type) -> None:
        build = vars(kind).get("__init__")
        if build is None:
            return

        @functools.wraps(build)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            nonlocal depth
            depth += 1
            try:
                build(self, *args, **kwargs)
            finally:
                depth -= 1
            if depth == 0 and type(self) is kind:
                _mix(self)

        kind.__init__ = init  # type: ignore[misc]

    former = PreTrainedModel.__init_subclass__.__func__  # type: ignore[attr-defined]

    def init_subclass(cls: type, **kwargs: Any) -> None:
        former(cls, **kwargs)
        wrap(cls)

    PreTrainedModel.__init_subclass__ = classmethod(init_subclass)  # type: ignore[assignment]


def _build_instead_of_loading() -> None:
    import transformers

    def build(cls: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        word = next((word for word in SMALL if word in name.lower()), None)
        if word is None or os.path.isdir(name):
            raise OSError(f"{name}: this run has no hub, and no small model in its place")
        kind, sizes = SMALL[word]
        tokens = dict(vocab_size=1000, bos_token_id=0, eos_token_id=1, pad_token_id=2)
        config = getattr(transformers, kind)(**tokens, **sizes)
        for field, value in (
            ("num_hidden_layers", 2),
            ("encoder_layers", 2),
            ("decoder_layers", 2),
        ):
            if hasattr(config, field):
                setattr(config, field, value)
        model = cls.from_config(config)
        model.name_or_path = name
        model = model.to(kwargs.get("dtype") or kwargs.get("torch_dtype") or model.dtype).eval()
        return _mix(model) if MIXING else model

    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    for name in dir(auto):
        kind = getattr(auto, name)
        if name.startswith("AutoModel") and isinstance(kind, type):
            kind.from_pretrained = classmethod(build)  # type: ignore[attr-defined]
