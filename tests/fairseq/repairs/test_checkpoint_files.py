"""Hostile, damaged or unsuitable checkpoints.

The check refuses each, and every command calls it.
"""

import ast
import os
import pickle
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.logging.meters import AverageMeter, StopwatchMeter, TimeMeter
from omegaconf import OmegaConf

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.repairs.checkpoint_files import check_finite, check_state
from mixhead_plugin.fairseq.repairs.checkpoint_files.code_in_config import EVALUATED, is_arithmetic
from mixhead_plugin.fairseq.repairs.checkpoint_files.other_model import mismatch
from mixhead_plugin.fairseq.repairs.checksums import check_records
from mixhead_plugin.fairseq.repairs.one_training import LOCK_FILE
from tests.commands import PLUGIN, SIZES, TRAINING, refusal
from tests.helpers import run_here


class Code:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, made: Path):
        self.made = made

    def __reduce__(self):
        return os.mkdir, (str(self.made),)


def cut(keep, good, bad):
    whole = good.read_bytes()
    bad.write_bytes(whole[: int(keep * len(whole)) if isinstance(keep, float) else keep])


def flipped(good, bad):
    content = bytearray(good.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 2000] = bytes(byte ^ 0x55 for byte in content[middle : middle + 2000])
    bad.write_bytes(content)


def changed(change, good, bad):
    """Write `good` after `change(state)`."""
    state = torch.load(good, weights_only=True)
    change(state)
    torch.save(state, bad)


def with_code(site, good, bad):
    """Write `good` with code that makes the folder `made` beside it."""
    state = torch.load(good, weights_only=True)
    made = bad.with_name("made")
    call = f"__import__('os').mkdir({str(made)!r})"
    if site == "reference":
        values = f'decoder_attention: "{call}"'
        model = f"${{oc.create:{{_name: fconv_lm, {values}}}}}"
        state["cfg"] = OmegaConf.create({**state["cfg"], "model": model})
    elif site == "reference in a list of lists":
        task = {"_name": "translation", "data": [["${oc.env:HOME}"]]}
        state["cfg"]["task"] = OmegaConf.create(task)
    elif site in EVALUATED:
        setattr(state["cfg"]["model"], site, call)
    else:
        state[site] = Code(made)
    torch.save(state, bad)


def code_alone(good, bad):
    bad.write_bytes(pickle.dumps(Code(bad.with_name("made"))))


def html(good, bad):
    bad.write_bytes(b"<!DOCTYPE html><title>404 Not Found</title>")


def a_list(good, bad):
    torch.save([1, 2], bad)


# Each puts a fault into the state of a good checkpoint.


def without_model(state):
    del state["model"]


def with_model(model, state):
    state["model"] = model


def with_config(config, state):
    state["cfg"] = config


def with_flags(flags, state):
    state["cfg"]["model"] = flags


def with_weight(value, state):
    """Change one number of the first tensor that has some."""
    for tensor in state["model"].values():
        if tensor.is_floating_point() and tensor.numel() > 1:
            tensor.view(-1)[1] = value
            return


# What writes a file `bad` from a checkpoint `good`.
BAD = {
    "code alone": code_alone,
    "code beside the model": partial(with_code, "extra"),
    "code as the model": partial(with_code, "model"),
    "code in the config": partial(with_code, "cfg"),
    "code to evaluate": partial(with_code, "adaptive_softmax_cutoff"),
    "code behind a reference": partial(with_code, "reference"),
    "a reference in a list of lists": partial(with_code, "reference in a list of lists"),
    **{f"cut to {keep}": partial(cut, keep) for keep in (0, 1, 4, 100, 0.1, 0.5, 0.9, 0.999, -1)},
    "flipped bits": flipped,
    "HTML": html,
    "a list": a_list,
    "no model": partial(changed, without_model),
    "a model of words": partial(changed, partial(with_model, {"weight": "heavy"})),
    "a list as the model": partial(changed, partial(with_model, [torch.zeros(3)])),
    "a config of words": partial(changed, partial(with_config, "de-en")),
    "a list as the model's flags": partial(changed, partial(with_flags, [1])),
    "one NaN": partial(changed, partial(with_weight, float("nan"))),
}


@pytest.mark.parametrize("kind", BAD)
def test_the_check_refuses(kind, translation_checkpoint, tmp_path):
    bad = tmp_path / "bad.pt"
    BAD[kind](translation_checkpoint, bad)
    with pytest.raises(OptionError, match=f"^{re.escape(str(bad))}: .*$") as error:
        checkpoint_utils.load_checkpoint_to_cpu(str(bad))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "made").exists(), "code has run"


def test_the_check_refuses_code_in_every_value_that_fairseq_evaluates():
    for name in EVALUATED:
        state = {
            "model": {"weight": torch.zeros(2)},
            "cfg": {"model": {name: "__import__('os').mkdir('made')"}},
        }
        with pytest.raises(
            OptionError, match=f"^bad.pt: its {name} is no list of numbers; not loaded"
        ):
            check_state("bad.pt", state)


@pytest.mark.parametrize(
    "text", ["${oc.env:SECRET}", "${ oc.env:SECRET}", "${${r}:SECRET}", "${oc.${y}:SECRET}"]
)
def test_the_check_refuses_functions_of_omegaconf(text):
    state = {
        "model": {"weight": torch.zeros(2)},
        "cfg": {"model": {"data": text, "task": "${task.data}"}},
    }
    with pytest.raises(OptionError, match=r"^bad.pt: its data refers to a function; not loaded"):
        check_state("bad.pt", state)


def test_a_good_checkpoint_and_one_with_arithmetic_load(translation_checkpoint, tmp_path):
    def with_arithmetic(state):
        state["cfg"]["model"].decoder_layers = "[(512, 3)] * 2"

    changed(with_arithmetic, translation_checkpoint, tmp_path / "x")
    for path in (translation_checkpoint, tmp_path / "x"):
        state = checkpoint_utils.load_checkpoint_to_cpu(str(path), {"dropout": 0.3})
        assert state["cfg"].model.dropout == 0.3


def test_a_missing_file_is_not_called_damaged(tmp_path):
    path = str(tmp_path / "none.pt")
    with pytest.raises(FileNotFoundError):
        checkpoint_utils.load_checkpoint_to_cpu(path)
    with pytest.raises(FileNotFoundError) as error:
        checkpoint_utils.load_model_ensemble([path])
    assert str(error.value) == f"{path}: no such file; must be a checkpoint"


@pytest.mark.parametrize("meter", [AverageMeter, StopwatchMeter, TimeMeter])
def test_the_meters_of_fairseq_0_9_load(meter, translation_checkpoint, tmp_path, monkeypatch):
    """Its checkpoints hold them, pickled under the module's former name.

    fairseq itself no longer reads them.
    """
    monkeypatch.setattr(meter, "__module__", "fairseq.meters")
    counted = meter()
    counted.__dict__["count"] = 7
    state = torch.load(translation_checkpoint, weights_only=True)
    state["extra_state"]["train_meters"] = {"train_loss": counted}
    torch.save(state, tmp_path / "old.pt")
    loaded = checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "old.pt"))
    assert loaded["extra_state"]["train_meters"]["train_loss"].count == 7


def differences(*lines):
    """Return torch's list of the tensors that do not fit a model."""
    sizes = "size mismatch for {}: copying a param with shape torch.Size({}) from checkpoint, "
    sizes += "the shape in current model is torch.Size({})."
    listed = [line if isinstance(line, str) else sizes.format(*line) for line in lines]
    return "\n\t".join(["Error(s) in loading state_dict for TransformerModel:", *listed])


WIDER = ("encoder.layers.0.fc1.weight", [24, 16], [40, 16])
MODEL = "is of another model; --arch and sizes must be the same: "


@pytest.mark.parametrize(
    "lines, expected",
    [
        (
            [WIDER, ("encoder.embed_tokens.weight", [29, 16], [31, 16])],
            "its dictionary is another one: the dictionary has 31 symbols, the checkpoint's 29 "
            "(encoder.embed_tokens.weight); must be the data folder that it was trained with",
        ),
        (
            [("encoder.lm_head.bias", [29], [31])],
            "its dictionary is another one: the dictionary has 31 symbols, the checkpoint's 29 "
            "(encoder.lm_head.bias); must be the data folder that it was trained with",
        ),
        (
            [("encoder.embed_tokens.weight", [29, 16], [31, 8])],
            f"{MODEL}size mismatch for encoder.embed_tokens.weight",
        ),
        (
            [WIDER],
            f"{MODEL}size mismatch for encoder.layers.0.fc1.weight: copying a param with shape",
        ),
        (
            ['Missing key(s) in state_dict: "a", "b".'],
            f'{MODEL}Missing key(s) in state_dict: "a", "b".',
        ),
        (["CUDA out of memory"], ""),
    ],
    ids=["dictionary", "roberta's", "dictionary and width", "width", "missing", "something else"],
)
def test_tensors_that_do_not_fit_say_what_is_another(lines, expected):
    found = mismatch(differences(*lines))
    assert found.startswith(expected) and bool(found) == bool(expected)


USE = ["--user-dir", PLUGIN, "--cpu"]
# Commands that read a checkpoint, and the bad file that each gets.
COMMANDS = {
    "restore": "code beside the model",
    "restore as last": "one NaN",
    "finetune": "cut to 0.5",
    "generate": "code to evaluate",
    "generate with overrides": "code behind a reference",
    "validate": "no model",
    "interactive": "HTML",
    "eval-lm": "code beside the model",
}


def command_line(command, data, bad):
    training = [
        "fairseq-train",
        data,
        "--arch=mixhead_transformer",
        *SIZES,
        *TRAINING,
        *USE,
        "--max-update=2",
    ]
    training += ["--save-dir", bad.parent]
    return {
        "restore": [*training, "--restore-file", bad],
        "restore as last": training,
        "finetune": [*training, "--finetune-from-model", bad],
        "generate": ["fairseq-generate", data, *USE, "--path", bad],
        "generate with overrides": [
            "fairseq-generate",
            data,
            *USE,
            f"--path={bad}",
            "--model-overrides",
            {"dropout": 0},
        ],
        "validate": [
            "fairseq-validate",
            data,
            *USE,
            "--task=translation",
            f"--path={bad}",
            "--max-tokens=400",
        ],
        "interactive": ["fairseq-interactive", data, *USE, "--path", bad],
        "eval-lm": ["fairseq-eval-lm", data, *USE, "--path", bad],
    }[command]


SLOW = ("restore as last", "generate with overrides")


@pytest.mark.parametrize(
    "command",
    [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in COMMANDS],
)
def test_every_command_calls_the_check(
    command, translation_data, text_data, translation_checkpoint, tmp_path
):
    data = text_data if command == "eval-lm" else translation_data
    bad = tmp_path / ("checkpoint_last.pt" if command == "restore as last" else "bad.pt")
    BAD[COMMANDS[command]](translation_checkpoint, bad)
    line = refusal(*command_line(command, data, bad), stdin="hund katze sieht\n")
    assert f": error: {bad}: " in line, line
    assert {path.name for path in tmp_path.iterdir()} <= {bad.name, LOCK_FILE}, (
        "code has run, or something is written"
    )


@pytest.mark.slow
def test_a_checkpoint_of_a_later_version_is_refused_if_its_attention_is_not_known(
    translation_data, translation_checkpoint, tmp_path
):
    def later(state):
        for record in state["model"]._metadata.values():
            if "head_mixing" in record:
                record["attention_sinks"] = 4

    changed(later, translation_checkpoint, tmp_path / "later.pt")
    with pytest.raises(OptionError, match="--attention-sinks 4"):
        run_here("fairseq-generate", translation_data, *USE, "--path", tmp_path / "later.pt")


EVALUATING = ("eval", "eval_str_list", "eval_bool", "eval_str_dict")
# Arguments of fairseq's helpers, and lines of a speech manifest: no checkpoint holds them.
NO_OPTION = {"x", "uf"}


def evaluated_by_fairseq():
    """Yield NAME of every `eval(NAME)` and `eval(x.NAME)` in fairseq itself.

    Its examples are left out.
    """
    package = Path(checkpoint_utils.__file__).parent
    paths = [
        path for path in package.rglob("*.py") if path.relative_to(package).parts[0] != "examples"
    ]
    assert len(paths) > 300
    for text in filter(re.compile(r"\beval").search, (path.read_text() for path in paths)):
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.Call)
                and node.args
                and ast.unparse(node.func).rpartition(".")[2] in EVALUATING
            ):
                argument = node.args[0]
                name = (
                    argument.attr
                    if isinstance(argument, ast.Attribute)
                    else getattr(argument, "id", None)
                )
                if ast.unparse(node.func) != "editdistance.eval" and not ast.unparse(
                    node.func
                ).endswith("ed.eval"):
                    yield name


def test_every_name_that_fairseq_evaluates_is_checked():
    found = {name for name in evaluated_by_fairseq() if name is not None}
    assert {"adaptive_softmax_cutoff", "self_attention", "adam_betas"} <= found
    assert found - NO_OPTION <= EVALUATED


NUMBERS = ["(1, 2)", "[(1, 64)] * 2 + [(2, 128)]", "-3", "1e-3", "True", "'a'", "2 * (3 + 4)"]
CODE = [
    b"f()",
    "f()",
    "__import__('os')",
    "a",
    "(1).real",
    "[x for x in (1,)]",
    "lambda: 1",
    "9 ** 9 ** 9",
]


def test_numbers_and_strings_alone_may_be_evaluated():
    assert [text for text in NUMBERS if not is_arithmetic(text)] == []
    assert [text for text in [*CODE, "(" * 500, "", "\0"] if is_arithmetic(text)] == []


NAN_TENSOR = torch.tensor([0.0, float("nan")])


def with_buffer(name, value, persistent=True):
    module = torch.nn.Linear(1, 1)
    module.register_buffer(name, value, persistent)
    return module.state_dict()


@pytest.mark.parametrize(
    "value", [NAN_TENSOR, -1 / torch.zeros(2), NAN_TENSOR.bfloat16(), NAN_TENSOR * 1j]
)
def test_buffers_are_checked_like_parameters(value):
    with pytest.raises(
        OptionError, match="infinite values in 1 of 3 tensors, the first is scale; must be finite"
    ):
        check_finite("new.pt", with_buffer("scale", value))


@pytest.mark.parametrize(
    "name, value, persistent",
    [
        ("_float_tensor", NAN_TENSOR, True),  # fairseq reads its type alone
        ("conv_bias", NAN_TENSOR, True),  # unset where it is not used
        ("scale", NAN_TENSOR, False),  # it is not saved
        ("counts", torch.tensor([1, 2]), True),
    ],
)
def test_buffers_without_a_value_may_hold_anything(name, value, persistent):
    check_finite("new.pt", with_buffer(name, value, persistent))


# ---- bit rot -----------------------------------------------------------------------------------

HISTORY = {"optimizer_name": "FairseqAdam", "lr_scheduler_state": {}, "num_updates": 1}
SMALL = {
    "model": {"weight": torch.arange(600.0), "bias": torch.ones(3)},
    "cfg": {"model": {}, "task": {}},
    "args": None,
    "optimizer_history": [HISTORY],
    "last_optimizer_state": {},
    "extra_state": {"train_iterator": {"epoch": 1}},
}


def test_a_changed_byte_is_refused_or_changes_nothing(tmp_path):
    """Change bytes all over a file: in tensors, in the pickle, in names, in padding."""
    path = tmp_path / "a.pt"
    names = set()
    loaded = 0
    torch.save(SMALL, path)
    good = path.read_bytes()
    for at in range(0, len(good), 23):
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :])
        try:
            model = checkpoint_utils.load_checkpoint_to_cpu(str(path))["model"]
        except OptionError as error:
            assert str(error).startswith(f"{path}: ") and "\n" not in str(error)
            names.update(re.findall(r"its record (\S+) has changed", str(error)))
        else:
            assert all(torch.equal(model[name], tensor) for name, tensor in SMALL["model"].items())
            loaded += 1
    assert {"a/data/0", "a/data.pkl"} <= names and loaded > 0


def test_without_the_repair_a_changed_byte_is_another_weight(tmp_path):
    path = tmp_path / "a.pt"
    torch.save(SMALL, path)
    content = path.read_bytes()
    at = content.index(torch.arange(600.0).numpy().tobytes()) + 401
    path.write_bytes(content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :])
    assert not torch.equal(
        torch.load(path, weights_only=True)["model"]["weight"], SMALL["model"]["weight"]
    )
    with pytest.raises(OptionError, match="its record a/data/0 has changed"):
        check_records(path)


@pytest.mark.parametrize("kind", ["older torch", "switched off"])
def test_a_checkpoint_without_checksums_loads(kind, tmp_path):
    path = tmp_path / "old.pt"
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(kind != "switched off")
    try:
        torch.save(SMALL, path, _use_new_zipfile_serialization=kind != "older torch")
    finally:
        torch.serialization.set_crc32_options(before)
    assert checkpoint_utils.load_checkpoint_to_cpu(str(path))["model"]["bias"].sum() == 3
