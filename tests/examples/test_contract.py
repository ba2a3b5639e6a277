"""Every recipe keeps one contract: the variables of examples/README.md.

Something that cannot be gives one line.
"""

import os
import re
from typing import NamedTuple

import pytest
import synthetic
import torch
from nearest_neighbour.run import TASK as NEAREST_NEIGHBOUR
from recall.run import TASK as RECALL
from recipes import EXAMPLES, dry_run, parse, script
from synthetic import Setting

pytestmark = pytest.mark.usefixtures("plain_environment")


class Recipe(NamedTuple):
    """What the messages of a recipe depend on."""

    # the folder that its scripts need inside DATA; None for a recipe that draws its data
    data: str | None
    prepared: str  # files in DATA without which evaluate.sh stops before it looks for a checkpoint
    without_model: str  # how the line of evaluate.sh begins if SAVE=/nowhere has no model


BEST = "SAVE=/nowhere: has no checkpoint_best.pt; give "
RECIPES = {
    "wikitext2": Recipe("lines", "lines/test.idx", BEST),
    "wikitext103": Recipe("lines", "lines/test.idx", BEST),
    "lm1b": Recipe("word", "word/test.idx", BEST),
    "iwslt14_de_en": Recipe("bpe", "bpe/reference/test.raw.en", BEST),
    "multi30k_de_en": Recipe("binary", "binary/reference/test.raw.en", BEST),
    "bert/glue": Recipe("bert/RTE", "bert/RTE/x", BEST),
    "bert/pretraining": Recipe(
        "binary", "binary/x", "SAVE=/nowhere: has no 128/checkpoint_last.pt; give "
    ),
    "bert/squad": Recipe("text", "text/x", BEST),
    "recall": Recipe(None, "x", "/nowhere/model.pt: no such file; train.sh writes it into SAVE"),
    "nearest_neighbour": Recipe(
        None, "x", "/nowhere/model.pt: no such file; train.sh writes it into SAVE"
    ),
}


BOTH = ("train", "evaluate")
# Of the variables that only some recipes have: words of shell with a wrong value, the scripts that
# refuse it, and how their error begins. {data} is DATA. A dry run says nothing of this machine.
OWN = {
    "wikitext2": [
        ("BREAKS=words", BOTH, "{data}/words: no such folder; examples/wikitext2/prepare.sh makes"),
        ("DRY_RUN=1 MODEL=gpt", BOTH, "MODEL=gpt: must be vanilla, transformer-xl or masked"),
    ],
    "wikitext103": [
        (
            "BREAKS=words",
            BOTH,
            "{data}/words: no such folder; examples/wikitext103/prepare.sh makes",
        ),
        (
            "DRY_RUN=1 MODEL=gpt",
            BOTH,
            "MODEL=gpt: must be one of baevski, vanilla, transformer-xl, synthesizer",
        ),
    ],
    "lm1b": [("MODEL=gpt", BOTH, "MODEL=gpt: must be one of baevski, transformer-xl, fixhead")],
    "iwslt14_de_en": [
        ("VARIANT=words", BOTH, "VARIANT=words: must be bpe, bpe-joined or sentencepiece, "),
        ("DRY_RUN=1 SELECT=ter", ["train"], "SELECT=ter: must be bleu or loss, the metric that "),
    ],
    "bert/glue": [
        ("VARIANT=SNLI", BOTH, "VARIANT=SNLI: must be CoLA, SST-2, MRPC, STS-B, QQP, "),
        ("MODEL=gpt", BOTH, "MODEL=gpt: must be bert or roberta"),
    ],
    "bert/pretraining": [("VARIANT=256", BOTH, "VARIANT=256: must be 128 or 512")],
    "bert/squad": [
        ("METRIC=BLEU", ["evaluate"], "METRIC=BLEU: must be F1 or EM, the number of the last line")
    ],
}


def test_the_table_has_every_recipe():
    folders = {str(path.parent.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("train.sh")}
    assert set(RECIPES) == folders


def contract(name, recipe, folder):
    """Return for each line of shell the one line of its error.

    `folder` is DATA with what the recipe needs.
    """
    train = f"DATA={folder} examples/{name}/train.sh"
    evaluate = f"DATA={folder} examples/{name}/evaluate.sh"
    sees = torch.cuda.device_count()
    lines = {}
    if recipe.data is None:
        # These look for CHECKPOINT when they have imported torch, so below a test tries it in this
        # process.
        own = f"examples/{name}"
        lines[f"DATA=/nowhere {own}/train.sh"] = (
            f"train: error: DATA=/nowhere: must be left out, {own} draws its data"
        )
        lines[f"AVERAGE=3 {own}/evaluate.sh"] = (
            f"evaluate: error: AVERAGE=3: must be left out, {own} saves one model"
        )
        wrong = f"must be fp32 or left out, {own} runs on the CPU alone"
        train = f"{own}/train.sh"
        evaluate = f"{own}/evaluate.sh"
    else:
        needed = f"/nowhere/{recipe.data}: no such folder; examples/{name}/prepare.sh"
        for step in ("train", "evaluate"):
            if (name, step) != ("lm1b", "evaluate"):  # whose text depends on the checkpoint
                lines[f"DATA=/nowhere examples/{name}/{step}.sh"] = f"{step}: error: {needed}"
        missing = "prepare: error: ARCHIVES=/nowhere: no such folder"
        lines[f"ARCHIVES=/nowhere examples/{name}/prepare.sh"] = missing
        wrong = "must be one of fp16, bf16, amp, fp32"
        lines[f"AVERAGE=3 CHECKPOINT=/x.pt {evaluate}"] = (
            "evaluate: error: AVERAGE=3: must be left out with CHECKPOINT=/x.pt, which is one file"
        )
        lines[f"CHECKPOINT=/nowhere/x.pt {evaluate}"] = (
            "evaluate: error: CHECKPOINT=/nowhere/x.pt: no such file"
        )
        lines[f"DRY_RUN=1 PRECISION=fp8 {evaluate}"] = f"evaluate: error: PRECISION=fp8: {wrong}"
    for step, line in (("train", train), ("evaluate", evaluate)):
        lines[f"GPUS=two {line}"] = f"{step}: error: GPUS=two: must be a number such as 0, 1 or 8"
        lines[f"GPUS=1000 {line}"] = f"{step}: error: GPUS=1000: torch sees {sees} on this machine"
    lines[f"PRECISION=fp8 {train}"] = f"train: error: PRECISION=fp8: {wrong}"
    lines[f"SAVE=/nowhere {evaluate}"] = f"evaluate: error: {recipe.without_model}"
    for words, steps, said in OWN.get(name, []):
        for step in steps:
            line = f"{words} DATA={folder} examples/{name}/{step}.sh"
            lines[line] = f"{step}: error: {said.format(data=folder)}"
    return lines


def test_every_variable_of_the_page_is_tried():
    page = (EXAMPLES / "README.md").read_text()
    variables = set(re.findall(r"^\| `([A-Z_]+)` \|", page, re.M))
    tried = set()
    for name, recipe in RECIPES.items():
        for line in contract(name, recipe, "data"):
            tried.update(re.findall(r"([A-Z_]+)=", line))
    # They have no value that is wrong before anything is done. What they do is tried in
    # test_archives.py and in bert/test_pretraining_recipe.py.
    assert variables - tried == {"MIRROR", "EARLY"}


# The recipes of a kind share this code, so the default suite tries one of each: one that trains by
# fairseq, and one that draws its data.
SEVERAL = [
    name if name in ("wikitext2", "recall") else pytest.param(name, marks=pytest.mark.slow)
    for name in RECIPES
]


@pytest.mark.parametrize("name", SEVERAL)
def test_a_variable_with_a_wrong_value_is_refused_in_one_line(name, tmp_path):
    recipe = RECIPES[name]
    (tmp_path / recipe.prepared).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / recipe.prepared).touch()
    for line, expected in contract(name, recipe, tmp_path).items():
        result = script(line, check=False)
        assert result.returncode == 1, line
        assert result.stdout == "", line
        (said,) = result.stderr.splitlines()
        assert said.startswith(expected), line


@pytest.mark.parametrize("name", RECIPES)
def test_a_wrong_flag_is_named_in_the_last_line(name, capsys):
    tasks = {"recall": RECALL, "nearest_neighbour": NEAREST_NEIGHBOUR}
    with pytest.raises(SystemExit):
        if name in tasks:
            synthetic.main(tasks[name], ["train", "--zzz"])
        else:
            (command,) = dry_run(f"examples/{name}/train.sh --zzz")
            parse(command)
    assert capsys.readouterr().err.splitlines()[-1].endswith("error: unrecognized arguments: --zzz")


# ---- recall and nearest neighbour, which have no fairseq to refuse for them --------------------

WRONG = {
    "--lr nan": "--lr nan: must be greater than 0, and at most 1000",
    "--lr inf": "--lr inf: must be greater than 0, and at most 1000",
    "--lr 0": "--lr 0.0: must be greater than 0, and at most 1000",
    "--mixing-lr-scale nan": "--mixing-lr-scale nan: must be from 0 to 1000",
    "--steps 0": "--steps 0: must be at least 1",
    "--steps -1": "--steps -1: must be at least 1",
    "--seed -1": "--seed -1: must be from 0 to 4294967295",
    "--warmup-steps -1": "--warmup-steps -1: must be at least 0",
    "--decay-steps -1": "--decay-steps -1: must be at least 0",
    "--valid-interval 0": "--valid-interval 0: must be at least 1",
    "--valid-interval 1 --stop-at nan": "--stop-at nan: must be a finite number",
    "--stop-at 0.1": "--stop-at 0.1: needs --valid-interval",
    "--steps 2 --valid-interval 3 --stop-at 0.1": (
        "--stop-at 0.1: needs a validation, but --valid-interval 3 is more than --steps 2"
    ),
}
OF_A_TASK = {
    RECALL: {},
    NEAREST_NEIGHBOUR: {
        "--width 0": "--width 0: must be at least 1",
        "--width 7": "--head-size 8: must divide --width 7",
    },
}
for size in (0, -1, 7, 128):
    flag = f"--head-size {size}"
    OF_A_TASK[RECALL][flag] = f"{flag}: must divide 64, the width of the model"
    OF_A_TASK[NEAREST_NEIGHBOUR][flag] = f"{flag}: must divide --width 16"
for length in (0, 3, 300):
    flag = f"--length {length}"
    why = "must be from 4 to 256, a fourth of it are keys, and no key comes twice"
    OF_A_TASK[RECALL][flag] = f"{flag}: {why}"


@pytest.mark.parametrize(
    "task, flags, said",
    [
        (task, flags, said)
        for task, own in OF_A_TASK.items()
        for flags, said in {**WRONG, **own}.items()
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_number_that_cannot_be_meant_is_refused_in_one_line(
    task, flags, said, tmp_path, monkeypatch
):
    monkeypatch.setenv("SAVE", str(tmp_path / "save"))
    with pytest.raises(SystemExit) as refused:
        synthetic.main(task, ["train", *flags.split()])
    assert refused.value.code == f"train: error: {said}"
    assert not (tmp_path / "save").exists()


def saved(folder, **changes):
    """Save a model of one step, with changes, as train.sh would; return the file."""
    setting = Setting("B", 8, 16, 0.01, 1.0, 1, 1)
    model = synthetic.train(NEAREST_NEIGHBOUR, setting)
    content = {"setting": {**setting._asdict(), **changes}, "model": model.state_dict()}
    torch.save(content, folder / "model.pt")
    return folder / "model.pt"


def evaluated(capsys, *words):
    """Return the message with which an evaluation ends, or what it prints."""
    capsys.readouterr()
    try:
        synthetic.main(NEAREST_NEIGHBOUR, ["evaluate", *words])
    except SystemExit as refused:
        assert capsys.readouterr().out == ""
        return refused.code
    return capsys.readouterr().out


def test_checkpoint_is_the_model_that_is_evaluated(tmp_path, monkeypatch, capsys):
    file = saved(tmp_path)
    monkeypatch.setenv("SAVE", str(tmp_path))
    printed = evaluated(capsys)
    monkeypatch.setenv("SAVE", "/nowhere")
    monkeypatch.setenv("CHECKPOINT", str(file))
    assert evaluated(capsys) == printed
    assert re.fullmatch(r"mean squared error = \d+\.\d{6}\n", printed)


def test_a_checkpoint_that_is_not_there_is_refused_in_one_line(monkeypatch, capsys):
    monkeypatch.setenv("CHECKPOINT", "/nowhere/x.pt")
    assert evaluated(capsys) == "evaluate: error: CHECKPOINT=/nowhere/x.pt: no such file"


def test_a_file_that_is_no_model_of_the_recipe_is_refused_in_one_line(
    tmp_path, monkeypatch, capsys
):
    file = saved(tmp_path)
    monkeypatch.setenv("CHECKPOINT", str(file))
    message = (
        f"evaluate: error: {file}: is no model of examples/nearest_neighbour/train.sh, or it is "
        "damaged"
    )
    whole = torch.load(file)
    for content in (
        {"model": whole["model"]},
        {"setting": {"attention": "B"}, "model": whole["model"]},
        {**whole, "setting": {**whole["setting"], "attention": "none of them"}},
        {**whole, "setting": {**whole["setting"], "head_size": 4}},
        {**whole, "setting": {**whole["setting"], "size": "16"}},
        {**whole, "model": {}},
        [],
        torch.zeros(3),
    ):
        torch.save(content, file)
        assert evaluated(capsys) == message
    for bytes_ in (b"", b"no model", b"PK" + os.urandom(1000)):
        file.write_bytes(bytes_)
        assert evaluated(capsys) == message


def test_numbers_that_are_not_finite_fail_an_evaluation(tmp_path, monkeypatch, capsys):
    file = saved(tmp_path)
    monkeypatch.setenv("CHECKPOINT", str(file))
    whole = torch.load(file)
    whole["model"]["attention.q_proj.weight"][0, 0] = float("nan")
    torch.save(whole, file)
    assert (
        evaluated(capsys)
        == "evaluate: error: the mean squared error is nan, which is no finite number"
    )


def nan_loss(model, batch):
    return {"loss": model(*batch[:2]).sum() * float("nan")}


def nan_gradient(model, batch):
    zero = model(*batch[:2]).sum() * 0
    return {"loss": zero.sqrt()}


@pytest.mark.parametrize(
    "measure, said",
    [
        (nan_loss, "train: error: the loss of step 1 is nan; try a lower --lr"),
        (
            nan_gradient,
            "train: error: a parameter is no finite number after the last step; try a lower --lr",
        ),
    ],
)
def test_numbers_that_are_not_finite_fail_a_training(measure, said, tmp_path, monkeypatch):
    monkeypatch.setenv("SAVE", str(tmp_path))
    with pytest.raises(SystemExit) as refused:
        synthetic.main(NEAREST_NEIGHBOUR._replace(measure=measure), ["train", "--steps", "1"])
    assert refused.value.code == said
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_to_is_refused_before_the_training(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SAVE", str(tmp_path / "file" / "save"))
    monkeypatch.setattr(synthetic, "train", lambda *_: 1 / 0)
    with pytest.raises(SystemExit) as refused:
        synthetic.main(NEAREST_NEIGHBOUR, ["train"])
    assert (
        refused.value.code
        == f"train: error: SAVE={tmp_path}/file/save: cannot be written to (Not a directory)"
    )
