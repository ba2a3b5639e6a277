"""A model that shares its gradients between processes is mixed before, or not at all."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from mixhead_plugin.parts.wrappers import refuse_wrapped


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


WRAPPED = {
    "DistributedDataParallel": nn.parallel.DistributedDataParallel,
    "FSDPModule": fully_shard,
}


@pytest.mark.parametrize("name", WRAPPED)
def test_gradients_of_new_parameters_would_not_be_shared(name, one_process):
    inside = WRAPPED[name](nn.Linear(3, 3))
    for model, place in ((inside, "the model"), (nn.Sequential(inside), "0")):
        with pytest.raises(ValueError) as refused:
            refuse_wrapped(model)
        assert str(refused.value) == (
            f"{place}: is in {name}, which would not share the gradients of new parameters; must "
            "be mixed before"
        )
    refuse_wrapped(nn.Sequential(nn.Linear(3, 3)))
