#!/usr/bin/env python
"""Convert a BERT of Hugging Face's `transformers` to a checkpoint of fairseq, and back.

    examples/bert/convert_bert.py to-fairseq bert-base-uncased bert.base
    examples/bert/convert_bert.py to-fairseq bert-base-uncased bert.base --arch mixhead_bert_base --head-mixing none
    examples/bert/convert_bert.py to-huggingface bert.base/model.pt out

`to-fairseq` reads config.json, vocab.txt and model.safetensors or pytorch_model.bin. It writes model.pt, dict.txt, and
copies of vocab.txt and tokenizer_config.json. It takes the flags of fairseq-train. model.pt fits every family, because
mixing starts at the identity and is not saved; --head-mixing random and average are saved.

`to-huggingface` writes what `to-fairseq` reads. It takes a BERT with softmax attention and no mixing but the identity.
Both name the tensors that they leave out. Both need the package safetensors.
"""

import argparse
import json
import shutil
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the package bert is

import torch
from fairseq import checkpoint_utils, options, tasks
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_CONFIG_REGISTRY
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from torch import Tensor

from bert import register
from bert.model import NEXT_SENTENCE, TOKEN_TYPES, BertModel
from bert.wordpiece import CLOSING, OPENING, SPECIAL, read_vocabulary, write_dictionary
from mixhead_plugin.errors import OptionError, option_name
from mixhead_plugin.modules.head_mixing import HEAD_MIXINGS
from mixhead_plugin.options import STOCK_MODEL, model_options
from mixhead_plugin.untrusted import check_finite

State = Dict[str, Tensor]

ENCODER = "encoder.sentence_encoder."
SENTENCE_HEAD = "sentence_classification_head"  # fairseq's default of --classification-head-name
HEADS = {"cls.seq_relationship": NEXT_SENTENCE, "classifier": SENTENCE_HEAD}
ACTIVATIONS = {"gelu": "gelu", "relu": "relu", "gelu_new": "gelu_accurate", "gelu_pytorch_tanh": "gelu_accurate"}
# The numbers of a config, and the flags that say the same.
SIZES = {
    "num_hidden_layers": "encoder_layers",
    "hidden_size": "encoder_embed_dim",
    "intermediate_size": "encoder_ffn_embed_dim",
    "num_attention_heads": "encoder_attention_heads",
    "max_position_embeddings": "max_positions",
    "layer_norm_eps": "layer_norm_eps",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
}
POSITION_OFFSET = 2  # fairseq's first position follows that of padding, 1
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
LARGEST = 1 << 20  # the limit of all sizes in a config
COPIED = ("vocab.txt", "tokenizer_config.json")


def modules(layers: int) -> Iterator[Tuple[str, str]]:
    """Yield the names in `transformers` and in fairseq of all modules with a weight and a bias."""
    yield "bert.embeddings.LayerNorm", f"{ENCODER}layernorm_embedding"
    for number in range(layers):
        theirs, ours = f"bert.encoder.layer.{number}.", f"{ENCODER}layers.{number}."
        for their, our in (
            ("attention.self.query", "self_attn.q_proj"),
            ("attention.self.key", "self_attn.k_proj"),
            ("attention.self.value", "self_attn.v_proj"),
            ("attention.output.dense", "self_attn.out_proj"),
            ("attention.output.LayerNorm", "self_attn_layer_norm"),
            ("intermediate.dense", "fc1"),
            ("output.dense", "fc2"),
            ("output.LayerNorm", "final_layer_norm"),
        ):
            yield theirs + their, ours + our
    yield "bert.pooler.dense", "pooler.dense"
    yield "cls.predictions.transform.dense", "encoder.lm_head.dense"
    yield "cls.predictions.transform.LayerNorm", "encoder.lm_head.layer_norm"
    for theirs, name in HEADS.items():
        yield theirs, f"classification_heads.{name}.out_proj"


def rename(state: State, layers: int, back: bool = False) -> State:
    """Return the tensors that are equal on both sides, under their names on the other side."""
    names = {"bert.embeddings.token_type_embeddings.weight": "encoder.segment_embeddings.weight"}
    for theirs, ours in modules(layers):
        names |= {f"{theirs}.{kind}": f"{ours}.{kind}" for kind in ("weight", "bias")}
    if back:
        names = {ours: theirs for theirs, ours in names.items()}
    return {names[name]: tensor for name, tensor in state.items() if name in names}


def read_tensors(folder: Path) -> State:
    """Read model.safetensors or pytorch_model.bin, in float32 and under the present names of the tensors."""
    path = next((path for path in (folder / name for name in WEIGHTS) if path.exists()), None)
    if path is None:
        raise OptionError(f"{folder}: has neither {' nor '.join(WEIGHTS)}")
    try:
        if path.suffix == ".safetensors":
            state = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged or foreign file fails in any way
        raise OptionError(f"{path}: is damaged, or no file of tensors alone") from error
    if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise OptionError(f"{path}: is no file of tensors alone")
    check_finite(str(path), state)
    renamed = {}
    for name, tensor in state.items():
        # the names of the first ports from TensorFlow
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        # without heads a model has no prefix
        name = f"bert.{name}" if name.startswith(("embeddings.", "encoder.", "pooler.")) else name
        renamed[name] = tensor.float() if tensor.is_floating_point() else tensor
    return renamed


def read_config(path: Path) -> Dict[str, Any]:
    """Read config.json, and refuse impossible sizes."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise OptionError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(config, dict):
        raise OptionError(f"{path}: must be an object")
    for name in SIZES.keys() & config.keys():
        value, whole = config[name], name.startswith(("num_", "max_")) or name.endswith("_size")
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            raise OptionError(f"{path}: {name} {value!r}, must be a {'whole ' * whole}number")
        if not (1 <= value <= LARGEST if whole else 0 <= value <= 1):
            raise OptionError(f"{path}: {name} {value}, must be from {f'1 to {LARGEST}' if whole else '0 to 1'}")
    return config


def flags_of(config: Dict[str, Any], path: Path) -> List[str]:
    """Return the flags of fairseq-train that describe the model of config.json."""

    def demand(name: str, valid: Any, default: Any) -> None:
        if config.get(name, default) not in valid:
            raise OptionError(f"{path}: {name} {config[name]}, must be {' or '.join(map(str, valid))}")

    demand("model_type", ["bert"], "bert")
    demand("position_embedding_type", ["absolute"], "absolute")
    demand("type_vocab_size", [TOKEN_TYPES], TOKEN_TYPES)
    demand("hidden_act", list(ACTIVATIONS), "gelu")
    demand("is_decoder", [False], False)
    missing = [name for name in SIZES if name not in config]
    if missing:
        raise OptionError(f"{path}: has no {', '.join(missing)}")
    values = {flag: config[name] for name, flag in SIZES.items()}
    values["tokens_per_sample"] = values["max_positions"]
    dropout = config.get("classifier_dropout")
    values["pooler_dropout"] = config["hidden_dropout_prob"] if dropout is None else dropout
    values["activation_fn"] = ACTIVATIONS[config.get("hidden_act", "gelu")]
    return [part for name, value in values.items() for part in (option_name(name), str(value))]


def to_fairseq(folder: Path, out: Path, arch: str, flags: List[str]) -> None:
    config_path = folder / "config.json"
    for path in (config_path, folder / "vocab.txt"):
        if not path.exists():
            raise OptionError(f"{folder}: has no {path.name}")
    config = read_config(config_path)
    own_flags = flags_of(config, config_path)
    words = read_vocabulary(folder / "vocab.txt")
    theirs = read_tensors(folder)
    embedding = _take(theirs, "bert.embeddings.word_embeddings.weight", folder)
    if embedding.shape[1:] != (config["hidden_size"],):
        raise OptionError(f"{config_path}: hidden_size {config['hidden_size']}, the model has {embedding.shape[1:]}")
    if config["num_hidden_layers"] > len(theirs):
        raise OptionError(f"{config_path}: num_hidden_layers {config['num_hidden_layers']}, more than the model has")
    if len(words) != len(embedding):
        raise OptionError(f"{folder / 'vocab.txt'}: has {len(words)} words, the model {len(embedding)}")

    out.mkdir(parents=True, exist_ok=True)
    dictionary = write_dictionary(words, out / "dict.txt", folder / "vocab.txt")
    order = torch.tensor([words.index(word) for word in OPENING] + [i for i, w in enumerate(words) if w not in SPECIAL])
    order = torch.cat([order, torch.tensor([words.index(word) for word in CLOSING])])  # [V], fairseq's index -> theirs

    # --data is set later, because the folder has no text, and the plugin checks the text of the command line.
    arguments = ["", "--task", "bert_pretraining", "--criterion", "bert_pretraining", "--arch", arch]
    args = options.parse_args_and_arch(options.get_training_parser(), [*arguments, *own_flags, *flags])
    args.data = str(out)
    cfg = convert_namespace_to_omegaconf(args)
    task = tasks.setup_task(cfg.task)
    assert task.source_dictionary.symbols == dictionary.symbols
    model = task.build_model(cfg.model)

    layers = config["num_hidden_layers"]
    ours = rename(theirs, layers)
    positions = _take(theirs, "bert.embeddings.position_embeddings.weight", folder)
    ours[f"{ENCODER}embed_positions.weight"] = torch.cat(
        [positions.new_zeros(POSITION_OFFSET, len(positions[0])), positions]
    )
    ours[f"{ENCODER}embed_tokens.weight"] = ours["encoder.lm_head.weight"] = embedding[order]
    for name in ("cls.predictions.bias", "cls.predictions.decoder.bias"):  # two names of one tensor
        if name in theirs:
            ours["encoder.lm_head.bias"] = theirs[name][order]
    if not torch.equal(theirs.get("cls.predictions.decoder.weight", embedding), embedding):
        raise OptionError(f"{folder}: cls.predictions.decoder.weight is not the embedding; fairseq ties them")
    if "classifier.weight" in theirs:
        model.register_classification_head(SENTENCE_HEAD, len(theirs["classifier.weight"]))
    load(model, ours, folder)
    _say_left_out(folder, set(theirs) - _known_names(layers))

    state = model.state_dict()
    if HEAD_MIXINGS[args.head_mixing].trained or args.head_mixing == "none":
        # without a record of the attention, as in checkpoints of fairseq's own models
        state = {name: tensor for name, tensor in state.items() if ".head_mixing." not in name}
    save(state, cfg, out / "model.pt")
    _copy(folder, out)


def load(model: BertModel, ours: State, folder: Path) -> None:
    """Load the tensors into the model. Heads and the pooler may be missing; they keep their initial values."""
    own = model.state_dict()
    fresh = sorted(name for name in own if name.startswith(("pooler.", "encoder.lm_head.", "classification_heads.")))
    missing = [name for name in own if name not in ours and name not in fresh and ".head_mixing." not in name]
    missing = [name for name in missing if not name.endswith(".version")]
    if missing:
        raise OptionError(
            f"{folder}: lacks what becomes {missing[0]}" + f" and {len(missing) - 1} more" * (len(missing) > 1)
        )
    for name, tensor in ours.items():
        if tensor.shape != own[name].shape:
            raise OptionError(
                f"{folder}: what becomes {name} has the shape {list(tensor.shape)}, "
                f"the flags ask for {list(own[name].shape)}"
            )
    anew = [name for name in fresh if name not in ours]
    if anew:
        print(f"convert_bert.py: {folder} has no values for {', '.join(anew)}; they keep their initial values")
    model.load_state_dict({**own, **ours})  # a plain dict has no record of the attention


def save(state: State, cfg: Any, path: Path) -> None:
    """Write a checkpoint as fairseq's trainer does before the first update."""
    checkpoint = {
        "args": None,
        "cfg": OmegaConf.to_container(cfg, resolve=True, enum_to_str=True),
        "model": state,
        "optimizer_history": [
            {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}, "num_updates": 0},
        ],
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0, "shuffle": True}},
    }
    torch.save(checkpoint, path)


def to_huggingface(checkpoint: Path, out: Path, dict_path: Optional[Path], vocab_path: Optional[Path]) -> None:
    if not checkpoint.exists():
        raise OptionError(f"{checkpoint}: no such file")
    loaded = checkpoint_utils.load_checkpoint_to_cpu(str(checkpoint))
    if loaded.get("cfg") is None or "model" not in loaded["cfg"]:
        raise OptionError(f"{checkpoint}: has no config of a model; must be a checkpoint that fairseq-train wrote")
    state = {name: tensor.float() for name, tensor in loaded["model"].items()}
    args = check_is_bert(loaded["cfg"]["model"], state, checkpoint)
    words = theirs_order(
        dict_path or checkpoint.parent / "dict.txt", vocab_path or checkpoint.parent / "vocab.txt", state
    )
    symbols = [*OPENING, *(word for word in words if word not in SPECIAL), *CLOSING]
    place = {word: index for index, word in enumerate(symbols)}
    order = torch.tensor([place[word] for word in words])  # [V], their index -> fairseq's

    theirs = rename(state, args.encoder_layers, back=True)
    theirs["bert.embeddings.word_embeddings.weight"] = state[f"{ENCODER}embed_tokens.weight"][order]
    theirs["bert.embeddings.position_embeddings.weight"] = state[f"{ENCODER}embed_positions.weight"][POSITION_OFFSET:]
    theirs["cls.predictions.bias"] = state["encoder.lm_head.bias"][order]
    known = set(rename(theirs, args.encoder_layers)) | {"encoder.lm_head.weight", "encoder.lm_head.bias"}
    known |= {f"{ENCODER}{name}" for name in ("version", "embed_tokens.weight", "embed_positions.weight")}
    _say_left_out(checkpoint, {name for name in state if ".head_mixing." not in name} - known)

    out.mkdir(parents=True, exist_ok=True)
    config = config_of(args, theirs, words)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (out / "vocab.txt").write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    tokenizer = checkpoint.parent / "tokenizer_config.json"
    if tokenizer.exists():
        shutil.copy(tokenizer, out)
    theirs = {name: tensor.contiguous() for name, tensor in theirs.items()}
    save_file(theirs, out / "model.safetensors", metadata={"format": "pt"})


def check_is_bert(model: Any, state: State, checkpoint: Path) -> Namespace:
    """Return all flags of a checkpoint's model; refuse a model that `transformers` does not have."""
    arch = getattr(model, "arch", None) or getattr(model, "_name", None)
    given = model_options(model)
    if given is None or given is STOCK_MODEL or "encoder.segment_embeddings.weight" not in state:
        raise OptionError(f"{checkpoint}: --arch {arch}, must be an architecture *_bert*")
    ARCH_CONFIG_REGISTRY[arch](given)  # a YAML file has only the values that differ
    head_dim = given.encoder_embed_dim // given.encoder_attention_heads
    valid = {
        "attention_normalizer": ["softmax"],
        "head_dim": [None, head_dim],
        "relative_position": ["none"],
        "relative_gain": [0],
        "heads_per_layer": [None],
        "encoder_normalize_before": [False],
        "untie_weights_roberta": [False],
    }
    for name, values in valid.items():
        value = getattr(given, name, values[0])
        if value not in values:
            raise OptionError(f"{checkpoint}: {option_name(name)} {value}, must be {values[-1]} for transformers")
    build, heads = HEAD_MIXINGS[given.head_mixing].build, given.encoder_attention_heads
    identity = {} if build is None else build(heads, head_dim, heads).identity()
    for name, tensor in state.items():
        kind = name.rpartition(".head_mixing.")[2]
        if ".head_mixing." in name and not (kind in identity and torch.equal(tensor, identity[kind])):
            raise OptionError(f"{checkpoint}: --head-mixing {given.head_mixing}, but {name} is not the identity")
    return given


def theirs_order(dict_path: Path, vocab_path: Path, state: State) -> List[str]:
    """Return the words in the order of vocab.txt; without that file the special ones come first."""
    if not dict_path.exists():
        raise OptionError(f"--dict {dict_path}: no such file; must be the dictionary of the model")
    dictionary = Dictionary.load(str(dict_path))
    own = [word for word in dictionary.symbols[dictionary.nspecial :] if word != SPECIAL["[MASK]"]]
    if len(own) + len(SPECIAL) != len(state["encoder.lm_head.bias"]):
        raise OptionError(
            f"--dict {dict_path}: has {len(own) + len(SPECIAL)} symbols, the model {len(state['encoder.lm_head.bias'])}"
        )
    if not vocab_path.exists():
        return ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *own]
    words = read_vocabulary(vocab_path)
    if [word for word in words if word not in SPECIAL] != own:
        raise OptionError(f"--vocab {vocab_path}: must have the words of {dict_path} in the same order")
    return words


def config_of(args: Namespace, theirs: State, words: List[str]) -> Dict[str, Any]:
    activation = next(name for name, flag in ACTIVATIONS.items() if flag == args.activation_fn)
    config = {"model_type": "bert", "vocab_size": len(words), "hidden_act": activation, "type_vocab_size": TOKEN_TYPES}
    config |= {name: getattr(args, flag) for name, flag in SIZES.items()}
    config["max_position_embeddings"] = len(theirs["bert.embeddings.position_embeddings.weight"])
    config |= {"classifier_dropout": args.pooler_dropout, "initializer_range": 0.02}
    config["pad_token_id"] = words.index("[PAD]")
    architecture = "BertForMaskedLM"
    if "cls.seq_relationship.weight" in theirs:
        architecture = "BertForPreTraining"
    elif "classifier.weight" in theirs:
        architecture = "BertForSequenceClassification"
    if "classifier.weight" in theirs:
        config["id2label"] = {str(i): f"LABEL_{i}" for i in range(len(theirs["classifier.weight"]))}
    return {"architectures": [architecture], **config}


def _take(state: State, name: str, folder: Path) -> Tensor:
    if name not in state:
        raise OptionError(f"{folder}: its model has no {name}; must be a BERT")
    return state[name]


def _known_names(layers: int) -> set:
    names = {f"{theirs}.{kind}" for theirs, _ in modules(layers) for kind in ("weight", "bias")}
    names |= {f"bert.embeddings.{kind}_embeddings.weight" for kind in ("word", "position", "token_type")}
    names |= {f"cls.predictions.{name}" for name in ("bias", "decoder.weight", "decoder.bias")}
    return names | {"bert.embeddings.position_ids"}  # 0, 1, 2, ...


def _say_left_out(where: Path, names: set) -> None:
    if names:
        print(f"convert_bert.py: of {where} left out: {', '.join(sorted(names))}")


def _copy(folder: Path, out: Path) -> None:
    for name in COPIED:
        if (folder / name).exists() and folder.resolve() != out.resolve():
            shutil.copy(folder / name, out)


def main(arguments: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    there = commands.add_parser("to-fairseq", help="further flags are those of fairseq-train")
    there.add_argument("folder", type=Path, help="config.json, vocab.txt, model.safetensors or pytorch_model.bin")
    there.add_argument("out", type=Path, help="folder to write to")
    there.add_argument(
        "--arch", default="mixhead_bert_base", help="config.json overrides its sizes (default: %(default)s)"
    )
    back = commands.add_parser("to-huggingface")
    back.add_argument("checkpoint", type=Path)
    back.add_argument("out", type=Path, help="folder to write to")
    back.add_argument("--dict", type=Path, help="dictionary of the model (default: dict.txt beside the checkpoint)")
    back.add_argument(
        "--vocab", type=Path, help="file with the order of the words (default: vocab.txt beside the checkpoint, if any)"
    )
    given, flags = parser.parse_known_args(arguments)
    if flags and given.command != "to-fairseq":
        parser.error(f"unrecognized arguments: {' '.join(flags)}")
    register()
    try:
        if given.command == "to-fairseq":
            to_fairseq(given.folder, given.out, given.arch, flags)
        else:
            to_huggingface(given.checkpoint, given.out, given.dict, given.vocab)
    except OptionError as error:
        print(f"convert_bert.py: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
