"""Slows down one rank of four, and looks whether it is named.

Steps mostly sleep, so that ranks do not hold each other up where they are more than the cores; in
the trials of a CPU quota each rank computes on a core of its own, and the victim has the quota, by
a cgroup that only root can make.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.distributed.launching import launch, script

pytestmark = [pytest.mark.distributed, pytest.mark.long]

RANKS = 4
NAMED = re.compile(
    r"rank (\d+) delays all ranks .*?: "
    r"(its \w+|other \w+|no single)"
)
CAUSES = {
    "data": "its data",
    "forward": "its forward",
    "save": "its checkpoint",
    "quota": "other processes",
}
_CGROUP = Path("/sys/fs/cgroup/cpu")  # of version 1

SCRIPT = """
import os, sys, time
import torch
from headway import Accelerator

place, victim, nap_s, seconds = sys.argv[1], *map(float, sys.argv[2:5])
torch.set_num_threads(1)
if place == "quota" and int(os.environ["RANK"]) == victim:
    with open(os.environ["SLOW_GROUP"] + "/cgroup.procs", "w") as procs:
        procs.write(str(os.getpid()))
accelerator = Accelerator(cpu=True, project_dir=sys.argv[5])
is_victim = accelerator.process_index == victim
if place == "quota":
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[accelerator.process_index % len(cores)]})

def nap(here):
    if is_victim and place == here:
        time.sleep(nap_s)

def compute(seconds):
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 10**6
    def __getitem__(self, index):
        if index % 4 == 0:
            nap("data")
            time.sleep(0.004)
        return torch.randn(16), torch.randn(1)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
        )
    def forward(self, x):
        nap("forward")
        (compute if place == "quota" else time.sleep)(0.025)
        return self.layers(x)

model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
loader = torch.utils.data.DataLoader(Samples(), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.register_save_state_pre_hook(lambda *_: nap("save"))
until = time.monotonic() + seconds
for number, (x, y) in enumerate(loader):
    loss = torch.nn.functional.mse_loss(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    if place == "save" and number % 2:
        accelerator.save_state(os.path.join(sys.argv[5], "last"))
    is_over = torch.tensor(int(time.monotonic() > until))
    if number % 20 == 0 and accelerator.reduce(is_over, "max"):
        break
"""


class Trial(NamedTuple):
    """One training of four ranks, of which one is slowed; or none, with the place `none`."""

    place: str
    rank: int
    nap_s: float


class Found(NamedTuple):
    """What was said of it."""

    names: list[tuple[int, str]]
    output: str

    def is_right(self, trial: Trial) -> bool:
        cause = CAUSES.get(trial.place, "")
        return self.names == ([] if trial.place == "none" else [(trial.rank, cause)])


def run_trial(trial: Trial, seconds: float) -> Found:
    """Train for so many seconds, and return what the launcher said of slow ranks."""
    with tempfile.TemporaryDirectory() as folder, _group(trial) as group:
        num_ranks = min(RANKS, os.cpu_count() or 1) if trial.place == "quota" else RANKS
        words = ["-q", "--cpu", "--num-processes", str(num_ranks), script(SCRIPT)]
        words += [trial.place, str(trial.rank), str(trial.nap_s), str(seconds), folder]
        done = launch(*words, timeout_s=seconds + 120, SLOW_GROUP=group)
    output = done.stdout + done.stderr
    if done.returncode:
        raise RuntimeError(output)
    return Found([(int(rank), cause) for rank, cause in NAMED.findall(output)], output)


def can_make_groups() -> bool:
    """Return whether there can be cgroups with a CPU quota here."""
    return os.access(_CGROUP, os.W_OK) and (_CGROUP / "cpu.cfs_quota_us").exists()


@contextmanager
def _group(trial: Trial) -> Iterator[str]:
    """Have a cgroup in which 25 ms of computing take `nap_s` longer."""
    if trial.place != "quota":
        yield ""
        return
    group = _CGROUP / f"headway-test-{os.getpid()}"
    group.mkdir()
    try:
        period_us = int((group / "cpu.cfs_period_us").read_text())
        share = 0.025 / (0.03 + trial.nap_s)
        (group / "cpu.cfs_quota_us").write_text(str(int(period_us * share)))
        yield str(group)
    finally:
        group.rmdir()


@pytest.mark.parametrize(
    "trial",
    [
        *(Trial("data", 1, 0.02), Trial("forward", 3, 0.02), Trial("save", 2, 0.1)),
        pytest.param(
            Trial("quota", 1, 0.25),
            marks=pytest.mark.skipif(not can_make_groups(), reason="needs cgroup v1, and root"),
        ),
        Trial("none", 0, 0.0),
    ],
    ids=lambda trial: trial.place,
)
def test_the_rank_that_is_slow_is_named_with_its_cause_and_no_other(trial: Trial) -> None:
    found = run_trial(trial, seconds=25)
    assert found.is_right(trial), found.output
