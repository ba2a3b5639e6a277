"""All repairs are applied, and no test sees what the training of another has left behind."""

import pytest
from fairseq import checkpoint_utils
from fairseq_cli import train

import mixhead_plugin

mixhead_plugin.register()


@pytest.fixture(autouse=True)
def no_validation_is_remembered():
    """Let no test see the best loss and the bad epochs of another.

    fairseq keeps them in attributes of these functions.
    """
    forget_validations()
    yield
    forget_validations()


def forget_validations():
    for function in (checkpoint_utils.save_checkpoint, train.should_stop_early):
        vars(function).pop("best", None)
        vars(function).pop("num_runs", None)
