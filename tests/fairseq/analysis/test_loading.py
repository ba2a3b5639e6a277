"""Test that checkpoints of every kind load, and that other files are refused in one line."""

from argparse import Namespace
from pathlib import Path

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.modules import MultiheadAttention
from torch import nn

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.analysis.adapter import attentions_of
from mixhead_plugin.fairseq.analysis.loading import (
    _replace_fairseq_attention,
    batches,
    load,
    load_from,
)
from mixhead_plugin.fairseq.analysis.output import labels, name_of
from mixhead_plugin.fairseq.attention import MixheadAttention
from mixhead_plugin.heads.sites import Where, by_site, where
from mixhead_plugin.heads.views import watched
from tests.fairseq.repairs.test_checkpoint_files import Code

CHECKPOINTS = [
    "lm_checkpoint",
    "fairseq_lm_checkpoint",
    "translation_checkpoint",
    "fairseq_translation_checkpoint",
]


def first_batch(loaded):
    return next(iter(batches(loaded, batch_size=4)))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_outputs_are_those_of_the_model_that_fairseq_loads_and_every_attention_has_a_hook(
    name, request
):
    path = request.getfixturevalue(name)
    loaded = load(path, cpu=True)
    (own,), _, _ = checkpoint_utils.load_model_ensemble_and_task([path])
    net_input = first_batch(loaded)["net_input"]
    seen = []
    with watched(attentions_of(loaded.model), lambda attention, heads: seen.append(attention)):
        torch.testing.assert_close(loaded.model(**net_input)[0], own.eval()(**net_input)[0])
    assert not loaded.model.training
    modules = {attention.module for attention in seen}
    assert modules == {m for m in loaded.model.modules() if isinstance(m, MultiheadAttention)}
    assert all(isinstance(module, MixheadAttention) for module in modules)


@pytest.mark.parametrize("settings", [{"add_zero_attn": True}, {"add_bias_kv": True}], ids=list)
def test_an_attention_with_constant_keys_computes_what_fairseq_s_does(settings):
    model = nn.ModuleList([MultiheadAttention(8, 2, self_attention=True, **settings)]).eval()
    x = torch.randn(5, 3, 8)
    expected, _ = model[0](x, x, x)
    _replace_fairseq_attention("file.pt", model, "auto")
    assert isinstance(model[0], MixheadAttention)
    torch.testing.assert_close(model[0](x, x, x)[0], expected)


class Sparse(MultiheadAttention):
    """Another attention that inherits from fairseq's, as several of its own do."""


@pytest.mark.parametrize(
    "kind, by_xformers, problem",
    [
        (
            Sparse,
            False,
            "is of Sparse, whose heads cannot be studied; must be an attention of mixhead_plugin, "
            "or fairseq's MultiheadAttention",
        ),
        (
            MultiheadAttention,
            True,
            "is computed by xFormers, whose heads cannot be studied; must be trained without "
            "--decoder-xformers-att-config",
        ),
    ],
    ids=["subclass", "xFormers"],
)
def test_an_attention_that_may_compute_something_else_is_refused(kind, by_xformers, problem):
    model = nn.ModuleDict({"decoder": nn.ModuleDict({"self_attn": kind(8, 2)})})
    model.decoder.self_attn.use_xformers = by_xformers
    with pytest.raises(OptionError, match=rf"^file\.pt: decoder\.self_attn {problem}$"):
        _replace_fairseq_attention("file.pt", model, "auto")


def test_attentions_are_found_by_site_and_layer(translation_checkpoint, lm_checkpoint):
    def found(path):
        return by_site(each.name for each in attentions_of(load(path, cpu=True).model))

    assert found(translation_checkpoint) == {
        "encoder-self": [f"encoder.layers.{i}.self_attn" for i in range(2)],
        "decoder-self": [f"decoder.layers.{i}.self_attn" for i in range(2)],
        "cross": [f"decoder.layers.{i}.encoder_attn" for i in range(2)],
    }
    assert list(found(lm_checkpoint)) == ["decoder-self"]
    assert where("encoder.sentence_encoder.layers.11.self_attn") == Where("encoder-self", 11)
    assert str(Where("cross", 3)) == "cross 3"


def test_all_sentences_come_once(translation_checkpoint):
    loaded = load(translation_checkpoint, cpu=True)
    ids = [i for batch in batches(loaded, "test", batch_size=4) for i in batch["id"].tolist()]
    assert sorted(ids) == list(range(len(loaded.task.dataset("test"))))
    assert len(ids) % 8 != 0, "fairseq's multiple of 8 would not show"


def test_a_limit_draws_the_same_batches_each_time_and_not_the_shortest(translation_checkpoint):
    loaded = load(translation_checkpoint, cpu=True)

    def ids(**settings):
        return [batch["id"].tolist() for batch in batches(loaded, batch_size=2, **settings)]

    everything = ids()
    drawn = ids(limit=3)
    assert len(drawn) == 3
    assert drawn == ids(limit=3)
    assert drawn != everything[:3]
    assert all(batch in everything for batch in drawn)


def test_a_model_of_other_sizes_and_a_damaged_file_with_overrides_are_refused_in_one_line(
    lm_checkpoint, tmp_path
):
    with pytest.raises(
        OptionError,
        match=r"--model-overrides {'decoder_layers': 3}: .*: is of another model; .*: Missing key",
    ):
        load(lm_checkpoint, overrides={"decoder_layers": 3}, cpu=True)
    (tmp_path / "cut.pt").write_bytes(Path(lm_checkpoint).read_bytes()[:3000])
    with pytest.raises(OptionError, match=r"cut\.pt: is damaged"):
        load(str(tmp_path / "cut.pt"), overrides={"dropout": 0.1}, cpu=True)


def test_overrides_reach_the_model(fairseq_lm_checkpoint, lm_checkpoint, text_data):
    overrides = {"attention_impl": "reference", "dropout": 0.25}
    for path in (fairseq_lm_checkpoint, lm_checkpoint):
        loaded = load(path, data=str(text_data), overrides=overrides, cpu=True)
        assert {each.module.impl for each in attentions_of(loaded.model)} == {"reference"}
        assert loaded.model.decoder.dropout_module.p == 0.25


def test_a_checkpoint_of_old_form_loads(fairseq_translation_checkpoint, tmp_path):
    state = torch.load(fairseq_translation_checkpoint)
    cfg = state["cfg"]
    flags = {
        k: v
        for part in ("task", "optimization", "dataset", "common", "criterion")
        for k, v in cfg[part].items()
    }
    registered = {"task": "translation", "criterion": "cross_entropy", "optimizer": "adam"}
    state["args"] = Namespace(**{**flags, **vars(cfg["model"]), **registered})
    del state["args"]._name
    state["cfg"] = None
    torch.save(state, tmp_path / "old.pt")
    old = load(str(tmp_path / "old.pt"), cpu=True)
    new = load(fairseq_translation_checkpoint, cpu=True)
    net_input = first_batch(new)["net_input"]
    with torch.no_grad():
        assert torch.equal(old.model(**net_input)[0], new.model(**net_input)[0])
    assert (old.name, new.name) == ("old", "fairseq_translation")


@pytest.mark.parametrize("change", ["code", "missing"])
def test_what_is_no_checkpoint_is_refused_in_one_line(change, lm_checkpoint, analysis, tmp_path):
    file = tmp_path / "bad.pt"
    if change == "code":
        torch.save(
            {**torch.load(lm_checkpoint), "extra_state": {"x": Code(tmp_path / "was_here")}}, file
        )
    status, _, errors = analysis("mixing", file, "--output", tmp_path / "out")
    assert status == 1
    assert "error: " in errors and str(file) in errors and errors.count("\n") == 1
    assert not (tmp_path / "was_here").exists() and not (tmp_path / "out").exists()


@pytest.mark.parametrize("name, flag", [("task", "--task"), ("model", "--arch")])
def test_a_name_that_no_plugin_has_registered_asks_for_the_user_dir(
    name, flag, lm_checkpoint, tmp_path
):
    state = torch.load(lm_checkpoint)
    state["cfg"][name]["_name"] = "of_another_plugin"
    torch.save(state, tmp_path / "other.pt")
    with pytest.raises(OptionError) as error:
        load(str(tmp_path / "other.pt"), cpu=True)
    assert str(error.value) == (
        f"{tmp_path}/other.pt: {flag} of_another_plugin: unknown; must be a known name; "
        "does it need another --user-dir?"
    )


def test_an_old_checkpoint_of_another_plugin_asks_for_the_user_dir(fairseq_lm_checkpoint, tmp_path):
    state = torch.load(fairseq_lm_checkpoint)
    state["args"] = Namespace(task="language_modeling", arch="of_another_plugin", data="data")
    torch.save(state, tmp_path / "old.pt")
    with pytest.raises(
        OptionError, match=r"^--arch of_another_plugin: unknown; .*another --user-dir\?$"
    ):
        load(str(tmp_path / "old.pt"), cpu=True)


def test_a_batch_that_holds_no_sentence_is_refused_in_one_line(translation_checkpoint):
    with pytest.raises(
        OptionError, match=r"^--max-tokens 3: .*; must be at least the longest sentence of --subset"
    ):
        next(batches(load(translation_checkpoint, cpu=True), max_tokens=3))


def test_a_folder_without_the_languages_is_refused_in_one_line(translation_checkpoint, tmp_path):
    with pytest.raises(
        OptionError, match=rf"^--data {tmp_path}: \S+\.pt: Could not infer language pair"
    ):
        load(translation_checkpoint, data=str(tmp_path), cpu=True)


def test_a_folder_or_file_of_data_that_is_missing_is_refused_in_one_line(
    translation_checkpoint, lm_checkpoint, tmp_path
):
    with pytest.raises(OptionError, match=r"^--data /nowhere: /nowhere: no such file or folder$"):
        load(translation_checkpoint, data="/nowhere", cpu=True)
    with pytest.raises(
        OptionError, match=rf"^--data {tmp_path}: {tmp_path}/dict\.txt: no such file or folder$"
    ):
        load(lm_checkpoint, data=str(tmp_path), cpu=True)


def test_a_set_that_the_data_lack_is_refused_by_the_name_of_its_flag(translation_checkpoint):
    loaded = load(translation_checkpoint, cpu=True)
    with pytest.raises(OptionError, match=r"^--subset zzz: Dataset not found: zzz "):
        batches(loaded, "zzz")


def test_more_than_two_sets_are_refused(analysis, lm_checkpoint):
    for subset in ("valid,test,train", "valid,valid", "valid,"):
        status, _, errors = analysis("ablate", lm_checkpoint, "--subset", subset)
        message = f"--subset {subset}: must be one set, or two different ones"
        assert status == 1
        assert errors.endswith(f"error: {message}\n")


@pytest.mark.parametrize("command", ["ablate", "importance"])
def test_a_second_set_that_is_not_there_is_refused_before_the_first_is_read(
    command, analysis, lm_checkpoint
):
    status, out, errors = analysis(command, lm_checkpoint, "--subset", "valid,zzz")
    assert (status, out) == (1, "")
    assert "error: --subset zzz: Dataset not found: zzz " in errors


def test_a_plugin_that_is_missing_is_refused_by_the_name_of_its_flag(lm_checkpoint):
    args = Namespace(user_dir="/nowhere", data=None, model_overrides={}, cpu=True)
    with pytest.raises(OptionError, match=r"^--user-dir /nowhere: no such folder$"):
        load_from(args, lm_checkpoint)


def test_a_checkpoint_without_a_config_is_refused_in_one_line(lm_checkpoint, tmp_path):
    file = str(tmp_path / "tensors.pt")
    torch.save({**torch.load(lm_checkpoint), "cfg": None, "args": None}, file)
    with pytest.raises(OptionError) as error:
        load(file, cpu=True)
    expected = (
        f"{file}: has no config; must be a checkpoint that fairseq-train wrote, not its tensors "
        "alone"
    )
    assert str(error.value) == expected


def test_a_folder_in_place_of_a_checkpoint_is_not_called_a_wrong_label():
    assert labels(Namespace(labels=None), [name_of(".")]) == [""]
