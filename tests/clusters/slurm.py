"""A real SLURM on this host; its nodes have loopback addresses for names."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tests.distributed.launching import environment, execute, free_port, is_alive

NODES = ("127.0.0.2", "127.0.0.3")
SPARE = "127.0.0.4"
_PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "salloc", "scancel", "squeue")
_ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL"}

_CONFIG = Path(__file__).with_name("slurm.conf").read_text()


def unavailable_reason() -> str:
    """Return why SLURM cannot be started here; empty if it may be."""
    if sys.platform != "linux":
        return "SLURM is for Linux"
    if missing := [name for name in _PROGRAMS if shutil.which(name) is None]:
        return f"{', '.join(missing)} not installed: .ci/install-slurm does"
    return "" if os.getuid() == 0 else "only root can start SLURM's daemons"


class Slurm:
    """A controller, its nodes, and their authentication, in a folder of their own.

    Args:
        folder: an empty one; its path is short enough for a socket in it.
        nodes: their addresses.
        node_timeout_s: when a node that does not answer is taken for failed.
    """

    def __init__(
        self, folder: Path, nodes: Sequence[str] = NODES, node_timeout_s: int = 300
    ) -> None:
        self.folder = folder
        self._nodes = nodes
        self._node_timeout_s = node_timeout_s

    def start(self) -> None:
        """Start all daemons and wait until all nodes are idle.

        Raises:
            OSError: one could not be started, or the nodes do not come up.
        """
        self.folder.chmod(0o755)
        (self.folder / "state").mkdir()
        for node in self._nodes:
            (self.folder / f"spool-{node}").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        names = {"socket": "sock", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}
        own = [f"--{name}={self.folder}/munge.{suffix}" for name, suffix in names.items()]
        self._run("munged", "--force", f"--key-file={key}", *own)
        host = socket.gethostname().partition(".")[0]
        ports = [free_port() for _ in range(1 + len(self._nodes))]
        nodes = [
            f"NodeName={node} NodeHostname={host} NodeAddr={node} Port={port} CPUs=4"
            for node, port in zip(self._nodes, ports[1:], strict=True)
        ]
        self.conf.write_text(
            _CONFIG.format(
                host=host,
                port=ports[0],
                folder=self.folder,
                nodes="\n".join(nodes),
                node_timeout_s=self._node_timeout_s,
                # runs take their ports from it, and another worker may have a SLURM here too
                first_job=1 + os.getpid() * 1000,
            )
        )
        self._run("slurmctld", "-c")
        for node in self._nodes:
            self._run("slurmd", "-N", node)
        if not wait_for(
            lambda: (
                self.ask("sinfo", "-h", "-N", "-p", "usual", "-o", "%T").split()
                == ["idle"] * len(self._nodes)
            ),
            within_s=60,
        ):
            log = self.folder / "slurmctld.log"
            raise OSError(f"the nodes are not up: {log.read_text()[-300:] if log.exists() else ''}")

    def kill_node(self, node: str, job: str) -> None:
        """End a node as a loss of power does: its daemon, and all that it runs of a job."""
        daemon = psutil.Process(int((self.folder / f"slurmd-{node}.pid").read_text()))
        of_node = {"SLURMD_NODENAME": node, "SLURM_JOB_ID": job, "SLURM_CONF": str(self.conf)}
        tasks = [process for process in psutil.process_iter() if _has(process, of_node)]
        steps = [up for task in tasks for up in task.parents() if up.name() == "slurmstepd"]
        for process in [daemon, *steps, *tasks]:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def stop(self) -> None:
        """End all jobs, and then all daemons."""
        daemons = self._daemons()
        with suppress(subprocess.SubprocessError):  # the controller may have ended
            for job in self.ask("squeue", "-h", "-o", "%i").split():
                self.ask("scancel", "-s", "KILL", job)
                self.ask("scancel", job)
            wait_for(lambda: not self.ask("squeue", "-h"), within_s=60)  # its daemons end it
        for number in (signal.SIGTERM, signal.SIGKILL):
            for daemon in daemons:
                with suppress(psutil.NoSuchProcess):
                    daemon.send_signal(number)
            if wait_for(lambda: not any(is_alive(daemon.pid) for daemon in daemons), within_s=10):
                return

    def _daemons(self) -> list[psutil.Process]:
        """Return the daemons that run; a number that one has noted may be another process's now."""
        found = []
        for path in self.folder.glob("*.pid"):
            with suppress(ValueError, psutil.NoSuchProcess):
                one = psutil.Process(int(path.read_text()))
                if one.environ().get("SLURM_CONF") == str(self.conf):
                    found.append(one)
        return found

    @property
    def conf(self) -> Path:
        """The file that all of SLURM's programs read."""
        return self.folder / "slurm.conf"

    def environment(self, **variables: str) -> dict[str, str]:
        """Return an environment in which SLURM's programs find it, and Headway is found."""
        return environment(SLURM_CONF=str(self.conf), **variables)

    def ask(self, *words: str) -> str:
        """Return what one of SLURM's programs prints; empty if it fails."""
        return self.run(*words, timeout_s=60).stdout

    def run(self, *words: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
        """Run one of SLURM's programs to its end, in the working directory."""
        return execute([*words], self.environment(), timeout_s=timeout_s, typed="")

    def submit(self, body: str, *options: str) -> Job:
        """Submit a batch script whose output goes to `out-JOB.txt` in the working directory."""
        script = Path("job.sh")
        home = shlex.quote(os.environ["HOME"])  # SLURM sets this user's own with --export=NONE
        script.write_text(f"#!/bin/bash\nexport HOME={home}\n{body}\n")
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


def _has(process: psutil.Process, variables: Mapping[str, str]) -> bool:
    try:
        return variables.items() <= process.environ().items()
    except (psutil.Error, OSError):
        return False


def wait_for(is_so: Callable[[], bool], within_s: float = 300) -> bool:
    """Return whether it becomes so in time."""
    deadline = time.monotonic() + within_s
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def summing(where: str) -> str:
    """Return a script that prints `where`, the numbers of its rank, and the sum over all ranks."""
    return f"""
import os, socket, torch, torch.distributed as dist
from headway.launcher.clusters import mpi
dist.init_process_group("gloo")
total = torch.tensor([1.0 + dist.get_rank()])
dist.all_reduce(total)
numbers = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")]
print({where}, *numbers, int(total), flush=True)
dist.destroy_process_group()
"""


def launch(*words: str) -> str:
    """Return the line of `headway launch` for a shell."""
    return subprocess.list2cmdline([sys.executable, "-m", "headway", "launch", *words])
