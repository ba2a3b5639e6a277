"""The GLUE recipe works on small archives of the same layout."""

import json
import os
import random
import re
import shlex
import zipfile
from pathlib import Path

import numpy
import pytest
import torch
from bert.convert_bert import save
from bert.glue import evaluate, prepare
from bert.glue.metrics import measure
from bert.glue.pieces import Encoder
from bert.glue.rows import read_table
from bert.glue.tasks import TASKS
from bert.pretrained import FILES
from fairseq.data import Dictionary
from fairseq.data.encoders.gpt2_bpe_utils import bytes_to_unicode, get_encoder
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import build_model
from fairseq.tasks.sentence_prediction import SentencePredictionConfig, SentencePredictionTask
from recipes import dry_run, parse, refused_here, script

WORDS = "the cat dog sat ran on under mat tree . , good bad yes no".split()
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, "##s", "##t", "c", "##a"]
SPLITS = {
    "train": 40,
    "dev": 9,
    "test": 7,
    "dev_matched": 9,
    "dev_mismatched": 8,
    "test_matched": 7,
}
SPLITS |= {"test_mismatched": 6, "AX": 5}
# the columns of the labelled files and of the others, some that no task reads among them
COLUMNS = {
    "CoLA": ("", "index sentence"),
    "SST-2": ("sentence label", "index sentence"),
    "QQP": ("id qid1 qid2 question1 question2 is_duplicate", "id question1 question2"),
    "STS-B": ("index genre sentence1 sentence2 score", "index genre sentence1 sentence2"),
    "MNLI": (
        "index promptID sentence1 sentence2 label1 gold_label",
        "index promptID sentence1 sentence2",
    ),
    "QNLI": ("index question sentence label", "index question sentence"),
    "RTE": ("index sentence1 sentence2 label", "index sentence1 sentence2"),
    "WNLI": ("index sentence1 sentence2 label", "index sentence1 sentence2"),
}
LABELS = {"STS-B": ["0.000", "2.500", "3.2", "5"]}


def sentence(dice):
    return " ".join(dice.choices(WORDS[:11], k=dice.randint(2, 6)))


def table(name, split, number):
    """Return a file of a task.

    Texts that end in 'good' have the last label or a large similarity.
    """
    task = TASKS[name]
    dice = random.Random(f"{name} {split}")
    labelled = split.startswith(("train", "dev"))
    columns = COLUMNS[name][not labelled].split()
    lines = ["\t".join(columns)] if columns else []
    labels = LABELS.get(name) or list(task.labels)
    for i in range(number):
        label = labels[i % len(labels)]
        good = label == labels[-1] if task.labels else float(label) > 3
        end = "good" if good else "bad"
        texts = [sentence(dice) for _ in task.texts]
        texts[-1] += f" {end} {end}"
        values = {
            **dict.fromkeys(columns, "x"),
            "index": str(i),
            "id": str(i),
            **dict(zip(task.texts, texts)),
        }
        values |= {task.label: label} if labelled else {}
        lines.append(
            "\t".join(values[column] for column in columns)
            if columns
            else f"gj04\t{label}\t*\t{texts[0]}"
        )
    return "".join(f"{line}\n" for line in lines)


def mrpc(number, first):
    dice = random.Random(first)
    lines = ["\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String"]
    for i in range(number):
        end = ("bad", "good")[i % 2]
        lines.append(
            f"{i % 2}\t{first + i}\t{first + i + 1}\t{sentence(dice)}\t{sentence(dice)} {end} {end}"
        )
    return "".join(f"{line}\r\n" for line in lines)


def pack(folder, **changes):
    """Write all archives.

    `changes` are other contents of files, by name with _ in place of other signs.
    """
    folder.mkdir(exist_ok=True)
    for name, task in TASKS.items():
        if name == "MRPC":
            continue
        splits = {"train", "dev", "test"}
        if name == "MNLI":
            splits = {file.split("/")[-1].removesuffix(".tsv") for file in task.files.values()} - {
                "AX"
            }
        with zipfile.ZipFile(folder / task.archives[0].file, "w") as archive:
            top = task.files["train"].split("/")[0]
            archive.writestr(f"{top}/original/readme.txt", "not wanted")
            for split in sorted(splits):
                key = re.sub(r"\W", "_", f"{name}_{split}")
                archive.writestr(
                    f"{top}/{split}.tsv", changes.get(key) or table(name, split, SPLITS[split])
                )
    (folder / "AX.tsv").write_text(table("WNLI", "test", SPLITS["AX"]))
    (folder / "msr_paraphrase_train.txt").write_bytes(mrpc(20, 100).encode())
    (folder / "msr_paraphrase_test.txt").write_bytes(mrpc(7, 500).encode())
    (folder / "mrpc_dev_ids.tsv").write_text(
        "".join(f"{100 + i}\t{101 + i}\n" for i in (3, 4, 11, 12))
    )
    return folder


TINY = (
    "--encoder-layers 1 --encoder-embed-dim 32 --encoder-ffn-embed-dim 32 "
    "--encoder-attention-heads 2"
)


@pytest.fixture(autouse=True)
def environment(plain_environment, tmp_path):
    plain_environment.setenv("DATA", str(tmp_path / "data"))
    plain_environment.setenv("GPUS", "0")
    return plain_environment


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    return pack(tmp_path_factory.mktemp("glue") / "archives")


@pytest.fixture
def bert(archives, tmp_path, environment):
    """Return a folder with a vocabulary and a tiny model for it; put the archives in place."""
    environment.setenv("ARCHIVES", str(archives))
    folder = tmp_path / "pretrained"
    folder.mkdir()
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in VOCABULARY))
    (folder / "dict.txt").write_text("".join(f"{piece} 1\n" for piece in VOCABULARY[5:]))
    (command,) = dry_run(f"examples/bert/glue/train.sh {TINY} --head-mixing none", DATA=folder)
    args = parse(command)
    dictionary = Dictionary.load(str(folder / "dict.txt"))
    task = SentencePredictionTask(SentencePredictionConfig(), dictionary, None)
    dictionary.add_symbol("<mask>")
    torch.manual_seed(1)
    model = build_model(args, task)
    # Tensors alone, as from fairseq's model, load into every family.
    save(dict(model.state_dict()), convert_namespace_to_omegaconf(args), folder / "model.pt")
    return folder


def data():
    return Path(os.environ["DATA"])


def run(*arguments):
    prepare.main(["--workers", "1", "--any-counts", *map(str, arguments)])


def read_by_fairseq(name, subset, model="bert"):
    """Return the examples (tokens, label) of fairseq's task with the flags of train.sh."""
    (command,) = dry_run("examples/bert/glue/train.sh", VARIANT=name, MODEL=model)
    args = parse(command)
    fields = {
        key: getattr(args, key)
        for key in ("data", "num_classes", "init_token", "separator_token", "seed")
    }
    cfg = SentencePredictionConfig(
        **fields, no_shuffle=True, regression_target=args.regression_target
    )
    task = SentencePredictionTask.setup_task(cfg)
    found = task.load_dataset(subset)
    examples = []
    for i in range(len(found)):
        tokens = [task.dictionary[number] for number in found[i]["net_input.src_tokens"]]
        label = found[i].get("target")
        if label is not None and TASKS[name].labels:
            label = task.label_dictionary[int(label) + task.label_dictionary.nspecial]
        examples.append((" ".join(tokens), label))
    return examples


def test_the_nine_tasks_and_what_train_sh_says_of_them():
    assert len(TASKS) == 9
    lines = 'for VARIANT in "$@"; do VARIANT=$VARIANT examples/bert/glue/train.sh; done'
    commands = shlex.join(["bash", "-c", lines, "-"])
    for (name, task), command in zip(TASKS.items(), dry_run(f"{commands} {' '.join(TASKS)}")):
        args = parse(command)
        assert args.data == str(data() / "bert" / name)
        assert args.save_dir.endswith(f"checkpoints/bert/glue/{name}/mixhead_bert_base")
        assert (args.num_classes, args.regression_target) == (task.classes, not task.labels)
        assert args.maximize_best_checkpoint_metric == bool(task.labels)
        valid = [
            subset for subset in task.files if subset != "train" and subset not in task.predictions
        ]
        assert args.valid_subset.split(",") == valid
        assert int(args.warmup_updates) < int(args.total_num_update) == args.max_update
        assert (args.init_token, args.separator_token) == (0, None)
    assert {*prepare.TASKS["MNLI"].predictions.values()} == {"MNLI-m.tsv", "MNLI-mm.tsv", "AX.tsv"}


def test_fairseq_reads_every_task(bert, capsys):
    run("--from", bert)
    for name, task in TASKS.items():
        assert {path.name for path in (data() / "text" / name).glob("*")} >= {
            task.files["train"].split("/")[0]
        }
        for subset in task.files:
            examples = read_by_fairseq(name, subset)
            assert examples
            for tokens, label in examples:
                texts = tokens.removeprefix("<s> ").removesuffix(" </s>").split(" </s> ")
                assert len(texts) == len(task.texts) and "<unk>" not in tokens
                assert (label is None) == (subset in task.predictions)
                if task.labels and label:
                    assert texts[-1].endswith("good good") == (label == task.labels[-1])
            if subset in task.predictions:
                index = (data() / "bert" / name / f"{subset}.index").read_text().split()
                assert index == [str(i) for i in range(len(examples))]
    assert [label for _, (label,) in read_by_fairseq("STS-B", "valid")[:4]] == pytest.approx(
        [0, 0.5, 0.64, 1]
    )
    # MRPC's validation set is a part of its training file.
    assert [len(read_by_fairseq("MRPC", subset)) for subset in ("train", "valid", "test")] == [
        16,
        4,
        7,
    ]
    assert [len(read_by_fairseq("MNLI", subset)) for subset in TASKS["MNLI"].files] == [
        40,
        9,
        8,
        7,
        6,
        5,
    ]


def test_the_pieces_are_berts_and_the_classes_are_in_the_order_of_the_table(bert):
    text = (
        "index\tsentence1\tsentence2\tlabel\n0\tCáts, CATS\tThe "
        "zebra!\tnot_entailment\n1\tA\tcat\tentailment\n"
    )
    pack(data().parent / "own", RTE_train=text)
    os.environ["ARCHIVES"] = str(data().parent / "own")
    run("--from", bert, "--tasks", "RTE")
    first, second = read_by_fairseq("RTE", "train")
    assert first == ("<s> cat ##s , cat ##s </s> the <unk> <unk> </s>", "not_entailment")
    assert second == ("<s> <unk> </s> cat </s>", "entailment")
    labels = (data() / "bert" / "RTE" / "label" / "dict.txt").read_text().split()[::2]
    assert labels == TASKS["RTE"].labels


def test_the_pieces_of_roberta_are_fairseqs(tmp_path):
    """Compare byte pairs with merges, as GPT-2's files have them."""
    folder = tmp_path
    dice = random.Random(1)
    merges = ["t h", "th e", "\u0120 the", "\u0120 c", "a t", "\u0120c at", "\u00c3 \u00a9", "! !"]
    vocabulary = {letter: number for number, letter in enumerate(bytes_to_unicode().values())}
    vocabulary |= {merge.replace(" ", ""): len(vocabulary) + i for i, merge in enumerate(merges)}
    (folder / "encoder.json").write_text(json.dumps(vocabulary))
    (folder / "vocab.bpe").write_text("\n".join(["#version: 0.2", *merges, ""]))
    numbers = reversed(range(len(vocabulary)))
    (folder / "dict.txt").write_text("".join(f"{number} 1\n" for number in numbers))
    encode = Encoder("roberta", folder, True)
    fairseqs = get_encoder(*(str(folder / name) for name in FILES["roberta"]))
    words = (
        "the| cat|  the!!!|Caf\u00e9|\n\n| \u6771\u4eac|it's| 3.14|\u00a0|they'LL|\t |\U0001f5fb"
    ).split("|")
    texts = ["".join(dice.choices(words, k=dice.randrange(12))) for _ in range(300)]
    expected = []
    for text in texts:
        expected.append([encode.dictionary.index(str(piece)) for piece in fairseqs.encode(text)])
    assert encode(texts) == expected


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "of an older version"])
def test_a_task_with_the_pieces_of_another_model_is_refused(recorded, bert, tmp_path, capsys):
    run("--from", bert, "--tasks", "RTE")
    folder = data() / "bert" / "RTE"
    if not recorded:
        file = folder / "settings.json"
        settings = json.loads(file.read_text())["settings"]
        older = {name: settings[name] for name in ("max_length", "cased")}
        file.write_text(json.dumps({"settings": older}))
    run("--from", bert, "--tasks", "RTE")

    model = data() / "bert" / "model" / "dict.txt"
    lines = model.read_text().splitlines()
    model.write_text("".join(f"{line}\n" for line in [*lines[1:], lines[0]]))
    message = refused_here(capsys, run, "--tasks", "RTE")
    if recorded:
        assert message.startswith(f"{folder}: made with dict.txt ")
    else:
        assert message == (
            f"{folder}/input0/dict.txt: is not the dict.txt of {model.parent}; remove {folder}, or "
            "choose another DATA"
        )


def test_numbers_of_examples_are_checked(bert, capsys):
    with pytest.raises(SystemExit):
        prepare.main(["--workers", "1", "--from", str(bert), "--tasks", "RTE"])
    assert "train has 40 examples, must have 2,490" in capsys.readouterr().err


def test_broken_rows_of_a_labelled_set_are_listed(tmp_path):
    rows = [
        "good\tgood\t1",
        "cut off",
        "good\tgood\t0",
        "too\tmany\tcolumns\t1",
        "no\tlabel\t",
        "no\tsuch label\t2",
    ]
    head = COLUMNS["QQP"][0].replace(" ", "\t")
    lines = [head] + [f"1\ta\tb\t{row}" for row in rows]
    (tmp_path / "table.tsv").write_text("".join(f"{line}\n" for line in lines))
    found = read_table(tmp_path / "table.tsv", TASKS["QQP"], labelled=True)
    assert [example.label for example in found.examples] == ["1", "0"]
    assert found.left_out == [
        "line 3: 4 columns, not 6",
        "line 5: 7 columns, not 6",
        "line 6: is_duplicate is ''",
        "line 7: is_duplicate is '2'",
    ]


def test_predictions_are_as_the_server_takes_them(tmp_path):
    evaluate.write_predictions(
        tmp_path / "a" / "RTE.tsv", numpy.array([1, 0]), ["7", "3"], TASKS["RTE"]
    )
    assert (
        tmp_path / "a" / "RTE.tsv"
    ).read_text() == "index\tprediction\n7\tnot_entailment\n3\tentailment\n"
    evaluate.write_predictions(
        tmp_path / "STS-B.tsv", numpy.array([-0.2, 5.3, 2.0625]), range(3), TASKS["STS-B"]
    )
    assert (
        tmp_path / "STS-B.tsv"
    ).read_text() == "index\tprediction\n0\t0.000\n1\t5.000\n2\t2.062\n"
    evaluate.write_predictions(tmp_path / "AX.tsv", numpy.array([2, 0]), range(2), TASKS["MNLI"])
    assert (tmp_path / "AX.tsv").read_text().split()[3::2] == ["neutral", "contradiction"]


FAST = (
    f"{TINY} --lr 0.02 --warmup-updates 2 --max-update 30 --max-epoch 60 --dropout 0 --num-workers "
    "0"
)
FAST += " --validate-interval 10 --save-interval 10 --no-last-checkpoints"


def test_the_metrics_are_in_percent_and_nan_where_there_is_none():
    assert measure(TASKS["MRPC"], [1, 0, 1, 1], [1, 1, 1, 0]) == pytest.approx(
        {"accuracy": 50, "F1": 200 / 3}
    )
    assert measure(TASKS["CoLA"], [1, 0, 1], [1, 1, 1])["Matthews correlation"] == 0
    assert numpy.isnan(measure(TASKS["STS-B"], [1.0, 2.0], [3.0, 3.0])["Pearson correlation"])


@pytest.mark.slow
def test_the_three_commands(bert, tmp_path):
    """Cut the text in several processes; train a task with classes and one with similarities."""
    big = {f"RTE_{split}": table("RTE", split, 1100) for split in ("train", "dev")}
    os.environ["ARCHIVES"] = str(pack(tmp_path / "own", **big))
    script(
        f"examples/bert/glue/prepare.sh --any-counts --workers 2 --from {bert} --tasks RTE STS-B"
    )
    assert [tokens for tokens, _ in read_by_fairseq("RTE", "train")][:2] == [
        "<s> {} </s> {} </s>".format(*line.split("\t")[1:3])
        for line in big["RTE_train"].splitlines()[1:3]
    ]
    for name, more, least in (
        ("RTE", "--mixing-lr-scale 10", 80),
        ("STS-B", "--arch l2_bert_base", 40),
    ):
        own = {"VARIANT": name, "SAVE": tmp_path / name}
        script(f"examples/bert/glue/train.sh {FAST} {more}", **own)
        *_, where, last = script("examples/bert/glue/evaluate.sh", **own).stdout.splitlines()
        metric, _, value = last.partition(" = ")
        if name == "RTE":
            rows = Path(where.removeprefix("predictions: ")).read_text().splitlines()[1:]
            gold = [row.split("\t")[-1] for row in big["RTE_dev"].splitlines()[1:]]
            right = sum(row.split("\t")[1] == label for row, label in zip(rows, gold, strict=True))
            assert value == f"{100 * right / len(gold):.2f}"
        assert metric == TASKS[name].metrics[-1] and float(value) > least
    script(
        f"examples/bert/glue/evaluate.sh --valid-subset test --results-path {tmp_path}/server",
        **own,
    )
    lines = (tmp_path / "server" / "STS-B.tsv").read_text().splitlines()
    assert len(lines) == 8 and all(0 <= float(line.split("\t")[1]) <= 5 for line in lines[1:])
