import json
from argparse import Namespace

import pytest
import torch

from mixhead_plugin.analysis.attentions import attentions
from mixhead_plugin.analysis.head_numbers import as_json, from_json, read_importance, table
from mixhead_plugin.analysis.importance import weigh
from mixhead_plugin.analysis.loading import batches, load
from mixhead_plugin.analysis.weighing import importance
from mixhead_plugin.errors import OptionError


def test_every_head_is_weighed_by_the_training_s_loss(analysis, translation_checkpoint, tmp_path):
    status, out, err = analysis("importance", translation_checkpoint, "--output", tmp_path, "--batch-size", 4, "--cpu")
    assert status == 0, err
    assert {f.name for f in tmp_path.iterdir()} == {"importance.png", "importance.svg", "importance.json"}
    (found,) = json.loads((tmp_path / "importance.json").read_text())["sets"]
    assert (found["subset"], found["sentences"]) == ("valid", 15)

    loaded = load(translation_checkpoint, cpu=True)
    expected, _ = importance(loaded.model, loaded.criterion, batches(loaded, batch_size=4), attentions(loaded.model))
    read = read_importance(str(tmp_path / "importance.json"), attentions(loaded.model))
    assert set(expected["encoder.layers.0.self_attn"]) == {"mixed"}  # --attention-scope decoder
    assert set(expected["decoder.layers.1.encoder_attn"]) == {"source", "mixed"}
    for name, by_kind in expected.items():
        for kind, weights in by_kind.items():
            assert (weights > 0).all()
            torch.testing.assert_close(read[name][kind], weights)
    assert "encoder-self 0 " in out and "cross 1, source heads" in out


def test_two_sets_are_compared(analysis, lm_checkpoint, tmp_path):
    flags = ["--subset", "valid,test", "--normalize", "layer", "--output", tmp_path]
    status, out, err = analysis("importance", lm_checkpoint, *flags)
    assert status == 0, err
    content = json.loads((tmp_path / "importance.json").read_text())
    assert [s["label"] for s in content["sets"]] == ["valid", "test"]
    points = []
    for found in content["sets"]:
        layers = [torch.tensor(entry["mixed"]) for entry in found["attentions"]]
        points.append(torch.cat([layer / layer.norm() for layer in layers]))
    assert content["pearson"]["mixed"] == pytest.approx(float(torch.corrcoef(torch.stack(points))[0, 1]), abs=1e-5)
    assert f"Pearson's r of the mixed heads: {content['pearson']['mixed']:.3f}" in out
    assert (tmp_path / "importance-correlation.svg").exists()


@pytest.mark.slow
def test_the_same_set_of_other_data_is_compared_too(analysis, lm_checkpoint, text_data, tmp_path):
    status, _, err = analysis("importance", lm_checkpoint, "--compare-data", f"{text_data}/.", "--output", tmp_path)
    assert status == 0, err
    content = json.loads((tmp_path / "importance.json").read_text())
    assert content["pearson"] == pytest.approx({"source": 1.0, "mixed": 1.0})
    assert [s["label"] for s in content["sets"]] == [f"valid of {text_data}", f"valid of {text_data}/."]


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--subset", "valid,valid"], "--subset valid,valid: the same set twice"),
        (["--subset", "valid,test,train"], "--subset valid,test,train: 3 sets"),
        (["--normalize", "head"], "invalid choice: 'head'"),
        (["--compare-data", "/nowhere"], "/nowhere: no such folder"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(analysis, lm_checkpoint, flags, message, tmp_path):
    status, _, err = analysis("importance", lm_checkpoint, *flags, "--output", tmp_path)
    assert status != 0
    assert message in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_activation_checkpointing_does_not_keep_the_gradients_away(stock_lm_checkpoint):
    args = Namespace(subset="valid", max_tokens=None, batch_size=None, limit=None)
    plain, recomputing = (
        weigh(args, load(stock_lm_checkpoint, overrides={"checkpoint_activations": on}), "valid").weights
        for on in (False, True)
    )
    for name, by_kind in plain.items():
        torch.testing.assert_close(recomputing[name]["mixed"], by_kind["mixed"])


def numbers(heads):
    return {
        "decoder.layers.0.self_attn": {kind: torch.rand(heads, dtype=torch.float64) for kind in ("source", "mixed")},
        "decoder.layers.1.self_attn": {kind: torch.rand(heads, dtype=torch.float64) for kind in ("source", "mixed")},
    }


def test_numbers_come_back_from_json_as_they_were(lm_checkpoint):
    found = attentions(load(lm_checkpoint).model)
    values = numbers(4)
    read = from_json(json.loads(json.dumps(as_json(values))), found)
    for name, by_kind in values.items():
        assert all(torch.equal(read[name][kind], by_kind[kind]) for kind in by_kind)
    assert as_json(values)[1]["place"] == "decoder-self" and as_json(values)[1]["layer"] == 1
    assert len(table(values).splitlines()) == 4


def without_sources(values):
    return {name: {"mixed": by_kind["mixed"]} for name, by_kind in values.items()}


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "is not what the command importance writes"),
        ('{"sets": []}', "is not what the command importance writes"),
        ("[1]", "is not what the command importance writes"),
        (json.dumps({"sets": [{"attentions": [1]}]}), "has no list of attentions"),
        (as_json(numbers(3)), "has 3 source heads of decoder.layers.0.self_attn, this model 4"),
        (as_json(numbers(4))[:1], "says nothing of decoder.layers.1.self_attn"),
        (as_json(without_sources(numbers(4))), "has no numbers of the source heads of decoder.layers.0.self_attn"),
    ],
)
def test_the_importance_of_another_model_is_refused(content, message, lm_checkpoint, tmp_path):
    file = tmp_path / "importance.json"
    file.write_text(content if isinstance(content, str) else json.dumps({"sets": [{"attentions": content}]}))
    with pytest.raises(OptionError, match=f"^--importance {file}: {message}"):
        read_importance(str(file), attentions(load(lm_checkpoint).model))


def test_a_file_that_is_not_there_is_named(lm_checkpoint):
    with pytest.raises(OptionError, match=r"^--importance /nowhere\.json: No such file"):
        read_importance("/nowhere.json", attentions(load(lm_checkpoint).model))
