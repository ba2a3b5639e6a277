"""Checkpoints that are no checkpoints, damaged, hostile, of other models: each command refuses them in one line."""

import ast
import gzip
import os
import pickle
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq import checkpoint_utils, models
from omegaconf import OmegaConf

from mixhead_plugin import overrides, untrusted
from mixhead_plugin.errors import OptionError
from mixhead_plugin.reporting import one_line
from mixhead_plugin.untrusted import EVALUATED, check_finite, is_arithmetic
from tests.commands import PLUGIN, SIZES, run
from tests.helpers import TINY, build
from tests.robustness.conftest import LM_TRAIN, TRAIN, TRANSLATION_TRAIN, USE
from tests.robustness.inprocess import ROOT, refusal, seen

# ---- files that are no checkpoint, or a bad one ----------------------------------------------------------------------


class Code:
    """What pickle would run."""

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


def saved(value, good, bad):
    torch.save(value, bad)


def changed(change, good, bad):
    """`good` after `change(state)`"""
    state = torch.load(good, weights_only=True)
    torch.save(change(state) or state, bad)


def with_code(site, good, bad):
    state = torch.load(good, weights_only=True)
    made = bad.with_name("made")
    if site == "evaluated":
        for name in ("adaptive_softmax_cutoff", "adaptive_input_cutoff"):
            _set(state["cfg"]["model"], name, f"__import__('os').mkdir({str(made)!r})")
    elif site == "xformers":
        _set(state["cfg"]["model"], "encoder_xformers_att_config", f"__import__('os').mkdir({str(made)!r})")
    elif site == "reference":
        values = f"decoder_attention: \"__import__('os').mkdir('{made}')\""
        state["cfg"] = OmegaConf.create({**state["cfg"], "model": f"${{oc.create:{{_name: fconv_lm, {values}}}}}"})
    elif site == "pickle":
        bad.write_bytes(pickle.dumps(Code(made)))
        return
    else:
        state[site] = Code(made)
    torch.save(state, bad)


def _set(model, name, value):
    model.__setitem__(name, value) if isinstance(model, dict) else setattr(model, name, value)


def first_weight(value, state):
    name = next(name for name, tensor in state["model"].items() if tensor.is_floating_point() and tensor.numel() > 1)
    state["model"][name].view(-1)[1] = value


def all_weights(value, state):
    for tensor in state["model"].values():
        if tensor.is_floating_point():
            tensor.fill_(value)


def buffer(value, state):
    """One that every model of translation has; no parameter, and nothing reads its value any more."""
    state["model"]["decoder.version"].fill_(value)


def without(name, state):
    del state[name]


NOT_ONE = (
    "holds other than tensors and plain values, or is not a checkpoint that fairseq-train wrote; "
    r"not loaded, as weights_only forbids it(?: \(\S+\))?"
)
DAMAGED = "is damaged, or not a checkpoint that fairseq-train wrote"
NO_MODEL = "not a checkpoint that fairseq-train wrote: no tensors of a model"
NO_CONFIG = "not a checkpoint that fairseq-train wrote: no config of a model"
EITHER = f"({NOT_ONE}|{DAMAGED})"
NAN = (
    r"has NaN or infinite values in (\d+) of \d+ tensors, the first is \S+; must be finite, take an earlier checkpoint"
)

BAD = {
    "code alone": (partial(with_code, "pickle"), NOT_ONE),
    "code beside the model": (partial(with_code, "extra"), NOT_ONE),
    "code as the model": (partial(with_code, "model"), NOT_ONE),
    "code in the config": (partial(with_code, "cfg"), NOT_ONE),
    "code to be evaluated": (partial(with_code, "evaluated"), r"its adaptive_\w+_cutoff is no list of numbers"),
    "code in a flag of attention": (partial(with_code, "xformers"), r"its encoder_xformers_att_config is no list of"),
    "code behind a reference": (partial(with_code, "reference"), "its model refers to what is to be computed"),
    "empty": (partial(cut, 0), DAMAGED),
    **{f"cut after {keep}": (partial(cut, keep), EITHER) for keep in (1, 4, 100, 0.1, 0.5, 0.9, 0.999)},
    "last byte gone": (partial(cut, -1), EITHER),
    "flipped bits": (flipped, EITHER),
    "text": (lambda good, bad: bad.write_text("epoch 1\n" * 1000), EITHER),
    "HTML": (lambda good, bad: bad.write_text("<!DOCTYPE html><title>404 Not Found</title>"), EITHER),
    "zeros": (lambda good, bad: bad.write_bytes(bytes(100_000)), EITHER),
    "compressed": (lambda good, bad: bad.write_bytes(gzip.compress(good.read_bytes())), EITHER),
    "a number": (partial(saved, 7), EITHER),
    "a list": (partial(saved, [1, 2]), EITHER),
    "a tensor": (partial(saved, torch.zeros(3)), EITHER),
    "nothing in it": (partial(saved, {}), EITHER),
    "no model": (partial(changed, partial(without, "model")), f"({NO_MODEL}|{DAMAGED})"),
    "a model of words": (partial(changed, lambda s: {**s, "model": {"weight": "heavy"}}), f"({NO_MODEL}|{DAMAGED})"),
    "a list as the model": (partial(changed, lambda s: {**s, "model": [torch.zeros(3)]}), f"({NO_MODEL}|{DAMAGED})"),
    "a config of words": (partial(changed, lambda s: {**s, "cfg": "de-en"}), NO_CONFIG),
    "a config of numbers": (partial(changed, lambda s: {**s, "cfg": [1, 2]}), f"({NO_CONFIG}|{DAMAGED})"),
    "a list as the model's flags": (
        partial(changed, lambda s: {**s, "cfg": {**s["cfg"], "model": [1]}}),
        f"({NO_CONFIG}|{DAMAGED})",
    ),
    "one NaN": (partial(changed, partial(first_weight, float("nan"))), NAN),
    "one infinity": (partial(changed, partial(first_weight, float("-inf"))), NAN),
    "NaN in a buffer": (partial(changed, partial(buffer, float("nan"))), NAN.replace(r"\S+", r"decoder\.version")),
    "all NaN": (partial(changed, partial(all_weights, float("nan"))), NAN),
}
FEW = ("code beside the model", "cut after 0.5", "HTML", "no model", "one NaN")


def translating(command, lab, bad, tmp_path):
    """The command line of a command of translation with `bad` as its checkpoint."""
    data = lab / "de-en"
    train = ["fairseq-train", data, *TRANSLATION_TRAIN, "--save-dir", tmp_path / "save"]
    return {
        "restore": [*train, "--restore-file", bad],
        "finetune": [*train, "--finetune-from-model", bad],
        "generate": ["fairseq-generate", data, *USE, "--path", bad],
        "generate ensemble": ["fairseq-generate", data, *USE, "--path", f"{lab / 'de-en.pt'}:{bad}"],
        "validate": ["fairseq-validate", data, *USE, "--task", "translation", "--path", bad],
        "interactive": ["fairseq-interactive", data, "--user-dir", PLUGIN, "--cpu", "--path", bad],
        "analysis": ["-m mixhead_plugin.analysis", "mixing", bad, "--cpu", "--output", tmp_path / "out"],
        "convert": [str(ROOT / "scripts" / "convert_bert.py"), "to-huggingface", bad, tmp_path / "out"],
    }[command]


COMMANDS = ("restore", "finetune", "generate", "generate ensemble", "validate", "interactive", "analysis", "convert")


def check_refused(kind, command, lab, tmp_path):
    make, expected = BAD[kind]
    bad = tmp_path / "bad.pt"
    make(lab / "de-en.pt", bad)
    before = sorted(tmp_path.iterdir())
    line = refusal(*translating(command, lab, bad, tmp_path), stdin=b"hund katze sieht\n")
    assert re.search(rf": error: {re.escape(str(bad))}: {expected}", line), line
    left = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {bad}, "nothing is written"
    assert not (tmp_path / "made").exists(), "code has run"
    assert bad in before


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_checkpoint_is_refused(kind, lab, tmp_path):
    make, expected = BAD[kind]
    bad = tmp_path / "bad.pt"
    make(lab / "de-en.pt", bad)
    with pytest.raises(OptionError, match=f"^{re.escape(str(bad))}: {expected}") as error:
        checkpoint_utils.load_checkpoint_to_cpu(str(bad))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "made").exists(), "code has run"


@pytest.mark.parametrize("kind, command", [(FEW[i % len(FEW)], command) for i, command in enumerate(COMMANDS)])
def test_every_command_refuses(kind, command, lab, tmp_path):
    check_refused(kind, command, lab, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", BAD)
def test_every_command_refuses_every_bad_checkpoint(kind, command, lab, tmp_path):
    check_refused(kind, command, lab, tmp_path)


def check_the_language_model_refuses(kind, command, lab, tmp_path):
    make, expected = BAD[kind]
    bad = tmp_path / "bad.pt"
    make(lab / "text.pt", bad)
    commands = {
        "eval-lm": ["fairseq-eval-lm", lab / "text", *USE, "--path", bad],
        "last": ["fairseq-train", lab / "text", *LM_TRAIN, "--save-dir", tmp_path],
        "validate": ["fairseq-validate", lab / "text", *USE, "--task", "language_modeling", "--path", bad],
        "spectrum": ["-m mixhead_plugin.analysis", "spectrum", bad, "--cpu", "--output", tmp_path / "out"],
    }
    if command == "last":
        bad = bad.rename(tmp_path / "checkpoint_last.pt")
    line = refusal(*commands[command])
    assert re.search(rf": error: {re.escape(str(bad))}: {expected}", line), line
    assert not (tmp_path / "made").exists(), "code has run"


@pytest.mark.parametrize(
    "command, kind", [("eval-lm", k) for k in FEW] + [("last", "cut after 0.5"), ("last", "one NaN")]
)
def test_a_bad_language_model_is_refused(command, kind, lab, tmp_path):
    check_the_language_model_refuses(kind, command, lab, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["eval-lm", "last", "validate", "spectrum"])
@pytest.mark.parametrize("kind", BAD)
def test_every_command_refuses_every_bad_language_model(command, kind, lab, tmp_path):
    check_the_language_model_refuses(kind, command, lab, tmp_path)


@pytest.mark.parametrize("kind", [*FEW[1:2], *(pytest.param(kind, marks=pytest.mark.slow) for kind in FEW[2:])])
def test_the_average_refuses(kind, lab, tmp_path):
    make, _ = BAD[kind]
    (tmp_path / "checkpoint1.pt").write_bytes((lab / "de-en.pt").read_bytes())
    make(lab / "de-en.pt", tmp_path / "checkpoint2.pt")
    (tmp_path / "average_last_2.pt").write_text("an earlier one")
    line = refusal("-m common.average", tmp_path, 2, path=[ROOT / "examples"])
    assert line.startswith(f"average: error: {tmp_path / 'checkpoint2.pt'}: "), line
    assert (tmp_path / "average_last_2.pt").read_text() == "an earlier one"
    assert len(list(tmp_path.iterdir())) == 3


def mostly_slow(cases, quick):
    """The cases of which only those that are `quick` belong to the default suite."""
    return [case if case in quick else pytest.param(*case, marks=pytest.mark.slow) for case in cases]


NO_FILES = [(kind, name) for kind in ("a folder", "nothing") for name in COMMANDS if name != "generate ensemble"]


@pytest.mark.parametrize(
    "kind, command",
    mostly_slow(NO_FILES, [("a folder", "restore"), ("nothing", "finetune"), ("nothing", "generate")]),
)
def test_what_is_no_file(kind, command, lab, tmp_path):
    bad = tmp_path / "bad.pt"
    if kind == "a folder":
        bad.mkdir()
    line = refusal(*translating(command, lab, bad, tmp_path), stdin=b"hund\n")
    assert str(bad) in line, line


# ---- good checkpoints of something else ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_stock_checkpoint_goes_into_the_plugin_and_back_into_a_command(lab, tmp_path):
    data, stock = lab / "de-en", ["--arch", "transformer", *SIZES, *TRAIN]
    assert seen("fairseq-train", data, *stock, "--save-dir", tmp_path / "stock").status == 0
    path = tmp_path / "stock" / "checkpoint_last.pt"
    resets = ["--reset-optimizer", "--reset-dataloader", "--reset-meters", "--reset-lr-scheduler"]
    into = ["fairseq-train", data, *TRANSLATION_TRAIN, "--save-dir", tmp_path / "own", "--restore-file", path, *resets]
    assert seen(*into).status == 0
    assert seen("fairseq-generate", data, *USE, "--path", path).status == 0


OTHERS = {
    "another size": (
        ["--encoder-embed-dim=32", "--decoder-embed-dim=32"],
        "mixhead_transformer",
        "checkpoint of another family: its .* has --encoder-embed-dim 16, this model 32",
    ),
    "another size of a layer": (
        ["--encoder-ffn-embed-dim=48"],
        "mixhead_transformer",
        r"is of another model: encoder\.layers\.0\.fc1\.weight has the shape \[24, 16\], here \[48, 16\]",
    ),
    "another layer": (["--decoder-layers=3"], "mixhead_transformer", "is of another model: Missing key"),
    "another family": ([], "l2_transformer", "checkpoint of another family"),
    "a stock model": ([], "transformer", "is of another model: Unexpected key"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_checkpoint_of_other_flags_does_not_go_on(kind, lab, tmp_path):
    flags, arch, expected = OTHERS[kind]
    command = ["fairseq-train", lab / "de-en", *TRANSLATION_TRAIN, *flags, "--arch", arch, "--save-dir", tmp_path]
    path = lab / "de-en.pt"
    line = refusal(*command, "--restore-file", path)
    assert re.search(f": error: {re.escape(str(path))}: {expected}", line), line


def test_a_checkpoint_of_another_task_does_not_go_on(lab, tmp_path):
    path = lab / "text.pt"
    line = refusal("fairseq-train", lab / "de-en", *TRANSLATION_TRAIN, "--save-dir", tmp_path, "--restore-file", path)
    assert f": error: {path}: is of another model: Missing key(s)" in line, line


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["criterion", "optimizer"])
def test_a_training_goes_on_with_its_own_criterion_and_optimizer(flag, lab, tmp_path):
    other = {"criterion": "label_smoothed_cross_entropy", "optimizer": "sgd"}[flag]
    command = ["fairseq-train", lab / "de-en", *TRANSLATION_TRAIN, "--max-update", "2", "--save-dir", tmp_path]
    path = lab / "de-en.pt"
    line = refusal(*command, "--restore-file", path, f"--{flag}", other)
    assert f": error: {path}: was trained with another --{flag} (" in line, line
    assert line.endswith("use that one, or --reset-optimizer")


def of_a_later_version(change, good, bad):
    state = torch.load(good, weights_only=True)
    change(state)
    torch.save(state, bad)


def later_option(state):
    for record in state["model"]._metadata.values():
        if "head_mixing" in record:
            record["attention_sinks"] = 4


def later_model(state):
    _set(state["cfg"]["model"], "arch", "mixhead_perceiver")
    _set(state["cfg"]["model"], "_name", "mixhead_perceiver")


def later_task(state):
    _set(state["cfg"]["task"], "_name", "telepathy")


def later_flag(state):
    _set(state["cfg"]["model"], "attention_depth", 7)
    state["cfg"]["quantum"] = {"qubits": 3}
    state["format"] = 99


LATER = {
    "an option of the attention": (
        later_option,
        "generate",
        "was trained with --attention-sinks 4, which this mixhead_plugin has not",
    ),
    "an option of the attention, going on": (
        later_option,
        "restore",
        "was trained with --attention-sinks 4, which this mixhead_plugin has not",
    ),
    "an architecture": (later_model, "generate", "its model mixhead_perceiver is not known here"),
    "a task": (later_task, "validate", "its task telepathy is not known here"),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if "," in kind else kind for kind in LATER]
)
def test_a_checkpoint_of_a_later_version(kind, lab, tmp_path):
    change, command, expected = LATER[kind]
    path = tmp_path / "bad.pt"
    of_a_later_version(change, lab / "de-en.pt", path)
    line = refusal(*translating(command, lab, path, tmp_path))
    assert str(path) in line and expected in line, line


@pytest.mark.parametrize("key", ["_name", "arch"])
@pytest.mark.parametrize(
    "read, expected",
    [
        (None, "model._name mixhead_perceiver (--arch): is not known here"),
        ("a.pt", "a.pt: its model mixhead_perceiver is"),
    ],
)
def test_a_model_that_is_not_known_is_the_users_if_no_checkpoint_was_read(read, expected, key, monkeypatch):
    """fairseq-train knows all values of --arch, fairseq-hydra-train takes any model._name."""
    monkeypatch.setattr(untrusted, "last_checkpoint", read)
    with pytest.raises(OptionError) as error:
        models.build_model(OmegaConf.create({key: "mixhead_perceiver"}), None)
    assert one_line(error.value).startswith(expected)


@pytest.mark.slow
def test_flags_of_the_training_alone_that_are_not_known_do_no_harm(lab, tmp_path):
    """What changes the attention stands in the record of its tensors, see above."""
    path = tmp_path / "later.pt"
    of_a_later_version(later_flag, lab / "de-en.pt", path)
    assert seen("fairseq-generate", lab / "de-en", *USE, "--path", path).status == 0


# ---- --model-overrides -----------------------------------------------------------------------------------------------

NO_DICTIONARY = r"must be a dictionary such as \"\{'dropout': 0\.0\}\"$"
OVERRIDES = {
    "no Python": ("{'dropout': ", NO_DICTIONARY),
    "no dictionary": ("dropout=0", NO_DICTIONARY),
    "a number": ("3", NO_DICTIONARY),
    "code": ("{'dropout': open('made', 'w')}", NO_DICTIONARY),
    "an unknown flag": ("{'dropuot': 0.1}", r"\S+ has no flag dropuot; must be one such as dropout$"),
    "no name": ("{1: 2}", r"\S+ has no flag 1$"),
    "an unknown part": ("{'parts': {'x': {'y': 1}}}", r"\S+ has no flag parts"),
    "of no part": ("{'task': {'dtaa': 'x'}}", r"the task of \S+ has no flag dtaa; must be data$"),
    "of a model": (
        "{'model': {'dropuot': 0.1}}",
        r"the model of \S+ has (its flags in no part of their own|no flag dropuot); must be",
    ),
    "another type": (
        "{'tokens_per_sample': 'x', 'left_pad_source': [1]}",
        r"(\S+ has no flag|does not fit the config)",
    ),
}


def with_overrides(command, lab, text, path=None):
    data, task = ("text", "language_modeling") if command == "fairseq-eval-lm" else ("de-en", "translation")
    flags = ["--user-dir", PLUGIN, "--cpu"] if command == "fairseq-interactive" else USE
    return [
        command,
        lab / data,
        *flags,
        "--task",
        task,
        "--path",
        path or lab / f"{data}.pt",
        "--model-overrides",
        text,
    ]


@pytest.mark.parametrize(
    "command, kind",
    mostly_slow(
        [
            (f"fairseq-{command}", kind)
            for command in ("eval-lm", "generate", "validate", "interactive")
            for kind in OVERRIDES
        ],
        [
            ("fairseq-generate", "no dictionary"),
            ("fairseq-validate", "no Python"),
            ("fairseq-eval-lm", "code"),
            ("fairseq-generate", "an unknown flag"),
            ("fairseq-eval-lm", "an unknown part"),
        ],
    ),
)
def test_bad_overrides_are_not_the_checkpoints_fault(command, kind, lab, tmp_path):
    text, expected = OVERRIDES[kind]
    line = refusal(*with_overrides(command, lab, text), stdin=b"hund\n", cwd=tmp_path)
    assert re.search(rf": error: --model-overrides {re.escape(text)}: {expected}", line), line
    assert not list(tmp_path.iterdir()), "code has run"


@pytest.mark.parametrize(
    "command",
    ["fairseq-eval-lm", *(pytest.param(f"fairseq-{c}", marks=pytest.mark.slow) for c in ("generate", "validate"))],
)
def test_good_overrides_count(command, lab):
    """head_dim 3 makes another model of it, which its weights do not fit."""
    assert seen(*with_overrides(command, lab, "{'dropout': 0.3, 'task': {}}")).status == 0
    assert "--head-dim 4, this model has 3" in refusal(*with_overrides(command, lab, "{'head_dim': 3}"))


def test_overrides_of_an_ensemble_may_be_of_one_of_its_models(lab):
    paths = [str(lab / "de-en.pt"), str(lab / "text.pt")]
    overrides.check("{'tokens_per_sample': 4}", paths)
    with pytest.raises(OptionError, match=r"de-en\.pt has no flag tokens_per_sample"):
        overrides.check("{'tokens_per_sample': 4}", paths[:1])
    with pytest.raises(OptionError, match=r"de-en\.pt, \S+text\.pt have no flag tokens_per_smaple"):
        overrides.check("{'tokens_per_smaple': 4}", paths)


def test_overrides_may_be_flags_that_came_after_the_checkpoint(lab, tmp_path):
    state = torch.load(lab / "de-en.pt", weights_only=True)
    del state["cfg"]["model"].attention_impl
    torch.save(state, tmp_path / "old.pt")
    overrides.check("{'attention_impl': 'auto'}", [str(tmp_path / "old.pt")])
    found = checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "old.pt"), {"attention_impl": "auto"})
    assert found["cfg"].model.attention_impl == "auto"
    # a config of hydra's takes what it has alone
    state["cfg"]["model"] = vars(state["cfg"]["model"])
    torch.save(state, tmp_path / "old.pt")
    with pytest.raises(OptionError, match="has no flag attention_impl"):
        overrides.check("{'attention_impl': 'auto'}", [str(tmp_path / "old.pt")])


def test_overrides_of_a_checkpoint_from_before_hydra(lab, tmp_path):
    state = torch.load(lab / "de-en.pt", weights_only=True)
    state["args"] = state.pop("cfg")["model"]
    torch.save(state, tmp_path / "old.pt")
    overrides.check("{'dropout': 0.3}", [str(tmp_path / "old.pt")])
    for text in ("{'dropuot': 0.3}", "{'model': {'dropout': 0.3}}"):
        with pytest.raises(OptionError, match=f"^--model-overrides {re.escape(text)}: "):
            overrides.check(text, [str(tmp_path / "old.pt")])


def test_overrides_of_a_program_are_told_from_a_damaged_file(lab, tmp_path):
    state = torch.load(lab / "text.pt", weights_only=True)
    state["cfg"]["task"] = dict(state["cfg"]["task"])
    torch.save(state, tmp_path / "text.pt")
    with pytest.raises(OptionError, match=r"text\.pt: its config does not take \{'task': \{'x': \{'y': 1\}\}\}"):
        checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "text.pt"), {"task": {"x": {"y": 1}}})
    (tmp_path / "text.pt").write_bytes(b"no checkpoint")
    with pytest.raises(OptionError, match="not a checkpoint that fairseq-train wrote"):
        checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "text.pt"), {"task": {}})


# ---- what is said, and of what ---------------------------------------------------------------------------------------


def test_what_was_typed_in_several_lines_is_told_in_one():
    assert one_line(OptionError("--save-dir a\nb: must be\r\none")) == "--save-dir a b: must be one"


def test_unknown_exceptions_keep_their_traceback():
    for error in (
        KeyError("mine"),
        RuntimeError("CUDA error"),
        AssertionError(),
        ValueError("loaded"),
        OSError(5, "I/O"),
        FileNotFoundError(2, "No such file or directory", "no-such-compiler"),
        raised(KeyError("mine"), during=UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")),
        raised(Exception("Cannot load model parameters from checkpoint a.pt; please"), during=AttributeError("mine")),
        raised(
            Exception("Cannot load model parameters from checkpoint a.pt; please"), during=RuntimeError("no memory")
        ),
    ):
        assert one_line(error) is None, error


def raised(error, during):
    """`error` as it comes out of an `except` without `from`."""
    error.__context__ = during
    return error


@pytest.mark.parametrize(
    "line, said",
    [
        ("open('table.csv')", "FileNotFoundError"),
        pytest.param("open('notes').read()", "UnicodeDecodeError", marks=pytest.mark.slow),
    ],
)
def test_a_program_that_imports_the_plugin_keeps_its_tracebacks(line, said, tmp_path):
    (tmp_path / "notes").write_bytes(b"\xff")
    program = [sys.executable, "-X", "utf8", "-c", f"import mixhead_plugin\n{line}", "table.csv"]
    result = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "Traceback" in result.stderr and said in result.stderr.splitlines()[-1]


def test_what_fairseq_says_in_a_process_that_torch_has_started_is_known():
    text = "\n\n-- Process 1 terminated with the following error:\nTraceback (most recent call last):\n  File ...\n"
    assert one_line(Exception(f"{text}FileNotFoundError: Dataset not found: valid (data/de-en)\n")) == (
        "data data/de-en: has no set valid; run fairseq-preprocess first"
    )
    assert one_line(Exception(f"{text}KeyError: 'mine'\n")) is None


def evaluated_by_fairseq():
    """NAME of every `eval(x.NAME)` in fairseq itself, its examples apart."""
    package = Path(checkpoint_utils.__file__).parent
    paths = [path for path in package.rglob("*.py") if path.relative_to(package).parts[0] != "examples"]
    assert len(paths) > 300
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Attribute):
                continue
            if ast.unparse(node.func).rpartition(".")[2] in EVALUATING:
                yield node.args[0].attr


EVALUATING = ("eval", "eval_str_list", "eval_bool", "eval_str_dict")


def test_all_that_fairseq_evaluates_of_a_config_is_looked_at():
    found = set(evaluated_by_fairseq())
    assert {"adaptive_softmax_cutoff", "self_attention", "adam_betas"} <= found
    assert found <= EVALUATED


def test_no_module_of_fairseq_evaluates_code(tmp_path):
    evaluate = checkpoint_utils.eval
    assert evaluate("[(512, 3)] * 2") == [(512, 3)] * 2 and evaluate("{'a': (1, True)}") == {"a": (1, True)}
    with pytest.raises(OptionError, match="must be of numbers and strings alone"):
        evaluate(f"__import__('os').mkdir({str(tmp_path / 'made')!r})")
    assert not (tmp_path / "made").exists()
    # of a process of its own: what other tests import later is not the plugin's
    program = """
import sys, mixhead_plugin
modules = [module for name, module in sys.modules.items() if name.startswith("fairseq.")]
print(len(modules), len({vars(module)["eval"] for module in modules}))
"""
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    modules, functions = map(int, printed.split()[-2:])
    assert modules > 200 and functions == 1


def test_a_refusal_in_a_process_that_torch_has_started_is_one_line():
    text = "\n\n-- Process 1 terminated with the following error:\nTraceback (most recent call last):\n  File ...\n"
    assert one_line(Exception(f"{text}mixhead_plugin.options.OptionError: --head-dim 0: must be\n")) == (
        "--head-dim 0: must be"
    )
    text = "Caught OptionError in DataLoader worker process 0.\nOriginal Traceback\n"
    assert one_line(OptionError(f"{text}mixhead_plugin.options.OptionError: a.bin: is short")) == "a.bin: is short"


@pytest.mark.parametrize("text", ["(1, 2)", "[(1, 64)] * 2 + [(2, 128)]", "-3", "1e-3", "True", "'a'", "2 * (3 + 4)"])
def test_numbers_may_be_evaluated(text):
    assert is_arithmetic(text)


@pytest.mark.parametrize(
    "text",
    [
        b"f()",
        "f()",
        "__import__('os')",
        "a",
        "(1).real",
        "[x for x in (1,)]",
        "lambda: 1",
        "9 ** 9 ** 9",
        "(" * 500,
        "",
        "\0",
    ],
)
def test_nothing_else_may_be_evaluated(text):
    assert not is_arithmetic(text)


@pytest.mark.parametrize("arch", [f"mixhead_{stock}" for stock in TINY] + ["mixhead_synthesizer_lm", "l2_transformer"])
def test_no_model_has_other_than_finite_tensors_to_save(arch):
    check_finite("new.pt", build(arch).state_dict())


class WithBuffer(torch.nn.Module):
    def __init__(self, name, value, persistent=True):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))
        self.register_buffer(name, value, persistent)


NAN_TENSOR = torch.tensor([0.0, float("nan")])


@pytest.mark.parametrize("value", [NAN_TENSOR, -1 / torch.zeros(2), NAN_TENSOR.bfloat16(), NAN_TENSOR * 1j])
def test_buffers_are_looked_at_like_parameters(value):
    """An infinite mask of another project among them: fairseq and the plugin save none."""
    with pytest.raises(OptionError, match="infinite values in 1 of 2 tensors, the first is scale; must be finite"):
        check_finite("new.pt", WithBuffer("scale", value).state_dict())


@pytest.mark.parametrize(
    "name, value, persistent",
    [
        ("_float_tensor", NAN_TENSOR, True),  # fairseq's, for its type alone
        ("scale", NAN_TENSOR, False),  # is not saved
        ("counts", torch.tensor([1, 2]), True),
    ],
)
def test_buffers_without_a_value_may_hold_anything(name, value, persistent):
    check_finite("new.pt", WithBuffer(name, value, persistent).state_dict())


def test_a_frozen_mixing_that_is_nan_is_neither_loaded_nor_saved(tmp_path):
    """`random` mixing is a buffer that the attention computes with."""
    made = build("mixhead_transformer", head_mixing="random")
    name = next(name for name, _ in made.named_buffers() if name.endswith("head_mixing.weight"))
    made.get_buffer(name).view(-1)[0] = float("nan")
    said = f"first is {re.escape(name)}"
    with pytest.raises(OptionError, match=said):
        check_finite("new.pt", made.state_dict())
    trainer = SimpleNamespace(is_fsdp=False, model=made, get_num_updates=lambda: 3)
    with pytest.raises(OptionError, match=said):
        cfg = SimpleNamespace(no_save=False, save_dir=str(tmp_path))
        checkpoint_utils.save_checkpoint(cfg, trainer, None, None)


def test_the_real_command_says_it_in_one_line(lab, tmp_path):
    """Not in a fork: as a user types it."""
    bad = tmp_path / "bad.pt"
    cut(0.5, lab / "de-en.pt", bad)
    result = run("fairseq-generate", lab / "de-en", *USE, "--path", bad, check=False)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == f"fairseq-generate: error: {bad}: {DAMAGED}"
    assert "Traceback" not in result.stderr
