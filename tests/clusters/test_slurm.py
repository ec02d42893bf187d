"""A real SLURM starts runs of several machines without a flag that says so."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from headway.launcher.clusters.slurm import read_nodelist
from tests.clusters.slurm import NODES, SPARE, Job, Slurm, launch, summing, wait_for
from tests.distributed.launching import finished, is_alive, script, wait_for_pids
from tests.distributed.test_preemption import WORKER, require_exact
from tests.distributed.test_preemption import Job as Training

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.xdist_group("slurm"),  # one worker starts it
]

SUM = summing('"place", os.environ["SLURMD_NODENAME"]')


def places(output: str) -> list[str]:
    """Return what the ranks have printed: node, rank, local rank, world sizes, sum."""
    return sorted(re.findall(r"place (.*)", output), key=lambda line: line.split()[1])


def on_two_nodes(per_node: int) -> list[str]:
    size = 2 * per_node
    total = size * (size + 1) // 2
    return [
        f"{node} {index * per_node + local} {local} {size} {per_node} {total}"
        for index, node in enumerate(NODES)
        for local in range(per_node)
    ]


def test_a_batch_script_starts_one_run_on_all_nodes(slurm: Slurm) -> None:
    """With another number of ranks on each, `--export=NONE`, and no secret in what is shown."""
    name = script(SUM)
    body = f"{launch('--cpu', name)}\n{launch('--cpu', '--dry-run', name)}"
    environment = f"export PYTHONPATH={os.pathsep.join(filter(None, sys.path))}"
    options = ("--nodes=2", "--ntasks=3", "--export=NONE")
    job = slurm.submit(f"{environment}\nexport SLURM_CONF={slurm.conf}\n{body}", *options)
    output = job.wait()
    first, other = NODES
    expected = [f"{first} 0 0 3 2 6", f"{first} 1 1 3 2 6", f"{other} 2 0 3 1 6"]
    assert places(output) == expected, output
    assert "HEADWAY_RUN_KEY" not in output
    assert job.states == {"COMPLETED"}


@pytest.mark.long
def test_a_shell_of_salloc_starts_one_run_on_two_nodes(slurm: Slurm) -> None:
    words = launch("-q", "--cpu", script(SUM)).split()
    done = slurm.run("salloc", "--nodes=2", "--ntasks-per-node=2", *words)
    assert places(done.stdout) == on_two_nodes(2), done.stderr


def test_the_tasks_of_srun_are_the_ranks_where_a_node_has_several(slurm: Slurm) -> None:
    name = script(SUM)
    srun = ("srun", "--nodes=2", "--ntasks-per-node=2")
    done = slurm.run(*srun, *launch("-q", "--cpu", name).split())
    assert places(done.stdout) == on_two_nodes(2), done.stderr
    refused = slurm.run(*srun, *launch("-q", "--cpu", "--num-processes", "3", name).split())
    assert refused.returncode == 2
    assert "num_processes is 3, but slurm started 2 tasks" in refused.stderr


@pytest.mark.long
def test_the_jobs_of_an_array_are_runs_of_their_own(slurm: Slurm) -> None:
    jobs = slurm.submit(launch("-q", "--cpu", script(SUM)), "--nodes=2", "--array=0-1")
    jobs.wait()
    outputs = [path.read_text() for path in Path.cwd().glob("out-*.txt")]
    assert [places(output) for output in outputs] == [on_two_nodes(1)] * 2, outputs


SLEEPS = """
import os, time
open("pid_" + os.environ["RANK"], "w").write(f"{os.getpid()} {os.getppid()}")
while True:
    time.sleep(0.1)
"""


def test_scancel_leaves_nothing(slurm: Slurm) -> None:
    job = slurm.submit(launch("-q", "--cpu", script(SLEEPS)), "--nodes=2")
    pids = wait_for_pids("pid_*", 2)
    job.cancel()
    job.wait()
    assert wait_for(lambda: not any(map(is_alive, pids)), within_s=300)


@pytest.mark.long
def test_the_exit_code_of_a_rank_is_the_jobs(slurm: Slurm) -> None:
    text = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(42)\ntime.sleep(600)"
    job = slurm.submit(launch("--cpu", script(text)) + "\necho code $?", "--nodes=2")
    output = job.wait()
    assert codes(output) == [42]
    assert output.count("rank 1 of 2 exited with code 42") == 1  # by machine 0
    assert output.count("as machine 0 reports") == 1


GOES_ON = """
code=$?
echo "code $code"
if [ $code -eq 75 ]; then scontrol requeue $SLURM_JOB_ID; fi
"""
"""What docs/guides/clusters.md says for a job that goes on where it was stopped."""


def submit_training(slurm: Slurm, training: Training, nap: str, *options: str) -> Job:
    words = launch("-q", "--cpu", WORKER, str(training.folder), "--nap", nap)
    return slurm.submit(words + GOES_ON, "--nodes=2", "--exclusive", "--requeue", *options)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_job_whose_node_fails_goes_on_on_the_spare_one_as_if_nothing_had_happened(
    slurm_with_spare: Slurm, tmp_path: Path
) -> None:
    training, whole = Training(tmp_path / "job"), Training(tmp_path / "whole", "--num-processes=2")
    job = submit_training(slurm_with_spare, training, "1")
    assert wait_for(lambda: len(training.ledger(rank=1)) > 9), job.output
    slurm_with_spare.kill_node(NODES[1], job.number)
    assert wait_for((training.folder / "done.json").exists, within_s=600), job.output
    output = job.wait()
    assert codes(output)[-1] == 0, output
    nodes = slurm_with_spare.ask("squeue", "-h", "-t", "all", "-o", "%N", "-j", job.number)
    assert read_nodelist(nodes.strip()) == [NODES[0], SPARE]
    process = whole.start("--nap", "0")  # SLURM's daemons run on beside it
    finished(process, 0)
    assert training.done["weights"] == whole.done["weights"]


def codes(output: str) -> list[int]:
    return [int(code) for code in re.findall(r"^code (\d+)$", output, re.MULTILINE)]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_job_goes_on_after_its_time_limit_and_loses_nothing(slurm: Slurm, tmp_path: Path) -> None:
    training = Training(tmp_path / "job")
    # SLURM may send the signal a minute too early; the training takes at least 156 s
    job = submit_training(slurm, training, "3", "--time=3", "--signal=USR1@30")
    output = job.wait(within_s=800)
    assert codes(output)[-1] == 0, output
    assert {*codes(output)[:-1]} == {75}, output
    require_exact(training, ranks=2)


@pytest.mark.long
def test_a_job_that_is_preempted_goes_on_and_loses_nothing(slurm: Slurm, tmp_path: Path) -> None:
    training = Training(tmp_path / "job")
    job = submit_training(slurm, training, "1")
    assert wait_for(lambda: len(training.ledger()) > 5, within_s=300), job.output
    urgent = slurm.submit("sleep 1", "--partition=urgent", "--nodes=2", "--exclusive")
    urgent.wait()
    output = job.wait(within_s=400)
    assert codes(output) == [75, 0], output
    require_exact(training, ranks=2)
