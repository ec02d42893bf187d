"""A real mpirun of Open MPI starts one run, and says where its processes are."""

from __future__ import annotations

import re
import shlex
import shutil
import socket
from pathlib import Path

import pytest

from tests.clusters.slurm import launch, summing
from tests.distributed.launching import execute, executed, script
from tests.distributed.networks import needs_namespaces, network

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun of Open MPI"),
]


def test_the_processes_of_mpirun_on_one_machine_are_the_ranks() -> None:
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    words = launch("-q", "--cpu", script(summing("*mpi.ask_server()"))).split()
    done = execute([*mpirun, *words], timeout_s=300)
    here = f"{socket.gethostname()} 1 0"
    expected = [f"{here} 0 0 2 2 3", f"{here} 1 1 2 2 3"]
    assert sorted(done.stdout.splitlines()) == expected, done.stderr


def agent_of_mpirun(folder: Path, prefixes: dict[str, list[str]]) -> str:
    """Write what mpirun starts its daemons on other machines with, in place of ssh."""
    lines = [f'{name}) exec {shlex.join(prefix)} sh -c "$*";;' for name, prefix in prefixes.items()]
    agent = folder / "agent"
    agent.write_text("\n".join(["#!/bin/sh", "host=$1; shift", "case $host in", *lines, "esac"]))
    agent.chmod(0o755)
    return str(agent)


@pytest.mark.long
@needs_namespaces
def test_one_process_of_mpirun_on_each_of_two_machines_is_one_run(tmp_path: Path) -> None:
    with network(2, tmp_path) as net:
        agent = agent_of_mpirun(tmp_path, {f"n{n}": net.prefix(n) for n in net.numbers})
        mpirun = ["mpirun", "--allow-run-as-root", "--host", "n1:2,n2:2", "--map-by", "ppr:1:node"]
        name = script(summing("socket.gethostname()"))
        words = launch("-q", "--cpu", "--num-processes", "2", name).split()
        with executed():
            running = net.start(1, [*mpirun, *words], OMPI_MCA_plm_rsh_agent=agent)
            out, errors = running.communicate(timeout=120)
    assert running.returncode == 0, errors
    places = sorted(re.findall(r"n\d \d \d \d \d \d+", out))
    assert places == ["n1 0 0 4 2 10", "n1 1 1 4 2 10", "n2 2 0 4 2 10", "n2 3 1 4 2 10"]
