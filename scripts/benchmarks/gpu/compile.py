"""The part `compile`: the first calls, which compile for the parts that follow."""

import functools
import importlib.util
import time
from collections.abc import Callable, Iterator
from unittest import mock

from benchmarks import core
from benchmarks.gpu import gpt
from benchmarks.gpu.core import contenders, core_steps, timing_of
from benchmarks.gpu.module import module_step, module_steps
from benchmarks.gpu.settings import Settings, synchronize
from benchmarks.gpu.training import training_step, training_steps
from benchmarks.steps import Row
from mixhead_plugin.ops.triton import support

# What `compile_step` calls beside the attentions that the part `core` times.
TRAINING = "training"
MODULE = "module"
GPT = "gpt"
FIRST_CALLS: dict[str, Callable[[Settings, str], Iterator[Row]]] = {
    TRAINING: functools.partial(training_step, updates=1),
    MODULE: module_step,
    GPT: gpt.first_update,
}


def compile_steps(settings: Settings) -> list[str]:
    """Return a contender of a size for each first call that compiles.

    torch.compile comes first, because it takes longest.
    """
    by_torch = []
    by_triton = []
    for step in core_steps(settings):
        for contender in contenders(settings, timing_of(settings, step)):
            if contender.is_compiled:
                by_torch.append(f"{step} | {contender.name}")
            elif "triton" in contender.provider:
                by_triton.append(f"{step} | {contender.name}")
    trained = []
    if importlib.util.find_spec("fairseq") is not None:
        # fairseq's own compiles nothing
        trained = [f"{TRAINING} | {step}" for step in training_steps(settings)[1:]]
    modules = [f"{MODULE} | {step}" for step in module_steps(settings)]
    models = [f"{GPT} | {name}" for name in gpt.NAMES[1:]]  # torch's compiles nothing
    return [*trained, *modules, *models, *by_torch, *by_triton]


def compile_step(settings: Settings, step: str) -> Iterator[Row]:
    """Yield the seconds of the first call of a contender.

    What it compiles stays on disk for the parts that follow.
    """
    size, _, name = step.partition(" | ")
    if size in FIRST_CALLS:
        began = time.monotonic()
        for _ in FIRST_CALLS[size](settings, name):
            pass
        yield {"size": size, "name": name, "seconds": time.monotonic() - began}
        return
    timing = timing_of(settings, size)
    contender = next(one for one in contenders(settings, timing) if one.name == name)
    inputs = core.Inputs(timing.size, settings.device, timing.dtype)
    began = time.monotonic()
    with mock.patch.object(support, "trial_fault", lambda inputs: ""):
        if contender.forward_only:
            inputs.forward(contender, timing.dropout)
        else:
            inputs.run(contender, timing.dropout, inputs.d_output)
        synchronize(settings)
    yield {"size": size, "name": name, "seconds": time.monotonic() - began}
    with settings.compiled.open("a") as file:
        file.write(f"{step}\n")
