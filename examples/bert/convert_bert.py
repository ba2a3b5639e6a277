#!/usr/bin/env python
"""Convert a BERT of Hugging Face's `transformers` to a checkpoint of fairseq, and back.

    examples/bert/convert_bert.py to-fairseq bert-base-uncased bert.base
    examples/bert/convert_bert.py to-fairseq bert-base-uncased bert.base --head-mixing none
    examples/bert/convert_bert.py to-huggingface bert.base/model.pt out

`to-fairseq` reads config.json, vocab.txt and model.safetensors or pytorch_model.bin. It writes
model.pt, dict.txt, and copies of vocab.txt and tokenizer_config.json. It takes the flags of
fairseq-train. model.pt fits every family, because mixing starts at the identity and is not saved;
--head-mixing random and average are saved.

`to-huggingface` writes what `to-fairseq` reads. It takes a BERT with softmax attention and no
mixing but the identity. Both name the tensors that they leave out. Both need the package
safetensors.
"""

import argparse
import json
import shutil
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any, Optional

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
from mixhead_plugin.fairseq.config import flat_copy, model_name
from mixhead_plugin.fairseq.repairs.checkpoint_files import check_finite
from mixhead_plugin.fairseq.repairs.checksums import check_records
from mixhead_plugin.parts import PARTS, Variant, build_part, is_of_a_part

State = dict[str, Tensor]

ENCODER = "encoder.sentence_encoder."
SENTENCE_HEAD = "sentence_classification_head"  # fairseq's default of --classification-head-name
HEADS = {"cls.seq_relationship": NEXT_SENTENCE, "classifier": SENTENCE_HEAD}
ACTIVATIONS = {
    "gelu": "gelu",
    "relu": "relu",
    "gelu_new": "gelu_accurate",
    "gelu_pytorch_tanh": "gelu_accurate",
}
# The numbers of a config, and fairseq's flags for them.
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
LAYER = {
    "attention.self.query": "self_attn.q_proj",
    "attention.self.key": "self_attn.k_proj",
    "attention.self.value": "self_attn.v_proj",
    "attention.output.dense": "self_attn.out_proj",
    "attention.output.LayerNorm": "self_attn_layer_norm",
    "intermediate.dense": "fc1",
    "output.dense": "fc2",
    "output.LayerNorm": "final_layer_norm",
}
EMBEDDINGS = "bert.embeddings.word_embeddings.weight"
POSITIONS = "bert.embeddings.position_embeddings.weight"
BIAS = "cls.predictions.bias"
POSITION_OFFSET = 2  # in fairseq position 1 is padding's
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
LARGEST = 1 << 20  # the limit of all sizes in a config
COPIED = ("vocab.txt", "tokenizer_config.json")


def names_of(layers: int) -> dict[str, str]:
    """Return the names in `transformers` and in fairseq of all tensors with equal values."""
    pairs = {
        "bert.embeddings.LayerNorm": f"{ENCODER}layernorm_embedding",
        "bert.pooler.dense": "pooler.dense",
        "cls.predictions.transform.dense": "encoder.lm_head.dense",
        "cls.predictions.transform.LayerNorm": "encoder.lm_head.layer_norm",
    }
    for theirs, name in HEADS.items():
        pairs[theirs] = f"classification_heads.{name}.out_proj"
    for layer in range(layers):
        for theirs, ours in LAYER.items():
            pairs[f"bert.encoder.layer.{layer}.{theirs}"] = f"{ENCODER}layers.{layer}.{ours}"

    names = {"bert.embeddings.token_type_embeddings.weight": "encoder.segment_embeddings.weight"}
    for theirs, ours in pairs.items():
        names[f"{theirs}.weight"] = f"{ours}.weight"
        names[f"{theirs}.bias"] = f"{ours}.bias"
    return names


def take(state: State, names: dict[str, str]) -> State:
    """Move the tensors of `names` out of `state`, under their new names."""
    return {new: state.pop(old) for old, new in names.items() if old in state}


def report_left_out(where: Path, state: State) -> None:
    if state:
        print(f"convert_bert.py: of {where} left out: {', '.join(sorted(state))}")


def read_tensors(folder: Path) -> State:
    """Read model.safetensors or pytorch_model.bin as float32.

    The tensors get their present names, which older files do not have.
    """
    present = [folder / name for name in WEIGHTS if (folder / name).exists()]
    if not present:
        raise OptionError(f"{folder}: has neither {' nor '.join(WEIGHTS)}")
    path = present[0]
    check_records(path)
    try:
        if path.suffix == ".safetensors":
            state = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a file of another kind fails in any way
        raise OptionError(f"{path}: is damaged, or does not contain only tensors") from error
    if not is_state(state):
        raise OptionError(f"{path}: does not contain only tensors")
    check_finite(str(path), state)
    present_names = {}
    for name, tensor in state.items():
        # the names of the first ports from TensorFlow
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight")
        name = name.replace("LayerNorm.beta", "LayerNorm.bias")
        # without heads a model has no prefix
        if name.startswith(("embeddings.", "encoder.", "pooler.")):
            name = f"bert.{name}"
        present_names[name] = tensor.float() if tensor.is_floating_point() else tensor
    return present_names


def is_state(content: Any) -> bool:
    """Tell whether `content` is a dictionary of tensors."""
    return isinstance(content, dict) and all(isinstance(each, Tensor) for each in content.values())


def read_config(path: Path) -> dict[str, Any]:
    """Read config.json, and refuse impossible sizes."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(config, dict):
        raise OptionError(f"{path}: must be an object")
    for name in SIZES.keys() & config.keys():
        problem = number_problem(name, config[name])
        if problem:
            raise OptionError(f"{path}: {name} {problem}")
    return config


def number_problem(name: str, value: Any) -> str:
    """Return what is wrong with the number `name` of a config, or an empty text."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if name.startswith(("num_", "max_")) or name.endswith("_size"):
        if not is_number or isinstance(value, float):
            return f"{value!r}, must be a whole number"
        if not 1 <= value <= LARGEST:
            return f"{value}, must be from 1 to {LARGEST}"
        return ""
    # shares and epsilons
    if not is_number:
        return f"{value!r}, must be a number"
    if not 0 <= value <= 1:
        return f"{value}, must be from 0 to 1"
    return ""


def flags_of(config: dict[str, Any], path: Path) -> list[str]:
    """Return the flags of fairseq-train that describe the model of config.json."""
    valid = {
        "model_type": ["bert"],
        "position_embedding_type": ["absolute"],
        "type_vocab_size": [TOKEN_TYPES],
        "hidden_act": list(ACTIVATIONS),
        "is_decoder": [False],
        "mixhead": [None],  # mixed by mixhead_plugin.hf
    }
    for name, values in valid.items():
        if config.get(name, values[0]) not in values:
            raise OptionError(
                f"{path}: {name} {config[name]}, must be {' or '.join(map(str, values))}"
            )
    missing = [name for name in SIZES if name not in config]
    if missing:
        raise OptionError(f"{path}: has no {', '.join(missing)}")
    values = {flag: config[name] for name, flag in SIZES.items()}
    values["tokens_per_sample"] = values["max_positions"]
    dropout = config.get("classifier_dropout")
    values["pooler_dropout"] = config["hidden_dropout_prob"] if dropout is None else dropout
    values["activation_fn"] = ACTIVATIONS[config.get("hidden_act", "gelu")]
    flags = []
    for name, value in values.items():
        flags += [option_name(name), str(value)]
    return flags


def to_fairseq(folder: Path, out: Path, arch: str, flags: list[str]) -> None:
    """Write what `to-fairseq` writes.

    Args:
        folder: the folder of a model of transformers
        out: the folder to write to, which is made
        arch: an architecture of BERT
        flags: further flags of fairseq-train

    Raises:
        OptionError: the folder has no such model, in one line
    """
    config_path = folder / "config.json"
    vocabulary = folder / "vocab.txt"
    for path in (config_path, vocabulary):
        if not path.exists():
            raise OptionError(f"{folder}: has no {path.name}")
    config = read_config(config_path)
    own_flags = flags_of(config, config_path)
    words = read_vocabulary(vocabulary)
    theirs = checked_tensors(folder, config, len(words))

    out.mkdir(parents=True, exist_ok=True)
    write_dictionary(words, out / "dict.txt", vocabulary)
    args, cfg, model = built_model(out, arch, [*own_flags, *flags])
    if "classifier.weight" in theirs:
        model.register_classification_head(SENTENCE_HEAD, len(theirs["classifier.weight"]))
    ours = renamed(theirs, words, config["num_hidden_layers"])
    load(model, ours, folder)
    report_left_out(folder, theirs)

    state = model.state_dict()
    kinds = [table[getattr(args, option)] for option, table in PARTS.items()]
    if all(kind.build is None or (kind.trained and kind.loads_without) for kind in kinds):
        # without a record of the attention, as in checkpoints of fairseq's own models
        state = {name: tensor for name, tensor in state.items() if not is_of_a_part(name)}
    save(state, cfg, out / "model.pt")
    for name in COPIED:
        if (folder / name).exists() and folder.resolve() != out.resolve():
            shutil.copy(folder / name, out)


def checked_tensors(folder: Path, config: dict[str, Any], num_words: int) -> State:
    """Return the tensors of a model of transformers, the embedding of the words once.

    Raise OptionError if they do not fit config.json and vocab.txt.
    """
    theirs = read_tensors(folder)
    for name in (EMBEDDINGS, POSITIONS):
        if name not in theirs or theirs[name].shape[1:] != (config["hidden_size"],):
            raise OptionError(
                f"{folder}: has no {name} of the hidden_size {config['hidden_size']}; must be a "
                "BERT"
            )

    # Each layer has a tensor at least. More layers are refused before they are built, because a
    # damaged config may ask for a million of them, which fills the memory.
    layers = config["num_hidden_layers"]
    if layers > len(theirs) - len((EMBEDDINGS, POSITIONS)):
        raise OptionError(
            f"{folder / 'config.json'}: num_hidden_layers {layers}, more than the model has"
        )
    embedding = theirs[EMBEDDINGS]
    if num_words != len(embedding):
        raise OptionError(
            f"{folder / 'vocab.txt'}: has {num_words} words, the model {len(embedding)}"
        )
    if not torch.equal(theirs.pop("cls.predictions.decoder.weight", embedding), embedding):
        raise OptionError(
            f"{folder}: cls.predictions.decoder.weight is not the embedding; fairseq ties them"
        )
    return theirs


def built_model(data: Path, arch: str, flags: list[str]) -> tuple[Namespace, Any, BertModel]:
    """Return the flags, the config and the new model of a command of fairseq-train.

    Args:
        data: the folder with the dictionary
        arch: an architecture of BERT
        flags: further flags, of which the last one counts
    """
    required = ["--task=bert_pretraining", "--criterion=bert_pretraining", f"--arch={arch}"]
    args = options.parse_args_and_arch(options.get_training_parser(), ["", *required, *flags])
    # The folder has no text, and the plugin checks the text of the command line.
    args.data = str(data)
    cfg = convert_namespace_to_omegaconf(args)
    return args, cfg, tasks.setup_task(cfg.task).build_model(cfg.model)


def renamed(theirs: State, words: list[str], layers: int) -> State:
    """Move the tensors that fairseq has, too, out of `theirs`; return them by fairseq's names.

    Args:
        theirs: what `checked_tensors` returns
        words: those of vocab.txt
        layers: the number of layers
    """
    index = {word: number for number, word in enumerate(words)}
    # [V], fairseq's index -> theirs
    order = torch.tensor([index[word] for word in fairseqs_order(words)])
    embedding = theirs.pop(EMBEDDINGS)[order]  # [V, C]
    positions = theirs.pop(POSITIONS)  # [N, C]

    ours = take(theirs, names_of(layers))
    ours[f"{ENCODER}embed_tokens.weight"] = embedding
    ours["encoder.lm_head.weight"] = embedding  # tied
    empty = positions.new_zeros(POSITION_OFFSET, positions.shape[1])
    ours[f"{ENCODER}embed_positions.weight"] = torch.cat([empty, positions])
    for name in ("cls.predictions.decoder.bias", BIAS):  # two names of one tensor
        if name in theirs:
            ours["encoder.lm_head.bias"] = theirs.pop(name)[order]
    theirs.pop("bert.embeddings.position_ids", None)  # 0, 1, 2, ...
    return ours


def fairseqs_order(words: list[str]) -> list[str]:
    """Return the words of a vocab.txt in the order of fairseq's dictionary."""
    plain = [word for word in words if word not in SPECIAL]
    return [*OPENING, *plain, *CLOSING]


def load(model: BertModel, ours: State, folder: Path) -> None:
    """Load the tensors into the model.

    Heads and the pooler may be missing; they keep their initial values.
    """
    own = model.state_dict()
    may_be_fresh = ("pooler.", "encoder.lm_head.", "classification_heads.")
    fresh = sorted(name for name in own if name.startswith(may_be_fresh))
    needed = {
        name
        for name in own.keys() - set(fresh)
        if not is_of_a_part(name) and not name.endswith(".version")
    }
    missing = sorted(needed - ours.keys())
    if missing:
        raise OptionError(f"{folder}: has no tensor for {missing[0]}; {len(missing)} are missing")
    for name, tensor in ours.items():
        if tensor.shape != own[name].shape:
            shape = list(tensor.shape)
            asked = list(own[name].shape)
            raise OptionError(
                f"{folder}: the tensor for {name} has the shape {shape}, the flags ask for {asked}"
            )
    anew = [name for name in fresh if name not in ours]
    if anew:
        print(
            f"convert_bert.py: {folder} has no values for {', '.join(anew)}; they keep their "
            "initial values"
        )
    model.load_state_dict({**own, **ours})  # a plain dict has no record of the attention


def save(state: State, cfg: Any, path: Path) -> None:
    """Write a checkpoint as fairseq's trainer does before the first update."""
    checkpoint = {
        "args": None,
        "cfg": OmegaConf.to_container(cfg, resolve=True, enum_to_str=True),
        "model": state,
        "optimizer_history": [
            {
                "criterion_name": "",
                "optimizer_name": "",
                "lr_scheduler_state": {},
                "num_updates": 0,
            }
        ],
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0, "shuffle": True}},
    }
    torch.save(checkpoint, path)


def to_huggingface(
    checkpoint: Path, out: Path, dict_path: Optional[Path], vocab_path: Optional[Path]
) -> None:
    """Write what `to-huggingface` writes.

    Args:
        checkpoint: a checkpoint of fairseq
        out: the folder to write to, which is made
        dict_path: the dictionary of the model; None for dict.txt beside the checkpoint
        vocab_path: the file with the order of the words; None for vocab.txt beside the checkpoint

    Raises:
        OptionError: the file has no such model, in one line
    """
    if not checkpoint.exists():
        raise OptionError(f"{checkpoint}: no such file")
    loaded = checkpoint_utils.load_checkpoint_to_cpu(str(checkpoint))
    if loaded.get("cfg") is None or "model" not in loaded["cfg"]:
        raise OptionError(
            f"{checkpoint}: has no config of a model; must be a checkpoint that fairseq-train wrote"
        )
    state = {name: tensor.float() for name, tensor in loaded["model"].items()}
    args = check_is_bert(loaded["cfg"]["model"], state, checkpoint)
    beside = checkpoint.parent
    dict_path = dict_path or beside / "dict.txt"
    vocab_path = vocab_path or beside / "vocab.txt"
    words = theirs_order(dict_path, vocab_path, state)
    index = {word: number for number, word in enumerate(fairseqs_order(words))}
    order = torch.tensor([index[word] for word in words])  # [V], their index -> fairseq's

    theirs = take(state, {ours: name for name, ours in names_of(args.encoder_layers).items()})
    theirs[EMBEDDINGS] = state.pop(f"{ENCODER}embed_tokens.weight")[order]
    theirs[POSITIONS] = state.pop(f"{ENCODER}embed_positions.weight")[POSITION_OFFSET:]
    theirs[BIAS] = state.pop("encoder.lm_head.bias")[order]
    # the embeddings once more; a mark of fairseq
    for name in ("encoder.lm_head.weight", f"{ENCODER}version"):
        state.pop(name, None)
    left_out = {name: state[name] for name in state if ".head_mixing." not in name}
    report_left_out(checkpoint, left_out)

    out.mkdir(parents=True, exist_ok=True)
    config = config_of(args, theirs, words)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (out / "vocab.txt").write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    if (beside / "tokenizer_config.json").exists():
        shutil.copy(beside / "tokenizer_config.json", out)
    theirs = {name: tensor.contiguous() for name, tensor in theirs.items()}
    save_file(theirs, out / "model.safetensors", metadata={"format": "pt"})


def check_is_bert(model: Any, state: State, checkpoint: Path) -> Namespace:
    """Return all flags of a checkpoint's model; refuse one that `transformers` does not have."""
    arch = model_name(model)
    if arch not in ARCH_CONFIG_REGISTRY or "encoder.segment_embeddings.weight" not in state:
        raise OptionError(f"{checkpoint}: --arch {arch}, must be an architecture *_bert*")
    given = flat_copy(model)
    ARCH_CONFIG_REGISTRY[arch](given)  # a YAML file has only the values that differ
    head_dim = given.encoder_embed_dim // given.encoder_attention_heads
    valid = {
        "attention_normalizer": ["softmax"],
        "head_dim": [None, head_dim],
        **{option: ["none"] for option in PARTS if option != "head_mixing"},
        "relative_gain": [0],
        "heads_per_layer": [None],
        "encoder_normalize_before": [False],
        "untie_weights_roberta": [False],
    }
    for name, values in valid.items():
        value = getattr(given, name, values[0])
        if value not in values:
            raise OptionError(
                f"{checkpoint}: {option_name(name)} {value}, must be {values[-1]} for transformers"
            )
    variant = Variant.of_flags(given)
    sizes = variant.sizes(given.encoder_attention_heads, given.encoder_embed_dim)
    mixing = build_part(variant.part_kinds()["head_mixing"], variant, sizes)
    identity = {} if mixing is None else mixing.identity()
    for name, tensor in state.items():
        _, of_mixing, part = name.rpartition(".head_mixing.")
        if not of_mixing:
            continue
        # Where the identity names some tensors alone, the others may have any value.
        differs = part in identity and not torch.equal(tensor, identity[part])
        if differs or not identity:
            raise OptionError(
                f"{checkpoint}: --head-mixing {given.head_mixing}, but {name} is not the identity"
            )
    return given


def theirs_order(dict_path: Path, vocab_path: Path, state: State) -> list[str]:
    """Return the words in the order of vocab.txt; without that file the special ones come first."""
    if not dict_path.exists():
        raise OptionError(f"--dict {dict_path}: no such file; must be the dictionary of the model")
    dictionary = Dictionary.load(str(dict_path))
    own = [word for word in dictionary.symbols[dictionary.nspecial :] if word != SPECIAL["[MASK]"]]
    symbols = len(own) + len(SPECIAL)
    known = len(state["encoder.lm_head.bias"])
    if symbols != known:
        raise OptionError(f"--dict {dict_path}: has {symbols} symbols, the model {known}")
    if not vocab_path.exists():
        return ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *own]
    words = read_vocabulary(vocab_path)
    if [word for word in words if word not in SPECIAL] != own:
        raise OptionError(
            f"--vocab {vocab_path}: must have the words of {dict_path} in the same order"
        )
    return words


def config_of(args: Namespace, theirs: State, words: list[str]) -> dict[str, Any]:
    """Return the content of config.json.

    Args:
        args: all flags of fairseq's model
        theirs: the tensors under the names of transformers
        words: the vocabulary, in the order of vocab.txt
    """
    activation = next(name for name, flag in ACTIVATIONS.items() if flag == args.activation_fn)
    config = {
        "model_type": "bert",
        "vocab_size": len(words),
        "hidden_act": activation,
        "type_vocab_size": TOKEN_TYPES,
    }
    config |= {name: getattr(args, flag) for name, flag in SIZES.items()}
    config["max_position_embeddings"] = len(theirs[POSITIONS])
    config |= {"classifier_dropout": args.pooler_dropout, "initializer_range": 0.02}
    config["pad_token_id"] = words.index("[PAD]")
    architecture = "BertForMaskedLM"
    if "cls.seq_relationship.weight" in theirs:
        architecture = "BertForPreTraining"
    elif "classifier.weight" in theirs:
        architecture = "BertForSequenceClassification"
    if "classifier.weight" in theirs:
        labels = range(len(theirs["classifier.weight"]))
        config["id2label"] = {str(label): f"LABEL_{label}" for label in labels}
    return {"architectures": [architecture], **config}


def main(arguments: Optional[list[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    there = commands.add_parser("to-fairseq", help="further flags are those of fairseq-train")
    there.add_argument(
        "folder", type=Path, help="config.json, vocab.txt, model.safetensors or pytorch_model.bin"
    )
    there.add_argument("out", type=Path, help="folder to write to")
    there.add_argument(
        "--arch",
        default="mixhead_bert_base",
        help="config.json overrides its sizes (default: %(default)s)",
    )
    back = commands.add_parser("to-huggingface")
    back.add_argument("checkpoint", type=Path)
    back.add_argument("out", type=Path, help="folder to write to")
    back.add_argument(
        "--dict",
        type=Path,
        help="dictionary of the model (default: dict.txt beside the checkpoint)",
    )
    back.add_argument(
        "--vocab",
        type=Path,
        help="file with the order of the words (default: vocab.txt beside the checkpoint, if any)",
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
