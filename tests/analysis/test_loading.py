"""Checkpoints of every kind load as what they are; files that cannot be used are refused in one line."""

import pickle
import re
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.modules import MultiheadAttention

from mixhead_plugin.analysis import loading
from mixhead_plugin.analysis.attentions import Where, attentions, by_place, where
from mixhead_plugin.analysis.loading import batches, forward, load
from mixhead_plugin.errors import OptionError
from mixhead_plugin.modules.attention import MixheadAttention
from tests.commands import LM_SIZES, ROBERTA_SIZES

CHECKPOINTS = ["lm_checkpoint", "stock_lm_checkpoint", "translation_checkpoint", "stock_translation_checkpoint"]


def first_batch(loaded):
    return next(iter(batches(loaded, batch_size=4)))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_outputs_are_those_of_the_model_that_fairseq_loads(name, request):
    path = request.getfixturevalue(name)
    loaded = load(path, cpu=True)
    (own,), _, _ = checkpoint_utils.load_model_ensemble_and_task([path])
    own.eval()
    net_input = first_batch(loaded)["net_input"]
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(**net_input)[0], own(**net_input)[0])
    assert loaded.converted == name.startswith("stock")
    assert not loaded.model.training


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_attention_can_be_watched(name, request):
    loaded = load(request.getfixturevalue(name), cpu=True)
    all_of_them = [m for m in loaded.model.modules() if isinstance(m, MultiheadAttention)]
    assert list(attentions(loaded.model).values()) == all_of_them
    assert all(isinstance(m, MixheadAttention) for m in all_of_them)
    seen = []
    for module in all_of_them:
        module.hook = lambda attention, out, heads: seen.append(attention) or out
    with torch.no_grad():
        forward(loaded, first_batch(loaded)["net_input"])
    assert set(seen) == set(all_of_them)


def test_attentions_are_found_by_place_and_layer(translation_checkpoint, lm_checkpoint):
    assert by_place(load(translation_checkpoint, cpu=True).model) == {
        "encoder-self": {i: f"encoder.layers.{i}.self_attn" for i in range(2)},
        "decoder-self": {i: f"decoder.layers.{i}.self_attn" for i in range(2)},
        "cross": {i: f"decoder.layers.{i}.encoder_attn" for i in range(2)},
    }
    assert list(by_place(load(lm_checkpoint, cpu=True).model)) == ["decoder-self"]
    assert where("encoder.sentence_encoder.layers.11.self_attn") == Where("encoder-self", 11)


def test_the_criterion_is_the_one_of_the_training(lm_checkpoint):
    loaded = load(lm_checkpoint, cpu=True)
    with torch.no_grad():
        loss, sample_size, _ = loaded.task.valid_step(first_batch(loaded), loaded.model, loaded.criterion)
    assert type(loaded.criterion).__name__ == "CrossEntropyCriterion"
    assert loss.isfinite() and sample_size > 0


def test_all_sentences_come_once(translation_checkpoint):
    loaded = load(translation_checkpoint, cpu=True)
    ids = [i for batch in batches(loaded, "test", batch_size=4) for i in batch["id"].tolist()]
    assert sorted(ids) == list(range(len(loaded.task.dataset("test"))))
    assert len(ids) % 8 != 0, "fairseq's multiple of 8 would not show"


def test_a_limit_draws_the_same_batches_each_time_and_not_the_shortest(translation_checkpoint):
    def ids(**settings):
        return [b["id"].tolist() for b in batches(load(translation_checkpoint, cpu=True), batch_size=2, **settings)]

    everything = ids()
    drawn = ids(limit=3)
    assert len(drawn) == 3
    assert drawn == ids(limit=3)
    assert drawn != everything[:3]
    assert all(batch in everything for batch in drawn)


def test_overrides_reach_the_model(stock_lm_checkpoint, lm_checkpoint, text_data):
    overrides = {"attention_impl": "reference", "dropout": 0.25}
    for path in (stock_lm_checkpoint, lm_checkpoint):
        loaded = load(path, data=str(text_data), overrides=overrides, cpu=True)
        assert {m.impl for m in attentions(loaded.model).values()} == {"reference"}
        assert loaded.model.decoder.dropout_module.p == 0.25


def test_a_checkpoint_of_old_form_loads(stock_translation_checkpoint, tmp_path):
    state = torch.load(stock_translation_checkpoint)
    cfg = state["cfg"]
    flags = {k: v for part in ("task", "optimization", "dataset", "common", "criterion") for k, v in cfg[part].items()}
    flags = {k: v for k, v in flags.items() if k != "_name"}
    state["args"] = Namespace(
        **{**flags, **vars(cfg["model"]), "task": "translation", "criterion": "cross_entropy", "optimizer": "adam"}
    )
    state["cfg"] = None
    torch.save(state, tmp_path / "old.pt")
    old, new = load(str(tmp_path / "old.pt"), cpu=True), load(stock_translation_checkpoint, cpu=True)
    net_input = first_batch(new)["net_input"]
    with torch.no_grad():
        assert torch.equal(old.model(**net_input)[0], new.model(**net_input)[0])
    assert (old.name, new.name) == ("old", "stock_translation")


# ---- refusals --------------------------------------------------------------------------------------------------------


def refused(path, message, **settings):
    with pytest.raises(OptionError, match=message) as error:
        load(str(path), cpu=True, **settings)
    assert "\n" not in str(error.value)
    return str(error.value)


class Hostile:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return (open, (str(self.file), "w"))


def test_code_in_a_file_is_not_run(tmp_path, lm_checkpoint):
    state = torch.load(lm_checkpoint)
    state["extra_state"]["x"] = Hostile(tmp_path / "was_here")
    torch.save(state, tmp_path / "hostile.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Hostile(tmp_path / "was_here")))
    refused(tmp_path / "hostile.pt", "hostile.pt: holds other than tensors and plain values")
    refused(tmp_path / "plain.pt", "plain.pt: ")
    assert not (tmp_path / "was_here").exists()


def test_code_in_a_flag_is_not_run(tmp_path, lm_checkpoint):
    state = torch.load(lm_checkpoint)
    state["cfg"]["model"]["adaptive_softmax_cutoff"] = f"[open({str(tmp_path / 'was_here')!r}, 'w') and 5]"
    torch.save(state, tmp_path / "hostile.pt")
    refused(tmp_path / "hostile.pt", "adaptive_softmax_cutoff is no list of numbers; not loaded")
    assert not (tmp_path / "was_here").exists()


def test_what_is_no_checkpoint_is_refused(tmp_path, lm_checkpoint):
    whole = Path(lm_checkpoint).read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.pt").write_text("not a checkpoint")
    torch.save({"weights": torch.zeros(3)}, tmp_path / "other.pt")
    torch.save(torch.zeros(3), tmp_path / "tensor.pt")
    for name in ("cut", "text", "other", "tensor"):
        reason = refused(tmp_path / f"{name}.pt", f"{name}.pt: ")
        assert "not a checkpoint that fairseq-train wrote" in reason
        assert "Error" not in reason and "WeightsUnpickler" not in reason and "attribute" not in reason
    refused(tmp_path / "none.pt", "none.pt: no such file")
    refused(tmp_path, "is a folder; give a file like checkpoint_best.pt")


def test_a_model_without_counterpart_is_refused(tmp_path, stock_lm_checkpoint):
    state = torch.load(stock_lm_checkpoint)
    state["cfg"]["model"]["_name"] = state["cfg"]["model"]["arch"] = "fconv_lm"
    torch.save(state, tmp_path / "fconv.pt")
    refused(tmp_path / "fconv.pt", "its model fconv_lm has no counterpart in mixhead_plugin")


def test_an_unknown_task_is_refused(tmp_path, lm_checkpoint):
    state = torch.load(lm_checkpoint)
    state["cfg"]["task"]["_name"] = "chess"
    torch.save(state, tmp_path / "chess.pt")
    refused(tmp_path / "chess.pt", "its task chess is not known here; .*--user-dir")


def test_tensors_that_do_not_fit_the_config_are_refused(tmp_path, lm_checkpoint):
    state = torch.load(lm_checkpoint)
    state["cfg"]["model"]["decoder_layers"] = 3
    torch.save(state, tmp_path / "misfit.pt")
    refused(tmp_path / "misfit.pt", "its model cannot be built: .*Missing key")


def test_data_that_is_not_there_is_refused(tmp_path, lm_checkpoint):
    refused(lm_checkpoint, "--data .*nowhere: no such folder", data=str(tmp_path / "nowhere"))
    state = torch.load(lm_checkpoint)
    state["cfg"]["task"]["data"] = "of/another/machine"
    torch.save(state, tmp_path / "moved.pt")
    refused(tmp_path / "moved.pt", "its data folder of/another/machine is not here; say by --data")


def test_data_of_another_model_is_blamed_and_not_the_checkpoint(tmp_path, lm_checkpoint, text_data, analysis):
    refused(lm_checkpoint, f"^--data {tmp_path}: is not the data of .*dict.txt", data=str(tmp_path))
    words = (Path(text_data) / "dict.txt").read_text().splitlines()
    (tmp_path / "dict.txt").write_text("\n".join(words[:-2]) + "\n")
    reason = refused(lm_checkpoint, f"^--data {tmp_path}: its dictionary has ", data=str(tmp_path))
    here, trained = map(int, re.findall(r"has (\d+)", reason))
    assert trained - here == 2
    status, _, errors = analysis("importance", lm_checkpoint, "--compare-data", tmp_path, "--output", tmp_path / "out")
    assert status == 1
    assert f"--compare-data {tmp_path}: its dictionary has {here} symbols" in errors and errors.count("\n") == 1


def test_batches_hold_the_longest_window_or_the_flag_is_named(lm_checkpoint, monkeypatch):
    loaded = load(lm_checkpoint, cpu=True)
    monkeypatch.setattr(loading, "DEFAULT_MAX_TOKENS", 5)
    assert max(batch["net_input"]["src_tokens"].shape[1] for batch in batches(loaded)) == 16
    with pytest.raises(OptionError, match=r"^--max-tokens 5: must be at least 16, the longest sentence or window of v"):
        batches(loaded, max_tokens=5)


def test_unknown_overrides_and_subsets_are_refused(lm_checkpoint):
    refused(lm_checkpoint, "--model-overrides head_dimm: no flag of this checkpoint", overrides={"head_dimm": 3})
    with pytest.raises(OptionError, match="--subset dev: not in "):
        list(batches(load(lm_checkpoint, cpu=True), "dev"))


def test_settings_of_a_refused_model_are_named(lm_checkpoint):
    refused(lm_checkpoint, "--head-mixing position-wise, this model has none", overrides={"head_mixing": "none"})


@pytest.mark.parametrize("text", ["{", "[1]", "{1: 2}", "__import__('os')", "{'a': open('x')}"])
def test_overrides_are_read_as_a_dict_and_not_run(text, lm_checkpoint, analysis):
    status, _, errors = analysis("spectrum", lm_checkpoint, "--model-overrides", text)
    assert status == 2
    assert errors.startswith(f"analysis spectrum: error: argument --model-overrides: {text}: must be a dict")
    assert errors.count("\n") == 1


def test_the_name_of_a_checkpoint_is_what_tells_it_from_others(lm_checkpoint):
    assert load(lm_checkpoint, cpu=True).name == "mixhead_lm"
    assert load(lm_checkpoint, cpu=True, name="B").name == "B"


@pytest.mark.parametrize("arch", ["roberta_base", "mixhead_roberta_base"])
def test_roberta_loads(arch, write_checkpoint, text_data):
    flags = ["--task", "masked_lm", "--criterion", "masked_lm", "--tokens-per-sample", 16, *ROBERTA_SIZES]
    loaded = load(write_checkpoint("roberta", text_data, arch, *flags), cpu=True)
    assert list(by_place(loaded.model)) == ["encoder-self"]
    with torch.no_grad():
        forward(loaded, first_batch(loaded)["net_input"])


def test_an_adaptive_language_model_loads(write_checkpoint, text_data):
    flags = ["--task", "language_modeling", "--tokens-per-sample", 16, "--criterion", "adaptive_loss", *LM_SIZES]
    flags += ["--adaptive-input", "--adaptive-input-cutoff", "6,10", "--adaptive-softmax-cutoff", "6,10"]
    flags += ["--ddp-backend", "legacy_ddp"]
    loaded = load(write_checkpoint("adaptive", text_data, "transformer_lm", *flags), cpu=True)
    with torch.no_grad():
        loss, _, _ = loaded.task.valid_step(first_batch(loaded), loaded.model, loaded.criterion)
    assert loss.isfinite()
