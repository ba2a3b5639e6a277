"""fairseq's commands without the seconds of its imports, which take longer than most commands of the tests.

A process imports what a command imports first, and runs each in a fork of itself: its program, flags, environment,
folder, files and exit are those of a process of its own, and so is all that it imports later, the plugin above all.
"""

import importlib
import json
import os
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
            json.dump({"command": command, "files": list(map(str, files)), **where}, self.control)
            self.control.write("\n")
            self.control.flush()
            pid = int(self.control.readline())
            self.socket.settimeout(timeout)
            try:
                status = int(self.control.readline())
            except TimeoutError:
                os.killpg(pid, signal.SIGKILL)
                self.stop()  # what it still has to say would be taken for the next command's
                raise subprocess.TimeoutExpired(command, timeout) from None
            self.socket.settimeout(None)
            return subprocess.CompletedProcess(command, status, *(file.read_text() for file in files[1:]))

    def start(self):
        self.socket, theirs = socket.socketpair()
        self.server = subprocess.Popen(
            [sys.executable, __file__, self.module, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        theirs.close()
        self.control = self.socket.makefile("rw")

    def stop(self):
        self.control.close()
        self.socket.close()  # which ends it
        self.server.wait()
        self.server = None


def serve(control):
    """Until the other side closes. Returns in the forks too, which have a command to run."""
    for line in control:
        request = json.loads(line)
        if (pid := os.fork()) == 0:
            return request
        print(pid, file=control, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=control, flush=True)
    return None


def become(request):
    os.setpgid(0, 0)
    for descriptor, (path, mode) in enumerate(zip(request["files"], (os.O_RDONLY, *[os.O_WRONLY | os.O_CREAT] * 2))):
        opened = os.open(path, mode)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = request["command"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    importlib.import_module(sys.argv[1])
    channel = socket.socket(fileno=int(sys.argv[2]))
    if (command := serve(channel.makefile("rw"))) is not None:
        become(command)
