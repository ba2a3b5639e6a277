"""Random combinations of flags, and the commands of fairseq that try them, each in a process of its own.

`python -m tests.robustness.flags FOLDER [SEED ...]` tries 100 draws for each seed in FOLDER and prints
what became of each.
"""

import json
import math
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Tuple

from bert.model import BERT_ARCHITECTURES

from mixhead_plugin.modules.head_mixing import HEAD_MIXINGS
from mixhead_plugin.modules.penalties import PENALTIES
from mixhead_plugin.modules.relative_position import RELATIVE_POSITIONS
from mixhead_plugin.modules.synthesizer import SYNTHESIZERS
from mixhead_plugin.ops import IMPLEMENTATIONS, NORMALIZERS
from mixhead_plugin.options import FAMILIES, SCOPES
from tests.commands import BERT as BERT_DIR
from tests.commands import LM_SIZES, ROBERTA_SIZES, SIZES, WHOLE_SETS
from tests.squad import write_data
from tests.xl import XL_SIZES

Flags = Dict[str, Tuple[str, ...]]  # by flag its values; none for a flag that takes no value

ON: Tuple[str, ...] = ()
PROBABILITY = ("0", "0.1", "0.5")
ODD_PROBABILITY = ("-0.1", "1.5", "nan")

# ---- what can be drawn -----------------------------------------------------------------------------------------------

ATTENTION: Flags = {
    "--attention-normalizer": tuple(NORMALIZERS),
    "--head-mixing": tuple(HEAD_MIXINGS),
    "--head-dim": ("2", "4", "5", "8", "32"),
    "--attention-scope": tuple(SCOPES),
    "--attention-impl": ("auto", *IMPLEMENTATIONS),
    "--value-init-scale": ("0.1", "0.5", "2"),
    "--mixing-lr-scale": ("0.1", "10"),
    "--relative-position": tuple(RELATIVE_POSITIONS),
    "--relative-gain": ("0", "1", "4", "100"),
    "--heads-per-layer": (
        "encoder-self=3,2",
        "encoder-self=2:1,4:3",
        "decoder-self=4,2;cross=1:2,3",
        "decoder-self=3:2,1",
        "cross=4:3,4",
    ),
}
ODD_ATTENTION: Flags = {
    "--attention-normalizer": ("Softmax", "", "l3"),
    "--head-mixing": ("b", "position_wise", ""),
    "--head-dim": ("0", "-1", "1.5", "nan", "1000000000", "eight"),
    "--attention-scope": ("encoder-self", "none", ""),
    "--attention-impl": ("cuda", "Auto"),
    "--value-init-scale": ("0", "-1", "nan", "inf", "1e38", "1e-45", "one"),
    "--mixing-lr-scale": ("0", "-2", "nan", "inf", "1e30", "ten"),
    "--relative-position": ("rope", "sinusoidal"),
    "--relative-gain": ("-1", "2.5", "1000000000", "nan"),
    "--heads-per-layer": (
        "encoder-self=0,2",
        "encoder-self=2",
        "self=2,2",
        "cross",
        "decoder-self=2:2:2,1",
        "encoder-self=4,4;encoder-self=2,2",
        "encoder-self=100000000000,1",
        ";",
    ),
}

TRAINING: Flags = {
    "--optimizer": ("adam", "nag", "adafactor", "sgd", "adagrad", "adadelta", "adamax"),
    "--lr-scheduler": ("fixed", "inverse_sqrt", "cosine", "polynomial_decay", "triangular", "tri_stage", "step"),
    "--lr": ("0.01", "1e-4", "0.01,0.001"),
    "--weight-decay": ("0", "0.1"),
    "--clip-norm": ("0", "0.1", "25"),
    "--update-freq": ("1", "2", "4", "2,3"),
    "--ddp-backend": ("c10d", "legacy_ddp", "pytorch_ddp", "no_c10d"),
    "--bf16": ON,
    "--memory-efficient-bf16": ON,
    "--sentence-avg": ON,
    "--store-ema": ON,
    "--patience": ("9",),
    "--max-tokens": ("100", "1000"),
    "--batch-size": ("2", "5"),
    "--required-batch-size-multiple": ("1", "8"),
    "--validate-interval-updates": ("1", "2"),
    "--disable-validation": ON,
    "--skip-invalid-size-inputs-valid-test": ON,
    "--no-save-optimizer-state": ON,
    "--keep-best-checkpoints": ("1",),
    "--find-unused-parameters": ON,
    "--skip-remainder-batch": ON,
    "--data-buffer-size": ("0", "1"),
    "--curriculum": ("1",),
    "--grouped-shuffling": ON,
    "--update-ordered-indices-seed": ON,
    "--max-tokens-valid": ("500",),
    "--use-bmuf": ON,
    "--seed": ("0", "7"),
}
ODD_TRAINING: Flags = {
    "--fp16": ON,
    "--memory-efficient-fp16": ON,
    "--fp16-no-flatten-grads": ON,
    "--amp": ON,
    "--optimizer": ("composite", "lamb", "adamw"),
    "--ddp-backend": ("slowmo", "fully_sharded", "ddp"),
    "--zero-sharding": ("os",),
    "--cpu-offload": ON,
    "--criterion": ("cross_entropi",),
}

LAYERS: Flags = {
    "--dropout": PROBABILITY,
    "--attention-dropout": PROBABILITY,
    "--activation-dropout": PROBABILITY,
    "--activation-fn": ("relu", "gelu", "gelu_accurate", "tanh", "linear"),
    "--layernorm-embedding": ON,
    "--quant-noise-pq": ("0.1",),
    "--quant-noise-pq-block-size": ("2", "4"),
    "--quant-noise-scalar": ("0.1",),
}
CHECKPOINTED: Flags = {"--checkpoint-activations": ON, "--offload-activations": ON}  # no flags of RoBERTa's
ODD_LAYERS: Flags = {
    "--dropout": ODD_PROBABILITY,
    "--attention-dropout": ODD_PROBABILITY,
    "--activation-dropout": ODD_PROBABILITY,
    "--quant-noise-pq": ("-1", "2"),
    "--quant-noise-pq-block-size": ("0", "7"),
}
ENCODER: Flags = {
    "--encoder-attention-heads": ("1", "2", "8"),
    "--encoder-embed-dim": ("8", "24"),
    "--encoder-ffn-embed-dim": ("8",),
    "--encoder-layers": ("1", "3"),
    "--encoder-normalize-before": ON,
    "--encoder-layerdrop": ("0.3",),
    "--encoder-layers-to-keep": ("0", "0,1"),
}
ODD_ENCODER: Flags = {
    "--encoder-attention-heads": ("3", "5", "0", "-4"),
    "--encoder-embed-dim": ("15", "0", "-16"),
    "--encoder-layers": ("0", "-1"),
    "--encoder-layerdrop": ODD_PROBABILITY,
    "--encoder-layers-to-keep": ("0,7", "a"),
}


def _decoder(flags: Flags) -> Flags:
    return {flag.replace("encoder", "decoder"): values for flag, values in flags.items()}


DECODER = {
    **_decoder(ENCODER),
    **CHECKPOINTED,
    "--decoder-learned-pos": ON,
    "--no-decoder-final-norm": ON,
    "--no-token-positional-embeddings": ON,
    "--no-scale-embedding": ON,
    "--share-decoder-input-output-embed": ON,
    "--decoder-output-dim": ("8", "16"),
}
ODD_DECODER = {**_decoder(ODD_ENCODER), "--decoder-output-dim": ("0", "-8"), "--decoder-xformers-att-config": ("{}",)}

ADAPTIVE: Flags = {
    "--adaptive-softmax-cutoff": ("5,10", "8"),
    "--adaptive-softmax-factor": ("2", "4"),
    "--adaptive-softmax-dropout": ("0.1",),
    "--tie-adaptive-weights": ON,
    "--tie-adaptive-proj": ON,
}
ODD_ADAPTIVE: Flags = {"--adaptive-softmax-cutoff": ("10,5", "0", "a", "5,100000"), "--adaptive-softmax-factor": ("0",)}

LABEL_SMOOTHING: Flags = {"--label-smoothing": ("0", "0.1"), "--ignore-prefix-size": ("0", "1")}
ODD_LABEL_SMOOTHING: Flags = {"--label-smoothing": ("-0.1", "1.5", "nan")}
PENALTY: Flags = {f"--{name}-weight": ("0", "0.001", "1") for name in PENALTIES}
ODD_PENALTY: Flags = {f"--{name}-weight": ("-1", "nan", "inf", "1e300") for name in PENALTIES}

LANGUAGE_MODEL: Flags = {
    "--tokens-per-sample": ("8", "16", "32"),
    "--sample-break-mode": ("none", "complete", "complete_doc", "eos"),
    "--add-bos-token": ON,
    "--max-target-positions": ("40",),
    "--shorten-method": ("truncate", "random_crop"),
    "--pad-to-fixed-length": ON,
    "--pad-to-fixed-bsz": ON,
}
ODD_LANGUAGE_MODEL: Flags = {
    "--tokens-per-sample": ("0", "-1", "1"),
    "--max-target-positions": ("4", "0", "-1"),
    "--future-target": ON,
    "--self-target": ON,
    "--output-dictionary-size": ("10",),
}
LM_LAYERS: Flags = {
    "--decoder-input-dim": ("8", "16"),
    "--adaptive-input": ON,
    "--adaptive-input-cutoff": ("5,10", "8"),
    "--adaptive-input-factor": ("2", "4"),
    "--character-embeddings": ON,
    "--scale-heads": ON,
    "--scale-attn": ON,
    "--scale-fc": ON,
    "--scale-resids": ON,
}
ODD_LM_LAYERS: Flags = {
    "--adaptive-input-cutoff": ("10,5", "0", "a"),
    "--adaptive-input-factor": ("0",),
    "--decoder-input-dim": ("0",),
}
MASKED: Flags = {
    "--tokens-per-sample": ("16", "32"),
    "--sample-break-mode": ("none", "complete", "complete_doc", "eos"),
    "--mask-prob": ("0.15", "0.5"),
    "--leave-unmasked-prob": ("0", "0.5"),
    "--random-token-prob": ("0", "0.4"),
    "--max-positions": ("32", "64"),
}
ODD_MASKED: Flags = {
    "--mask-prob": ("0", "1", "-1", "nan"),
    "--random-token-prob": ("-1", "0.95"),
    "--max-positions": ("0", "4"),
    "--tokens-per-sample": ("0", "-1", "2", "65"),
}
BERT_LAYERS: Flags = {
    "--pooler-dropout": PROBABILITY,
    "--untie-weights-roberta": ON,
    "--spectral-norm-classification-head": ON,
    "--mha-reg-scale-factor": ("0.1",),
    "--ffn-reg-scale-factor": ("0.1",),
    "--mha-heads-to-keep": ("2",),
    "--ffn-blocks-to-remove": ("1",),
}
ODD_BERT_LAYERS: Flags = {
    "--pooler-dropout": ODD_PROBABILITY,
    "--mha-heads-to-keep": ("0", "9"),
    "--ffn-blocks-to-remove": ("99",),
}


class Kind(NamedTuple):
    """A model with a task."""

    architectures: Tuple[str, ...]  # without their family
    data: str  # its folder
    arguments: Tuple[str, ...]
    criteria: Tuple[str, ...]
    usual: Tuple[Flags, ...]
    odd: Tuple[Flags, ...]
    evaluation: Tuple[str, ...]  # the command and its flags


PLAIN = ("cross_entropy", "label_smoothed_cross_entropy", "adaptive_loss")
PLAIN = (*PLAIN, *(f"orthogonal_{name}" for name in PLAIN))
ALL: Tuple[Flags, ...] = (ATTENTION, TRAINING)
ODD: Tuple[Flags, ...] = (ODD_ATTENTION, ODD_TRAINING)
BERT_SIZES = ("--max-positions", "64", *ROBERTA_SIZES)
SENTENCES = ("--task", "sentence_prediction", "--num-classes", "2", "--init-token", "0", "--max-positions", "64")
SENTENCE_CRITERIA = ("sentence_prediction", "orthogonal_sentence_prediction")
TEXT = ("--task", "language_modeling", "--tokens-per-sample", "16", "--sample-break-mode", "none")
VALIDATE = ("fairseq-validate",)
BERT = tuple(name for name, sizes in BERT_ARCHITECTURES.items() if sizes.encoder_layers <= 12)

KINDS = {
    "translation": Kind(
        ("transformer", "transformer_iwslt_de_en", "transformer_wmt_en_de"),
        "translation",
        ("--task", "translation", *SIZES),
        PLAIN,
        (
            *ALL,
            LAYERS,
            ENCODER,
            DECODER,
            ADAPTIVE,
            LABEL_SMOOTHING,
            PENALTY,
            {
                "--encoder-learned-pos": ON,
                "--share-all-embeddings": ON,
                "--merge-src-tgt-embed": ON,
                "--cross-self-attention": ON,
                "--no-cross-attention": ON,
                "--max-source-positions": ("20", "1024"),
                "--max-target-positions": ("20",),
                "--left-pad-source": ON,
                "--left-pad-target": ON,
                "--upsample-primary": ("2",),
                "--truncate-source": ON,
                "--eval-bleu": ON,
            },
        ),
        (
            *ODD,
            ODD_LAYERS,
            ODD_ENCODER,
            ODD_DECODER,
            ODD_ADAPTIVE,
            ODD_LABEL_SMOOTHING,
            ODD_PENALTY,
            {"--max-source-positions": ("1", "0", "-3"), "--encoder-xformers-att-config": ("{}",)},
        ),
        ("fairseq-generate", "--beam", "2", "--max-len-b", "6"),
    ),
    "language_model": Kind(
        ("transformer_lm", "transformer_lm_gpt", "transformer_lm_wiki103"),
        "text",
        (*TEXT, *LM_SIZES),
        PLAIN,
        (*ALL, LAYERS, DECODER, ADAPTIVE, LABEL_SMOOTHING, PENALTY, LANGUAGE_MODEL, LM_LAYERS),
        (
            *ODD,
            ODD_LAYERS,
            ODD_DECODER,
            ODD_ADAPTIVE,
            ODD_LABEL_SMOOTHING,
            ODD_PENALTY,
            ODD_LANGUAGE_MODEL,
            ODD_LM_LAYERS,
        ),
        ("fairseq-eval-lm", "--tokens-per-sample", "8", "--sample-break-mode", "none"),
    ),
    "synthesizer": Kind(
        ("synthesizer_lm", "synthesizer_lm_wiki103"),
        "text",
        (*TEXT, *LM_SIZES),
        PLAIN,
        (
            *ALL,
            {
                "--synthesizer": tuple(SYNTHESIZERS),
                **dict.fromkeys(("--synthesizer-rank", "--synthesizer-factor"), ("1", "2")),
            },
            LAYERS,
            DECODER,
            ADAPTIVE,
            LABEL_SMOOTHING,
            PENALTY,
            LANGUAGE_MODEL,
        ),
        (
            *ODD,
            {
                "--synthesizer": ("Dense", "dense-random"),
                "--synthesizer-rank": ("0", "-1", "1000000000"),
                "--synthesizer-factor": ("0", "99"),
            },
            ODD_LAYERS,
            ODD_DECODER,
            ODD_ADAPTIVE,
            ODD_LABEL_SMOOTHING,
            ODD_PENALTY,
            ODD_LANGUAGE_MODEL,
        ),
        ("fairseq-eval-lm", "--tokens-per-sample", "8", "--sample-break-mode", "none"),
    ),
    "transformer_xl": Kind(
        ("transformer_xl", "transformer_xl_wiki2"),
        "text",
        ("--task", "truncated_bptt_lm", "--tokens-per-sample", "8", "--batch-size", "3", *XL_SIZES, "--mem-len", "6"),
        ("cross_entropy", "adaptive_loss", "orthogonal_cross_entropy", "orthogonal_adaptive_loss"),
        (
            *ALL,
            PENALTY,
            {
                "--n-layer": ("1", "3"),
                "--n-head": ("1", "4"),
                "--d-model": ("8", "16"),
                "--d-head": ("2", "4"),
                "--d-inner": ("8",),
                "--mem-len": ("0", "3", "20"),
                "--clamp-len": ("-1", "2"),
                "--same-length": ON,
                "--div-val": ("1", "2"),
                "--dropout": PROBABILITY,
                "--dropatt": PROBABILITY,
                **CHECKPOINTED,
                "--cutoffs": ("5", "100000"),
                "--tokens-per-sample": ("4", "16"),
            },
        ),
        (
            *ODD,
            ODD_PENALTY,
            {
                "--n-layer": ("0", "-1"),
                "--n-head": ("0", "-3"),
                "--d-model": ("7", "0"),
                "--d-head": ("0", "-5"),
                "--d-inner": ("0",),
                "--mem-len": ("-1",),
                "--div-val": ("0", "100"),
                "--dropout": ODD_PROBABILITY,
                "--dropatt": ODD_PROBABILITY,
                "--cutoffs": ("0", "10,5", "a"),
                "--tokens-per-sample": ("0", "-1", "100000"),
                "--max-target-positions": ("0", "2"),
            },
        ),
        ("fairseq-eval-lm", "--batch-size", "1"),
    ),
    "masked_lm": Kind(
        ("roberta_base", "roberta_large", "bert_base"),
        "documents",
        ("--task", "masked_lm", "--tokens-per-sample", "32", *BERT_SIZES),
        ("masked_lm", "orthogonal_masked_lm"),
        (*ALL, LAYERS, ENCODER, PENALTY, MASKED, BERT_LAYERS),
        (*ODD, ODD_LAYERS, ODD_ENCODER, ODD_PENALTY, ODD_MASKED, ODD_BERT_LAYERS),
        (*VALIDATE, "--task", "masked_lm"),
    ),
    "sentence_prediction": Kind(
        ("roberta_base", "bert_base"),
        "sentences",
        (*SENTENCES, *BERT_SIZES),
        SENTENCE_CRITERIA,
        (*ALL, LAYERS, ENCODER, PENALTY, BERT_LAYERS, {"--max-positions": ("32",), "--no-shuffle": ON}),
        (*ODD, ODD_LAYERS, ODD_ENCODER, ODD_PENALTY, ODD_BERT_LAYERS, {"--max-positions": ("0", "3")}),
        (*VALIDATE, "--criterion", "sentence_prediction"),
    ),
    "bert_pretraining": Kind(
        BERT,
        "documents",
        ("--task", "bert_pretraining", "--tokens-per-sample", "24", *BERT_SIZES),
        ("bert_pretraining", "orthogonal_bert_pretraining"),
        (
            *ALL,
            LAYERS,
            ENCODER,
            PENALTY,
            BERT_LAYERS,
            {name: values for name, values in MASKED.items() if name != "--sample-break-mode"},
            {"--short-prob": ("0", "0.9"), "--lines-per-document": ("3",), "--layer-norm-eps": ("1e-5",)},
        ),
        (
            *ODD,
            ODD_LAYERS,
            ODD_ENCODER,
            ODD_PENALTY,
            ODD_MASKED,
            ODD_BERT_LAYERS,
            {"--short-prob": ("2",), "--lines-per-document": ("-1",), "--layer-norm-eps": ("0", "-1", "nan", "2")},
        ),
        VALIDATE,
    ),
    "squad": Kind(
        ("bert_base", "roberta_base"),
        "squad",
        (
            *("--task", "squad", "--max-seq-length", "48", "--doc-stride", "16", "--max-query-length", "24"),
            *BERT_SIZES,
        ),
        ("squad", "orthogonal_squad"),
        (
            *ALL,
            LAYERS,
            ENCODER,
            PENALTY,
            BERT_LAYERS,
            {"--cased": ON, "--doc-stride": ("8",), "--max-answer-length": ("1", "9"), "--n-best-size": ("3",)},
        ),
        (
            *ODD,
            ODD_LAYERS,
            ODD_ENCODER,
            ODD_PENALTY,
            ODD_BERT_LAYERS,
            {"--max-seq-length": ("10", "65", "0"), "--doc-stride": ("0", "40"), "--max-answer-length": ("0",)},
        ),
        VALIDATE,
    ),
}

# ---- drawing ---------------------------------------------------------------------------------------------------------

ALWAYS = "--cpu --num-workers 0 --log-format json --log-interval 1 --no-epoch-checkpoints --max-update 3".split()
ALWAYS += ["--user-dir", BERT_DIR, "--optimizer", "adam", "--lr", "0.01", "--max-tokens", "400"]


class Draw(NamedTuple):
    """A training and what must be possible after it."""

    name: str
    kind: str
    flags: Tuple[str, ...]  # those that were drawn, as typed

    def training(self, data: Path, save: Path) -> List[str]:
        kind = KINDS[self.kind]
        folder = str(data / kind.data)
        ddp = ["--ddp-backend", "legacy_ddp"] if any("adaptive_loss" in flag for flag in self.flags) else []
        flags = [*kind.arguments, *ALWAYS, *WHOLE_SETS, *ddp, *self.flags]
        return ["fairseq-train", folder, *flags, "--save-dir", str(save)]

    def evaluation(self, data: Path, save: Path) -> List[str]:
        kind = KINDS[self.kind]
        command, *flags = kind.evaluation
        general = ["--user-dir", BERT_DIR, "--path", str(save / "checkpoint_last.pt"), "--cpu", "--num-workers", "0"]
        general += ["--log-format", "json", *WHOLE_SETS]
        if kind.data != "text":
            general += ["--max-tokens", "400"]
        if command != "fairseq-eval-lm":
            arguments = list(kind.arguments)
            flags += arguments[arguments.index("--task") :][:2]
        if self.kind == "transformer_xl":
            flags += ["--task", "truncated_bptt_lm"]
        return [command, str(data / kind.data), *general, *flags]


def draw(seed: int, number: int) -> Draw:
    """The draw of this number; the kinds take turns."""
    rng = random.Random(f"{seed}-{number}")
    name = list(KINDS)[number % len(KINDS)]
    kind = KINDS[name]
    # the plugin's flags first: few of them would be drawn among all
    usual = [rng.choice([ATTENTION, ATTENTION, *kind.usual]) for _ in range(rng.randint(1, 7))]
    odd = [rng.choice([ODD_ATTENTION, *kind.odd]) for _ in range(rng.choice([0, 0, 0, 0, 1, 1, 2]))]
    chosen = {}
    for table in [*usual, *odd]:
        flag = rng.choice(list(table))
        chosen[flag] = f"{flag}={rng.choice(table[flag])}" if table[flag] else flag

    architectures, criteria, more = kind.architectures, kind.criteria, {}
    family, likely = rng.choice([*FAMILIES, "mixhead"]), rng.random() < 0.85
    if likely:  # what would be refused of almost every draw is brought together in most
        if criteria == PLAIN:
            adaptive = rng.random() < 0.5
            criteria = [criterion for criterion in criteria if ("adaptive" in criterion) == adaptive]
            architectures = [arch for arch in architectures if adaptive or "wiki103" not in arch]
            if adaptive:
                more |= {"--adaptive-softmax-cutoff": "5,10", "--adaptive-input-cutoff": "5,10"}
            else:
                chosen = {flag: text for flag, text in chosen.items() if flag not in ADAPTIVE}
        if "--heads-per-layer" in chosen:
            more["--head-dim"] = "4"
            if name in ("language_model", "synthesizer", "transformer_xl"):
                chosen["--heads-per-layer"] = chosen["--heads-per-layer"].replace("encoder-self", "decoder-self")
    criterion = rng.choice(criteria)
    if likely and family != "mixhead" and ("orthogonal" in criterion or "--mixing-lr-scale" in chosen):
        more["--head-mixing"] = rng.choice([mixing for mixing, entry in HEAD_MIXINGS.items() if entry.trained])
    if family == "fixhead" and "--tokens-per-sample" not in kind.arguments:
        more.setdefault("--head-dim", "6")
    if name == "translation":
        more.pop("--adaptive-input-cutoff", None)
    flags = ["--arch", f"{family}_{rng.choice(architectures)}", "--criterion", criterion]
    flags += [f"{flag}={value}" for flag, value in more.items() if flag not in chosen]
    return Draw(f"{seed}-{number}-{name}", name, (*flags, *_within_their_choice(chosen, flags)))


def _within_their_choice(chosen: Dict[str, str], flags: List[str]) -> List[str]:
    """argparse knows the flags of the chosen criterion, optimizer and scheduler alone; others are left out."""
    criterion = chosen.get("--criterion", flags[flags.index("--criterion") + 1])
    optimizer = chosen.get("--optimizer", "adam")
    needs = {
        "--label-smoothing": "label_smoothed" in criterion,
        "--ignore-prefix-size": "label_smoothed" in criterion,
        "--sentence-avg": True,
        "--weight-decay": not optimizer.endswith(("composite", "adamw")),
        **{flag: criterion.startswith("orthogonal") for flag in PENALTY},
    }
    extra = {
        "--lr-scheduler=cosine": ["--max-update", "3"],
        "--lr-scheduler=polynomial_decay": ["--total-num-update", "3"],
        "--lr-scheduler=triangular": ["--max-lr", "0.02", "--lr-period-updates", "4"],
        "--lr-scheduler=tri_stage": ["--warmup-steps", "1", "--hold-steps", "1", "--decay-steps", "1"],
    }
    kept = [text for flag, text in chosen.items() if needs.get(flag, True)]
    return [*kept, *(part for text in kept for part in extra.get(text, []))]


# ---- trying ----------------------------------------------------------------------------------------------------------

# Reads [command, arguments, folder for its output, ...] of each line, answers with its exit status. Every command runs
# in a fork of a process that has torch, fairseq and the plugin in memory already, and has used none of them.
SERVER = """
import argparse, contextlib, importlib, json, os, resource, signal, sys, traceback
for command in ("train", "generate", "eval_lm", "validate", "preprocess"):
    importlib.import_module("fairseq_cli." + command)
from fairseq import utils
utils.import_user_module(argparse.Namespace(user_dir=sys.argv[1]))
for line in sys.stdin:
    output, command, *arguments = json.loads(line)
    child = os.fork()
    if child == 0:
        signal.alarm(120)
        resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{output}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.argv = [command, *arguments]
        status = 1
        try:
            name = "fairseq_cli." + command.removeprefix("fairseq-").replace("-", "_")
            importlib.import_module(name).cli_main()
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Ran(NamedTuple):
    status: int
    out: str
    err: str


class Server:
    """Context in which commands of fairseq start at once; their output is kept in `folder`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> "Server":
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SERVER, BERT_DIR],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()

    def run(self, name: str, command: str, *arguments: object) -> Ran:
        output = self.folder / name
        self.process.stdin.write(json.dumps([str(output), command, *map(str, arguments)]) + "\n")
        self.process.stdin.flush()
        status = int(self.process.stdout.readline())
        return Ran(status, *(Path(f"{output}.{end}").read_text(errors="replace") for end in ("out", "err")))


TRAINED, REFUSED = "trained", "refused"


def verdict(drawn: Draw, server: Server, data: Path) -> str:
    """TRAINED, REFUSED, or what is wrong."""
    save = server.folder / "save" / drawn.name
    command = drawn.training(data, save)
    ran = server.run(f"{drawn.name}-train", *command)
    if ran.status == 0:
        problem = _training_problem(ran)
        if not problem:
            evaluation = drawn.evaluation(data, save)
            problem = _evaluation_problem(evaluation[0], server.run(f"{drawn.name}-evaluate", *evaluation))
        return problem or TRAINED
    return _refusal_problem(ran, save, drawn) or REFUSED


def _training_problem(ran: Ran) -> str:
    losses = [float(found) for found in re.findall(r'\| train_inner \| .*?"loss": "([^"]*)"', ran.out)]
    if len(losses) != 3:
        return f"exit status 0 after {len(losses)} of 3 updates"
    return "" if all(map(math.isfinite, losses)) else f"losses {losses}"


def _evaluation_problem(command: str, ran: Ran) -> str:
    if ran.status != 0:
        return f"{command} ends with {ran.status}: {_end(ran.err)}"
    patterns = {
        "fairseq-generate": r"^H-\d+\t(\S+)\t",
        "fairseq-eval-lm": r"Perplexity: (\S+)",
        "fairseq-validate": r'"valid_loss": "([^"]*)"',
    }
    found = [float(number) for number in re.findall(patterns[command], ran.out, re.M)]
    if not found or not all(map(math.isfinite, found)):
        return f"{command} gives {found}: {_end(ran.err)}"
    return ""


# What a refusal may name in the place of a flag that was drawn and brings this along, by the drawn one's text.
PARTNERS: Dict[str, Tuple[str, ...]] = {
    r"--arch=fixhead_": ("--head-dim",),
    r"--arch=\w+_lm_wiki103": ("--adaptive-softmax-cutoff", "--adaptive-input-cutoff"),
    r"--criterion=orthogonal_": tuple(PENALTY),  # they are not 0 where the criterion alone is given
    r"--quant-noise-pq=": ("--quant-noise-pq-block-size",),
}
# Why a value from a table of usual ones is refused all the same, beside other flags that the line then names.
REASONS = (
    r"Transformer-XL has|a synthesizer|this model|relative positions|one for each layer|the vocabulary"  # the model
    r"|needs a GPU|CUDA device|fairseq (?:cannot|has no)"  # fairseq and the machine
)


def refusal_problem(line: str, drawn: Draw) -> str:
    """What is wrong with a refusal's line: it blames no flag that was drawn, or a usual value without a reason."""
    text = re.sub(r"^fairseq-train: error: (argument |unrecognized arguments: )?", "", line)
    named = set(re.findall(r"--[a-z0-9-]+", text))
    blamed = set(re.findall(r"--[a-z0-9-]+", text.partition(": ")[0])) or named  # what is said of the data blames all
    typed = _typed(drawn)
    partners = {flag for sign, flags in PARTNERS.items() if re.search(sign, " ".join(typed.values())) for flag in flags}
    if not blamed & {*typed, *partners}:
        return f"blames no flag that was drawn: {line}"
    usual = blamed <= set(typed) and not any(_is_odd(typed[flag], drawn.kind) for flag in blamed)
    if usual and not named - blamed and not re.search(REASONS, text):
        return f"refuses a usual value without a reason: {line}"
    return ""


def _typed(drawn: Draw) -> Dict[str, str]:
    """The drawn flags by name, with their values: --arch=..., --patience=9, --bf16."""
    texts: List[str] = []
    for part in drawn.flags:
        if part.startswith("--"):
            texts.append(part)
        else:
            texts[-1] += f"={part}"
    return {text.partition("=")[0]: text for text in texts}


def _is_odd(text: str, kind: str) -> bool:
    """Whether a drawn flag, or its value, is in a table of odd ones."""
    flag, _, value = text.partition("=")
    values = {value, value.replace("decoder-self", "encoder-self")}  # `draw` may have changed it
    return any(flag in table and values & set(table[flag] or [""]) for table in KINDS[kind].odd)


def _refusal_problem(ran: Ran, save: Path, drawn: Draw) -> str:
    if ran.status < 0:
        return f"killed by signal {-ran.status}"
    if "Traceback" in ran.err + ran.out:
        return f"traceback: {_end(ran.err)}"
    lines = ran.err.splitlines()
    if lines and lines[0].startswith("usage:"):  # argparse's own, which ends in the error
        lines = lines[-1:]
    if len(lines) != 1 or not re.match(r"fairseq-train: error: \S", lines[0]):
        return f"no single line of error: {ran.err[-600:]}"
    if problem := refusal_problem(lines[0], drawn):
        return problem
    if "train_inner" in ran.out:
        return f"refused after an update: {lines[0]}"
    if save.exists() and any(save.iterdir()):
        return f"refused, but wrote to --save-dir: {lines[0]}"
    return ""


def _end(text: str) -> str:
    return " / ".join(text.strip().splitlines()[-4:])[-700:]


def typed(drawn: Draw, data: Path, save: Path) -> str:
    """The command line, to repeat it."""
    return subprocess.list2cmdline(drawn.training(data, save))


# ---- what is trained on ----------------------------------------------------------------------------------------------

SPLITS = {"train": 80, "valid": 16, "test": 16}
WORDS = [f"{letter}{number}" for letter in "abcd" for number in range(6)]


def make_data(folder: Path, server: Server) -> Path:
    """Every folder that a `Kind.data` names, of made-up text."""
    rng = random.Random(1)

    def sentences(number: int) -> List[str]:
        return [" ".join(rng.choices(WORDS, k=rng.randint(3, 9))) for _ in range(number)]

    def documents(number: int) -> List[str]:
        return [line for i, text in enumerate(sentences(number)) for line in ([text, ""] if i % 4 == 3 else [text])]

    def preprocess(name: str, files: Dict[str, Callable[[int], List[str]]], *flags: str) -> None:
        text = folder / "raw" / name
        text.mkdir(parents=True)
        for split, number in SPLITS.items():
            for suffix, lines in files.items():
                (text / f"{split}{suffix}").write_text("".join(f"{line}\n" for line in lines(number)))
        prefixes = [part for split in SPLITS for part in (f"--{split}pref", str(text / split))]
        ran = server.run("preprocess", "fairseq-preprocess", *prefixes, "--destdir", folder / name, *flags)
        assert ran.status == 0, ran.err

    both = {".de": sentences, ".en": sentences}
    preprocess("translation", both, "--source-lang", "de", "--target-lang", "en", "--joined-dictionary")
    preprocess("text", {"": sentences}, "--only-source")
    preprocess("documents", {"": documents}, "--only-source")
    words = ["--srcdict", str(folder / "documents" / "dict.txt")]
    preprocess("sentences/input0", {"": sentences}, "--only-source", *words)
    preprocess("sentences/label", {"": lambda number: rng.choices(["yes", "no"], k=number)}, "--only-source")
    write_data(folder / "squad")
    return folder


def main() -> None:
    folder, *seeds = sys.argv[1:]
    with Server(Path(folder)) as server:
        data = Path(folder) / "data"
        if not data.exists():
            make_data(data, server)
        for seed in map(int, seeds or ["0"]):
            for drawn in (draw(seed, number) for number in range(100)):
                found = verdict(drawn, server, data)
                print(f"{drawn.name}: {found}\n    {' '.join(drawn.flags)}", flush=True)


if __name__ == "__main__":
    main()
