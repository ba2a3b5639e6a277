"""fairseq's commands without the seconds of its imports, which take longer than most commands of the tests.

A process imports what a command imports first, and runs each in a fork of itself. Program, flags, environment, folder,
files and exit are those of a process of its own, and so is all that it imports later, the plugin above all. Not so is
what Python and libraries read when they start (PYTHONHASHSEED, OMP_NUM_THREADS, ...): the order of sets is the same in
all of them. What has to show that nothing depends on it is for a process of its own.
"""

import contextlib
import importlib
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path


class WarmStart:
    """Runs Python programs that import `module` first, one after the other.

    Its process begins with the first of them, and ends with this one's.
    """

    def __init__(self, module):
        self.module = module
        self.server = None

    def run(self, program, arguments, stdin="", env=None, cwd=None, timeout=None):
        """As subprocess.run(..., capture_output=True, text=True)."""
        if self.server is None:
            self.start()
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder) / name for name in ("stdin", "stdout", "stderr")]
            files[0].write_text(stdin)
            command = [str(program), *map(str, arguments)]
            where = {"cwd": str(cwd or Path.cwd()), "env": dict(os.environ if env is None else env)}
            request = {"command": command, "files": list(map(str, files)), **where}
            pid = None
            try:
                pid = self.ask(request)
                self.socket.settimeout(timeout)
                status = self.answer()
                self.socket.settimeout(None)
            except BaseException as error:  # Ctrl-C too: nothing is left running, nothing of it is read as another's
                if pid is not None:
                    os.killpg(pid, signal.SIGKILL)
                self.stop()
                if isinstance(error, TimeoutError):
                    texts = [file.read_text() if file.exists() else "" for file in files[1:]]
                    raise subprocess.TimeoutExpired(command, timeout, *texts) from None
                raise
            return subprocess.CompletedProcess(command, status, *(file.read_text() for file in files[1:]))

    def start(self):
        self.socket, theirs = socket.socketpair()
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (as long as the process)
        self.server = subprocess.Popen(
            [sys.executable, __file__, self.module, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self.errors,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        theirs.close()
        self.control = self.socket.makefile("rw")

    def ask(self, request):
        """The process that the command runs in."""
        with contextlib.suppress(BrokenPipeError):  # it has ended, and answer() says why
            print(json.dumps(request), file=self.control, flush=True)
        return self.answer()

    def answer(self):
        try:
            line = self.control.readline()
        except ConnectionResetError:
            line = ""
        if not line:
            self.errors.seek(0)
            raise RuntimeError(f"the process that has imported {self.module} ended: {self.errors.read()[-2000:]}")
        return int(line)

    def stop(self):
        for end in (self.socket, self.errors):
            end.close()
        with contextlib.suppress(OSError):  # what could not be sent
            self.control.close()
        self.server.kill()
        self.server.wait()
        self.server = None


def serve(control):
    """Until the other side closes. Returns in the forks too, which have a command to run."""
    for line in control:
        request = json.loads(line)
        if (pid := os.fork()) == 0:
            os.setpgid(0, 0)
            return request
        with contextlib.suppress(OSError):  # who of the two is first: it may be killed at once
            os.setpgid(pid, pid)
        print(pid, file=control, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=control, flush=True)
    return None


def become(request):
    modes = (os.O_RDONLY, os.O_WRONLY | os.O_CREAT, os.O_WRONLY | os.O_CREAT)
    for descriptor, (path, mode) in enumerate(zip(request["files"], modes)):
        opened = os.open(path, mode)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    sys.argv = request["command"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    importlib.import_module(sys.argv[1])
    channel = socket.socket(fileno=int(sys.argv[2]))
    channel.set_inheritable(False)
    if (command := serve(channel.makefile("rw"))) is not None:
        become(command)
