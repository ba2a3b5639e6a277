"""What a machine has, and what each of several jobs gets of it."""

import os
import subprocess
import sys
from pathlib import Path

from studies.faults import fail

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

Share = dict[str, str]  # variables of the environment


def shares(jobs: int) -> list[Share]:
    """Return for each job its share of the GPUs, or of the cores if there are no GPUs.

    A single job needs no share of the GPUs, because it may use all of them.
    """
    wanted = os.environ.get("GPUS", "")
    if wanted and not wanted.isdecimal():
        fail(f"GPUS={wanted}: must be a number")
    gpus = []
    if jobs > 1 and wanted != "0":
        try:
            gpus = visible_gpus()
        except subprocess.CalledProcessError as error:
            why = error.stderr.strip().rpartition("\n")[2][:200]
            fail(
                f"--jobs {jobs}: {sys.executable} cannot count the GPUs ({why}); set GPUS=0 for "
                "none, or name them in CUDA_VISIBLE_DEVICES"
            )
    return shares_of_gpus(gpus, jobs, wanted) if gpus else shares_of_cores(jobs)


def shares_of_gpus(gpus: list[str], jobs: int, wanted: str) -> list[Share]:
    """Return as many shares as there are jobs, or GPUs if those are fewer."""
    jobs = min(jobs, len(gpus))
    # a power of two, because it can share the batches of an update: 7 GPUs for 2 jobs are 2 each
    most = len(gpus) // jobs
    size = 2 ** (most.bit_length() - 1)
    all_shares = []
    for job in range(jobs):
        gpus_of_job = gpus[size * job : size * (job + 1)]
        share = {"CUDA_VISIBLE_DEVICES": ",".join(gpus_of_job)}
        if wanted:
            share["GPUS"] = str(min(int(wanted), size))
        all_shares.append(share)
    return all_shares


def shares_of_cores(jobs: int) -> list[Share]:
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, CORES // jobs))
    return [{"OMP_NUM_THREADS": threads}] * jobs


def visible_gpus() -> list[str]:
    """Return the numbers, or the names, of the GPUs that this process may use.

    Raises CalledProcessError where this Python cannot count them, without torch say.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name for name in given.split(",") if name not in ("", "-1")]
    # in a process of its own, whose end frees torch's memory
    code = "import torch; print(torch.cuda.device_count())"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    sys.stderr.write(ended.stderr)  # why there are none, as with a driver that is too old
    return [str(number) for number in range(int(ended.stdout))]


def cpu_seconds(pid: int) -> float | None:
    """Return the CPU time of a process and its ended children; None if the system has no /proc."""
    try:
        # 'pid (name) state ...'; the name may have blanks and brackets
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # utime, stime, cutime, cstime of proc(5), in ticks
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
