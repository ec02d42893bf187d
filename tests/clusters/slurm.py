"""A real SLURM on this host: two nodes, which have loopback addresses for names."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from tests.distributed.launching import environment, is_alive

NODES = ("127.0.0.2", "127.0.0.3")
_PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "salloc", "scancel", "squeue")
_FIRST_PORT = 27200
_ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL"}

_CONFIG = """\
ClusterName=headway
SlurmctldHost={host}(127.0.0.1)
FirstJobId={first_job}
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
ReturnToService=2
KillWait=5
MessageTimeout=60
TCPTimeout=60
MinJobAge=300
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,batch_sched_delay=0,sched_interval=1,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
PropagateResourceLimits=NONE
SlurmdParameters=config_overrides
{nodes}
PartitionName=usual Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=120
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def why_not() -> str:
    """Return why SLURM cannot be started here; empty if it may be."""
    if sys.platform != "linux":
        return "SLURM is for Linux"
    if missing := [name for name in _PROGRAMS if shutil.which(name) is None]:
        return f"{', '.join(missing)} not installed: .ci/install-slurm does"
    return "" if os.getuid() == 0 else "only root can start SLURM's daemons"


class Slurm:
    """A controller, two nodes, and their authentication, in a folder of their own.

    Args:
        folder: an empty one; its path is short enough for a socket in it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pids: list[int] = []

    def start(self) -> None:
        """Start all daemons and wait until both nodes are idle.

        Raises:
            OSError: one could not be started, or the nodes do not come up.
        """
        self.folder.chmod(0o755)
        (self.folder / "state").mkdir()
        for node in NODES:
            (self.folder / f"spool-{node}").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        names = {"socket": "sock", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}
        own = [f"--{name}={self.folder}/munge.{suffix}" for name, suffix in names.items()]
        self._run("munged", "--force", f"--key-file={key}", *own)
        host = socket.gethostname().partition(".")[0]
        ports = _free_ports(1 + len(NODES))
        nodes = [
            f"NodeName={node} NodeHostname={host} NodeAddr={node} Port={port} CPUs=4"
            for node, port in zip(NODES, ports[1:], strict=True)
        ]
        self.conf.write_text(
            _CONFIG.format(
                host=host,
                port=ports[0],
                folder=self.folder,
                nodes="\n".join(nodes),
                # runs take their ports from it, and another worker may have a SLURM here too
                first_job=1 + os.getpid() * 1000,
            )
        )
        self._run("slurmctld", "-c")
        for node in NODES:
            self._run("slurmd", "-N", node)
        if not wait_for(
            lambda: (
                self.ask("sinfo", "-h", "-N", "-p", "usual", "-o", "%T").split() == ["idle"] * 2
            ),
            within_s=60,
        ):
            log = self.folder / "slurmctld.log"
            raise OSError(f"the nodes are not up: {log.read_text()[-300:] if log.exists() else ''}")

    def stop(self) -> None:
        """End all jobs, and then all daemons, each by its own pid."""
        for path in self.folder.glob("*.pid"):
            with suppress(ValueError):
                self._pids.append(int(path.read_text()))
        with suppress(subprocess.SubprocessError):  # the controller may have ended
            for job in self.ask("squeue", "-h", "-o", "%i").split():
                self.ask("scancel", "-s", "KILL", job)
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in filter(is_alive, self._pids):
                os.kill(pid, number)
            if wait_for(lambda: not any(map(is_alive, self._pids)), within_s=10):
                return

    @property
    def conf(self) -> Path:
        """The file that all of SLURM's programs read."""
        return self.folder / "slurm.conf"

    def environment(self, **variables: str) -> dict[str, str]:
        """Return an environment in which SLURM's programs find it, and Headway is found."""
        return environment(SLURM_CONF=str(self.conf), **variables)

    def ask(self, *words: str) -> str:
        """Return what one of SLURM's programs prints; empty if it fails."""
        return subprocess.run(
            words, env=self.environment(), capture_output=True, text=True, timeout=60
        ).stdout

    def run(self, *words: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
        """Run one of SLURM's programs to its end, in the working directory."""
        return subprocess.run(
            words,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )

    def submit(self, body: str, *options: str) -> Job:
        """Submit a batch script whose output goes to `out-JOB.txt` in the working directory."""
        script = Path("job.sh")
        script.write_text(f"#!/bin/bash\n{body}\n")
        words = ["sbatch", "--parsable", "--open-mode=append", "--output=out-%j.txt", *options]
        done = self.run(*words, str(script))
        assert done.returncode == 0, done.stderr
        return Job(self, done.stdout.strip())

    def _run(self, *words: str) -> None:
        done = self.run(*words)
        if done.returncode != 0:
            raise OSError(f"{words[0]}: {done.stderr}")


class Job:
    """A job that has been submitted."""

    def __init__(self, slurm: Slurm, number: str) -> None:
        self._slurm = slurm
        self.number = number

    @property
    def states(self) -> set[str]:
        """The states of the job, its components or the jobs of its array: RUNNING, COMPLETED."""
        words = ("squeue", "-h", "-t", "all", "-o", "%T", "-j", self.number)
        return {*self._slurm.ask(*words).split()}

    @property
    def output(self) -> str:
        """What it has printed."""
        path = Path(f"out-{self.number}.txt")
        return path.read_text() if path.exists() else ""

    def cancel(self, *options: str) -> None:
        """Cancel it, or send it the signal that the options name."""
        self._slurm.ask("scancel", *options, self.number)

    def wait(self, within_s: float = 300) -> str:
        """Return what it has printed, once it has ended."""
        assert wait_for(lambda: self.states <= _ENDED, within_s), f"{self.states}\n{self.output}"
        return self.output


def wait_for(is_so: Callable[[], bool], within_s: float = 300) -> bool:
    """Return whether it becomes so in time."""
    deadline = time.monotonic() + within_s
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def launch(*words: str) -> str:
    """Return the line of `headway launch` for a shell."""
    return subprocess.list2cmdline([sys.executable, "-m", "headway", "launch", *words])


def _free_ports(count: int) -> Sequence[int]:
    """Return ports that nobody listens on now, below those that the system gives out."""
    free: list[int] = []
    for port in range(_FIRST_PORT, 28000):
        with suppress(OSError), socket.create_server(("", port)):
            free.append(port)
        if len(free) == count:
            return free
    raise OSError("no free ports")
