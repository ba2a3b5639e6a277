"""No test sees what another one's training has left in this process."""

import pytest
from fairseq import checkpoint_utils
from fairseq_cli import train


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
