"""`headway launch --submit slurm` with a real SLURM: submitted, saved, run again, followed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.clusters.slurm import Job, Slurm, wait_for
from tests.distributed.launching import script

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.xdist_group("slurm"),  # one worker starts it
]

HEADWAY = (sys.executable, "-m", "headway")

# stops with 75 the first time; the first rank that ends would end those that have yet to print
RANK = """
import os, sys, time
from pathlib import Path
again = os.environ.get("SLURM_RESTART_COUNT", "0")
rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
print("attempt", again, "rank", rank, "of", world, sys.argv[1:], flush=True)
Path(f"printed_{again}_{rank}").touch()
while len([*Path().glob(f"printed_{again}_*")]) < int(world):
    time.sleep(0.05)
sys.exit(75 if again == "0" else 3)
"""

SAVES = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
open("up_" + os.environ.get("SLURM_RESTART_COUNT", "0") + "_" + os.environ["SLURM_NODEID"], "w")
time.sleep(600)
"""


def test_a_job_of_two_nodes_is_run_again_once_it_has_saved_and_followed_to_its_code(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("my jobs").mkdir()
    monkeypatch.chdir("my jobs")
    words = ["--num-machines=2", "--sbatch", "time=10m", "--num-processes=2", "--cpu"]
    words += ["--set", "start_method=exec", script(RANK), "it's $x"]  # imports torch less often
    submitted = slurm.run(*HEADWAY, "launch", "--submit", "slurm", "-q", *words)
    follow = (*HEADWAY, "logs", "--follow", submitted.stdout.strip())
    done = slurm.run(*follow)
    seen = {*re.findall(r"attempt .*", done.stdout)}  # the report repeats some
    places = [f'rank {rank} of 4 ["it\'s $x"]' for rank in range(4)]
    assert seen == {f"attempt {n} {place}" for n in (0, 1) for place in places}, done.stderr
    assert done.returncode == 3
    (log,) = Path("headway-jobs").glob("*.log")
    assert slurm.run(*follow).stdout == log.read_text()


STARTS = """
import os, time
open("up_" + os.environ.get("SLURM_RESTART_COUNT", "0"), "w")
time.sleep(600)  # loads, and has nothing to save yet
"""


@pytest.mark.long
def test_a_job_that_is_preempted_before_it_has_anything_to_save_starts_anew(slurm: Slurm) -> None:
    words = ["--num-machines", "2", "--sbatch", "exclusive", "-q", "--cpu", script(STARTS)]
    submitted = slurm.run(*HEADWAY, "launch", "--submit", "slurm", *words)
    job = Job(slurm, submitted.stdout.strip())
    log = Path(f"headway-jobs/script-{job.number}.log")
    try:
        assert wait_for(Path("up_0").exists), submitted.stderr
        slurm.submit("sleep 1", "--partition=urgent", "--nodes=2", "--exclusive").wait()
        assert wait_for(Path("up_1").exists), log.read_text()
    finally:
        job.cancel()
    assert wait_for(lambda: job.states == {"CANCELLED"}), job.states


@pytest.mark.parametrize("nodes", ["1", pytest.param("2", marks=pytest.mark.long)])
def test_a_job_that_slurm_signals_saves_and_goes_on_but_not_once_it_is_cancelled(
    nodes: str, slurm: Slurm
) -> None:
    words = ["--num-machines", nodes, "-q", "--cpu", script(SAVES)]
    submitted = slurm.run(*HEADWAY, "launch", "--submit", "slurm", *words)
    assert submitted.returncode == 0, submitted.stderr
    job = Job(slurm, submitted.stdout.strip())
    log = Path(f"headway-jobs/script-{job.number}.log")
    try:
        for node in range(int(nodes)):  # a rank without its handler would end with 143
            assert wait_for(Path(f"up_0_{node}").exists), log.read_text()
        job.cancel("--signal=TERM")  # what --signal does before the time limit
        assert wait_for(Path("up_1_0").exists), log.read_text()
    finally:
        job.cancel()
    assert wait_for(lambda: job.states == {"CANCELLED"}), job.states
