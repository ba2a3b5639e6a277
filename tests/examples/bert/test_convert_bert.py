"""The published BERT is converted and converted back.

`transformers` judges, without any download.
"""

import copy
import shutil

import pytest
import torch
from bert import convert_bert
from bert.model import NEXT_SENTENCE
from fairseq import checkpoint_utils

from mixhead_plugin.fairseq.attention import MixheadAttention
from tests.helpers import shake

transformers = pytest.importorskip("transformers")
hf = pytest.importorskip("mixhead_plugin.hf")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # fairseq's hydra warns

# The special words stand where BERT has them, among words that are never used.
WORDS = "[PAD] [unused0] [UNK] [CLS] [SEP] [MASK] [unused1] the ##s a # é 1 cat".split()
SIZES = dict(
    vocab_size=len(WORDS),
    hidden_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=40,
)
SIZES |= dict(max_position_embeddings=20)
TOLERANCE = dict(rtol=1e-5, atol=1e-5)


def shaken(model, seed=0):
    """Move biases and layer norms away from 0 and 1, which would hide a mistake."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def theirs(kind="BertForPreTraining", **config):
    torch.manual_seed(0)
    return shaken(getattr(transformers, kind)(transformers.BertConfig(**{**SIZES, **config})))


def write(model, folder, words=WORDS, **save):
    model.save_pretrained(folder, **save)
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    return folder


def convert(*arguments):
    return convert_bert.main([str(argument) for argument in arguments])


def ours(folder):
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(folder / "model.pt")])
    return model.eval(), task


def sentences():
    """Return two pairs of their words, with token types and attention mask.

    The second one is padded.
    """
    rows = [[3, 7, 8, 13, 4, 9, 5, 11, 4], [3, 12, 4, 10, 4, 0, 0, 0, 0]]
    types = [[0, 0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 0, 0, 0, 0]]
    ids = torch.tensor(rows)
    return ids, torch.tensor(types), ids.ne(0).long()


def our_indices(ids, task):
    symbols = [convert_bert.SPECIAL.get(WORDS[i], WORDS[i]) for i in ids.flatten().tolist()]
    return torch.tensor([task.source_dictionary.index(symbol) for symbol in symbols]).view_as(ids)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """Return a BERT of theirs, and the folder with it and its conversion."""
    model = theirs()
    folder = tmp_path_factory.mktemp("bert")
    write(model, folder / "theirs")
    assert convert("to-fairseq", folder / "theirs", folder / "ours") == 0
    return model, folder


@torch.no_grad()
def test_every_state_and_every_logit_is_theirs(pretrained):
    model, folder = pretrained
    converted, task = ours(folder / "ours")
    ids, types, real = sentences()
    expected = model(
        input_ids=ids, token_type_ids=types, attention_mask=real, output_hidden_states=True
    )
    tokens = our_indices(ids, task)
    states, extra = converted(tokens, features_only=True, return_all_hiddens=True, segments=types)
    assert len(extra["inner_states"]) == len(expected.hidden_states) == 4
    for state, hidden in zip(extra["inner_states"], expected.hidden_states):
        torch.testing.assert_close(
            state.transpose(0, 1)[real.bool()], hidden[real.bool()], **TOLERANCE
        )
    torch.testing.assert_close(
        converted.pooler(states), model.bert(ids, real, types).pooler_output, **TOLERANCE
    )
    logits, extra = converted(tokens, beside=NEXT_SENTENCE)  # token types are inferred
    torch.testing.assert_close(extra["beside"], expected.seq_relationship_logits, **TOLERANCE)
    order = our_indices(torch.arange(len(WORDS)), task)
    torch.testing.assert_close(
        logits[real.bool()][:, order], expected.prediction_logits[real.bool()], **TOLERANCE
    )


def test_there_and_back_is_the_same_model(pretrained, tmp_path):
    model, folder = pretrained
    assert convert("to-huggingface", folder / "ours" / "model.pt", tmp_path / "back") == 0
    back = transformers.BertForPreTraining.from_pretrained(tmp_path / "back")
    words = (tmp_path / "back" / "vocab.txt").read_text(encoding="utf-8").split()
    assert words == WORDS
    torch.testing.assert_close(back.state_dict(), model.state_dict(), rtol=0, atol=0)
    for name in (*SIZES, "layer_norm_eps", "hidden_act", "attention_probs_dropout_prob"):
        assert getattr(back.config, name) == getattr(model.config, name)
    assert back.config.pad_token_id == words.index("[PAD]")


def test_old_names_and_files_go_in(pretrained, tmp_path):
    """Convert pytorch_model.bin with gamma and beta.

    The bias of the words has its other name, too.
    """
    folder = shutil.copytree(pretrained[1] / "theirs", tmp_path / "theirs")
    (folder / "model.safetensors").unlink()
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    old |= {"cls.predictions.bias": "cls.predictions.decoder.bias"}
    state = {}
    for name, tensor in pretrained[0].state_dict().items():
        for new, other in old.items():
            name = name.replace(new, other)
        state[name] = tensor
    assert sum(name.endswith(".gamma") for name in state) == 2 + 3 * 2
    torch.save(state, folder / "pytorch_model.bin")
    assert convert("to-fairseq", folder, tmp_path / "ours") == 0
    found, expected = (
        torch.load(at / "ours" / "model.pt")["model"] for at in (tmp_path, pretrained[1])
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_classifier_goes_there_and_back(tmp_path):
    model = theirs(
        "BertForSequenceClassification", num_labels=3, hidden_act="relu", classifier_dropout=0.3
    )
    folder = write(model, tmp_path / "theirs")
    assert convert("to-fairseq", folder, tmp_path / "ours") == 0
    state = torch.load(tmp_path / "ours" / "model.pt", weights_only=True)
    head = "classification_heads.sentence_classification_head.out_proj.weight"
    torch.testing.assert_close(state["model"][head], model.classifier.weight)
    assert convert("to-huggingface", tmp_path / "ours" / "model.pt", tmp_path / "back") == 0
    back = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "back")
    torch.testing.assert_close(back.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert (back.config.hidden_act, back.config.classifier_dropout, back.config.num_labels) == (
        "relu",
        0.3,
        3,
    )


@torch.no_grad()
def test_one_conversion_goes_into_every_mixing_starts_as_bert_and_goes_on_as_in_transformers(
    pretrained, tmp_path
):
    model, folder = pretrained
    flags = [
        "--arch=l2_bert_base",
        "--attention-normalizer=softmax",
        "--head-mixing=position-independent",
    ]
    assert convert("to-fairseq", folder / "theirs", tmp_path, *flags) == 0
    ids, types, real = sentences()
    expected = model.bert(ids, real, types)[0][real.bool()]
    for mixing in ("none", "position-independent", "position-wise"):
        overrides = {"head_mixing": mixing}
        (converted,), _, task = checkpoint_utils.load_model_ensemble_and_task(
            [str(tmp_path / "model.pt")], overrides
        )
        attentions = [m for m in converted.modules() if isinstance(m, MixheadAttention)]
        assert {attention.variant.head_mixing for attention in attentions} == {mixing}
        found = converted.eval()(our_indices(ids, task), features_only=True)[0]
        torch.testing.assert_close(found[real.bool()], expected, **TOLERANCE)
        mixed = hf.mix(copy.deepcopy(model), mixing)
        own, theirs = (
            [p for name, p in m.named_parameters() if "mixing." in name]
            for m in (shake(converted), mixed)
        )
        for parameter, value in zip(theirs, own, strict=True):
            parameter.copy_(value)
        found = converted(our_indices(ids, task), features_only=True)[0][real.bool()]
        torch.testing.assert_close(found, mixed.bert(ids, real, types)[0][real.bool()], **TOLERANCE)


def test_gains_of_distances_are_left_out_because_they_start_as_bert(pretrained, tmp_path):
    flags = ["--head-mixing=none", "--relative-gain=4"]
    assert convert("to-fairseq", pretrained[1] / "theirs", tmp_path, *flags) == 0
    saved = torch.load(tmp_path / "model.pt", weights_only=True)["model"]
    plain = torch.load(pretrained[1] / "ours" / "model.pt", weights_only=True)["model"]
    torch.testing.assert_close(dict(saved), dict(plain), rtol=0, atol=0)


class Code:
    def __reduce__(self):
        return print, ("run",)


def test_code_or_a_changed_byte_in_a_file_of_tensors_is_refused(pretrained, tmp_path, capsys):
    folder = shutil.copytree(pretrained[1] / "theirs", tmp_path / "theirs")
    (folder / "model.safetensors").unlink()
    path = folder / "pytorch_model.bin"
    for content, reason in (
        ({"weight": Code()}, "only tensors"),
        ({"weight": torch.full((2,), 10.0)}, "has changed"),
    ):
        torch.save(content, path)
        path.write_bytes(
            path.read_bytes().replace(b"\x00\x00\x20\x41" * 2, b"\x00\x00\x20\x42" * 2)
        )
        assert convert("to-fairseq", folder, tmp_path / "ours") == 1
        said = capsys.readouterr()
        assert said.err.count("\n") == 1 and reason in said.err and "run" not in said.out.split()
        assert not (tmp_path / "ours" / "model.pt").exists()


def test_a_trained_mixing_does_not_go_to_transformers(pretrained, tmp_path, capsys):
    source = pretrained[1] / "ours"
    state = torch.load(source / "model.pt", weights_only=True)
    state["model"][f"{convert_bert.ENCODER}layers.0.self_attn.head_mixing.bias"] = torch.ones(4, 4)
    torch.save(state, tmp_path / "model.pt")
    assert (
        convert(
            "to-huggingface",
            tmp_path / "model.pt",
            tmp_path / "back",
            f"--dict={source / 'dict.txt'}",
        )
        == 1
    )
    assert "--head-mixing position-wise" in capsys.readouterr().err
    assert not (tmp_path / "back").exists()
