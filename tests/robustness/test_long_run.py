"""A training of days does not grow: memory, file descriptors, threads and the cost of an update stay what they were.

`fairseq-train` is watched from outside, by what Linux says of the process each time it logs an update.
"""

import gc
import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.trainer import Trainer
from fairseq_cli.train import cli_main

from tests.commands import LM_SIZES, PLUGIN
from tests.xl import XL_SIZES

ROOT = Path(__file__).parents[2]
REAL = ROOT.parent / "shared" / "data" / "wikitext-2-v1.zip"

linux = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
real = pytest.mark.skipif(not REAL.exists(), reason="needs ../shared/data/wikitext-2-v1.zip")


@dataclass(frozen=True)
class Sample:
    """What the process was after an update: bytes, numbers, seconds of its CPU time so far."""

    update: int
    resident: int
    descriptors: int
    threads: int
    seconds: float


def sample(process: int, update: int) -> Sample:
    folder = Path("/proc") / str(process)
    pages = int((folder / "statm").read_text().split()[1])
    # the name, in brackets, may hold spaces; user and system time are the 14th and 15th field
    ticks = sum(map(int, (folder / "stat").read_text().rpartition(")")[2].split()[11:13]))
    return Sample(
        update,
        pages * os.sysconf("SC_PAGE_SIZE"),
        len(list((folder / "fd").iterdir())),
        len(list((folder / "task").iterdir())),
        ticks / os.sysconf("SC_CLK_TCK"),
    )


def watched(*arguments) -> list[Sample]:
    """One sample for each update that `fairseq-train` logs (--log-format json)."""
    command = [str(Path(sys.executable).parent / "fairseq-train"), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    samples, lines = [], []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        try:
            for line in process.stdout:
                lines.append(line)
                if found := re.search(r"\| train_inner \| (\{.*\})", line):
                    samples.append(sample(process.pid, int(json.loads(found[1])["num_updates"])))
        finally:
            process.kill()  # nothing, once it has ended
    assert process.returncode == 0, "".join(lines)[-3000:]
    return samples


def assert_flat(samples: list[Sample], memory: float, cost: float) -> str:
    """What is held in the last quarter of the updates against the second; the first is warm-up. Its figures."""
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    resident = [median(s.resident for s in part) for part in (early, late)]
    seconds = [median(b.seconds - a.seconds for a, b in itertools.pairwise(part)) for part in (early, late)]
    # a checkpoint or a validation under way has its own, so it is the least that counts
    descriptors = [min(s.descriptors for s in part) for part in (early, late)]
    threads = [min(s.threads for s in part) for part in (early, late)]
    figures = f"{resident=} {descriptors=} {threads=} {seconds=}"
    assert resident[1] < (1 + memory) * resident[0], figures
    assert descriptors[1] <= descriptors[0], figures
    assert threads[1] <= threads[0], figures
    assert seconds[1] < (1 + cost) * seconds[0], figures
    return figures


# ---- some dozens of updates, in this process -------------------------------------------------------------------------

SHORT = (
    "--cpu --seed 1 --optimizer adam --lr 0.01 --max-update 48 --num-workers 1 --data-buffer-size 1 --log-interval 50"
)
# six validations that end before their set, as many checkpoints, and several epochs
SHORT += " --validate-interval-updates 8 --save-interval-updates 8 --keep-interval-updates 1 --max-valid-steps 1"
TEXTS = {
    "mixhead_transformer_lm": [*LM_SIZES, *"--task language_modeling --sample-break-mode eos --batch-size 8".split()],
    "mixhead_transformer_xl": [*XL_SIZES, *"--task truncated_bptt_lm --mem-len 8 --batch-size 2".split()],
}
TEXTS["mixhead_transformer_lm"] += "--tokens-per-sample 32 --batch-size-valid 1".split()
TEXTS["mixhead_transformer_xl"] += "--criterion adaptive_loss --ddp-backend legacy_ddp --tokens-per-sample 4".split()


def held() -> dict[str, int]:
    """By this process: tensors that Python knows, threads of the system, open files."""
    gc.collect()
    tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
    return {name: len(list(Path(f"/proc/self/{name}").iterdir())) for name in ("task", "fd")} | {"tensors": tensors}


@linux
@pytest.mark.parametrize(
    "arch", ["mixhead_transformer_lm", pytest.param("mixhead_transformer_xl", marks=pytest.mark.slow)]
)
def test_updates_validations_and_checkpoints_leave_nothing_behind(arch, text_data, tmp_path, monkeypatch):
    monkeypatch.delattr(checkpoint_utils.save_checkpoint, "best", raising=False)
    found = {}
    train_step = Trainer.train_step

    def counted(trainer, *args, **settings):
        output = train_step(trainer, *args, **settings)
        if trainer.get_num_updates() % 8 == 7:  # as far as can be from the next validation
            found[trainer.get_num_updates()] = held()
        return output

    monkeypatch.setattr(Trainer, "train_step", counted)
    words = ["fairseq-train", text_data, "--user-dir", PLUGIN, "--arch", arch, "--save-dir", tmp_path, *SHORT.split()]
    monkeypatch.setattr("sys.argv", [*map(str, words), *TEXTS[arch]])
    cli_main()
    assert list(found) == [7, 15, 23, 31, 39, 47]
    # the first validation and the first checkpoint make what stays; an epoch that begins just then, a worker more
    for name in ("task", "fd", "tensors"):
        assert max(found[update][name] for update in (39, 47)) <= max(found[update][name] for update in (15, 23)), found


# ---- two thousand updates on real text -------------------------------------------------------------------------------

LONG = [*"--user-dir --cpu --max-update 2000 --seed 1 --log-format json --log-interval 4 --num-workers 1".split()]
LONG.insert(1, PLUGIN)
# every 200 updates a validation and a checkpoint, of which the last two stay
LONG += "--save-interval-updates 200 --keep-interval-updates 2 --max-valid-steps 20 --optimizer adam --lr 0.001".split()
MODELS = {
    "mixhead_transformer_lm": "--task language_modeling --arch mixhead_transformer_lm --criterion adaptive_loss"
    " --ddp-backend legacy_ddp --adaptive-softmax-cutoff 2000,10000 --decoder-layers 2 --decoder-embed-dim 128"
    " --decoder-input-dim 128 --decoder-output-dim 128 --decoder-ffn-embed-dim 256 --decoder-attention-heads 16"
    " --tokens-per-sample 64 --max-tokens 512 --sample-break-mode none",
    "mixhead_transformer_xl": "--task truncated_bptt_lm --arch mixhead_transformer_xl --criterion adaptive_loss"
    " --ddp-backend legacy_ddp --cutoffs 2000,10000 --n-layer 2 --d-model 128 --n-head 16 --d-head 8 --d-inner 256"
    " --tokens-per-sample 32 --mem-len 32 --batch-size 16 --clip-norm 0.25",
}


@pytest.fixture(scope="module")
def wikitext(tmp_path_factory):
    data = tmp_path_factory.mktemp("wikitext2")
    environment = {**os.environ, "ARCHIVES": str(REAL.parent), "DATA": str(data), "PYTHON": sys.executable}
    subprocess.run([ROOT / "examples" / "wikitext2" / "prepare.sh"], check=True, capture_output=True, env=environment)
    return data / "lines"


@linux
@real
@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_two_thousand_updates_on_real_text_hold_no_more_than_five_hundred(model, wikitext, tmp_path):
    samples = watched(wikitext, *LONG, *MODELS[model].split(), "--save-dir", tmp_path)
    assert samples[-1].update == 2000
    print(assert_flat(samples, memory=0.02, cost=0.25))
    # of the process that trains, not of one that waits: what it holds is larger than the model and Adam's state
    assert samples[-1].resident > (tmp_path / "checkpoint_last.pt").stat().st_size
    assert {path.name for path in tmp_path.glob("checkpoint_*_*.pt")} >= {"checkpoint_1_2000.pt"}
