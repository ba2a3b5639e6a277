"""BERT's pre-training recipe prepares text and vocabulary, and trains in two phases."""

import json
import os
import random
import sys
from pathlib import Path

import pytest
import torch
from bert.glue.pieces import Encoder
from bert.pretrained import prepare_model
from bert.pretraining import begin, evaluate, prepare
from bert.pretraining.documents import own_text, sentences
from bert.pretraining.vocabulary import learn
from bert.wordpiece import SPECIAL, wordpiece, write_dictionary
from fairseq import checkpoint_utils
from fairseq.data import Dictionary, data_utils
from recipes import dry_run, parse, refusal, refused_here, script, zip_of

from tests.helpers import run_here

TINY = """
    --encoder-layers 1 --encoder-embed-dim 16 --encoder-ffn-embed-dim 16 --encoder-attention-heads 2
    --head-dim 8 --max-positions 48 --batch-size 8 --update-freq 1 --num-workers 0 --warmup-updates
    1 --log-format json
""".split()


@pytest.fixture(autouse=True)
def environment(plain_environment, tmp_path):
    for name in ("DATA", "SAVE"):
        plain_environment.setenv(name, str(tmp_path / name.lower()))
    plain_environment.setenv("GPUS", "0")


WORDS = (
    "the a cat cats dog dogs sleeping sleeps runs running under over old older tree trees house "
    "houses"
).split()


def own(path, documents=24, seed=0):
    """Write a file in BERT's format, of made-up sentences.

    There are several empty lines between documents.
    """
    dice = random.Random(seed)
    texts = [
        "\n".join(
            " ".join(dice.choices(WORDS, k=dice.randint(4, 9))).capitalize() + "." for _ in range(6)
        )
        for _ in range(documents)
    ]
    path.write_text("\n\n\n".join(texts) + "\n", encoding="utf-8")
    return path


def test_a_paragraph_is_cut_into_its_sentences():
    paragraph = (
        ' He said " go . " She ( a nurse . ) stayed ? Yes ! 3 @.@ 5 of J. Smith , too . " And " so '
        "\n"
    )
    assert list(sentences(paragraph)) == [
        'He said " go . "',
        "She ( a nurse . )",
        "stayed ?",
        "Yes !",
        "3 @.@ 5 of J. Smith , too .",
        '" And " so',
    ]
    assert " ".join(sentences(paragraph)) == " ".join(paragraph.split())


# The archive has a space on either side of every line.
WIKITEXT = "".join(
    f" {line} \n"
    for line in """
= A =

One well @-@ known cat . Two <unk> .

= = Part = =

Three 1 @,@ 000 .
= B =

= C =

Four .
""".split("\n")
)


def test_one_of_so_many_documents_is_held_out(tmp_path):
    """Hold out one of every ten, at changing positions."""
    text = tmp_path / "text"
    text.write_text("".join(f"{number}\n\n" for number in range(1000)))
    held = [int(line) for split, line in own_text([text], 10).lines() if split == "valid" and line]
    assert [number // 10 for number in held] == list(range(100))
    places = [number % 10 for number in held]
    assert set(places) == set(range(10)) and max(map(places.count, places)) < 25


def test_a_learnt_vocabulary_spells_every_word_in_few_pieces(tmp_path):
    lines = [*own(tmp_path / "text").read_text().splitlines(), "Café no. 7, 東京! 5€"]
    words = learn(lambda: lines, 90, lowercase=True)
    assert words == learn(lambda: lines, 90, lowercase=True) and len(set(words)) == 90
    assert set(words[:5]) == set(SPECIAL)
    assert {"e", "##e", "7", "東", "!", "##€"} <= set(words) and not {"C", "é"} & set(words)
    tokeniser = wordpiece(write_dictionary(words, tmp_path / "dict.txt", ""), lowercase=True)
    assert not any("<unk>" in tokeniser.encode(line).tokens for line in lines)
    assert tokeniser.encode("Cats running").tokens == ["cats", "running"]  # merged to whole words
    assert "<unk>" not in tokeniser.encode("ecafta").tokens  # every letter stands anywhere
    assert {"C", "é"} <= set(learn(lambda: lines, 100, lowercase=False))


def test_wikitext_becomes_pairs_of_pieces(tmp_path, monkeypatch, capsys):
    """Read documents, sentences and pieces back from the binary set.

    <unk> of WikiText stays unknown.
    """
    splits = ("train", "valid", "test")
    zip_of(
        tmp_path / "wikitext-2-v1.zip",
        {f"wikitext-2/wiki.{split}.tokens": WIKITEXT for split in splits},
    )
    monkeypatch.setenv("ARCHIVES", str(tmp_path))
    prepare.main(["--any-counts", "--learn-vocab", "60", "--workers", "1"])
    said = capsys.readouterr().err
    assert "train: 2 documents, 4 sentences, " in said and " pieces, 0 unknown\n" in said
    folder = tmp_path / "data" / "binary"
    words = Dictionary.load(str(folder / "dict.txt"))
    listed = [
        word for word in (folder / "vocab.txt").read_text().split("\n")[:-1] if word not in SPECIAL
    ]
    assert words.symbols[words.nspecial :] == listed
    for split in splits:
        binary = data_utils.load_indexed_dataset(str(folder / split), words)
        text = [words.string(line).replace(" ##", "") for line in binary]
        assert text == ["one well - known cat .", "two <unk> .", "three 1 , 000 .", "", "four ."]
        assert all(line[-1] == words.eos() for line in binary)
    counts = json.loads((folder / "settings.json").read_text())["sets"]["test"]
    assert counts["pieces"] == sum(len(line) - 1 - (words.unk() in line) for line in binary)
    log = (
        '| INFO | {0} | {{"{0}_loss": "9", "{0}_mlm_loss": "{1}", "{0}_nsp_loss": "0.9", '
        '"{0}_nsp_accuracy": "61"}}\n'
    )
    monkeypatch.setattr(sys, "argv", ["evaluate", str(folder), "--valid-subset", "test"])
    monkeypatch.setattr(sys, "stdin", [log.format("valid", "8.1"), log.format("test", "7.5")])
    evaluate.main()
    *_, last = capsys.readouterr().out.splitlines()
    assert last == "mlm_loss = 7.500"
    message = refused_here(capsys, prepare.main, ["--any-counts", "--learn-vocab", "61"])
    assert (
        message == f"{folder}: made with vocabulary 60, not 61; remove it, or choose another DATA"
    )


@pytest.mark.parametrize("content", [None, "{}", "[]"], ids=["no file", "no sets", "a list"])
def test_a_folder_without_the_sets_of_prepare_is_not_evaluated(
    content, tmp_path, monkeypatch, capsys
):
    if content is not None:
        (tmp_path / "settings.json").write_text(content)
    monkeypatch.setattr(sys, "argv", ["evaluate", str(tmp_path)])
    with pytest.raises(SystemExit):
        evaluate.main()
    assert capsys.readouterr().err == (
        f"evaluate: error: {tmp_path}: has no settings.json with sets; "
        "examples/bert/pretraining/prepare.sh makes it\n"
    )


@pytest.mark.parametrize(
    "variant, values",
    [
        ("128", (128, 64, 450_000, 5_000, None)),
        ("512", (512, 16, 50_000, 3_000, "/save/128/checkpoint_last.pt")),
    ],
)
def test_the_phases_are_the_papers(variant, values):
    for gpus in (1, 8):
        variables = {"GPUS": gpus, "PRECISION": "fp32", "VARIANT": variant, "SAVE": "/save"}
        (command,) = dry_run("examples/bert/pretraining/train.sh", **variables)
        args = parse(command)
        found = (args.tokens_per_sample, args.batch_size, args.max_update, args.warmup_updates)
        assert (*found, args.finetune_from_model) == values
        assert args.save_dir == f"/save/{variant}" and args.max_positions == 512
        assert gpus * args.batch_size * args.update_freq[0] == 1024
        assert args.max_tokens == args.batch_size * args.tokens_per_sample
        assert (args.lr, args.weight_decay, args.dropout, args.attention_dropout) == (
            [1e-4],
            0.01,
            0.1,
            0.1,
        )
        assert int(args.total_num_update) == args.max_update and args.fp16_no_flatten_grads
        assert (args.encoder_embed_dim, args.encoder_attention_heads, args.head_dim) == (
            512,
            8,
            128,
        )


def train(variant, *flags):
    begin.main(str(Path(os.environ["DATA"]) / "binary"), os.environ["SAVE"], str(variant))
    (command,) = dry_run(
        f"VARIANT={variant} examples/bert/pretraining/train.sh {' '.join([*TINY, *flags])}"
    )
    run_here(*command)


def state(path):
    return checkpoint_utils.load_checkpoint_to_cpu(str(path))


@pytest.mark.slow
def test_both_phases_give_a_model_for_the_other_recipes(tmp_path, capsys):
    """Prepare and train twice; glue takes the model and its vocabulary."""
    prepare.main(
        [
            "--text",
            str(own(tmp_path / "text")),
            "--hold-out=6",
            "--learn-vocab=70",
            "--workers=1",
        ]
    )
    train(128, "--tokens-per-sample", "16", "--max-update", "3", "--lr", "0.01")
    capsys.readouterr()
    train(512, "--tokens-per-sample", "32", "--max-update", "2", "--lr", "1e-30")
    said = f"train: begins with {tmp_path}/save/128/checkpoint_last.pt, update 3 of 3\n"
    assert capsys.readouterr().err.startswith(said)
    first, second = (
        state(tmp_path / "save" / phase / "checkpoint_last.pt") for phase in ("128", "512")
    )
    assert first["optimizer_history"][-1]["num_updates"] == 3
    assert second["optimizer_history"][-1]["num_updates"] == 2  # counted anew
    # the second has hardly trained: pooler and heads are the first's
    for name, value in first["model"].items():
        torch.testing.assert_close(second["model"][name], value, rtol=0, atol=1e-6)
    assert any(name.startswith("classification_heads.next_sentence.") for name in second["model"])

    folder = tmp_path / "save" / "model"
    copy = "mkdir model && cp dict.txt vocab.txt model && cp 512/checkpoint_last.pt model/model.pt"
    script(copy, cwd=folder.parent)
    copied = prepare_model("bert", folder, tmp_path / "glue")
    words = Dictionary.load(str(copied / "dict.txt"))
    assert (
        words.string(Encoder("bert", copied, lowercase=True)(["Old cats!"])[0]) == "old cats <unk>"
    )


def write_pieces(folder, words):
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("dict.txt", "vocab.txt"):
        (folder / name).write_text(
            "".join(f"{word}{' 1' * (name == 'dict.txt')}\n" for word in words)
        )
    return folder


def test_the_second_phase_begins_before_the_first_has_ended_only_with_early(
    tmp_path, monkeypatch, capsys
):
    binary = write_pieces(tmp_path / "binary", "abcd")
    save = tmp_path / "save"
    checkpoint = save / "128" / "checkpoint_last.pt"
    checkpoint.parent.mkdir(parents=True)
    state = {
        "model": {"weight": torch.zeros(1)},
        "optimizer_history": [{"num_updates": 3}],
        "cfg": {"model": {}, "optimization": {"max_update": 5}},
    }
    torch.save(state, checkpoint)

    for early in ("", "0"):
        monkeypatch.setenv("EARLY", early)
        with pytest.raises(SystemExit):
            begin.main(str(binary), str(save), "512")
        assert capsys.readouterr().err == (
            f"train: error: VARIANT=512: {checkpoint} is of update 3 of 5; EARLY=1 begins with it "
            "anyway\n"
        )
        assert not (save / "dict.txt").exists()

    monkeypatch.setenv("EARLY", "1")
    begin.main(str(binary), str(save), "512")
    assert capsys.readouterr().err == f"train: begins with {checkpoint}, update 3 of 5\n"
    assert (save / "dict.txt").exists()


PLACES = {"pretraining/evaluate": "binary", "squad/train": "text", "glue/train": "bert/RTE/input0"}


@pytest.mark.parametrize("recipe", PLACES)
def test_text_in_other_pieces_is_refused_everywhere(recipe, tmp_path):
    checkpoint = tmp_path / "save" / "512" / "checkpoint_last.pt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    write_pieces(checkpoint.parents[1], "abcd")
    place = write_pieces(tmp_path / "data" / PLACES[recipe], "abdc")
    asked = f"CHECKPOINT={checkpoint}" if "evaluate" in recipe else ""
    flag = "" if asked else f"--finetune-from-model {checkpoint}"
    line = f"{asked} examples/bert/{recipe}.sh {flag}"
    assert refusal(script(line, check=False)).endswith(
        f"{checkpoint}: has the pieces of {checkpoint.parent}/../dict.txt, not those of "
        f"{place}/dict.txt; take data "
        "of its pieces"
    )
