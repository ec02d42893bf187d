"""What a failure costs: ranks are killed, under Headway and under torchrun with its checkpoints.

    python benchmarks/race.py                 # about five minutes
    python benchmarks/race.py --form launcher # a launcher of two machines is killed
    python benchmarks/race.py --form stop     # a rank is stopped (SIGSTOP)
    python benchmarks/race.py --full          # 600 steps, 10 kills, 3 runs of each
    python benchmarks/race.py --json race.json

A small GPT on the CPU, 2 ranks, steps of 0.2 s (0.15 to 0.25, seeded), a checkpoint every --every
steps (20). At seeded moments a random rank is killed (kill -9). The contenders take turns in each
run:

1. headway auto: `resume()`, `checkpoint(every="auto", wait=False)`, `launch --max-restarts`;
2. headway: the same with `checkpoint(every=20, wait=False)`;
3. torchrun: DDP, and torch.distributed.checkpoint as in PyTorch's tutorial, which loads the newest
   checkpoint that has its metadata, `torchrun --max-restarts`.

A kill in the middle of 20 steps costs 10 steps, 2 s, whatever the launcher does.

Both have their defaults. An undisturbed run of the first is what their wall time is divided by.
Effective time is the part of the wall time in which rank 0 did steps that had not been done before.
A run that does no new step within --give-up seconds after a kill is ended, and counted as stuck.

`--form launcher` has two machines of one rank each, on 127.0.0.1. A random launcher is killed, and
with it all that it has started, as a scheduler clears a container. The benchmark is the scheduler:
it starts a launcher again as soon as it has failed, also one that failed because of the other. Two
more contenders: headway 2:3 has `--num-machines 2:3` instead of 2, so that machine 0 waits for the
other one instead of failing. torchrun has its c10d rendezvous, with the store on machine 0; a round
that still contains a killed launcher fails after its `read_timeout` of 60 s, which is stuck here,
and after 10 s in torchrun tuned.

`--form stop` stops a random rank with SIGSTOP. Headway has `--hang-timeout 5`. torchrun detects no
hang, but `init_process_group(timeout=)` of 5 s lets the other rank fail. It then waits 30 s before
it kills the stopped rank: torch 2.13 does not apply its `--shutdown-timeout` to a restart.

The second table is one restart of Headway in milliseconds, each row from the one before it: the
median over all kills, as rank 0 and the launcher (of the machine that was killed) have seen it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import psutil

RANKS, STEP_S, SPREAD_S = 2, 0.2, 0.05
POLL_S = 0.01
HANG_S = 5

RECORD = """\
import json, os, time

_who = os.environ.get("RANK", f"launcher-{os.environ['RACE_MACHINE']}")
_fd = os.open(f"events-{_who}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def log(event, step=0):
    row = {"at": time.time(), "pid": os.getpid(), "event": event, "step": step}
    os.write(_fd, (json.dumps(row) + "\\n").encode())

def after(owner, name, event, when=lambda result: True):
    wrapped = getattr(owner, name)
    def wrapper(*args, **kwargs):
        result = wrapped(*args, **kwargs)
        if when(result):
            log(event)
        return result
    setattr(owner, name, wrapper)
"""
LAUNCHER = """\
from record import after, log
log("launcher begins")
from headway.launcher.processes.starter import Starter
begin = Starter.__init__
def begin_and_import(self, *args, **kwargs):
    begin(self, *args, **kwargs)
    # these import torch, as the launcher does while its server imports torch, too
    from headway.launcher.multinode.rendezvous import Rendezvous
    from headway.launcher.processes.ranks import RankProcesses
    after(RankProcesses, "poll", "noticed", lambda result: result.is_failed())
    after(RankProcesses, "_stop", "others terminated")
    after(Rendezvous, "pause", "restart_delay")
    after(RankProcesses, "start", "forked")
Starter.__init__ = begin_and_import
from headway.__main__ import run
run()
"""
GPT = """\
from record import log
log("script begins")
import random, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
STEPS, EVERY, STEP_S, SPREAD_S = int(sys.argv[1]), {every}, {step_s}, {spread_s}
torch.manual_seed(0)

class Text(Dataset):
    def __len__(self):
        return STEPS * 8 * {ranks}
    def __getitem__(self, index):
        return torch.randint(0, 256, (65,), generator=torch.Generator().manual_seed(index))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(128), nn.LayerNorm(128)])
        self.qkv, self.out = nn.Linear(128, 384), nn.Linear(128, 128)
        self.mlp = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))
    def forward(self, x):
        parts = self.qkv(self.norms[0](x)).view(*x.shape[:2], 3, 4, 32).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norms[1](x))

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, 128), nn.Embedding(64, 128)
        self.blocks, self.head = nn.Sequential(*(Block() for _ in range(4))), nn.Linear(128, 256)
    def forward(self, x):
        return self.head(self.blocks(self.tokens(x) + self.places.weight))

def loss_of(model, batch):
    logits = model(batch[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

_began = 0.0
def begin_step():
    global _began
    _began = time.monotonic()
def end_step(step):
    takes_s = STEP_S + SPREAD_S * random.Random(step).uniform(-1, 1)
    time.sleep(max(_began + takes_s - time.monotonic(), 0))
    log("step", step)
"""
HEADWAY = """\
from gpt import *
from record import after
from headway import Accelerator
log("imports")
accelerator = Accelerator(cpu=True, project_dir="project")
log("process group")
from headway.checkpoint import loading, preemption, tensors
log("checkpoint's imports")
after(preemption, "_select_checkpoint", "checkpoint found")
after(loading, "verify", "verified")
after(tensors.SavedTensors, "load", "loaded")
model = GPT()
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(Text(), 8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
log("prepared")
step = accelerator.resume().step
log("resumed")
begin_step()
for batch in loader:
    log("batch", step)
    optimizer.zero_grad()
    accelerator.backward(loss_of(model, batch))
    optimizer.step()
    step += 1
    end_step(step)
    accelerator.checkpoint(every=EVERY, wait=False)
    begin_step()
accelerator.end_training()
"""
TORCHRUN = """\
from gpt import *
import os, shutil
from datetime import timedelta
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pathlib import Path
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler
log("imports")
dist.init_process_group("gloo", timeout={timeout})
log("process group")

class AppState(Stateful):
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}
    def load_state_dict(self, state):
        set_state_dict(
            self.model, self.optimizer,
            model_state_dict=state["model"], optim_state_dict=state["optimizer"],
        )

model = DistributedDataParallel(GPT())
optimizer = torch.optim.AdamW(model.parameters())
sampler = DistributedSampler(Text())
loader = DataLoader(Text(), 8, sampler=sampler)
folder, step = Path("checkpoints"), 0
whole = sorted(int(one.parent.name) for one in folder.glob("*/.metadata"))
newest = [whole[-1] if whole else 0]
dist.broadcast_object_list(newest)
if newest[0]:
    step = newest[0]
    dcp.load({"app": AppState(model, optimizer)}, checkpoint_id=str(folder / str(step)))
log("resumed")
begin_step()
for batch in loader:
    if step == STEPS:
        break
    log("batch", step)
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()
    step += 1
    end_step(step)
    if step % EVERY == 0:
        dcp.save({"app": AppState(model, optimizer)}, checkpoint_id=str(folder / str(step)))
        if dist.get_rank() == 0:
            for old in whole[:-1]:
                shutil.rmtree(folder / str(old), ignore_errors=True)
            whole.append(step)
    begin_step()
dist.destroy_process_group()
"""
SCRIPTS = {
    "headway auto": HEADWAY.replace("every=EVERY", 'every="auto"'),
    "headway": HEADWAY,
    "headway 2:3": HEADWAY,
    "torchrun": TORCHRUN,
    "torchrun tuned": TORCHRUN,
}
FORMS = {
    "rank": ("headway auto", "headway", "torchrun"),
    "launcher": tuple(SCRIPTS),
    "stop": ("headway auto", "headway", "torchrun"),
}
ROWS = (
    *("launcher begins", "noticed", "others terminated", "restart_delay", "forked"),
    *("script begins", "imports"),
    *(
        "process group",
        "checkpoint's imports",
        "prepared",
        "checkpoint found",
        "verified",
        "loaded",
        "resumed",
    ),
    *("batch", "step"),
)


class Kill(NamedTuple):
    """What one kill has cost; None: no such step came.

    Args:
        step: the last step that was done.
        first_s: until the first step after it.
        new_s: until the first step that had not been done before.
        repeated: steps that were done again.
        rows: of a restart, the milliseconds of each row since the one before it.
    """

    step: int
    first_s: float | None = None
    new_s: float | None = None
    repeated: int | None = None
    rows: Mapping[str, float] = MappingProxyType({})


class Run(NamedTuple):
    contender: str
    wall_s: float
    effective: float
    is_stuck: bool
    kills: list[Kill]


Event = dict[str, Any]


def is_torchrun(contender: str) -> bool:
    return contender.startswith("torchrun")


def commands_of(contender: str, form: str, steps: int) -> list[list[str]]:
    """Return the command of each machine."""
    usual = [*("--max-restarts", "100"), "train.py", str(steps)]
    machines, port = range(2 if form == "launcher" else 1), free_port()
    ranks = str(RANKS // len(machines))
    if is_torchrun(contender):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", ranks]
        if form != "launcher":
            return [[*torchrun, "--standalone", *usual]]
        torchrun += ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "race"]
        torchrun += ["--rdzv-endpoint", f"127.0.0.1:{port}"]
        tuned = ",read_timeout=10" * (contender == "torchrun tuned")
        confs = [f"is_host={int(not number)}{tuned}" for number in machines]
        return [[*torchrun, "--rdzv-conf", conf, *usual] for conf in confs]
    headway = [sys.executable, "launcher.py", "launch", "--cpu", "--num-processes", ranks]
    if form != "launcher":
        timeout = ["--hang-timeout", str(HANG_S)] if form == "stop" else []
        return [[*headway, *timeout, *usual]]
    headway += ["--main-address", "127.0.0.1", "--main-port", str(port)]
    headway += ["--num-machines", "2:3" if contender == "headway 2:3" else "2"]
    return [[*headway, "--machine-rank", str(number), *usual] for number in machines]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def write_scripts(folder: Path, contender: str, form: str, every: int) -> None:
    sizes: dict[str, object] = {
        "every": every,
        "step_s": STEP_S,
        "spread_s": SPREAD_S,
        "ranks": RANKS,
    }
    sizes["timeout"] = f"timedelta(seconds={HANG_S})" if form == "stop" else None
    texts = {"record": RECORD, "launcher": LAUNCHER, "gpt": GPT, "train": SCRIPTS[contender]}
    for name, text in texts.items():
        for size, value in sizes.items():
            text = text.replace(f"{{{size}}}", str(value))
        (folder / f"{name}.py").write_text(text)


class Launchers:
    """The launchers of a run, and the scheduler that starts the failed ones of two again."""

    def __init__(self, commands: Sequence[list[str]], folder: Path) -> None:
        self._commands, self._folder = commands, folder
        self._processes = [self._start(number) for number in range(len(commands))]

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        paths = [str(Path(__file__).parents[1]), str(self._folder)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        environ["PYTHONPATH"] = os.pathsep.join(paths)
        for name in ("state", "config"):
            environ[f"XDG_{name.upper()}_HOME"] = str(self._folder / name)
        environ["RACE_MACHINE"] = str(number)
        with self.output.open("ab") as output:
            return subprocess.Popen(
                self._commands[number],
                cwd=self._folder,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    @property
    def output(self) -> Path:
        return self._folder / "output"

    def poll(self) -> int | None:
        """Return the highest exit code once all have exited."""
        for number, process in enumerate(self._processes):
            if process.poll() and len(self._processes) > 1:
                self._processes[number] = self._start(number)
        codes = [process.poll() for process in self._processes]
        exited = [abs(code) for code in codes if code is not None]
        return max(exited) if len(exited) == len(codes) else None

    def kill(self, number: int) -> None:
        """Kill a launcher, and what is left of the processes that it has started."""
        with suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(self._processes[number].pid)
            for one in (launcher, *launcher.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    one.kill()
        self._processes[number].wait()

    def end(self) -> None:
        for number in range(len(self._processes)):
            self.kill(number)


class Events:
    """What the processes of a run have logged so far, in order."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[object, tuple[int, list[Event]]] = {}

    def of(self, who: object) -> list[Event]:
        """Return the events of a rank, or of the launcher."""
        offset, known = self._known.get(who, (0, []))
        with suppress(OSError), (self._folder / f"events-{who}").open("rb") as file:
            file.seek(offset)
            text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            known += map(json.loads, whole.splitlines())
            self._known[who] = (offset + len(whole), known)
        return known

    @property
    def furthest(self) -> int:
        """The last step that any rank has done."""
        return max((one["step"] for rank in range(RANKS) for one in self.of(rank)), default=0)

    @property
    def pids(self) -> set[int]:
        return {one["pid"] for rank in range(RANKS) for one in self.of(rank)}

    def effective_s(self) -> float:
        """Return what rank 0 has spent on steps, each the first time that it was done.

        The first step of a process, of which the start is not known, counts as the median one.
        """
        steps = [one for one in self.of(0) if one["event"] == "step"]
        took = {
            index: now["at"] - before["at"]
            for index, (before, now) in enumerate(pairwise(steps), 1)
            if now["pid"] == before["pid"]
        }
        usual = statistics.median(took.values()) if took else 0.0
        most, total = 0, 0.0
        for index, step in enumerate(steps):
            if step["step"] > most:
                most = step["step"]
                total += took.get(index, usual)
        return total


def wait_for(find: Callable[[], Any], launchers: Launchers, within_s: float) -> Any:
    """Return what `find` finds; None if the run ends or it takes too long."""
    until = time.monotonic() + within_s
    while launchers.poll() is None and time.monotonic() < until:
        if (found := find()) is not None:
            return found
        time.sleep(POLL_S)
    return find()


def run(
    contender: str,
    form: str,
    steps: int,
    every: int,
    kill_at: Sequence[float],
    seed: int,
    give_up_s: float,
) -> Run:
    """Run a contender to its end, and kill or stop at these steps, and parts of a step."""
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="race-") as name:
        folder = Path(name)
        write_scripts(folder, contender, form, every)
        began_at = time.time()
        launchers = Launchers(commands_of(contender, form, steps), folder)
        events, kills = Events(folder), list[Kill]()
        is_stuck = False
        try:
            for at in kill_at:
                wait_for(lambda: events.furthest >= int(at) or None, launchers, 600)  # noqa: B023
                time.sleep((at % 1) * STEP_S)
                kills.append(kill(form, events, launchers, dice.randrange(RANKS), give_up_s))
                if is_stuck := kills[-1].new_s is None:
                    break
            if not is_stuck:
                is_stuck = wait_for(launchers.poll, launchers, 60 + 2 * steps * STEP_S) != 0
        finally:
            launchers.end()
        if is_stuck:
            print(launchers.output.read_text(errors="replace")[-3000:], file=sys.stderr)
        wall_s = time.time() - began_at
        return Run(contender, wall_s, events.effective_s() / wall_s, is_stuck, kills)


def kill(form: str, events: Events, launchers: Launchers, number: int, give_up_s: float) -> Kill:
    """Kill or stop a rank, or kill a launcher, and return what that has cost."""
    before, last, at = events.pids, events.furthest, time.time()
    if form == "launcher":
        launchers.kill(number)
    else:
        signals = {"rank": signal.SIGKILL, "stop": signal.SIGSTOP}
        os.kill(events.of(number)[-1]["pid"], signals[form])

    def step_after(least: int) -> Event | None:
        """Return the first step of rank 0 in a new process that is at least this one."""
        return next(
            (
                one
                for one in events.of(0)
                if one["pid"] not in before and one["event"] == "step" and one["step"] >= least
            ),
            None,
        )

    if (new := wait_for(lambda: step_after(last + 1), launchers, give_up_s)) is None:
        return Kill(last)
    first = step_after(0)
    assert first is not None
    machine = number if form == "launcher" else 0
    seen = [one for one in events.of(f"launcher-{machine}") if one["at"] > at]
    seen += [one for one in events.of(0) if one["pid"] == first["pid"]]
    rows, since = {}, at
    for name in ROWS:
        found = next((one["at"] for one in seen if one["event"] == name), None)
        if found is not None:
            rows[name], since = 1e3 * (found - since), found
    return Kill(last, first["at"] - at, new["at"] - at, last + 1 - first["step"], rows)


def moments(steps: int, every: int, kills: int, seed: int) -> list[float]:
    """Return the steps, and parts of one, at which ranks are killed: one in each equal part."""
    dice, part = random.Random(seed), (steps - every) / max(kills, 1)
    return [every / 2 + part * (number + dice.uniform(0.1, 0.9)) for number in range(kills)]


def median(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.1f}" if known else "-"


def show(undisturbed: Sequence[Run], runs: Sequence[Run]) -> None:
    usual_s = statistics.median(one.wall_s for one in undisturbed)
    head = ("", "first step", "first new step", "repeated", "wall time", "effective", "recovered")
    print(("{:<15}" + "{:>16}" * 6).format(*head))
    for name in ("undisturbed", *dict.fromkeys(one.contender for one in runs)):
        of = [one for one in runs if one.contender == name] or undisturbed
        kills = [kill for name in of for kill in name.kills]
        done = [name for name in of if not name.is_stuck]
        wall = [one.wall_s / usual_s for one in done]
        cells = [
            *(
                f"{median([one.first_s for one in kills])} s",
                f"{median([one.new_s for one in kills])} s",
            ),
            median([one.repeated for one in kills]),
            f"{statistics.median(wall):.2f}" if wall else "stuck",
            f"{statistics.median(name.effective for name in of):.3f}",
            f"{sum(one.new_s is not None for one in kills)} of {len(kills)}",
        ]
        print(("{:<15}" + "{:>16}" * 6).format(name, *cells))
    rows = [
        one.rows for run in runs if not is_torchrun(run.contender) for one in run.kills if one.rows
    ]
    if not rows:
        return
    print("\none restart of Headway, in milliseconds, each row from the one before it")
    for name in ROWS:
        if known := [row[name] for row in rows if name in row]:
            print(f"  {name:<20}{statistics.median(known):>8.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--form", choices=[*FORMS], default="rank")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--every", type=int, default=20, help="steps between two checkpoints")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--give-up", type=float, default=60, help="seconds, after a kill")
    parser.add_argument("--full", action="store_true", help="600 steps, 10 kills, 3 runs")
    parser.add_argument("--only", choices=[*SCRIPTS], help="one contender alone")
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args()
    if given.full:
        given.steps, given.kills, given.runs = 600, 10, 3
    undisturbed: list[Run] = []
    runs: list[Run] = []
    for number in range(given.runs):
        seed = given.seed + number
        usual = (given.form, given.steps, given.every)
        undisturbed.append(run("headway", *usual, [], seed, given.give_up))
        kill_at = moments(given.steps, given.every, given.kills, seed)
        for contender in [given.only] if given.only else FORMS[given.form]:
            runs.append(run(contender, *usual, kill_at, seed, given.give_up))
            print(f"{contender}: {runs[-1].wall_s:.0f} s", file=sys.stderr)
    show(undisturbed, runs)
    if given.json:
        rows = [
            {
                **one._asdict(),
                "kills": [{**kill._asdict(), "rows": {**kill.rows}} for kill in one.kills],
            }
            for one in (*(one._replace(contender="undisturbed") for one in undisturbed), *runs)
        ]
        Path(given.json).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
