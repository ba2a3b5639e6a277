"""fairseq's search for the layer of a NaN ends, and names it."""

import logging

from fairseq.nan_detector import NanDetector

from tests.fairseq.criterions.cases import CASES, criterion, model

INF = float("inf")


def test_the_search_for_nan_ends_where_an_encoder_returns_a_dict(caplog):
    """fairseq computes the batch again with these hooks when it sees a NaN or infinite gradient."""
    name = "label_smoothed_cross_entropy"
    made = model(name)
    sample = CASES[name].batch()
    layer = next(name for name, module in made.named_modules() if name.endswith("layers.1.fc2"))
    made.get_submodule(layer).bias.data[0] = INF
    with caplog.at_level(logging.WARNING), NanDetector(made):
        criterion(f"orthogonal_{name}", rank_weight=0.01)(made, sample)[0].sum().backward()
    (said,) = [record.message for record in caplog.records]
    assert said.startswith(f"Inf detected in output of {layer}, shape")
