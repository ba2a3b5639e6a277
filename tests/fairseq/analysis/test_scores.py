"""Test the scores of a model: loss, accuracy and BLEU."""

import math
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from fairseq.data import encoders

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.analysis import scores
from mixhead_plugin.fairseq.analysis.loading import batches, load
from tests.commands import SIZES
from tests.fairseq.criterions import cases


def test_the_loss_is_the_mean_over_all_tokens_in_bits_and_not_rounded(fairseq_lm_checkpoint):
    loaded = load(fairseq_lm_checkpoint)
    samples = list(batches(loaded, batch_size=3))
    # a mean over batches would be another number
    assert len({len(sample["id"]) for sample in samples}) == 2
    nats = 0.0
    tokens = 0
    for sample in samples:
        with torch.no_grad():
            likelihoods = loaded.model(**sample["net_input"])[0].log_softmax(-1)
        real = sample["target"].ne(loaded.task.target_dictionary.pad())
        nats -= float(likelihoods.gather(2, sample["target"][..., None])[..., 0][real].sum())
        tokens += int(real.sum())
    found = scores.score(loaded, samples, ["loss"])
    assert found == pytest.approx({"loss": nats / tokens / math.log(2)}, rel=1e-6)


def test_accuracy_is_the_share_of_sentences_that_are_right():
    model = cases.model("sentence_prediction").eval()
    criterion = cases.criterion("sentence_prediction").eval()
    samples = [cases.sentence_batch(), cases.sentence_batch()]
    right = 0
    for sample in samples:
        head = {"features_only": True, "classification_head_name": "sentence_classification_head"}
        right += int(
            (model(**sample["net_input"], **head)[0].argmax(1) == sample["target"][:, 0]).sum()
        )
    loaded = SimpleNamespace(model=model, criterion=criterion)
    found = scores.score(loaded, samples, ["loss", "accuracy"])
    assert found["accuracy"] == pytest.approx(100 * right / 6)
    assert found["loss"] > 0


@pytest.mark.parametrize("detokenizer", ["space", "moses"])
def test_bleu_of_a_batch_is_what_fairseq_s_eval_bleu_finds(
    detokenizer, fairseq_translation_checkpoint
):
    loaded = load(fairseq_translation_checkpoint)
    (sample,) = batches(loaded, limit=1, batch_size=4)
    task = loaded.task
    # every second word is a comma, which moses writes without a blank before it
    for number in range(task.target_dictionary.nspecial, len(task.target_dictionary), 2):
        task.target_dictionary.symbols[number] = ","
    task.cfg.eval_tokenized_bleu = True
    loaded.cfg.task.eval_tokenized_bleu = True
    task.tokenizer = encoders.build_tokenizer(Namespace(tokenizer=detokenizer))
    loaded.cfg.task.eval_bleu_detok = detokenizer
    loaded.cfg.task.eval_bleu_args = '{"beam": 2, "max_len_b": 12}'
    generator = task.build_generator([loaded.model], Namespace(beam=2, max_len_b=12))
    expected = task._inference_with_bleu(generator, sample, loaded.model)
    assert expected.precisions[0] > 0
    assert scores.bleu(loaded, [sample]) == pytest.approx(expected.score)


def test_bleu_of_several_languages_is_refused(write_checkpoint, translation_data):
    task = "translation_multi_simple_epoch"
    flags = ["--task", task, "--lang-pairs", "de-en", "--decoder-langtok"]
    path = write_checkpoint("several", translation_data, "mixhead_transformer", *SIZES, *flags)
    expected = f"^--metric bleu: --task {task} translates into several languages; must be loss$"
    with pytest.raises(OptionError, match=expected):
        scores.bleu(load(path, cpu=True), [])


def test_a_detokenizer_that_fairseq_lacks_is_refused(fairseq_translation_checkpoint):
    loaded = load(fairseq_translation_checkpoint, overrides={"eval_bleu_detok": "mozes"})
    with pytest.raises(OptionError, match=r"^--eval-bleu-detok mozes: must be one of moses, .*spa"):
        scores.bleu(loaded, [])
