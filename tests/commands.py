"""Start fairseq's commands as a user types them."""

import json
import re
import socket
from pathlib import Path

from fairseq import options
from fairseq_cli import preprocess as fairseq_preprocess

import mixhead_plugin
from mixhead_plugin.errors import option_name
from tests.helpers import TINY
from tests.launcher import LIMIT, Launcher

ROOT = Path(__file__).parents[1]
PLUGIN = str(Path(mixhead_plugin.__file__).parent)
BERT = str(Path(PLUGIN).parent / "examples" / "bert")  # registers the plugin, too


def as_flags(values, prefix=""):
    """Return the flags of the values whose names begin with `prefix`."""
    return [
        f"{option_name(name)}={value}" for name, value in values.items() if name.startswith(prefix)
    ]


SIZES = as_flags(TINY["transformer"])
LM_SIZES = as_flags(TINY["transformer_lm"], "decoder")
ROBERTA_SIZES = as_flags(TINY["roberta_base"], "encoder")
TRAINING = (
    "--optimizer adam --lr 0.01 --cpu --max-tokens 400 --num-workers 0 --log-format json --seed 1"
).split()
# By default fairseq drops the last sentences of a set, which fill no multiple of 8.
WHOLE_SETS = ["--required-batch-size-multiple", "1"]
TRAINING += ["--no-epoch-checkpoints", "--log-interval", "1", *WHOLE_SETS]


# What every command imports later.
NEEDED = ("hydra.core.override_parser.overrides_parser", "torch._dynamo")
# Registering the architectures takes half of a tiny command's time, so TRAIN has done it. OTHERS
# has not: there a command imports the plugin itself, as a user's does, also fairseq-train in
# tests/fairseq/repairs/test_import.py. fairseq-train has a server of its own, because it sets up
# its log before it imports fairseq, and the other commands log in fairseq's own way.
TRAIN = Launcher("train", "fairseq_cli.train", "mixhead_plugin.fairseq.models", *NEEDED)
OTHERS = Launcher("others", "fairseq", *NEEDED)


def start(command, *arguments, **settings):
    """Start a command of fairseq, a script or '-m module' beside others; see `Launcher.start`."""
    server = TRAIN if command == "fairseq-train" else OTHERS
    return server.start(command, *arguments, **settings)


def run(command, *arguments, check=True, timeout=LIMIT, **settings):
    """Return the finished command."""
    result = start(command, *arguments, **settings).wait(timeout)
    assert not check or result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result


def refusal(*command, **settings):
    """Run a command that must refuse its input; return the one line that it ends with."""
    result = run(*command, check=False, **settings)
    text = result.stdout[-1500:] + result.stderr[-3000:]
    assert result.returncode > 0, text
    assert "Traceback" not in result.stderr + result.stdout, text
    lines = [line for line in result.stderr.replace("\r", "\n").splitlines() if ": error: " in line]
    assert len(lines) == 1 and result.stderr.rstrip().splitlines()[-1] == lines[0], text
    return lines[0]


def train(data, arch, save, *flags, updates=3, check=True):
    arguments = [
        data,
        f"--user-dir={PLUGIN}",
        f"--arch={arch}",
        f"--save-dir={save}",
        f"--max-update={updates}",
    ]
    return run("fairseq-train", *arguments, *TRAINING, *flags, check=check)


def losses(result):
    return [log["loss"] for log in logged(result.stdout + result.stderr)]


def preprocess(texts, data, *flags):
    """Run fairseq-preprocess in this process on the file of each set; return the folder `data`."""
    arguments = ["--destdir", str(data), *flags]
    for split, path in texts.items():
        arguments += [f"--{split}pref", str(path)]
    parser = options.get_preprocessing_parser()
    fairseq_preprocess.main(parser.parse_args(arguments))
    return data


def several(*commands):
    """Run commands one after the other; return what each printed."""
    ended = [run(*command) for command in commands]
    return [result.stdout + result.stderr for result in ended]


def logged(output, kind="train_inner"):
    return [json.loads(line) for line in re.findall(rf"\| {kind} \| (\{{.*\}})", output)]


def free_port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def in_workers(number, *arguments, **settings):
    """Start fairseq-train in `number` workers on the CPU.

    Return them in the order of their ranks.
    """
    flags = [
        f"--distributed-world-size={number}",
        "--distributed-backend=gloo",
        "--distributed-no-spawn",
    ]
    flags += ["--distributed-init-method", f"tcp://localhost:{free_port()}", "--distributed-rank"]
    return [start("fairseq-train", *arguments, *flags, rank, **settings) for rank in range(number)]


def two_workers(*arguments):
    """Run two workers of fairseq-train; return what the first one printed."""
    ended = [worker.wait() for worker in in_workers(2, *arguments)]
    assert [worker.returncode for worker in ended] == [0, 0], [
        worker.stderr[-3000:] for worker in ended
    ]
    return ended[0].stdout + ended[0].stderr
