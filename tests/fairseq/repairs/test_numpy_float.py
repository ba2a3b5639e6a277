"""What needs the names that numpy has dropped."""

import torch
from fairseq.modules import DynamicCRF


def test_a_model_with_a_crf_layer_computes_its_loss():
    layer = DynamicCRF(num_embedding=7, low_rank=2, beam_size=3)
    words = torch.tensor([[1, 4, 6]])
    loss = layer(torch.randn(1, 3, 7), words, torch.ones(1, 3, dtype=torch.bool))
    assert loss.shape == (1,) and loss.isfinite()
