"""A model of NaN is neither loaded nor saved."""

from types import SimpleNamespace

import pytest
from fairseq import checkpoint_utils

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.repairs.checkpoint_files import check_finite
from tests.helpers import build

NAN = float("nan")


def test_a_frozen_mixing_that_is_nan_is_neither_loaded_nor_saved(tmp_path):
    """`random` mixing is a buffer that the attention computes with."""
    made = build("mixhead_transformer", head_mixing="random")
    name = next(name for name, _ in made.named_buffers() if name.endswith("head_mixing.weight"))
    made.get_buffer(name).view(-1)[0] = NAN
    with pytest.raises(OptionError, match=f"first is {name}"):
        check_finite("new.pt", made.state_dict())
    trainer = SimpleNamespace(is_fsdp=False, model=made, get_num_updates=lambda: 3)
    with pytest.raises(
        OptionError, match=f"NaN or infinite parameters after update 3, the first is {name}"
    ):
        checkpoint_utils.save_checkpoint(
            SimpleNamespace(no_save=False, save_dir=str(tmp_path)), trainer, None, None
        )
