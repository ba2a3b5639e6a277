"""Test that every mixing is timed."""

import torch

from mixhead_plugin.check import speed


def test_the_speed_of_every_mixing_is_measured(monkeypatch):
    monkeypatch.setattr(speed, "SPEED_SHAPE", (1, 2, 16, 4))
    assert all(
        milliseconds > 0 for milliseconds in speed.speed(torch.device("cpu"), 0.001).values()
    )
