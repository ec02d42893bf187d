"""Slows down one rank of four, and looks whether it is named; run it as a module.

Steps mostly sleep, so that ranks do not hold each other up where they are more than the cores; in
the trials of a busy core each rank computes, and the victim has its core to share; so it is in
those of a CPU quota, which the victim has, by a cgroup of its own that only root can make. A plain
script knows of no Headway, and its rank is named without a cause.

    python -m tests.distributed.slow_ranks --trials 20 --clean 5
    python -m tests.distributed.slow_ranks --trials 20 --clean 5 --plain
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

RANKS = 4
NAMED = re.compile(
    r"rank (\d+) makes all others wait .*?: "
    r"(its \w+|other \w+|none of|the cause)"
)
CAUSES = {
    "data": "its data",
    "forward": "its forward",
    "save": "its saving",
    "machine": "other processes",
    "quota": "other processes",
}
_COMPUTING = ("machine", "quota")
_CGROUP = Path("/sys/fs/cgroup/cpu")  # of version 1

PARTS = """
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
        (compute if place in ("machine", "quota") else time.sleep)(0.025)
        return self.layers(x)
"""

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
if place in ("machine", "quota"):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[accelerator.process_index % len(cores)]})

def nap(here):
    if is_victim and place == here:
        time.sleep(nap_s)

"""
SCRIPT += (
    PARTS
    + """
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
)


PLAIN = """
import sys, time
import torch
import torch.distributed as dist

place, victim, nap_s, seconds = sys.argv[1], *map(float, sys.argv[2:5])
torch.set_num_threads(1)
dist.init_process_group("gloo")

def nap(here):
    if dist.get_rank() == victim and place == here:
        time.sleep(nap_s)

"""
PLAIN += (
    PARTS
    + """
model = torch.nn.parallel.DistributedDataParallel(Model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
until = time.monotonic() + seconds
for number, (x, y) in enumerate(torch.utils.data.DataLoader(Samples(), batch_size=4)):
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    if number % 20 == 0:
        is_over = torch.tensor(int(time.monotonic() > until))
        dist.all_reduce(is_over, dist.ReduceOp.MAX)
        if is_over:
            break
dist.destroy_process_group()
"""
)


class Trial(NamedTuple):
    """One training of four ranks, of which one is slowed; or none, with the place `none`."""

    place: str
    rank: int
    nap_s: float
    is_plain: bool = False  # the script has no Accelerator


class Found(NamedTuple):
    """What was said of it."""

    names: list[tuple[int, str]]
    output: str

    def is_right(self, trial: Trial) -> bool:
        cause = "the cause" if trial.is_plain else CAUSES.get(trial.place, "")
        return self.names == ([] if trial.place == "none" else [(trial.rank, cause)])

    def is_false(self, trial: Trial) -> bool:
        """Return whether a rank is blamed that nobody has slowed."""
        return any(rank != trial.rank or trial.place == "none" for rank, _ in self.names)


def run_trial(trial: Trial, seconds: float) -> Found:
    """Train for so many seconds, and return what the launcher said of slow ranks."""
    busy = []
    with tempfile.TemporaryDirectory() as folder, _group(trial) as group:
        script = Path(folder) / "train.py"
        script.write_text(PLAIN if trial.is_plain else SCRIPT)
        if trial.place == "machine":
            core = sorted(os.sched_getaffinity(0))[trial.rank]
            loop = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
            busy = [subprocess.Popen([sys.executable, "-c", loop])]
        try:
            done = subprocess.run(
                [
                    *(sys.executable, "-m", "headway", "launch", "--cpu", "--quiet"),
                    *("--num-processes", str(ranks_of(trial.place)), str(script)),
                    *(trial.place, str(trial.rank), str(trial.nap_s), str(seconds), folder),
                ],
                check=False,
                env={**os.environ, "SLOW_GROUP": group},
                capture_output=True,
                text=True,
                timeout=seconds + 120,
            )
        finally:
            for one in busy:
                one.kill()
                one.wait()
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


def ranks_of(place: str) -> int:
    """Return how many ranks train: those that compute have a core each."""
    return min(RANKS, os.cpu_count() or 1) if place in _COMPUTING else RANKS


def random_trial(generator: random.Random, place: str, is_plain: bool = False) -> Trial:
    """Slow a rank by 15 to 60 % of a step of 45 or 30 ms; in saving, which is every second one."""
    step_s = 0.2 if place == "save" else 0.03 if is_plain else 0.045
    nap_s = generator.uniform(0.15, 0.6) * step_s
    return Trial(place, generator.randrange(ranks_of(place)), nap_s, is_plain)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--clean", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default="data,forward,save,machine", help=", ".join(CAUSES))
    parser.add_argument("--plain", action="store_true", help="scripts without an Accelerator")
    options = parser.parse_args()
    generator = random.Random(options.seed)
    kinds = ["data", "forward"] if options.plain else options.kinds.split(",")
    places = itertools.islice(itertools.cycle(kinds), options.trials)
    trials = [random_trial(generator, place, options.plain) for place in places]
    trials += [Trial("none", 0, 0, options.plain)] * options.clean
    right = false = 0
    for trial in trials:
        began = time.monotonic()
        found = run_trial(trial, options.seconds)
        right += found.is_right(trial) and trial.place != "none"
        false += found.is_false(trial)
        verdict = "right" if found.is_right(trial) else "WRONG" if found.is_false(trial) else "?"
        what = f"rank {trial.rank} {trial.place} {trial.nap_s * 1e3:.1f} ms"
        print(f"{verdict:6} {what:28} {time.monotonic() - began:.0f} s  {found.names}", flush=True)
        for line in found.output.splitlines() * (verdict != "right"):
            if "makes all" in line or "wait for data" in line:
                print("      ", line, flush=True)
    print(f"{right} of {options.trials} named rightly, {false} false names in {len(trials)} runs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
