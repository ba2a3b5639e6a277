"""Refuse to mix a model that DistributedDataParallel or FSDP has wrapped."""

from torch import nn

# Of torch. They are known by their names, because importing FSDP takes time.
WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")


def refuse_wrapped(model: nn.Module) -> None:
    """Raise ValueError if a module of the model is wrapped by DistributedDataParallel or FSDP.

    They share the gradients of the parameters that they found. So parameters that come later would
    be trained by each process in its own way.
    """
    for name, module in model.named_modules():
        for cls in type(module).__mro__:
            if cls.__name__ in WRAPPERS and cls.__module__.startswith("torch."):
                raise ValueError(
                    f"{name or 'the model'}: is in {cls.__name__}, which would not share the "
                    "gradients of new parameters; must be mixed before"
                )
