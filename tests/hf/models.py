"""Small random models of `transformers`, one for each kind of attention."""

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")
hf = pytest.importorskip("mixhead_plugin.hf")

VOCABULARY, LAYERS, HEADS, SIZE = 31, 2, 4, 32
CONFIG = dict(
    vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2, pad_token_id=0, decoder_start_token_id=0
)
CONFIG |= dict.fromkeys("hidden_size d_model n_embd dim word_embed_proj_dim".split(), SIZE)
CONFIG |= dict.fromkeys(
    "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers".split(), LAYERS
)
CONFIG |= dict.fromkeys("num_attention_heads n_head n_heads num_heads".split(), HEADS)
CONFIG |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS)
CONFIG |= dict.fromkeys(
    "intermediate_size hidden_dim ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff".split(), 40
)
CONFIG |= dict(
    num_key_value_heads=2, max_position_embeddings=64, num_mel_bins=8, max_source_positions=7
)
CONFIG |= dict(image_size=8, patch_size=4, d_kv=8, use_cache=True)
OWN = {
    "Mistral": {"sliding_window": 3},
    **{name: {"num_key_value_heads": HEADS} for name in ("Phi", "Whisper")},
}
# not hidden_size / num_attention_heads
OWN |= {name: {"head_dim": 16} for name in ("Qwen3", "Gemma")}
GROUPED = "Llama Mistral Qwen2 Qwen3 Gemma".split()
GENERATING = [f"{name}ForCausalLM" for name in (*GROUPED, "Phi", "OPT")]
GENERATING += ["GPT2LMHeadModel", "MarianMTModel"]
GENERATING += [f"{name}ForConditionalGeneration" for name in ("Bart", "MBart", "T5", "MT5")]
ENCODERS = [
    f"{name}ForMaskedLM" for name in ("Bert", "Roberta", "XLMRoberta", "Electra", "DistilBert")
]
FEW = "LlamaForCausalLM GPT2LMHeadModel BertForMaskedLM T5ForConditionalGeneration".split()
# The first features of these projections are the queries of all heads.
QUERIES = "q_attn c_attn q_proj query q_lin q".split()
MODELS = [*GENERATING, *ENCODERS, "ViTForImageClassification", "WhisperForConditionalGeneration"]


def build(name, config=None, **variant):
    """Return a model in double precision, its mixing away from the identity, and sentences with
    their mask.
    """
    cls, inputs = getattr(transformers, name), {"input_ids": torch.randint(3, VOCABULARY, (3, 7))}
    own = next((options for start, options in OWN.items() if name.startswith(start)), {})
    model = cls(cls.config_class(**CONFIG | own | (config or {}))).double().eval()
    for bias in (parameter for parameter in model.parameters() if parameter.dim() == 1):
        bias.data += 0.1 * torch.randn_like(bias)  # most start as 0
    if variant:
        shake(hf.mix(model, **variant))
    return model, inputs | {"attention_mask": torch.ones(3, 7, dtype=torch.long)}


def shake(model: nn.Module) -> nn.Module:
    for parameter in hf.mixing_parameters(model).values():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def whole(model, inputs):
    """Return the arguments of one call without a cache, for models that read words, images or
    sounds.
    """
    if model.config.model_type == "vit":
        return {"pixel_values": torch.randn(3, 3, 8, 8).double()}
    if model.config.model_type == "whisper":
        return {
            "input_features": torch.randn(3, 8, 14).double(),
            "decoder_input_ids": inputs["input_ids"],
        }
    decoder = {"decoder_input_ids": inputs["input_ids"]} if model.config.is_encoder_decoder else {}
    return {**inputs, **decoder}
