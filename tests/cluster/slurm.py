"""A SLURM of its own on this machine: one node, its daemons, ports and files in a folder."""

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

from tests.commands import ROOT, free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
CPUS = 4  # SLURM gives out so many, whatever the machine has
CONFIG = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
KillWait=30
MessageTimeout=60
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Return why no SLURM can be started here, or ''."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if absent:
        return (
            "needs SLURM and munge, as in Debian's slurm-wlm and munge; missing: "
            f"{', '.join(absent)}"
        )
    return "" if os.geteuid() == 0 else "starts daemons that need root"


PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


class Cluster:
    """The daemons; `close` ends them."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.host = socket.gethostname().split(".")[0]
        for name in ("state", "spool"):
            (folder / name).mkdir()
        ports = free_port(), free_port()
        (folder / "slurm.conf").write_text(
            CONFIG.format(host=self.host, ports=ports, folder=folder, cpus=CPUS)
        )
        (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        self.env = {
            **os.environ,
            "PATH": PATH,
            "SLURM_CONF": str(folder / "slurm.conf"),
            "OMP_NUM_THREADS": "1",
        }
        self.daemons: list[subprocess.Popen] = []
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        files = {
            "key-file": "munge.key",
            "socket": "munge.socket",
            "pid-file": "munge.pid",
            "seed-file": "munge.seed",
        }
        files["log-file"] = "munge.log"
        self._daemon(
            "munged",
            "-F",
            "--force",
            *(f"--{flag}={self.folder / file}" for flag, file in files.items()),
        )
        self._wait(lambda: (self.folder / "munge.socket").exists())
        self._daemon("slurmctld", "-D", "-i")
        self._daemon("slurmd", "-D", "-N", self.host)
        self._wait(
            lambda: " idle" in self.ask("sinfo", "--noheader", "--format=%n %t", check=False)
        )

    def _daemon(self, *command: str) -> None:
        with (self.folder / f"{command[0]}.out").open("w") as log:
            self.daemons.append(subprocess.Popen(command, env=self.env, stdout=log, stderr=log))

    def _wait(self, happened, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not happened():
            logs = {
                path.name: path.read_text()[-1500:] for path in self.folder.glob("*.[lo][ou][gt]")
            }
            assert time.monotonic() < deadline, "\n".join(
                f"{name}: {text}" for name, text in logs.items()
            )
            time.sleep(0.2)

    def ask(self, *command: str, check: bool = True) -> str:
        ended = subprocess.run(command, env=self.env, capture_output=True, text=True)
        assert not check or ended.returncode == 0, f"{command}: {ended.stdout}{ended.stderr}"
        return ended.stdout

    def close(self) -> None:
        self.ask("scancel", "--signal=KILL", "--full", "--user=root", check=False)
        for daemon in reversed(self.daemons):
            daemon.terminate()
            daemon.wait(30)


class Job:
    """A job of examples/slurm.sbatch."""

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        *command: object,
        tasks: int = 2,
        flags: tuple[str, ...] = (),
    ):
        self.cluster, self.log = cluster, folder / "slurm.log"
        resources = [
            "--nodes=1",
            "--gpus-per-node=0",
            f"--ntasks-per-node={tasks}",
            "--cpus-per-task=1",
            "--time=60",
        ]
        words = [
            "sbatch",
            "--parsable",
            f"--chdir={ROOT}",
            f"--output={self.log}",
            *resources,
            *flags,
        ]
        script = str(ROOT / "examples" / "slurm.sbatch")
        self.number = cluster.ask(*words, script, *map(str, command)).strip()

    def fact(self, name: str) -> str:
        """Return a value of `scontrol show job`."""
        words = self.cluster.ask("scontrol", "show", "job", self.number).split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))

    def starts_again(self, number: int) -> None:
        """Wait for a requeue; without the two minutes that SLURM lets pass."""
        self.until(lambda: int(self.fact("Restarts")) == number)

        def has_started() -> bool:
            words = ("scontrol", "update", f"JobId={self.number}", "StartTime=now")
            # a short job may have ended, too
            started = self.fact("JobState") in ("RUNNING", "COMPLETED", "FAILED")
            return started or self.cluster.ask(*words, check=False) is None

        self.until(has_started)

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def until(self, happened, seconds: float = 400) -> None:
        deadline = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < deadline, f"{self.fact('JobState')}: {self.text()[-3000:]}"
            time.sleep(0.3)

    def until_ended(self) -> str:
        """Return the state and the exit status."""
        self.until(lambda: self.fact("JobState") in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"))
        return f"{self.fact('JobState')} {self.fact('ExitCode')}"

    def processes(self) -> list[int]:
        """Return the trainings of this job by rank, without their data workers."""
        found = {}
        for path in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
            try:
                words = (path / "cmdline").read_bytes().split(b"\0")
                variables = (path / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"SLURM_JOB_ID={self.number}".encode() in variables and words[0].endswith(b"python"):
                rank = next(word for word in variables if word.startswith(b"SLURM_PROCID="))
                found.setdefault(rank, int(path.name))
        return [found[rank] for rank in sorted(found)]
