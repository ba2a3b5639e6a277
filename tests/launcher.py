"""Run fairseq's commands without the seconds of their imports.

A server process imports what every command imports and forks for each command. It runs no thread,
so the fork is safe. A command has its own program, flags, environment, folder, files and exit
status, as in a process of its own. It does not read what Python and torch read when they start
(PYTHONHASHSEED, OMP_NUM_THREADS), and ends without Python's clean-up. The recipes' slow tests start
real processes.

The workers of pytest-xdist share the server, because its imports take seconds. The first one that
starts a command starts it too, and it ends when the last one has ended.
"""

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import random
import runpy
import select
import selectors
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


# The folder of the servers' sockets, one for all workers of a run of pytest. tests/conftest.py sets
# it.
SOCKETS = None


@contextlib.contextmanager
def locked(path):
    """Let one process at a time do what stands below; the others wait."""
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def short_path(path):
    """Yield another path of a file, because that of a socket may have 107 characters alone."""
    folder = os.open(path.parent, os.O_PATH)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def locate(program):
    """Return the path of `program`: a path, or the name of a command beside this Python."""
    return str(program) if "/" in str(program) else str(Path(sys.executable).parent / program)


class Started:
    """A command that was started."""

    def __init__(self, launcher, command, folder, pid):
        self.launcher = launcher
        self.command = command
        self.pid = pid
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

    Args:
        name: of the server; its socket has it, so each launcher needs another
        modules: what the server imports
    """

    def __init__(self, name, *modules):
        self.name = name
        self.modules = modules
        self.connection = None  # to the server, from the first command on
        self.channel = None  # its answers
        self.server = None  # its process, if this launcher has started it

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

        When this process ends, the server ends all commands that it has started.
        """
        if self.channel is None:
            self._connect()
        line = ""
        with contextlib.suppress(ConnectionError):  # the server has ended
            # Without a signal, because `mixhead` and report.py let SIGPIPE end their process, and
            # tests call them in this one.
            self.connection.sendall(f"{json.dumps(request)}\n".encode(), socket.MSG_NOSIGNAL)
            line = self.channel.readline()
        if not line:
            errors = self._path("errors").read_text(errors="replace")
            raise RuntimeError(f"the process that imports {self.modules} ended: {errors[-2000:]}")
        return json.loads(line)

    def close(self):
        """End the commands that still run, and the server, if nobody else needs it."""
        if self.channel is not None:
            self.channel.close()
            self.connection.close()
            self.channel = None

    def _path(self, kind):
        return SOCKETS / f"{self.name}.{kind}"

    def _connect(self):
        # The server ends under the same lock: one that accepts a connection answers it.
        path = self._path("socket")
        self.connection = socket.socket(socket.AF_UNIX)
        with locked(self._path("lock")), short_path(path) as address:
            try:
                self.connection.connect(address)
            except (FileNotFoundError, ConnectionRefusedError):
                self._start_server(path, address)
                self.connection.connect(address)
        self.channel = self.connection.makefile("r")

    def _start_server(self, path, address):
        path.unlink(missing_ok=True)  # of a server that was killed
        with socket.socket(socket.AF_UNIX) as listener, open(self._path("errors"), "w") as errors:
            listener.bind(address)
            listener.listen()
            self.server = subprocess.Popen(
                [sys.executable, __file__, str(listener.fileno()), str(path), *self.modules],
                pass_fds=[listener.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env={**os.environ, **ONE_THREAD},
            )


# ---- the server --------------------------------------------------------------------------------


class Client:
    """A process that has connected, and the commands of its that still run."""

    def __init__(self, connection):
        self.channel = connection.makefile("rw")
        self.running = set()

    def request(self):
        """Return what it asks for, or None when it has closed.

        It waits for the answer before it asks again, so one line is all that there is to read.
        """
        line = ""
        with contextlib.suppress(ConnectionError):  # it was killed
            line = self.channel.readline()
        return json.loads(line) if line else None

    def answer(self, value):
        with contextlib.suppress(ConnectionError):  # it was killed
            print(json.dumps(value), file=self.channel, flush=True)

    def exit_status(self, pid):
        """Return the exit status of a command, or None while it runs."""
        ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            return None
        self.running.discard(pid)
        return os.waitstatus_to_exitcode(status)

    def end_commands(self):
        for pid in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def serve(listener, path):
    """Answer the requests of all clients until the last one closes.

    Return None then, and in each fork the command to run. The sockets are closed on return, in a
    fork, too.
    """
    with listener, selectors.DefaultSelector() as sockets:
        sockets.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in sockets.select():
                if key.fileobj is listener:
                    connection, _ = listener.accept()
                    sockets.register(connection, selectors.EVENT_READ, Client(connection))
                    continue

                client = key.data
                request = client.request()
                if request is None:
                    client.end_commands()
                    sockets.unregister(key.fileobj)
                    if len(sockets.get_map()) == 1 and nobody_comes(listener, path):
                        return None
                elif "status" in request:
                    client.answer(client.exit_status(request["status"]))
                else:
                    pid = os.fork()
                    if pid == 0:
                        os.setpgid(0, 0)
                        return request
                    with contextlib.suppress(OSError):  # both set it: either may be first
                        os.setpgid(pid, pid)
                    client.running.add(pid)
                    client.answer(pid)


def nobody_comes(listener, path):
    """Return whether no other client has connected. If so, the next one starts a new server."""
    with locked(path.with_suffix(".lock")):
        connecting, _, _ = select.select([listener], [], [], 0)
        if not connecting:
            path.unlink()
    return not connecting


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
    descriptor, path, *modules = sys.argv[1:]
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # or a command would copy all memory that its garbage collector visits
    listener = socket.socket(fileno=int(descriptor))
    listener.set_inheritable(False)
    requested = serve(listener, Path(path))
    if requested is not None:
        try:
            become(requested)
            status.append(0)
        except Exception:
            status.append(1)
            raise
        except SystemExit as end:
            status.append(end.code if isinstance(end.code, int) else int(end.code is not None))
            raise
