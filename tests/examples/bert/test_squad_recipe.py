"""SQuAD's recipe goes from files in the published layout to the official metrics."""

import json
from argparse import Namespace

import pytest
import torch
from bert.convert_bert import save
from bert.squad import evaluate
from bert.squad_task import SquadTask, SquadTaskConfig
from bert.wordpiece import SPECIAL
from fairseq.models import build_model
from omegaconf import OmegaConf
from recipes import dry_run, parse, refusal, script

from tests.commands import as_flags
from tests.squad import DROPOUT, SIZES, WINDOWS, content, dictionary, vocabulary

pytestmark = pytest.mark.usefixtures("plain_environment")


@pytest.fixture
def source(tmp_path):
    """Write a tiny BERT as convert_bert.py does, and files in the published layout.

    Return the model's folder.
    """
    folder = tmp_path / "model"
    folder.mkdir()
    dictionary().save(str(folder / "dict.txt"))
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL, *vocabulary()]), encoding="utf-8")
    task = SquadTask.setup_task(
        SquadTaskConfig(data=str(folder), train_subset="train", seed=1, **WINDOWS)
    )
    torch.manual_seed(1)
    args = Namespace(arch="mixhead_bert_base", max_positions=64, **SIZES, **DROPOUT)
    cfg = OmegaConf.create({"model": vars(args)})
    save(build_model(args, task).state_dict(), cfg, folder / "model.pt")
    for name in ("train", "dev"):
        (tmp_path / f"{name}-v1.1.json").write_text(json.dumps(content()), encoding="utf-8")
    return folder


@pytest.mark.slow
def test_from_the_archives_to_the_metrics(source, tmp_path):
    """Prepare, train from a pre-trained model, and evaluate.

    The questions are learned by heart.
    """
    places = {"DATA": tmp_path / "data", "SAVE": tmp_path / "save", "ARCHIVES": tmp_path, "GPUS": 0}
    result = script(f"examples/bert/squad/prepare.sh --any-counts --from {source}", **places)
    assert "dev-v1.1.json: 12 questions about 4 contexts" in result.stderr
    tiny = " ".join([*as_flags(WINDOWS | SIZES | DROPOUT), "--seed 1"])
    schedule = "--lr 0.003 --max-update 150 --total-num-update 300 --warmup-updates 5"
    schedule += " --num-workers 0 --validate-interval 50 --save-interval 50"
    result = script(f"examples/bert/squad/train.sh {tiny} {schedule}", **places)
    assert "loading pretrained model from" in (result.stdout + result.stderr).lower()
    result = script("examples/bert/squad/evaluate.sh", **places)
    assert result.stdout.splitlines()[-2:] == ["EM = 100.00", "F1 = 100.00"]
    answers = json.loads(
        (tmp_path / "save" / "checkpoint_best.squad" / "predictions.json").read_text()
    )
    assert answers["1-1"] == "José Ibáñez" and answers["3-1"] == "🗻"
    assert refusal(script("examples/bert/squad/prepare.sh", check=False, **places)).endswith(
        "give --any-counts, or remove it"
    )


def test_the_metric_chooses_the_number_of_the_last_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "valid.json").write_text("{}")
    monkeypatch.setattr(evaluate, "read_squad", lambda path: Namespace(questions=[]))
    monkeypatch.setattr(evaluate, "read_spans", lambda path, questions: [])
    monkeypatch.setattr(evaluate, "predictions", lambda *_: {})
    monkeypatch.setattr(evaluate, "score", lambda *_: Namespace(exact_match=80.6, f1=88.0))
    for metric, last in (
        ("F1", ["EM = 80.60", "F1 = 88.00"]),
        ("EM", ["F1 = 88.00", "EM = 80.60"]),
    ):
        monkeypatch.setenv("METRIC", metric)
        evaluate.main([str(tmp_path), str(tmp_path / "spans.jsonl")])
        assert capsys.readouterr().out.splitlines()[-2:] == last
    message = refusal(script("METRIC=BLEU examples/bert/squad/evaluate.sh", check=False))
    assert message == "evaluate: error: METRIC=BLEU: must be F1 or EM, the number of the last line"


@pytest.mark.parametrize("gpus", [1, 4])
def test_an_update_has_32_windows_on_any_number_of_gpus(gpus):
    (command,) = dry_run(f"GPUS={gpus} examples/bert/squad/train.sh")
    args = parse(command)
    assert gpus * args.batch_size * args.update_freq[0] == 32
    assert args.max_tokens == args.batch_size * args.max_seq_length
