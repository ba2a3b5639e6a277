"""Test the scores of a model: loss, accuracy and BLEU."""

import math
from argparse import ArgumentParser, Namespace
from types import SimpleNamespace

import pytest
import torch

from mixhead_plugin.analysis import scores
from mixhead_plugin.analysis.loading import batches, load
from tests.criterions import cases


def flags(*arguments):
    parser = ArgumentParser()
    scores.add_arguments(parser)
    return parser.parse_args(list(map(str, arguments)))


def test_the_loss_is_the_mean_over_all_tokens_in_bits_and_not_rounded(fairseq_lm_checkpoint):
    loaded = load(fairseq_lm_checkpoint)
    samples = list(batches(loaded, batch_size=3))
    assert len({len(sample["id"]) for sample in samples}) == 2  # a mean over batches would be another number
    nats, tokens = 0.0, 0
    for sample in samples:
        with torch.no_grad():
            likelihoods = loaded.model(**sample["net_input"])[0].log_softmax(-1)
        real = sample["target"].ne(loaded.task.target_dictionary.pad())
        nats -= float(likelihoods.gather(2, sample["target"][..., None])[..., 0][real].sum())
        tokens += int(real.sum())
    found = scores.score(loaded, samples, flags(), ["loss"])
    assert found == pytest.approx({"loss": nats / tokens / math.log(2)}, rel=1e-6)


def test_accuracy_is_the_share_of_sentences_that_are_right():
    model, criterion = cases.model("sentence_prediction").eval(), cases.criterion("sentence_prediction").eval()
    samples, right = [cases.sentence_batch(), cases.sentence_batch()], 0
    for sample in samples:
        head = {"features_only": True, "classification_head_name": "sentence_classification_head"}
        right += int((model(**sample["net_input"], **head)[0].argmax(1) == sample["target"][:, 0]).sum())
    loaded = SimpleNamespace(model=model, criterion=criterion)
    found = scores.score(loaded, samples, flags(), ["loss", "accuracy"])
    assert found["accuracy"] == pytest.approx(100 * right / 6)
    assert found["loss"] > 0


def test_bleu_of_a_batch_is_what_fairseq_s_eval_bleu_finds(fairseq_translation_checkpoint):
    loaded = load(fairseq_translation_checkpoint)
    (sample,) = batches(loaded, limit=1, batch_size=4)
    args = flags("--beam", 2, "--max-len-b", 12, "--bleu-tokenize", "none")
    loaded.task.tokenizer = None
    loaded.task.cfg.eval_tokenized_bleu = True
    generator = loaded.task.build_generator([loaded.model], scores.generation_flags(loaded, args))
    expected = loaded.task._inference_with_bleu(generator, sample, loaded.model)
    assert expected.precisions[0] > 0
    assert scores.bleu(loaded, [sample], args) == pytest.approx(expected.score)


def test_translations_are_those_of_the_training_s_eval_bleu_unless_flags_say_otherwise():
    def loaded(**task):
        return SimpleNamespace(cfg=SimpleNamespace(task=Namespace(**task)))

    assert vars(scores.generation_flags(loaded(), flags())) == {"beam": 5}
    trained = loaded(eval_bleu_args='{"beam": 4, "max_len_a": 1.2, "max_len_b": 10}')
    assert vars(scores.generation_flags(trained, flags())) == {"beam": 4, "max_len_a": 1.2, "max_len_b": 10}
    found = vars(scores.generation_flags(trained, flags("--beam", 2, "--lenpen", 0, "--max-len-a", 0)))
    assert found == {"beam": 2, "lenpen": 0, "max_len_a": 0, "max_len_b": 10}
