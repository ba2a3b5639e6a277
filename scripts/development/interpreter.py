"""Print what scripts/setup.sh asks of an interpreter, a line each, or say why it cannot serve.

The lines: its path, its version, its own torch >= 2.6, the path of Python.h if that is missing, and
how to install fairseq: 'wheel' or 'source'. The argument is the .venv that setup.sh makes. Any
Python 3 can read this file.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 (this is what finds out)
    sys.exit(
        "Python >= 3.11 is needed, this is %d.%d; name another one, as PYTHON=python3.12"  # noqa: UP031
        % sys.version_info[:2]
    )

import os

# an activated .venv cannot build itself
if os.path.realpath(sys.prefix) == os.path.realpath(sys.argv[1]):
    os.execv(sys._base_executable, [sys._base_executable, *sys.orig_argv[1:]])
try:
    import ensurepip  # noqa: F401
    import venv  # noqa: F401
except ImportError:
    sys.exit(
        "the modules venv and ensurepip are missing (Debian, Ubuntu: apt-get install python3-venv)"
    )

import importlib.metadata
import platform
import sysconfig


def own_torch():
    try:
        version = importlib.metadata.version("torch")
        new = tuple(map(int, version.split(".")[:2])) >= (2, 6)
    except Exception:  # none, or a damaged one
        return ""
    # A virtual environment does not see the packages of another one.
    return version if new and sys.prefix == sys.base_prefix else ""


def missing_header():
    header = os.path.join(sysconfig.get_path("include"), "Python.h")
    return "" if os.path.exists(header) else header


def fairseq():
    """Return 'wheel' on the platforms of scripts/requirements/fairseq_wheel.txt.

    They are manylinux_2_28_x86_64.
    """
    library, version = platform.libc_ver()
    new_library = library == "glibc" and tuple(map(int, version.split("."))) >= (2, 28)
    cpython = platform.python_implementation() == "CPython" and sys.version_info < (3, 13)
    if new_library and cpython and platform.machine() == "x86_64":
        return "wheel"
    return "source"


print(sys.executable, platform.python_version(), own_torch(), missing_header(), fairseq(), sep="\n")
