"""Small random models of `transformers`, one for each kind of attention."""

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")
hf = pytest.importorskip("mixhead_plugin.hf")

VOCABULARY = 31
LAYERS = 2
HEADS = 4
SIZE = 32

# Every config takes the names that it knows, and keeps the others, which its model does not read.
CONFIG = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "use_cache": True,
    "d_kv": 8,  # the size of a head of T5
    # of images, and of sounds
    "image_size": 8,
    "patch_size": 4,
    "num_mel_bins": 8,
    "max_source_positions": 7,
}
# What each family of models calls the same size.
NAMES = {
    SIZE: ["hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim"],
    LAYERS: [
        "num_hidden_layers",
        "n_layer",
        "n_layers",
        "num_layers",
        "encoder_layers",
        "decoder_layers",
    ],
    HEADS: [
        "num_attention_heads",
        "n_head",
        "n_heads",
        "num_heads",
        "encoder_attention_heads",
        "decoder_attention_heads",
    ],
    40: [
        "intermediate_size",
        "hidden_dim",
        "ffn_dim",
        "encoder_ffn_dim",
        "decoder_ffn_dim",
        "d_ff",
    ],
}
for size, names in NAMES.items():
    CONFIG |= dict.fromkeys(names, size)

# What some models need beside, by the beginning of their names.
OWN = {
    "Mistral": {"sliding_window": 3},
    "Phi": {"num_key_value_heads": HEADS},
    "Whisper": {"num_key_value_heads": HEADS},
    # not hidden_size / num_attention_heads
    "Qwen3": {"head_dim": 16},
    "Gemma": {"head_dim": 16},
}

GROUPED = ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma"]
GENERATING = [
    *(f"{name}ForCausalLM" for name in (*GROUPED, "Phi", "OPT")),
    "GPT2LMHeadModel",
    "MarianMTModel",
    *(f"{name}ForConditionalGeneration" for name in ("Bart", "MBart", "T5", "MT5")),
]
ENCODERS = [
    f"{name}ForMaskedLM" for name in ("Bert", "Roberta", "XLMRoberta", "Electra", "DistilBert")
]
MODELS = [*GENERATING, *ENCODERS, "ViTForImageClassification", "WhisperForConditionalGeneration"]
FEW = ["LlamaForCausalLM", "GPT2LMHeadModel", "BertForMaskedLM", "T5ForConditionalGeneration"]
# The first features of these projections are the queries of all heads.
QUERIES = ["q_attn", "c_attn", "q_proj", "query", "q_lin", "q"]


def config_of(name):
    """Return the sizes of a tiny model of the class `name`."""
    sizes = dict(CONFIG)
    for start, own in OWN.items():
        if name.startswith(start):
            sizes |= own
    return sizes


def build(name, config=None, **variant):
    """Return a random model in double precision, and sentences with their mask.

    Args:
        name: a class of transformers
        config: sizes beside those of CONFIG
        variant: what `hf.mix` is asked for; the mixing is then moved away from the identity
    """
    t5 = transformers.models.t5.modeling_t5
    if name.startswith(("T5", "MT5")) and not hasattr(t5, "ALL_ATTENTION_FUNCTIONS"):
        pytest.skip("T5 computes its attention itself in this transformers, as in 5.4")
    inputs = {"input_ids": torch.randint(3, VOCABULARY, (3, 7))}
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**config_of(name) | (config or {}))).double().eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # most biases start as 0
            parameter.data += 0.1 * torch.randn_like(parameter)
    if variant:
        shake(hf.mix(model, **variant))
    return model, inputs | {"attention_mask": torch.ones(3, 7, dtype=torch.long)}


def shake(model: nn.Module) -> nn.Module:
    for parameter in hf.mixing_parameters(model).values():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def whole(model, inputs):
    """Return the arguments of one call without a cache.

    The models read words, images or sounds.
    """
    if model.config.model_type == "vit":
        return {"pixel_values": torch.randn(3, 3, 8, 8).double()}
    if model.config.model_type == "whisper":
        return {
            "input_features": torch.randn(3, 8, 14).double(),
            "decoder_input_ids": inputs["input_ids"],
        }
    if model.config.is_encoder_decoder:
        return {**inputs, "decoder_input_ids": inputs["input_ids"]}
    return dict(inputs)
