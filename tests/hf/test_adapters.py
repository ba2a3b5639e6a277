"""Adapters of PEFT change the queries that mixings read; an adapter is not saved without the mixing."""

import copy

import pytest
import torch

from tests.hf.models import FEW, QUERIES, build, hf, whole

peft = pytest.importorskip("peft")


def adapt(model, **options):
    """Return a model with a low-rank adapter of its queries; all that is trained is away from its start."""
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=QUERIES, **options))
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter) * parameter.requires_grad
    return model


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize("name", FEW)
def test_mixings_read_adapted_queries_and_adapters_keep_the_mixing(name, tmp_path):
    base, inputs = build(name, head_mixing="position-wise")
    inputs = whole(base, inputs)
    adapted = adapt(copy.deepcopy(base))
    with torch.no_grad():
        found = adapted(**inputs).logits
        assert not torch.allclose(found, base(**inputs).logits)
        with pytest.raises(ValueError, match=r"modules_to_save=\['head_mixing'\]"):
            adapted.save_pretrained(tmp_path)
        adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
        torch.testing.assert_close(hf.load(tmp_path / "merged")(**inputs).logits, found)

        adapted = adapt(copy.deepcopy(base), modules_to_save=[*hf.PARTS])
        found = adapted(**inputs).logits
        adapted.save_pretrained(tmp_path)
        loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)
        torch.testing.assert_close(loaded(**inputs).logits, found)
        loaded.merge_and_unload().save_pretrained(tmp_path / "trained")
        torch.testing.assert_close(hf.load(tmp_path / "trained")(**inputs).logits, found)
    for change in (lambda model: hf.mix(model, "average"), lambda model: hf.prune(model, {0: [0]})):
        with pytest.raises(ValueError, match="has adapters; must be"):
            change(adapt(build(name)[0]))
