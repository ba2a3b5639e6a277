"""SQuAD through fairseq's real commands: a dozen questions learned by heart; and what the task's parts promise."""

import math
from argparse import Namespace

import pytest
import torch
from bert.answers import predictions, read_spans
from bert.criterions import SquadCriterion
from bert.span_head import SpanHead, install_span_head
from bert.squad_data import read_squad, score
from bert.squad_task import SquadTask, SquadTaskConfig
from bert.squad_windows import IGNORED
from fairseq.logging import metrics

from mixhead_plugin.errors import OptionError
from tests.commands import PLUGIN, WHOLE_SETS, as_flags, logged, run, several
from tests.helpers import build, shake
from tests.squad import DROPOUT, SIZES, WINDOWS, content, write_data

ARCHITECTURES = ["mixhead_roberta_base", "mixhead_bert_base", "roberta_base"]
TASK = ["--task", "squad", "--user-dir", PLUGIN, *as_flags(WINDOWS)]
TRAINING = [*TASK, "--criterion", "squad", "--arch", "mixhead_bert_base", *as_flags(SIZES | DROPOUT)]
TRAINING += "--optimizer adam --lr 0.003 --cpu --batch-size 16 --required-batch-size-multiple 1 --num-workers 0".split()
TRAINING += "--seed 1 --log-format json --log-interval 1 --no-epoch-checkpoints --ddp-backend legacy_ddp".split()
TRAINING += "--validate-interval 1000 --save-interval 1000 --best-checkpoint-metric f1".split()
TRAINING += ["--maximize-best-checkpoint-metric"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("squad") / "data")


@pytest.fixture(scope="module")
def outputs(data):
    """What every command says."""
    folder = data.parent
    flags = ["fairseq-train", data, *TRAINING]
    regularized = [*flags, "--criterion", "orthogonal_squad"]
    validate = [
        "fairseq-validate",
        data,
        *TASK,
        *WHOLE_SETS,
        "--cpu",
        "--path",
        folder / "heart" / "checkpoint_best.pt",
    ]
    commands = {
        "heart": [*flags, "--save-dir", folder / "heart", "--max-update", "140", "--batch-size", "32"],
        "penalties": [*regularized, "--save-dir", folder / "penalties", "--max-update", "3"],
        "validate": [*validate, "--batch-size", "7", "--nbest-file", folder / "spans", "--log-format", "json"],
    }
    return dict(zip(commands, several(*commands.values()), strict=True))


def losses(output):
    return [float(log["loss"]) for log in logged(output)]


def test_a_dozen_questions_are_learned_by_heart(outputs):
    (last,) = logged(outputs["heart"], "valid")
    assert (float(last["valid_exact_match"]), float(last["valid_f1"])) == (100, 100)
    assert losses(outputs["heart"])[-1] < 0.1 * losses(outputs["heart"])[0]


def test_the_penalties_act_in_training(outputs):
    first, *_, last = [float(log["orthogonal_loss"]) for log in logged(outputs["penalties"])]
    assert first == 0 < last
    assert not any("orthogonal" in name for log in logged(outputs["penalties"], "valid") for name in log)


def test_validate_gives_the_metrics_and_the_answers_of_all_windows(outputs, data):
    (found,) = logged(outputs["validate"], "valid")
    assert (float(found["valid_exact_match"]), float(found["valid_f1"])) == (100, 100)
    squad = read_squad(data / "valid.json")
    spans = read_spans(data.parent / "spans", squad.questions)
    answers = predictions(squad, spans, 20)
    assert score(squad.questions, {name: best[0]["text"] for name, best in answers.items()}) == (100, 100)
    assert {len(best) for best in answers.values()} == {20}
    for question in squad.questions:
        probabilities = [answer["probability"] for answer in answers[question.id]]
        assert probabilities == sorted(probabilities, reverse=True) and probabilities[0] > 0.25


# ---- refusals --------------------------------------------------------------------------------------------------------


def task(data, **settings):
    values = {"data": str(data), **WINDOWS, "max_answer_length": 12, "train_subset": "train", **settings}
    return SquadTask.setup_task(SquadTaskConfig(**values))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"max_seq_length": 65}, "--max-seq-length 65: must be at most --max-positions 64"),
        (
            {"max_seq_length": 27},
            "--max-seq-length 27: must be at least 28, or no context fits beside --max-query-length 24",
        ),
        (
            {"doc_stride": 22},
            "--doc-stride 22: must be at most 21, the context that a window has room for, or what lies between two "
            "windows is never read",
        ),
        ({"doc_stride": 0}, "--doc-stride 0: must be at least 1"),
        ({"n_best_size": 0}, "--n-best-size 0: must be at least 1"),
        ({"max_answer_length": -1}, "--max-answer-length -1: must be at least 1"),
    ],
)
def test_sizes_that_cannot_be_are_refused(settings, message, data):
    with pytest.raises(OptionError) as refused:
        task(data, **settings)
    assert str(refused.value) == message


def test_other_data_are_refused(data, tmp_path):
    with pytest.raises(OptionError) as refused:
        task(tmp_path)
    assert str(refused.value) == f"data {tmp_path}: has no dict.txt"
    (tmp_path / "dict.txt").write_text("13 1\n262 1\n")
    with pytest.raises(OptionError, match=r"dict.txt: must be a WordPiece vocabulary; it has no piece that begins"):
        task(tmp_path)
    with pytest.raises(OptionError, match=r"test\.json: No such file or directory"):
        task(data).load_dataset("test")


@pytest.mark.slow
def test_a_refusal_on_the_command_line_is_one_line(data, tmp_path):
    """Of a flag, and of the vocabulary of a published RoBERTa: numbers of GPT-2's byte pairs."""
    bpe = write_data(tmp_path / "bpe")
    (bpe / "dict.txt").write_text("13 850314647\n262 800385005\nmadeupword0000 0\n")
    stride = "--doc-stride 30: must be at most 21"
    for folder, flags, message in (
        (data, ["--doc-stride", "30"], stride),
        (bpe, ["--arch", "mixhead_roberta_base"], f"{bpe}/dict.txt: must be a WordPiece vocabulary"),
    ):
        result = run("fairseq-train", folder, *TRAINING, *flags, "--save-dir", tmp_path / "save", check=False)
        assert result.returncode != 0 and "Traceback" not in result.stderr
        assert result.stderr.splitlines()[-1].startswith(f"fairseq-train: error: {message}")


def test_the_nbest_file_is_for_validation(data, tmp_path):
    asked = task(data, nbest_file=str(tmp_path / "missing" / "spans"))
    with pytest.raises(OptionError, match=r"--nbest-file .*: is for fairseq-validate"):
        asked.begin_epoch(1, None)
    with pytest.raises(OptionError, match=r"--nbest-file .*: No such file or directory"):
        asked._nbest_file()


# ---- loss, answers, head ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prepared(data):
    made = task(data)
    for split in ("train", "valid"):
        made.load_dataset(split)
    return made


def model_of(made, arch="mixhead_roberta_base"):
    torch.manual_seed(1)
    return shake(made.build_model(Namespace(arch=arch, max_positions=64, **SIZES, **DROPOUT)))


def batch(made, indices, split="train"):
    windows = made.dataset(split)
    return windows.collater([windows[index] for index in indices])


def test_the_loss_is_the_mean_of_both_cross_entropies(prepared):
    model, criterion = model_of(prepared).eval(), SquadCriterion(prepared).train()
    sample = batch(prepared, [0, 5, 20])
    loss, sample_size, _ = criterion(model, sample)
    expected = 0.0
    for index, target in zip([0, 5, 20], sample["target"].tolist()):
        alone = batch(prepared, [index])
        logits = model(**alone["net_input"])[0][0]  # [N, 2], without padding
        expected += sum(-logits[:, side].log_softmax(0)[target[side]] for side in (0, 1)) / 2
    torch.testing.assert_close(loss, expected)
    assert sample_size == 3
    each = criterion(model, sample, reduce=False)[0]
    assert each.shape == (3,)
    torch.testing.assert_close(each.sum(), loss)


def test_windows_of_unknown_answers_count_for_nothing(prepared):
    model, criterion = model_of(prepared), SquadCriterion(prepared).train()
    known, both = batch(prepared, [0]), batch(prepared, [0, 1])
    both["target"][1] = IGNORED
    results = [criterion(model, sample) for sample in (known, both)]
    torch.testing.assert_close(results[0][0], results[1][0])
    assert [sample_size for _, sample_size, _ in results] == [1, 1]
    both["target"][0] = IGNORED
    loss, sample_size, log = criterion(model, both)
    loss.backward()
    assert sample_size == 0 and loss == 0
    with metrics.aggregate() as meters:
        prepared.reduce_metrics([log], criterion)
    assert "loss" not in meters.get_smoothed_values()


def test_validation_scores_the_best_answer_of_all_windows_of_a_question(prepared):
    """Over several batches and sets, of which each has questions and numbers of its own."""
    right, wrong = (0, 4, -1.0), (0, 1, -2.0)
    first = prepared.dataset("valid").first_question
    context = prepared._contexts[first]
    assert first == 12 and context[14:18] == "Oslo"
    batches = [[(first, *wrong), (first + 1, 70, 74, -9.0)], [(first, 14, 18, -0.5)], [(first + 1, *right)]]
    with metrics.aggregate() as meters:
        for rows in batches:
            log = {"loss": 1.0, "ntokens": 1, "nsentences": 1, "sample_size": 1}
            prepared._answers.append(torch.tensor(rows).double())
            prepared.reduce_metrics([log], SquadCriterion(prepared))
        found = meters.get_smoothed_values()
    assert (found["exact_match"], found["f1"]) == (50, 50)
    assert "_answers" not in found


def test_answers_are_decoded_in_validation_alone(prepared):
    model, criterion = model_of(prepared), SquadCriterion(prepared)
    sample = batch(prepared, range(30), "valid")
    criterion.train()
    criterion(model, sample)
    assert prepared._answers == []
    criterion.eval()
    log = criterion(model, sample)[2]
    with metrics.aggregate() as meters:
        prepared.reduce_metrics([log], criterion)
    assert meters["_answers"].tensor[:, 0].tolist() == sample["question"].tolist()
    assert prepared._answers == []


def test_a_diverged_model_gives_answers_that_are_wrong_instead_of_an_error(prepared):
    sample = batch(prepared, range(3))
    answers = prepared.decode(sample, torch.full((*sample["starts"].shape, 2), math.nan))
    prepared._answers.clear()
    assert answers[:, 1:].tolist() == [[0, 0, -math.inf]] * 3


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_model_of_masked_words_lends_all_but_its_head(arch, prepared, caplog):
    """A pre-trained checkpoint loads strictly; so does one with a span head, which is then kept."""
    model = model_of(prepared, arch)
    lender = model_of(prepared, arch)
    lender.encoder.lm_head = build("roberta_base", **SIZES).encoder.lm_head
    for parameter in lender.parameters():
        parameter.data.add_(1)
    head = model.encoder.lm_head.out_proj.weight.clone()
    model.load_state_dict(lender.state_dict())
    (said,) = [record for record in caplog.records if "no head for answers" in record.message]
    assert said.levelname == "WARNING"
    caplog.clear()
    assert torch.equal(model.encoder.lm_head.out_proj.weight, head)
    layer = "encoder.sentence_encoder.layers.0.fc1.weight"
    assert torch.equal(model.state_dict()[layer], lender.state_dict()[layer])
    fresh = model_of(prepared, arch)
    fresh.encoder.lm_head.out_proj.weight.data.zero_()
    fresh.load_state_dict(model.state_dict())
    assert "no head for answers" not in caplog.text
    assert torch.equal(fresh.encoder.lm_head.out_proj.weight, head)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_parameter_learns(arch, prepared):
    """Data parallel training would otherwise have to be told."""
    model, criterion = model_of(prepared, arch), SquadCriterion(prepared).train()
    criterion(model, batch(prepared, [0, 20]))[0].backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize(
    "stock, mixed, flags",
    [("roberta_base", "mixhead_roberta_base", {}), ("mixhead_bert_base", "mixhead_bert_base", {"head_mixing": "none"})],
)
def test_the_first_step_is_the_stock_models(stock, mixed, flags, prepared):
    torch.manual_seed(1)
    sizes = {"max_positions": 64, **SIZES, **DROPOUT}
    stock = prepared.build_model(Namespace(arch=stock, **sizes, **flags))
    mixed = prepared.build_model(Namespace(arch=mixed, **sizes))
    mixed.load_state_dict(stock.state_dict())
    sample = batch(prepared, [0, 20])
    criterion = SquadCriterion(prepared).train()
    expected, found = criterion(stock, sample)[0], criterion(mixed, sample)[0]
    torch.testing.assert_close(found, expected)
    expected.backward()
    found.backward()
    gradients = {name: parameter.grad for name, parameter in mixed.named_parameters()}
    for name, parameter in stock.named_parameters():
        torch.testing.assert_close(gradients.pop(name), parameter.grad, rtol=1e-4, atol=1e-6, msg=name)
    assert len(gradients) == 4 and all(gradient.any() for gradient in gradients.values())  # the mixing's


def test_other_models_are_refused():
    with pytest.raises(OptionError, match="--task squad: needs an architecture of BERT or RoBERTa, not a Mixhead"):
        install_span_head(build("mixhead_transformer"))


def test_the_head_is_one_linear_map():
    head = SpanHead(8)
    features = torch.randn(2, 5, 8)
    torch.testing.assert_close(head(features), features @ head.out_proj.weight.T)
    assert sum(parameter.numel() for parameter in head.parameters()) == 18


def test_questions_whose_answer_is_not_there_are_counted(tmp_path, caplog):
    misplaced = content()
    misplaced["data"][0]["paragraphs"][0]["qas"][0]["answers"] = [{"text": "Oslo", "answer_start": 0}]
    with caplog.at_level("INFO"):
        task(write_data(tmp_path, train=misplaced)).load_dataset("train")
    assert "12 questions, 32 windows; 0 questions cut to 24 tokens; 1 whose answer is not where" in caplog.text
