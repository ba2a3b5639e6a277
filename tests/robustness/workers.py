"""fairseq-train with several workers on a CPU, run after run in one process, to import everything once."""

import json
import os
import subprocess
import sys

from tests.commands import PLUGIN

# Every worker is a fork that runs the command as it was typed; what the first one says goes to `<run>.log`.
FORKS = """
import json, os, socket, sys, traceback
from argparse import Namespace
from fairseq_cli.train import cli_main  # first, to say how logs look
from fairseq import utils

plugin, runs = json.load(sys.stdin)
utils.import_user_module(Namespace(user_dir=plugin))

def work(arguments, log):
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1), os.dup2(output, 2)
    sys.argv = ["fairseq-train", *arguments]
    try:
        cli_main()
    except BaseException:
        traceback.print_exc()
        return 1
    return 0

for log, workers, arguments in runs:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"tcp://localhost:{free.getsockname()[1]}"
    children = []
    for rank in range(workers):
        more = []
        if workers > 1:
            more = ["--distributed-world-size", str(workers), "--distributed-backend", "gloo"]
            more += ["--distributed-no-spawn", "--distributed-init-method", address, "--distributed-rank", str(rank)]
        child = os.fork()
        if child == 0:
            status = work(arguments + more, log if rank == 0 else f"{log}.{rank}")
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)
        children.append(child)
    failed = [os.waitpid(child, 0)[1] for child in children]
    if any(failed):
        sys.exit(f"{log}: {failed}")
"""


def train_in_workers(folder, runs):
    """What the first worker of each run says, by name.

    Args:
        folder: takes a folder of checkpoints, `<name>`, and a log, `<name>.log`, of each run
        runs: by name the number of workers and the flags of fairseq-train, without --save-dir
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        [
            str(folder / f"{name}.log"),
            workers,
            [*map(str, flags), "--user-dir", PLUGIN, "--save-dir", str(folder / name)],
        ]
        for name, (workers, flags) in runs.items()
    ]
    result = subprocess.run(
        [sys.executable, "-c", FORKS],
        input=json.dumps([PLUGIN, lines]),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=900,
    )
    logs = {name: folder / f"{name}.log" for name in runs}
    said = {name: log.read_text() for name, log in logs.items() if log.exists()}
    assert result.returncode == 0, result.stdout[-3000:] + "".join(text[-3000:] for text in said.values())
    return said
