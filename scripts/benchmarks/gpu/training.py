"""The part `training`: updates of a language model by fairseq's trainer."""

import statistics
import time
from collections.abc import Iterator

from benchmarks.gpu.settings import Settings, synchronize
from benchmarks.steps import Row


def training_steps(settings: Settings) -> list[str]:
    return ["fairseq", "softmax", "Mixhead A", "Mixhead B"]


def training_step(settings: Settings, step: str, updates: int = 100) -> Iterator[Row]:
    """Yield losses and times of 100 updates by fairseq's trainer.

    All variants get the same weights and words.
    """
    from benchmarks import model  # needs fairseq

    arch = model.SMALL
    vocabulary = 10000
    batch = 16
    length = 512
    if settings.quick:
        arch = arch.replace("512", "16").replace("2048", "16").replace("layers 4", "layers 1")
        vocabulary = 64
        batch = 2
        length = 16
        updates = min(updates, 3)
    dtype = "bfloat16" if settings.device == "cuda" else "float32"
    dictionary = model.dictionary_of(vocabulary)
    trainer = model.trainer_of(step, arch, dictionary, length, settings.device, dtype)
    losses = []
    times = []
    for update in range(updates):
        sample = model.batch_of(dictionary, batch, length, seed=update % 20)
        synchronize(settings)
        began = time.perf_counter()
        logged = trainer.train_step([sample], raise_oom=True)
        synchronize(settings)
        times.append(1e3 * (time.perf_counter() - began))
        losses.append(float(logged["loss"]))
    row = {"name": step, "updates": len(losses), "ms": statistics.median(times[len(times) // 2 :])}
    row["tokens_per_second"] = batch * length / row["ms"] * 1e3
    for update in (1, 2, 10, 50, 100):
        if update <= updates:
            row[f"loss_{update}"] = losses[update - 1]
    yield row
