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

BOS = 0
PAD = 1
EOS = 2
PAIRS = torch.tensor([[BOS, 5, 6, EOS, 7, 8, 9, EOS], [BOS, 10, EOS, 11, EOS, PAD, PAD, PAD]])
LENGTH = 24


def vocabulary(size=4000):
    words = Dictionary()
    for i in range(size):
        words.add_symbol(f"w{i}")
    return words


def documents(number=40, seed=0):
    """Return lines of words that are all different, so that a word tells its place.

    Empty lines end documents.
    """
    rng = random.Random(seed)
    lines = []
    word = 4
    for _ in range(number):
        for _ in range(rng.choice([1, 2, 5, 9])):
            length = rng.choice([1, 3, 6, 30])
            lines.append([*range(word, word + length), EOS])
            word += length
        lines.append([EOS])
    return lines


def dataset(lines=None, length=LENGTH, seed=1, **flags):
    if lines is None:
        lines = documents()
    words = vocabulary()
    masking = flags.pop("masking", Masking(words.add_symbol("<mask>")))
    tensors = [torch.tensor(line) for line in lines]
    lengths = [len(line) for line in lines]
    return SentencePairs(tensors, lengths, words, length, masking, seed, **flags)


def whole(item):
    """Return the tokens of a pair before masking, A and B."""
    tokens = torch.where(item["target"].ne(PAD), item["target"], item["tokens"]).tolist()
    assert tokens[0] == BOS
    assert tokens[-1] == EOS
    assert tokens.count(EOS) == 2
    middle = tokens.index(EOS)
    return tokens[1:middle], tokens[middle + 1 : -1]


def sites(lines):
    """Return the document of each word."""
    found = {}
    document = 0
    for line in lines:
        if line == [EOS]:
            document += 1
        found |= dict.fromkeys(line[:-1], document)
    return found


def test_spans_cover_every_word_once_and_stay_within_a_document():
    lines = documents()
    found = dataset(lines, masking=Masking(4004, keep=1.0, replace=0.0), short_probability=0.3)
    seen = []
    for index in range(len(found)):
        start = found.span_start[index]
        stop = found.span_stop[index]
        seen += found._tokens(start, stop).tolist()
        assert found.unit_length[start:stop].sum() + 3 <= found.sizes[index] <= LENGTH
    assert seen == [word for line in lines for word in line[:-1]]


def test_half_of_the_pairs_go_on_and_the_others_come_from_elsewhere():
    lines = documents(250)
    document = sites(lines)
    found = dataset(lines)
    last = {line[-2] for line, after in pairwise(lines) if after == [EOS]}
    relations = []
    for index in range(len(found)):
        item = found[index]
        a, b = whole(item)
        assert len(a) + len(b) + 3 == len(item["tokens"]) <= found.sizes[index]
        for segment in (a, b):
            assert segment == list(range(segment[0], segment[0] + len(segment)))
            assert len({document[word] for word in segment}) == 1
        if item["relation"] == FOLLOWS:
            assert b[0] == a[-1] + 1
            assert document[b[0]] == document[a[0]]
        else:
            assert document[b[0]] != document[a[0]]
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
    """Use sentences with full stops.

    They are in documents of many spans and in documents of a few sentences.
    """
    rng = random.Random(0)
    lines = []
    stop = 5
    length = 64
    for _ in range(32000 // (longest_document * 24)):
        for _ in range(rng.randint(2, longest_document)):
            words = rng.choices(range(6, 4000), k=rng.randint(3, 28))
            lines.append([*words, stop, EOS])
        lines.append([EOS])
    found = dataset(lines, length=length)
    lengths = {FOLLOWS: [], RANDOM: []}
    stops = {FOLLOWS: [], RANDOM: []}
    for epoch in range(1, 1 + math.ceil(3000 / len(found))):
        found.set_epoch(epoch)
        for index in range(len(found)):
            item = found[index]
            _, b = whole(item)
            lengths[item["relation"]].append(len(b))
            stops[item["relation"]].append(b[-1] == stop)
    # The best rule of one threshold is right in half of 1 + this difference.
    shares = {}  # of the B that are shorter than each length
    for kind, some in lengths.items():
        shares[kind] = np.searchsorted(np.sort(some), np.arange(length)) / len(some)
        assert np.mean(stops[kind]) < 0.01
        assert np.mean(some) > length / 6
    assert np.abs(shares[FOLLOWS] - shares[RANDOM]).max() < 0.1


def test_masking_is_that_of_bert():
    mask = 4004  # the index of <mask>
    found = dataset(3 * documents(300), length=128)
    masked = 0
    kept = 0
    total = 0
    for index in range(len(found)):
        item = found[index]
        chosen = item["target"].ne(PAD)
        special = item["tokens"].eq(BOS) | item["tokens"].eq(EOS)
        assert not (chosen & special).any()
        assert chosen.sum() == max(1, round(0.15 * len(item["tokens"])))
        seen = item["tokens"][chosen]
        hidden = item["target"][chosen]
        assert seen[seen.ne(mask)].ge(4).all()
        masked += int(seen.eq(mask).sum())
        kept += int(seen.eq(hidden).sum())
        total += len(hidden)
    assert total > 4000
    assert round(masked / total, 1) == 0.8
    assert round(kept / total, 1) == 0.1
    assert round((total - masked - kept) / total, 1) == 0.1  # a random word stands there


def share_of_equals(some, others):
    """Return the share of the items of two lists that are equal, place by place."""
    equal = 0
    for one, other in zip(some, others):
        if all(torch.equal(one[name], other[name]) for name in ("tokens", "target", "segments")):
            equal += 1
    return equal / len(some)


def test_pairs_depend_on_seed_epoch_and_number_alone():
    found = dataset()
    numbers = range(len(found))
    first = [found[i] for i in numbers]

    again = dataset()
    backwards = [again[i] for i in reversed(numbers)]
    assert share_of_equals(first, backwards[::-1]) == 1

    found.set_epoch(2)
    assert share_of_equals(first, [found[i] for i in numbers]) < 0.1
    found.set_epoch(1)
    assert share_of_equals(first, [found[i] for i in numbers]) == 1

    other = dataset(seed=2)
    assert share_of_equals(first, [other[i] for i in range(len(other))]) < 0.1


@pytest.mark.slow
@in_own_process
def test_workers_hear_of_the_epoch():
    """Ask the task for batches in every epoch, as fairseq's training does."""
    lines = documents(20)

    def two_epochs(workers):
        task = BertPretrainingTask(BertPretrainingConfig(data=""), vocabulary())
        found = dataset(lines)
        seen = []
        for epoch in (1, 2):
            batches = task.get_batch_iterator(
                found, max_sentences=8, seed=1, num_workers=workers, epoch=epoch
            )
            for batch in batches.next_epoch_itr():
                seen.append(batch["net_input"]["src_tokens"].tolist())
        return seen

    assert two_epochs(workers=0) == two_epochs(workers=1)


def test_the_loss_is_that_of_the_words_and_of_the_relation_weighted_by_masked_words():
    model = build("mixhead_bert_base", pooler_dropout=0.0).eval()
    model.register_classification_head(NEXT_SENTENCE, num_classes=2)
    target = torch.full_like(PAIRS, PAD)
    target[0, 2] = 6
    target[0, 5] = 8
    target[1, 1] = 10
    relations = torch.tensor([FOLLOWS, RANDOM])
    sample = {"net_input": {"src_tokens": PAIRS}, "target": target, "next_sentence": relations}
    criterion = BertPretrainingCriterion(SimpleNamespace(target_dictionary=vocabulary()))
    loss, size, log = criterion(model, {**sample, "ntokens": 13, "nsentences": 2})
    words, extra = model(PAIRS, beside=NEXT_SENTENCE)
    logarithms = extra["beside"].log_softmax(1)
    word_loss = F.cross_entropy(words[target.ne(PAD)], target[target.ne(PAD)], reduction="sum")
    torch.testing.assert_close(loss, word_loss - 2 * logarithms[0, FOLLOWS] - logarithms[1, RANDOM])
    torch.testing.assert_close(log["nsp_loss"], -logarithms[0, FOLLOWS] - logarithms[1, RANDOM])
    assert size == 3
    assert log["nsp_correct"] == logarithms.argmax(1).eq(relations).sum()


def test_text_of_one_document_is_refused(tmp_path):
    (tmp_path / "train").write_text("the farm1 and the farm2\n" * 9)
    folder = str(preprocess({"train": tmp_path / "train"}, tmp_path / "bin", "--only-source"))
    task = BertPretrainingTask.setup_task(BertPretrainingConfig(data=folder, seed=1))
    told = r"has 1 documents, random segments need two; .* --lines-per-document"
    with pytest.raises(OptionError, match=told):
        task.load_dataset("train")
    task.cfg.lines_per_document = 3
    task.load_dataset("train")
