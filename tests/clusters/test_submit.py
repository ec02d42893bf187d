"""`headway launch --submit slurm` with a real SLURM: submitted, saved, run again, followed."""

from __future__ import annotations

import re
import subprocess
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

# stops with 75 the first time
RANK = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
again = os.environ.get("SLURM_RESTART_COUNT", "0")
print("attempt", again, "rank", os.environ["RANK"], "of", int(total), sys.argv[1:], flush=True)
dist.destroy_process_group()
sys.exit(75 if again == "0" else 3)
"""

SAVES = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
open("up_" + os.environ.get("SLURM_RESTART_COUNT", "0"), "w")
time.sleep(600)
"""


def test_a_job_of_two_nodes_is_run_again_once_it_has_saved_and_followed_to_its_code(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("p%j %%A").mkdir()
    monkeypatch.chdir("p%j %%A")  # what sbatch would replace in the path of the log
    words = ["--nodes", "2", "--time", "10m", "--num-processes", "2", "--cpu", script(RANK)]
    done = slurm.run(*HEADWAY, "launch", "--submit", "slurm", "--follow", "-q", *words, "it's $x")
    seen = {*re.findall(r"attempt .*", done.stdout)}  # the report repeats some
    places = [f'rank {rank} of 4 ["it\'s $x"]' for rank in range(4)]
    assert seen == {f"attempt {n} {place}" for n in (0, 1) for place in places}, done.stderr
    assert done.returncode == 3
    (log,) = Path("headway-jobs").glob("*.log")
    again = slurm.run(*HEADWAY, "follow", log.stem.rpartition("-")[2])
    assert again.stdout == log.read_text()


STARTS = """
import os, time
open("up_" + os.environ.get("SLURM_RESTART_COUNT", "0"), "w")
time.sleep(600)  # loads, and has nothing to save yet
"""


@pytest.mark.long
def test_a_job_that_is_preempted_before_it_has_anything_to_save_starts_anew(slurm: Slurm) -> None:
    words = ["--nodes", "2", "--sbatch", "exclusive", "-q", "--cpu", script(STARTS)]
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
    words = ["--nodes", nodes, "-q", "--cpu", script(SAVES)]
    submitted = slurm.run(*HEADWAY, "launch", "--submit", "slurm", *words)
    assert submitted.returncode == 0, submitted.stderr
    job = Job(slurm, submitted.stdout.strip())
    log = Path(f"headway-jobs/script-{job.number}.log")
    try:
        assert wait_for(Path("up_0").exists), log.read_text()
        job.cancel("--signal=TERM")  # what --signal does before the time limit
        assert wait_for(Path("up_1").exists), log.read_text()
    finally:
        job.cancel()
    assert wait_for(lambda: job.states == {"CANCELLED"}), job.states


LOCAL = "import near, sys\nprint('code', near.X, open(sys.argv[1]).read(), flush=True)\n"


def test_edits_while_a_job_is_queued_do_not_reach_it(slurm: Slurm) -> None:
    for name, text in {"near.py": "X = 1\n", "conf": "conf 1", "script.py": LOCAL}.items():
        Path(name).write_text(text)
    subprocess.run(["git", "init", "-q"], check=True)
    words = ["-q", "--cpu", "--sbatch", "hold", "script.py", "conf"]
    submitted = slurm.run(*HEADWAY, "launch", "--submit", "slurm", *words)
    job = Job(slurm, submitted.stdout.strip())
    log = Path(f"headway-jobs/script-{job.number}.log")
    try:
        Path("near.py").write_text("X = 2\n")
        Path("conf").write_text("conf 2")
        Path("script.py").write_text("raise SystemExit('edited')\n")
        slurm.run("scontrol", "release", job.number)
        assert wait_for(lambda: job.states == {"COMPLETED"}), log.read_text()
    finally:
        job.cancel()
    assert "code 1 conf 1" in log.read_text()
