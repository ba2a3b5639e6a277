"""Test the moving average of a model (--store-ema): how it begins, and what an update keeps."""

import pytest
import torch
from fairseq.dataclass.configs import EMAConfig
from fairseq.models.ema.ema import EMA

from mixhead_plugin.errors import CheckpointError
from tests.commands import PLUGIN, SIZES, TRAINING
from tests.helpers import build, run_here, shake


@pytest.mark.parametrize("flags", [[], ["--ema-fp32"]], ids=["as the model", "fp32"])
def test_the_average_begins_from_the_weights_of_the_checkpoint(flags, translation_data, tmp_path):
    """The checkpoint has no mixing, which starts as the identity, whatever a new model has.

    Layer norms after the last layers are part of the average, too.
    """
    common = [translation_data, "--user-dir", PLUGIN, *TRAINING, *SIZES, "--max-update", 1]
    common += ["--encoder-normalize-before", "--decoder-normalize-before"]
    run_here("fairseq-train", *common, "--arch", "transformer", "--save-dir", tmp_path / "plain")
    # Neither the model nor its average leaves its start.
    still = ["--lr", 0, "--store-ema", "--ema-decay", 1, *flags]
    log = run_here(
        "fairseq-train",
        *common,
        *["--arch", "mixhead_transformer", "--mixing-start", "random"],
        *still,
        *["--finetune-from-model", tmp_path / "plain" / "checkpoint_last.pt"],
        *["--save-dir", tmp_path / "average"],
    )
    assert "checkpoint_last.pt: has no moving average; it begins from the model's weights" in log
    state = torch.load(tmp_path / "average" / "checkpoint_last.pt", weights_only=True)
    plain = torch.load(tmp_path / "plain" / "checkpoint_last.pt", weights_only=True)["model"]
    average = state["extra_state"]["ema"]
    assert "decoder.layer_norm.weight" in average
    assert average.keys() == state["model"].keys() > plain.keys()
    for name, weight in state["model"].items():
        assert torch.equal(average[name], weight), name
        assert name not in plain or torch.equal(plain[name], weight), name


def averaged(model, **config):
    """Return the average of a model, before the first update."""
    return EMA(model, EMAConfig(store_ema=True, ema_decay=0.75, **config))


@pytest.mark.parametrize("arch", ["transformer", "mixhead_transformer"])
def test_the_average_of_a_decoder_keeps_its_final_norm(arch):
    flags = {"encoder_normalize_before": True, "decoder_normalize_before": True}
    trained = build(arch, **flags)
    ema = averaged(trained)
    before = ema.model.state_dict()
    before = {name: tensor.clone() for name, tensor in before.items()}

    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(torch.randn_like(parameter))
    ema.step(trained)

    after = ema.model.state_dict()
    assert "decoder.layer_norm.weight" in after and set(after) == set(before)
    for name, tensor in trained.state_dict().items():
        expected = 0.75 * before[name] + 0.25 * tensor
        torch.testing.assert_close(after[name], expected)


def test_an_update_is_not_warned_of_as_a_checkpoint_without_records(caplog):
    trained = build("l2_transformer")
    averaged(trained).step(trained)
    averaged(trained, ema_fp32=True).step(trained)
    assert caplog.text == ""


def test_the_average_in_a_checkpoint_is_checked_also_after_an_update():
    ema = averaged(build("l2_transformer"))
    ema.step(build("l2_transformer", seed=2))
    with pytest.raises(CheckpointError, match="was trained with --attention-normalizer softmax"):
        ema.restore(shake(build("mixhead_transformer")).state_dict())
