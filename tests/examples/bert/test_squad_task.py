"""The task of SQuAD checks its flags, computes loss and scores, and gives a model its head."""

import math
from argparse import Namespace

import pytest
import torch
from bert.criterions import SquadCriterion
from bert.squad_task import SquadTask, SquadTaskConfig
from bert.squad_windows import IGNORED
from fairseq.logging import metrics

from mixhead_plugin.errors import OptionError
from tests.helpers import build, shake
from tests.squad import DROPOUT, SIZES, WINDOWS, write_data

ARCHITECTURES = ["mixhead_bert_base", "roberta_base"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("squad") / "data")


def task(data, **settings):
    values = {
        "data": str(data),
        **WINDOWS,
        "max_answer_length": 12,
        "train_subset": "train",
        **settings,
    }
    return SquadTask.setup_task(SquadTaskConfig(**values))


@pytest.mark.parametrize("name, value", [("max_seq_length", 65), ("doc_stride", 22)])
def test_a_length_above_the_positions_and_a_stride_above_the_room_are_refused(name, value, data):
    with pytest.raises(
        OptionError, match=f"^--{name.replace('_', '-')} {value}: must be at (least|most) .*$"
    ):
        task(data, **{name: value})


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
    model = model_of(prepared).eval()
    criterion = SquadCriterion(prepared).train()
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
    model = model_of(prepared)
    criterion = SquadCriterion(prepared).train()
    known = batch(prepared, [0])
    both = batch(prepared, [0, 1])
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


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_model_of_masked_words_lends_all_but_its_head_and_every_parameter_learns(
    arch, prepared, caplog
):
    """Load a pre-trained checkpoint strictly, and one with a span head, which the model keeps."""
    model = model_of(prepared, arch)
    lender = model_of(prepared, arch)
    lender.encoder.lm_head = build("roberta_base", **SIZES).encoder.lm_head
    for parameter in lender.parameters():
        parameter.data.add_(1)
    head = model.encoder.lm_head.out_proj.weight.clone()
    model.load_state_dict(lender.state_dict())
    assert "no head for answers" in caplog.text
    caplog.clear()
    assert torch.equal(model.encoder.lm_head.out_proj.weight, head)
    layer = "encoder.sentence_encoder.layers.0.fc1.weight"
    assert torch.equal(model.state_dict()[layer], lender.state_dict()[layer])
    fresh = model_of(prepared, arch)
    fresh.encoder.lm_head.out_proj.weight.data.zero_()
    fresh.load_state_dict(model.state_dict())
    assert "no head for answers" not in caplog.text
    assert torch.equal(fresh.encoder.lm_head.out_proj.weight, head)
    criterion = SquadCriterion(prepared).train()
    criterion(model, batch(prepared, [0, 20]))[0].backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    evaluated = prepared.build_model(
        Namespace(arch=arch, max_positions=64, **SIZES, **DROPOUT), from_checkpoint=True
    )
    with pytest.raises(OptionError, match="--path: the model has no head for answers"):
        evaluated.load_state_dict(lender.state_dict())


def test_a_diverged_model_gives_answers_that_are_wrong_instead_of_an_error(prepared):
    sample = batch(prepared, range(3))
    answers = prepared.decode(sample, torch.full((*sample["starts"].shape, 2), math.nan))
    prepared._answers.clear()
    assert answers[:, 1:].tolist() == [[0, 0, -math.inf]] * 3
