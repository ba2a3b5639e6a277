"""Try `mixhead_plugin.hf` on a tiny model of every type in the installed transformers.

    python scripts/development/transformers_table.py > results/transformers/types.json

Every type whose code uses the AttentionInterface is built from its own config, with small sizes in
place of large ones, random weights and float64. readme_tables.py makes the table of
docs/huggingface.md of the results. With position-wise mixing, these are tried:

- start: a mixed model gives the outputs of the unmixed one.
- moved: after M has moved, it gives the outputs of the unmixed model with `defined_attention` in
  place of its attention function. That one gets queries, keys and values as the unmixed model
  makes them.
- reads queries: M of the first attention stays if all other weights in that attention change.
- trained: every tensor of every part gets a gradient, if its attention was called.
- cached: token by token with a cache gives the last outputs of the full pass.
- ablated: like columns of the output projection set to 0.
- pruned: like ablated.
- loaded: a saved folder gives the same outputs.
"""

import argparse
import copy
import dataclasses
import inspect
import json
import multiprocessing
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

# Python looks in the folder of the command alone
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from benchmarks.steps import one_line
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from development.transformers_results import CHECKS, REFUSES
from mixhead_plugin import hf
from mixhead_plugin.hf.finding import INTERFACE, find_attentions, is_inside
from mixhead_plugin.hf.layouts import FoundAttention
from mixhead_plugin.hf.studied_attention import attentions_of

VOCABULARY = 64
LENGTH = 7
LARGEST = 10_000_000  # parameters; a larger model has a size that SIZES does not know
DEFINED = "defined"  # the name of `defined_attention`

# The size of a number of a config, by the first pattern that its name fits.
SIZES: list[tuple[str, int]] = [
    (r"vocab_size|vocabulary|^codebook_size$", VOCABULARY),
    (r"heads?$", 4),
    (r"head_dim|d_kv|head_size|kv_channels", 8),
    (r"layers?$|depth$|num_block_repeats", 2),
    (
        r"hidden_size|d_model|n_embd|embed_dim|^dim$|embedding_size|width|projection_dim|d_embed"
        r"|hidden_dim$|output_dim|hidden_channels",
        32,
    ),
    (r"intermediate_size|ffn|d_ff|mlp_dim|feedforward|inner_dim|n_inner", 48),
    (r"position|max_length|seq_len", 64),
    (r"experts_per_tok|top_?k", 2),
    (r"experts", 4),
    (r"image_size", 16),
    (r"patch_size", 4),
]
KEY_HEADS = r"kv_heads|key_value_heads|multi_query_group_num"
# What these patterns would get wrong.
OWN: dict[str, dict[str, Any]] = {
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "xmod": {"default_language": "en_XX"},
    "ernie4_5_moe": {"moe_k": 2},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 1},
    "speech_to_text": {"conv_channels": 32, "input_feat_per_channel": 80},
    "wav2vec2": {"conv_dim": [16] * 7},
    "hubert": {"conv_dim": [16] * 7},
}
for _type in ("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "paddleocr_vl_text"):
    OWN[_type] = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}}
for _type in ("glm4v_text", "glm_ocr_text", "glm_image_text"):
    OWN[_type] = {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 1.0,
            "mrope_section": [2, 1, 1],
        }
    }
OWN["glm4v_moe_text"] = OWN["glm4v_text"]
# The arguments of models that read no text.
SENSES = ("pixel_values", "input_features", "input_values")
# The heads that a model of a type has, the best first.
MAPPINGS = (
    *("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "CAUSAL_LM"),
    *("IMAGE_TEXT_TO_TEXT", "MASKED_LM", ""),
)


# Tiny models


def name_of_class(model_type: str) -> str:
    """Return the name of the class of a model of a type, '' if no Auto class has one."""
    for mapping in MAPPINGS:
        name = f"MODEL_FOR_{mapping}_MAPPING_NAMES" if mapping else "MODEL_MAPPING_NAMES"
        classes = getattr(modeling_auto, name).get(model_type)
        if classes is not None:
            return classes if isinstance(classes, str) else classes[0]
    return ""


def types() -> list[str]:
    """Return the types whose files use the AttentionInterface, in the order of their names."""
    root = Path(transformers.__file__).parent / "models"
    chosen = []
    for model_type in CONFIG_MAPPING:
        folder = root / transformers.models.auto.configuration_auto.model_type_to_module_name(
            model_type
        )
        texts = (file.read_text(encoding="utf-8") for file in folder.glob("modeling_*.py"))
        if any(INTERFACE in text for text in texts) and name_of_class(model_type):
            chosen.append(model_type)
    return sorted(chosen)


def tiny_config(cls: Any, key_heads: int = 2) -> PreTrainedConfig:
    """Return a config of a class with small sizes, also in the configs inside."""
    try:
        default: Any = cls()
    except Exception:  # some need arguments
        default = None
    inner = getattr(cls, "sub_configs", {})
    settings: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if field.name not in inner:
            settings |= _smaller(field.name, _default(default, field), key_heads)

    for name, kind in inner.items():
        if kind is AutoConfig or not getattr(kind, "model_type", ""):
            kind = type(getattr(default, name, None))
        if issubclass(kind, PreTrainedConfig):
            settings[name] = tiny_config(kind, key_heads)
    layer_types = getattr(default, "layer_types", None)
    if "layer_types" in {field.name for field in dataclasses.fields(cls)} and layer_types:
        settings["layer_types"] = (list(dict.fromkeys(layer_types)) * 2)[:2]
    return cls(**settings | OWN.get(cls.model_type, {}))


def _default(config: Any, field: Any) -> object:
    """Return the value of a field in a config that was made without arguments."""
    if config is None:
        return field.default
    try:
        return getattr(config, field.name, None)
    except Exception:  # layers have different values
        return field.default


def _smaller(name: str, value: object, key_heads: int) -> dict[str, Any]:
    """Return the setting that makes a field of a config small; {} where it stays as it is.

    Args:
        name: the name of the field
        value: its value by default
        key_heads: how many heads keys and values shall have
    """
    if name == "image_size" and isinstance(value, list | tuple):
        return {name: [16] * len(value)}
    if isinstance(value, bool) or not isinstance(value, int | None):
        return {}
    if name.endswith(("token_id", "token_index")):
        is_too_large = value is not None and value >= VOCABULARY
        return {name: VOCABULARY - 4} if is_too_large else {}
    for pattern, size in [(KEY_HEADS, key_heads), *SIZES]:
        if not re.search(pattern, name):
            continue
        if value is None:
            # The model takes the number from others. These get one of their own, so that keys
            # are grouped, and a head may have another size than the width divided by the heads.
            has_own = re.search("head_dim|kv_heads|key_value", name)
            return {name: size} if has_own else {}
        return {name: size} if value > size else {}
    return {}


def inputs_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the arguments of a call: words, and for a model that reads none images or sounds."""
    parameters = inspect.signature(model.forward).parameters
    numbers = torch.Generator().manual_seed(0)
    config: Any = model.config
    ids = torch.randint(3, VOCABULARY - 10, (2, LENGTH), generator=numbers)
    inputs = {name: ids for name in ("input_ids", "decoder_input_ids") if name in parameters}
    main = model.main_input_name
    if main not in parameters:
        main = next((name for name in SENSES if name in parameters), main)

    vision = getattr(config, "vision_config", config)
    if "pixel_values" in parameters and (main == "pixel_values" or hasattr(config, "text_config")):
        size = getattr(vision, "image_size", None) or 16
        size = size if isinstance(size, int) else size[0]
        channels = getattr(vision, "num_channels", None) or 3
        two_towers = "CLIP" in type(model).__name__ or "logit_scale" in dict(
            model.named_parameters()
        )
        if main == "pixel_values" or two_towers:
            images = torch.randn(2, channels, size, size, generator=numbers)
            inputs["pixel_values"] = images.double()
    if main == "input_features":
        bins = getattr(config, "num_mel_bins", 80)
        frames = 2 * getattr(config, "max_source_positions", 32)
        inputs = {name: value for name, value in inputs.items() if name != "input_ids"}
        inputs[main] = torch.randn(2, bins, frames, generator=numbers).double()
    if main == "input_values":
        inputs = {name: value for name, value in inputs.items() if name != "input_ids"}
        inputs[main] = torch.randn(2, 1600, generator=numbers).double()
    return inputs


def build(model_type: str) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """Return a tiny model of a type that can be called, and its inputs; grouped keys if it may."""
    try:
        return _build(model_type, key_heads=2)
    except Exception:
        return _build(model_type, key_heads=4)


@torch.no_grad()
def _build(model_type: str, key_heads: int) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    torch.manual_seed(0)
    cls = getattr(transformers, name_of_class(model_type))
    config = tiny_config(CONFIG_MAPPING[model_type], key_heads)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in cls(copy.deepcopy(config)).parameters())
    if size > LARGEST:
        raise ValueError(f"{size} parameters")
    model = cls(config)
    if hasattr(model, "set_experts_implementation"):  # the others know no float64
        model.set_experts_implementation("eager")
    for parameter in model.parameters():  # most vectors start as 0 or 1
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model = model.double().eval()
    inputs = inputs_of(model)
    outputs_of(model, {"": inputs})
    return model, inputs


Inputs = dict[str, dict[str, Tensor]]  # by the name of a tower; '' is the whole model


def all_inputs(model: PreTrainedModel, first: dict[str, Tensor]) -> Inputs:
    """Return the arguments of a call of a model, and of each tower that this call leaves out.

    A model of texts and images that is given a text alone does not call its tower for images.
    """
    inputs = {"": first}
    left = {site.name for site in find_attentions(model)} - called(model, inputs)
    towers = [name for name, module in model.named_modules() if isinstance(module, PreTrainedModel)]
    for name in sorted(towers, key=len):
        inside = {site for site in left if is_inside(site, name)}
        tower: Any = model.get_submodule(name)
        if not name or not inside or "input_ids" in inputs_of(tower):
            continue
        try:
            of_tower = {name: inputs_of(tower)}
            reached = called(model, of_tower)
        except Exception:  # it needs more than its images
            continue
        if reached & left:
            inputs |= of_tower
            left -= reached
    return inputs


def tower_of(attention: str, towers: Iterable[str]) -> str:
    """Return the innermost tower that an attention is in; all are names in the model."""
    around = [name for name in towers if is_inside(attention, name)]
    return max(around, key=len)


@torch.no_grad()
def called(model: PreTrainedModel, inputs: Inputs) -> set[str]:
    """Return the names of the attentions that are called."""
    names: set[str] = set()
    handles = [
        model.get_submodule(site.name).register_forward_hook(
            lambda module, args, output, name=site.name: names.add(name)
        )
        for site in find_attentions(model)
    ]
    outputs_of(model, inputs)
    for handle in handles:
        handle.remove()
    return names


def outputs_of(model: PreTrainedModel, inputs: Inputs) -> Tensor:
    """Return the first tensor of numbers that a model gives, and that its towers give, flat."""
    outputs = []
    for name, arguments in inputs.items():
        torch.manual_seed(0)  # some hide patches at random
        outputs.append(numbers_of(model.get_submodule(name)(**arguments)).flatten())
    return torch.cat(outputs)


def numbers_of(outputs: Any) -> Tensor:
    tensors = [outputs] if isinstance(outputs, Tensor) else outputs.to_tuple()
    for tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            return tensor
    raise ValueError("gives no tensor of numbers")


# The definition


def defined_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Compute position-wise mixing by its equations, of what an unmixed model gives its attention.

    `module.seen` is what the projection of queries gave last.
    """
    mask = attention_mask
    heads, n_queries, size = query.shape[1:]
    group = heads // key.size(1)
    key = key.repeat_interleave(group, 1)
    value = value.repeat_interleave(group, 1)
    scores = query @ key.mT * (size**-0.5 if scaling is None else scaling)
    if position_bias is not None:
        scores = scores + position_bias
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, float("-inf"))
    elif mask is not None:
        scores = scores + mask
    if mask is None and n_queries > 1 and module.masks != "eager":
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if causal:
            hidden = torch.ones_like(scores, dtype=torch.bool).triu(1 + key.size(2) - n_queries)
            scores = scores.masked_fill(hidden, float("-inf"))
    if s_aux is not None:
        sinks = s_aux.view(1, -1, 1, 1).expand(len(query), -1, n_queries, 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., : key.size(2)]

    raw = module.seen[..., : heads * size].reshape(len(query), n_queries, heads, size)
    mixing = raw @ module.query_weight + module.bias  # [B, Nq, H, H]
    mixed = torch.einsum("bjqk,bqji->biqk", weights, mixing)
    return (mixed @ value).transpose(1, 2).contiguous(), mixed


transformers.AttentionInterface.register(DEFINED, defined_attention)


def defined(plain: PreTrainedModel, mixed: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of an unmixed model that computes the mixing of another by the definition."""
    model = copy.deepcopy(plain)
    for site in mixed_sites(mixed):
        module = model.get_submodule(site.name)
        part: Any = mixed.get_submodule(f"{site.name}.head_mixing")
        masks = module.config._attn_implementation
        vars(module).update(query_weight=part.query_weight, bias=part.bias, masks=masks)
        # Its own config: the model goes on making the masks that it made.
        module.config = copy.copy(module.config)
        module.config._attn_implementation_internal = DEFINED
        model.get_submodule(site.paths["queries"]).register_forward_hook(_keep_in(module))
    return model


def _keep_in(module: nn.Module) -> Callable[..., None]:
    def keep(projection: nn.Module, args: Any, output: Tensor) -> None:
        vars(module)["seen"] = output.clone()

    return keep


def mixed_sites(model: PreTrainedModel) -> list[FoundAttention]:
    return [site for site in find_attentions(model) if hf.MIXHEAD in vars(site.module)]


# The checks


def try_type(model_type: str) -> dict[str, Any]:
    """Return what holds for a type, or why it was not tried."""
    result: dict[str, Any] = {"type": model_type, "class": name_of_class(model_type)}
    try:
        plain, first = build(model_type)
    except Exception as error:
        return result | {"not built": one_line(error)}

    mixed = copy.deepcopy(plain)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            hf.mix(mixed, "position-wise")
        except ValueError as error:
            return result | {"refused": str(error)}
    inputs = all_inputs(plain, first)
    with torch.no_grad():
        expected = outputs_of(plain, inputs)
    messages = [str(warning.message) for warning in said]
    result["left out"] = [message for message in messages if "mixed without" in message]
    result["attentions"] = sorted({site.class_name for site in mixed_sites(mixed)})
    for check in CHECKS:
        try:
            result[check] = _CHECKS[check](plain, mixed, inputs, expected)
        except Exception as error:
            result[check] = one_line(error)
        if check == "start":  # all other checks are of a mixing that is not the identity
            move(mixed)
    return result


@torch.no_grad()
def move(mixed: PreTrainedModel) -> None:
    """Move the mixing away from the identity."""
    for parameter in hf.mixing_parameters(mixed).values():
        parameter += 0.3 * torch.randn_like(parameter)


def _same(outputs: Tensor, expected: Tensor) -> bool | str:
    """Return True if two outputs are the same, up to what models compute in float32."""
    close = torch.allclose(outputs, expected, rtol=1e-4, atol=1e-5 * float(expected.std()) + 1e-9)
    return close or f"differs by {float((outputs - expected).abs().max()):.1e}"


@torch.no_grad()
def _start(plain: Any, mixed: Any, inputs: Any, expected: Tensor) -> bool | str:
    return _same(outputs_of(mixed, inputs), expected)


@torch.no_grad()
def _moved(plain: Any, mixed: Any, inputs: Any, expected: Tensor) -> bool | str:
    outputs = outputs_of(mixed, inputs)
    if torch.allclose(outputs, expected):
        return "the mixing has no effect"
    return _same(outputs, outputs_of(defined(plain, mixed), inputs))


@torch.no_grad()
def _reads_queries(plain: Any, mixed: Any, inputs: Inputs, expected: Tensor) -> bool | str:
    site = _first_called(mixed, inputs)
    tower = tower_of(site.name, inputs)
    changed = copy.deepcopy(mixed)
    module = changed.get_submodule(site.name)
    projection: Any = changed.get_submodule(site.paths["queries"])
    kept = {id(p) for p in projection.parameters()}
    kept |= {id(p) for p in hf.mixing_parameters(changed).values()}
    if len(site.packed()) == 1:  # the features of keys and values in the one projection
        weight = projection.weight if isinstance(projection, nn.Linear) else projection.weight.t()
        weight[site.heads * site.head_dim :] += 1
    for parameter in module.parameters():
        if id(parameter) not in kept:
            parameter += torch.randn_like(parameter)

    def read(model: PreTrainedModel) -> Any:
        """Return what the heads of the site do."""
        torch.manual_seed(0)
        attentions = hf.attentions(model.get_submodule(tower), inputs[tower]).values()
        inside = {f"{tower}.{heads.name}".removeprefix("."): heads for heads in attentions}
        return inside[site.name]

    before = read(mixed)
    after = read(changed)
    assert before.mixing is not None and after.mixing is not None
    if torch.equal(before.source, after.source):
        return "the weights did not change"
    return _same(after.mixing, before.mixing)


def _trained(plain: Any, mixed: Any, inputs: Any, expected: Tensor) -> bool | str:
    reached = called(mixed, inputs)
    outputs = outputs_of(mixed.requires_grad_(True), inputs)
    (outputs * torch.randn_like(outputs)).sum().backward()
    for name, parameter in hf.mixing_parameters(mixed).items():
        if name.rpartition(".head_mixing")[0] not in reached:
            continue
        if parameter.grad is None or not parameter.grad.any():
            return f"{name} has no gradient"
    mixed.zero_grad()
    names = [site.name for site in mixed_sites(mixed)]
    missed = [name for name in names if name not in reached]
    return f"{len(missed)} of {len(names)} attentions are not called" if missed else True


@torch.no_grad()
def _cached(plain: Any, mixed: Any, by_tower: Any, expected: Tensor) -> bool | str | None:
    inputs = by_tower[""]
    name = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    if not mixed.can_generate() or name not in inputs:
        return None  # it has no cache
    full = numbers_of(mixed(**inputs))
    try:
        steps = _by_steps(plain, name, inputs)
        has_cache = _same(steps, numbers_of(plain(**inputs))[:, -1]) is True
    except Exception:
        has_cache = False
    if not has_cache:  # the unmixed model cannot do it either: it has no cache, or is not causal
        return None
    return _same(_by_steps(mixed, name, inputs), full[:, -1])


def _by_steps(model: Any, name: str, inputs: dict[str, Tensor]) -> Tensor:
    """Return the last logits, with a cache; `name` is the argument that has the words."""
    words = inputs[name]
    others = {key: value for key, value in inputs.items() if key != name}
    cache = model(**others, **{name: words[:, :-2]}, use_cache=True).past_key_values
    for position in range(LENGTH - 2, LENGTH):
        word = words[:, position : position + 1]
        step = model(**others, **{name: word}, past_key_values=cache, use_cache=True)
    return step.logits[:, -1]


def _first_called(model: PreTrainedModel, inputs: Inputs) -> FoundAttention:
    reached = called(model, inputs)
    return next(site for site in mixed_sites(model) if site.name in reached)


def _group(site: FoundAttention, model: PreTrainedModel) -> list[int]:
    """Return heads to remove: a group that shares keys."""
    attention: Any = next(heads for heads in attentions_of(model) if heads.name == site.name)
    return list(range(attention.sizes.heads_per_key))


@torch.no_grad()
def _ablated(plain: Any, mixed: Any, inputs: Any, expected: Tensor) -> bool | str:
    site = _first_called(mixed, inputs)
    heads = _group(site, mixed)
    with hf.ablate(mixed, {site.name: heads}):
        outputs = outputs_of(mixed, inputs)
    silenced = copy.deepcopy(mixed)
    projection: Any = silenced.get_submodule(site.paths["output"])
    weight = projection.weight if isinstance(projection, nn.Linear) else projection.weight.t()
    weight[:, : len(heads) * site.head_dim] = 0
    return _same(outputs, outputs_of(silenced, inputs))


@torch.no_grad()
def _pruned(plain: Any, mixed: Any, inputs: Any, expected: Tensor) -> bool | str:
    pruned = copy.deepcopy(mixed)
    site = _first_called(mixed, inputs)
    heads = _group(site, mixed)
    with hf.ablate(mixed, {site.name: heads}):
        silenced = outputs_of(mixed, inputs)
    try:
        hf.prune(pruned, {site.name: heads})
    except ValueError as error:
        return f"{REFUSES}{error}"
    return _same(outputs_of(pruned, inputs), silenced)


@torch.no_grad()
def _loaded(plain: Any, mixed: Any, inputs: Any, expected: Tensor) -> bool | str:
    with tempfile.TemporaryDirectory() as folder:
        mixed.save_pretrained(folder)
        loaded = hf.load(folder)
    if hasattr(loaded, "set_experts_implementation"):
        loaded.set_experts_implementation("eager")
    return _same(outputs_of(loaded.double().eval(), inputs), outputs_of(mixed, inputs))


_CHECKS: dict[str, Callable[..., bool | str | None]] = {
    "start": _start,
    "moved": _moved,
    "reads queries": _reads_queries,
    "trained": _trained,
    "cached": _cached,
    "ablated": _ablated,
    "pruned": _pruned,
    "loaded": _loaded,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("types", nargs="*", help="the types to try; all by default")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    names = args.types or types()
    with multiprocessing.Pool(args.jobs) as pool:
        results = []
        for result in pool.imap_unordered(try_type, names):
            results.append(result)
            print(json.dumps(result), file=sys.stderr, flush=True)
    results.sort(key=lambda result: result["type"])
    lines = ",\n".join(json.dumps(result) for result in results)
    print(f'{{"transformers": "{transformers.__version__}", "types": [\n{lines}\n]}}')


if __name__ == "__main__":
    main()
