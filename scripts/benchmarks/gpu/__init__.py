"""The parts of scripts/gpu_report.sh: what each tries on a GPU, step by step.

Every part is a function from a step to its rows. It runs in processes of its own (steps.py), so
nothing of a part is left for the next one but what triton and torch.compile keep on disk.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from benchmarks.gpu import (
    check,
    compile,
    core,
    gpt,
    kernels,
    machine,
    marked_tests,
    module,
    tiles,
    training,
)
from benchmarks.gpu.settings import Settings
from benchmarks.steps import Row


class Part(NamedTuple):
    """A part of the report.

    Args:
        title: above its table
        steps: returns the names of its steps, in order of worth
        run: yields the rows of a step
        seconds: for the whole part
        limit: seconds for a step
        parallel: whether steps run beside each other; what is timed runs alone
        needs: a package without which the part is left out
        asked: whether the part runs only where it is named
    """

    title: str
    steps: Callable[[Settings], list[str]]
    run: Callable[[Settings, str], Iterable[Row]]
    seconds: float
    limit: float
    parallel: bool = False
    needs: str = ""
    asked: bool = False


def one_step(settings: Settings) -> list[str]:
    return ["all"]


# Together these take longer than the six minutes of a report. So they stand in order of worth, and
# the last ones may get less time, or none. `compile` stands before the parts that find on disk what
# it has compiled.
PARTS = {
    "machine": Part("The machine", one_step, machine.machine, seconds=15, limit=15),
    "check": Part(
        "mixhead check", check.check_steps, check.check_step, seconds=80, limit=80, parallel=True
    ),
    "compile": Part(
        "First calls",
        compile.compile_steps,
        compile.compile_step,
        seconds=55,
        limit=55,
        parallel=True,
    ),
    "core": Part("The attention alone", core.core_steps, core.core_step, seconds=100, limit=50),
    "kernels": Part("The kernels", kernels.kernel_steps, kernels.kernel_step, seconds=20, limit=15),
    "tile_compile": Part(
        "Tiles that fail",
        tiles.tile_compile_steps,
        tiles.tile_compile_step,
        seconds=50,
        limit=50,
        parallel=True,
        asked=True,
    ),
    "tiles": Part(
        "More tiles", tiles.tile_steps, tiles.tile_step, seconds=40, limit=15, asked=True
    ),
    "gpt": Part("A training step of GPT-2", one_step, gpt.gpt, seconds=40, limit=40),
    "tests": Part(
        "The tests marked gpu", one_step, marked_tests.tests, seconds=75, limit=75, needs="pytest"
    ),
    "module": Part("The module", module.module_steps, module.module_step, seconds=60, limit=40),
    "decoding": Part("A step of decoding", one_step, module.decoding, seconds=10, limit=10),
    "training": Part(
        "100 updates",
        training.training_steps,
        training.training_step,
        seconds=60,
        limit=30,
        needs="fairseq",
    ),
}
