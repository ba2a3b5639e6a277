"""Run fairseq's commands without the seconds of their imports.

A server process imports what every command imports and forks for each command. It runs no thread,
so the fork is safe. A command has its own program, flags, environment, folder, files and exit
status, as in a process of its own. It does not read what Python and torch read when they start
(PYTHONHASHSEED, OMP_NUM_THREADS), and ends without Python's clean-up. The recipes' slow tests start
real processes.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path

LIMIT = 300  # seconds for one command
# One thread: the tests start more processes than there are cores, and a fork needs a process
# without threads.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


def locate(program):
    """Return the path of `program`: a path, or the name of a command beside this Python."""
    return str(program) if "/" in str(program) else str(Path(sys.executable).parent / program)


class Started:
    """A command that was started."""

    def __init__(self, launcher, command, folder, pid):
        self.launcher, self.command, self.pid = launcher, command, pid
        self.status = None  # the exit status, once `wait` has seen the end
        self.folder = folder  # holds stdin, stdout and stderr, as long as this object lives
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)

    def wait(self, timeout=LIMIT):
        """Return the CompletedProcess.

        After `timeout` seconds kill the command and its children.
        """
        deadline = time.monotonic() + timeout
        while self.status is None:
            self.status = self.launcher.ask(status=self.pid)
            if self.status is None:
                if time.monotonic() > deadline:
                    os.killpg(self.pid, signal.SIGKILL)
                    raise subprocess.TimeoutExpired(self.command, timeout)
                time.sleep(0.01)
        printed = (
            (self.folder / name).read_text(errors="replace") for name in ("stdout", "stderr")
        )
        return subprocess.CompletedProcess(self.command, self.status, *printed)


class Launcher:
    """Runs Python programs in forks of one process that has imported `modules`.

    The process starts at first use.
    """

    def __init__(self, *modules):
        self.modules = modules
        self.server = None

    def start(self, program, *arguments, stdin="", env=None, cwd=None, before=""):
        """Start a command, beside others that still run.

        Args:
            program: the name of a command, the path of a Python program, or '-m module'
            env: variables to set beside those of this process
            before: Python source that runs in the command's process before it
        """
        folder = Path(tempfile.mkdtemp())
        (folder / "stdin").write_bytes(stdin if isinstance(stdin, bytes) else stdin.encode())
        program = program if str(program).startswith("-m ") else locate(program)
        command = [str(program), *map(str, arguments)]
        pid = self.ask(
            command=command,
            folder=str(folder),
            env={**os.environ, **ONE_THREAD, **(env or {})},
            cwd=str(cwd or Path.cwd()),
            before=before,
        )
        return Started(self, command, folder, pid)

    def run(self, program, *arguments, timeout=LIMIT, **settings):
        """Return the CompletedProcess of a command.

        subprocess.run(..., capture_output=True, text=True) returns the same.
        """
        return self.start(program, *arguments, **settings).wait(timeout)

    def ask(self, **request):
        """Return the server's answer.

        The server ends, with all that it has started, when this process does.
        """
        if self.server is None:
            self._start_server()
        line = ""
        with contextlib.suppress(ConnectionError):  # the server has ended
            print(json.dumps(request), file=self.channel, flush=True)
            line = self.channel.readline()
        if not line:
            self.errors.seek(0)
            raise RuntimeError(
                f"the process that imports {self.modules} ended: {self.errors.read()[-2000:]}"
            )
        return json.loads(line)

    def _start_server(self):
        self.socket, theirs = socket.socketpair()
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (as long as the process)
        self.server = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno()), *self.modules],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self.errors,
            env={**os.environ, **ONE_THREAD},
        )
        theirs.close()
        self.channel = self.socket.makefile("rw")


# ---- the server --------------------------------------------------------------------------------


def serve(channel):
    """Answer requests until the other side closes.

    Return None then, and in each fork the command to run.
    """
    running = set()
    for line in channel:
        request = json.loads(line)
        if "status" in request:
            answer = None
            pid, status = os.waitpid(request["status"], os.WNOHANG)
            if pid:
                running.discard(pid)
                answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if answer == 0:
                os.setpgid(0, 0)
                return request
            with contextlib.suppress(OSError):  # parent and child both set it: either may be first
                os.setpgid(answer, answer)
            running.add(answer)
        print(json.dumps(answer), file=channel, flush=True)
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    return None


def become(request):
    """Run the requested command in this process."""
    modes = {
        "stdin": os.O_RDONLY,
        "stdout": os.O_WRONLY | os.O_CREAT,
        "stderr": os.O_WRONLY | os.O_CREAT,
    }
    for descriptor, (name, mode) in enumerate(modes.items()):
        opened = os.open(os.path.join(request["folder"], name), mode | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    # a shell's background process ignores it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    program, *arguments = request["command"]
    sys.argv = [program, *arguments]
    exec(request["before"], {})
    if program.startswith("-m "):
        sys.path[0] = request["cwd"]
        runpy.run_module(program[3:], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(program).parent)
        runpy.run_path(program, run_name="__main__")


def leave(status):
    """End the process. Python would free each object of the server first, which takes a second."""
    if status:  # empty after Ctrl-C: Python ends the process with that signal
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status[0])


if __name__ == "__main__":
    status = []  # stays empty in the server
    atexit.register(leave, status)  # registered first, it runs last
    # this checkout; not its tests, whose folder fairseq is not fairseq
    sys.path[0] = str(Path(__file__).parents[1])
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.freeze()  # or a command would copy all memory that its garbage collector visits
    ours = socket.socket(fileno=int(sys.argv[1]))
    ours.set_inheritable(False)
    if (requested := serve(ours.makefile("rw"))) is not None:
        try:
            become(requested)
            status.append(0)
        except Exception:
            status.append(1)
            raise
        except SystemExit as end:
            status.append(end.code if isinstance(end.code, int) else int(end.code is not None))
            raise
