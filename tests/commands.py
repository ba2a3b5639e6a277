"""fairseq's real commands, as a user types them."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import mixhead_plugin
from mixhead_plugin.errors import option_name
from tests.helpers import TINY
from tests.warm_start import WarmStart

PLUGIN = str(Path(mixhead_plugin.__file__).parent)
BERT = str(Path(PLUGIN).parent / "examples" / "bert")  # registers the plugin, too


def as_flags(values, prefix=""):
    """Those whose names begin with `prefix`."""
    return [f"{option_name(name)}={value}" for name, value in values.items() if name.startswith(prefix)]


SIZES = as_flags(TINY["transformer"])
LM_SIZES = as_flags(TINY["transformer_lm"], "decoder")
ROBERTA_SIZES = as_flags(TINY["roberta_base"], "encoder")
TRAINING = "--optimizer adam --lr 0.01 --cpu --max-tokens 400 --num-workers 0 --log-format json --seed 1".split()
# fairseq leaves out the last sentences of a set that fill no multiple of 8
WHOLE_SETS = ["--required-batch-size-multiple", "1"]
TRAINING += ["--no-epoch-checkpoints", "--log-interval", "1", *WHOLE_SETS]


# fairseq-train sets up its log before it imports fairseq, whose own way the others log in
WARM = {module: WarmStart(module) for module in ("fairseq_cli.train", "fairseq")}


def run(command, *arguments, stdin="", check=True, cwd=None, fresh=False):
    """`fresh`: in a process of its own, whose sets have another order."""
    program = Path(sys.executable).parent / command
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if fresh:
        line = [str(program), *map(str, arguments)]
        result = subprocess.run(line, input=stdin, capture_output=True, text=True, cwd=cwd, env=env, timeout=300)
    else:
        warm = WARM["fairseq_cli.train" if command == "fairseq-train" else "fairseq"]
        result = warm.run(program, arguments, stdin, env, cwd, timeout=300)
    assert not check or result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result


def train(data, arch, save, *flags, updates=3, check=True, fresh=False):
    arguments = [data, "--user-dir", PLUGIN, "--arch", arch, "--save-dir", save, "--max-update", updates]
    return run("fairseq-train", *arguments, *TRAINING, *flags, check=check, fresh=fresh)


def losses(result):
    logged = re.findall(r"\| train_inner \| (\{.*\})", result.stdout + result.stderr)
    return [json.loads(line)["loss"] for line in logged]


def preprocess(corpus, data, *flags):
    prefixes = [flag for split in ("train", "valid", "test") for flag in (f"--{split}pref", corpus / split)]
    run("fairseq-preprocess", "--user-dir", PLUGIN, *prefixes, "--destdir", data, *flags)
    return data


# fairseq's commands one after the other in one process, as their names are typed: the plugin is imported once.
SEVERAL = """
import importlib, json, sys
for command, arguments in json.load(sys.stdin):
    print("=====", flush=True)
    sys.argv = [command, *arguments]
    importlib.import_module(command.replace("fairseq-", "fairseq_cli.").replace("-", "_")).cli_main()
"""


def several(*commands):
    lines = json.dumps([[command, [str(a) for a in arguments]] for command, *arguments in commands])
    result = subprocess.run(
        [sys.executable, "-c", SEVERAL], input=lines, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert result.returncode == 0, result.stdout[-5000:]
    return result.stdout.split("=====\n")[1:]


def logged(output, kind="train_inner"):
    return [json.loads(line) for line in re.findall(rf"\| {kind} \| (\{{.*\}})", output)]


def two_workers(*arguments):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).parent / "fairseq-train"), *map(str, arguments)]
    command += ["--distributed-world-size", "2", "--distributed-backend", "gloo", "--distributed-no-spawn"]
    command += ["--distributed-init-method", f"tcp://localhost:{port}", "--distributed-rank"]
    workers = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in (0, 1)
    ]
    outputs = [worker.communicate(timeout=300)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    return outputs[0]
