"""A real mpirun of Open MPI starts one run, and says where its processes are."""

from __future__ import annotations

import shutil
import socket

import pytest

from tests.clusters.slurm import launch
from tests.distributed.launching import environment, executed, run, script

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun of Open MPI"),
]

PLACE = """
import os, torch, torch.distributed as dist
from headway.launcher.clusters.pmix import ask_server
dist.init_process_group("gloo")
total = torch.tensor([1.0 + dist.get_rank()])
dist.all_reduce(total)
place = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")]
print(*place, int(total), *ask_server(), flush=True)
dist.destroy_process_group()
"""


def test_the_processes_of_mpirun_on_one_machine_are_the_ranks() -> None:
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    words = launch("-q", "--cpu", script(PLACE)).split()
    with executed():
        done = run([*mpirun, *words], environment(), timeout_s=300)
    here = f"{socket.gethostname()} 1 0"
    assert sorted(done.stdout.splitlines()) == [f"0 0 2 2 3 {here}", f"1 1 2 2 3 {here}"], (
        done.stderr
    )
