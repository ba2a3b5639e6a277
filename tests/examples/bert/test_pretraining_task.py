"""BERT's pre-training task makes the pairs and masks of the paper, in a reproducible order."""

import math
import random
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from bert.criterions import BertPretrainingCriterion
from bert.model import NEXT_SENTENCE, infer_segments
from bert.pretraining_task import BertPretrainingConfig, BertPretrainingTask
from bert.sentence_pairs import FOLLOWS, RANDOM, Masking, SentencePairs
from fairseq.data import Dictionary

from mixhead_plugin.errors import OptionError
from tests.commands import preprocess
from tests.helpers import build
from tests.own_process import in_own_process

BOS, PAD, EOS = 0, 1, 2
PAIRS = torch.tensor([[BOS, 5, 6, EOS, 7, 8, 9, EOS], [BOS, 10, EOS, 11, EOS, PAD, PAD, PAD]])
LENGTH = 24


def vocabulary(size=4000):
    words = Dictionary()
    for i in range(size):
        words.add_symbol(f"w{i}")
    return words


def documents(number=40, seed=0):
    """Return lines of words that are all different, so that a word tells its place; empty lines end
    documents.
    """
    rng, lines, word = random.Random(seed), [], 4
    for _ in range(number):
        for _ in range(rng.choice([1, 2, 5, 9])):
            length = rng.choice([1, 3, 6, 30])
            lines.append([*range(word, word + length), EOS])
            word += length
        lines.append([EOS])
    return lines


def dataset(lines=None, length=LENGTH, seed=1, **flags):
    lines = [torch.tensor(line) for line in (documents() if lines is None else lines)]
    words = vocabulary()
    masking = flags.pop("masking", Masking(words.add_symbol("<mask>")))
    return SentencePairs(
        lines, [len(line) for line in lines], words, length, masking, seed, **flags
    )


def whole(item):
    """Return the tokens of a pair before masking, A and B."""
    tokens = torch.where(item["target"].ne(PAD), item["target"], item["tokens"]).tolist()
    assert tokens[0] == BOS and tokens[-1] == EOS and tokens.count(EOS) == 2
    middle = tokens.index(EOS)
    return tokens[1:middle], tokens[middle + 1 : -1]


def sites(lines):
    """Return the document of each word."""
    found, document = {}, 0
    for line in lines:
        document += len(line) == 1
        found |= dict.fromkeys(line[:-1], document)
    return found


def test_spans_cover_every_word_once_and_stay_within_a_document():
    lines = documents()
    found = dataset(lines, masking=Masking(4004, keep=1.0, replace=0.0), short_probability=0.3)
    seen = []
    for index in range(len(found)):
        start, stop = found.span_start[index], found.span_stop[index]
        seen += found._tokens(start, stop).tolist()
        assert found.unit_length[start:stop].sum() + 3 <= found.sizes[index] <= LENGTH
    assert seen == [word for line in lines for word in line[:-1]]


def test_half_of_the_pairs_go_on_and_the_others_come_from_elsewhere():
    lines = documents(250)
    document, found = sites(lines), dataset(lines)
    last = {line[-2] for line, after in pairwise(lines) if len(after) == 1}
    relations = []
    for index in range(len(found)):
        item = found[index]
        a, b = whole(item)
        assert a and b and len(a) + len(b) + 3 == len(item["tokens"]) <= found.sizes[index]
        # words stand in order
        assert a == list(range(a[0], a[0] + len(a))) and b == list(range(b[0], b[0] + len(b)))
        assert (document[a[0]] == document[b[0]]) == (item["relation"] == FOLLOWS)
        assert item["relation"] == RANDOM or b[0] == a[-1] + 1
        assert len({document[word] for word in a}) == len({document[word] for word in b}) == 1
        expected = infer_segments(item["tokens"][None], EOS, PAD)[0]
        assert torch.equal(item["segments"], expected)
        if a[-1] in last:  # nothing follows
            assert item["relation"] == RANDOM
        else:
            relations.append(item["relation"])
    assert len(relations) > 500
    assert abs(np.mean(np.array(relations) == RANDOM) - 0.5) < 0.06


@pytest.mark.parametrize("longest_document", [40, pytest.param(6, marks=pytest.mark.slow)])
def test_neither_length_nor_ending_tells_whether_b_follows(longest_document):
    """Use sentences with full stops, in documents of many spans and in documents of a few
    sentences.
    """
    rng, lines, stop, length = random.Random(0), [], 5, 64
    for _ in range(32000 // (longest_document * 24)):
        for _ in range(rng.randint(2, longest_document)):
            lines.append([*rng.choices(range(6, 4000), k=rng.randint(3, 28)), stop, EOS])
        lines.append([EOS])
    found = dataset(lines, length=length)
    lengths, stops = {FOLLOWS: [], RANDOM: []}, {FOLLOWS: [], RANDOM: []}
    for epoch in range(1, 1 + math.ceil(3000 / len(found))):
        found.set_epoch(epoch)
        for index in range(len(found)):
            item = found[index]
            _, b = whole(item)
            lengths[item["relation"]].append(len(b))
            stops[item["relation"]].append(b[-1] == stop)
    # The best rule of one threshold is right in half of 1 + this difference.
    grid = np.arange(length)
    shares = [
        np.searchsorted(np.sort(lengths[kind]), grid) / len(lengths[kind])
        for kind in (FOLLOWS, RANDOM)
    ]
    assert np.abs(shares[0] - shares[1]).max() < 0.1
    assert max(np.mean(stops[kind]) for kind in stops) < 0.01
    assert min(np.mean(lengths[kind]) for kind in lengths) > length / 6


def test_masking_is_that_of_bert():
    lines = [line for _ in range(3) for line in documents(300)]
    found = dataset(lines, length=128)
    masked = kept = replaced = total = 0
    for index in range(len(found)):
        item = found[index]
        chosen = item["target"].ne(PAD)
        assert not (chosen & (item["tokens"].eq(BOS) | item["tokens"].eq(EOS))).any()
        assert chosen.sum() == max(1, round(0.15 * len(item["tokens"])))
        seen, hidden = item["tokens"][chosen], item["target"][chosen]
        masked += seen.eq(4004).sum().item()
        kept += seen.eq(hidden).sum().item()
        replaced += (seen.ne(4004) & seen.ne(hidden)).sum().item()
        total += len(hidden)
        assert seen[seen.ne(4004)].ge(4).all()
    assert total > 4000
    assert [round(n / total, 1) for n in (masked, kept, replaced)] == [0.8, 0.1, 0.1]


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in ("tokens", "target", "segments"))


def test_pairs_depend_on_seed_epoch_and_number_alone():
    found, again = dataset(), dataset()
    forwards = [found[i] for i in range(len(found))]
    backwards = [again[i] for i in reversed(range(len(again)))][::-1]
    assert all(same(a, b) for a, b in zip(forwards, backwards, strict=True))
    found.set_epoch(2)
    second = [found[i] for i in range(len(found))]
    assert sum(same(a, b) for a, b in zip(forwards, second, strict=True)) < 0.1 * len(found)
    found.set_epoch(1)
    assert all(same(a, found[i]) for i, a in enumerate(forwards))
    other = dataset(seed=2)
    assert sum(same(other[i], forwards[i]) for i in range(min(len(other), len(found)))) < 0.1 * len(
        found
    )


@pytest.mark.slow
@in_own_process
def test_workers_hear_of_the_epoch():
    """Ask the task for batches in every epoch, as fairseq's training does."""
    lines, seen = documents(20), {}
    for workers in (0, 1):
        task, found = (
            BertPretrainingTask(BertPretrainingConfig(data=""), vocabulary()),
            dataset(lines),
        )
        for epoch in (1, 2):
            batches = task.get_batch_iterator(
                found, max_sentences=8, seed=1, num_workers=workers, epoch=epoch
            )
            seen[workers, epoch] = [
                batch["net_input"]["src_tokens"].tolist() for batch in batches.next_epoch_itr()
            ]
    assert seen[0, 1] == seen[1, 1] and seen[0, 2] == seen[1, 2]


def test_the_loss_is_that_of_the_words_and_of_the_relation_weighted_by_masked_words():
    model = build("mixhead_bert_base", pooler_dropout=0.0).eval()
    model.register_classification_head(NEXT_SENTENCE, num_classes=2)
    target = torch.full_like(PAIRS, PAD)
    target[0, 2], target[0, 5], target[1, 1] = 6, 8, 10
    relations = torch.tensor([FOLLOWS, RANDOM])
    sample = {"net_input": {"src_tokens": PAIRS}, "target": target, "next_sentence": relations}
    criterion = BertPretrainingCriterion(SimpleNamespace(target_dictionary=vocabulary()))
    loss, size, log = criterion(model, {**sample, "ntokens": 13, "nsentences": 2})
    words, extra = model(PAIRS, beside=NEXT_SENTENCE)
    logarithms = extra["beside"].log_softmax(1)
    word_loss = F.cross_entropy(words[target.ne(PAD)], target[target.ne(PAD)], reduction="sum")
    torch.testing.assert_close(loss, word_loss - 2 * logarithms[0, FOLLOWS] - logarithms[1, RANDOM])
    torch.testing.assert_close(log["nsp_loss"], -logarithms[0, FOLLOWS] - logarithms[1, RANDOM])
    assert size == 3 and log["nsp_correct"] == logarithms.argmax(1).eq(relations).sum()


def test_text_of_one_document_is_refused(tmp_path):
    (tmp_path / "train").write_text("the farm1 and the farm2\n" * 9)
    folder = str(preprocess({"train": tmp_path / "train"}, tmp_path / "bin", "--only-source"))
    task = BertPretrainingTask.setup_task(BertPretrainingConfig(data=folder, seed=1))
    with pytest.raises(
        OptionError, match=r"has 1 documents, random segments need two; .* --lines-per-document"
    ):
        task.load_dataset("train")
    task.cfg.lines_per_document = 3
    task.load_dataset("train")
