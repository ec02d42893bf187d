"""Two machines in the long form: what is said of each fault, after how long, and what `top` shows.

Needs root and `ip`. With `-s` the rows of the table of faults are printed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from tests.distributed.families import process_of_this_test
from tests.distributed.launching import script
from tests.distributed.networks import Network, needs_namespaces, network
from tests.distributed.test_machines import TRAINS, are_up, ends
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.long,
    pytest.mark.usefixtures("executed_starts"),
    needs_namespaces,
]

TIMEOUT_S = 5
_SLACK_S = 15.0  # on a busy machine, beyond the setting


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Network]:
    with network(2, tmp_path) as made:
        yield made


def begin(
    net: Network, rank: int, name: str, *words: str, **variables: str
) -> subprocess.Popen[str]:
    place = ["--num-machines", "2", "--machine-rank", str(rank), "--main-address", "n1"]
    timeout = ["--set", f"machine_timeout_s={TIMEOUT_S}"]
    return net.launch(rank + 1, "-q", "--cpu", *place, *timeout, *words, name, **variables)


def both(net: Network, *words: str, **variables: str) -> list[subprocess.Popen[str]]:
    name = script(TRAINS)
    return [begin(net, rank, name, *words, **variables) for rank in range(2)]


def pid_of_rank(rank: int) -> int:
    return int(Path(f"up_0_{rank}").read_text().split()[0])


class Fault(NamedTuple):
    """What happens to a run on two machines, and what both have to say of it."""

    name: str
    cause: Callable[[Network, list[subprocess.Popen[str]]], None]
    codes: tuple[int, int]
    said: tuple[str, str]  # on machine 0 and 1
    within_s: float = _SLACK_S
    times: int = 10


def kill_a_rank(_: Network, machines: list[subprocess.Popen[str]]) -> None:
    process_of_this_test(pid_of_rank(1)).kill()


LOST_0, LOST_1 = "machine 0 (n1) was lost: ", "machine 1 (n2) was lost: "
ENDED, SILENT = "its launcher exited", "it sent nothing"
CUT_S = TIMEOUT_S + _SLACK_S
FAULTS = [
    Fault("launcher 1 is killed", lambda _, both: both[1].kill(), (4, -9), (LOST_1 + ENDED, "")),
    Fault("launcher 0 is killed", lambda _, both: both[0].kill(), (-9, 4), ("", LOST_0 + ENDED)),
    Fault("a rank is killed", kill_a_rank, (137, 137), ("rank 1 of 2 was killed by SIGKILL",) * 2),
    Fault(
        "the link is cut both ways",
        *(lambda net, _: net.cut(2), (4, 4), (LOST_1 + SILENT, LOST_0 + SILENT), CUT_S),
    ),
    Fault(
        "the link is cut from machine 1 to machine 0",
        *(lambda net, _: net.cut_outgoing(2, to=1), (4, 4), (LOST_1[:-2], "was lost"), CUT_S),
    ),
    Fault(
        "the link is cut from machine 0 to machine 1",
        *(lambda net, _: net.cut_outgoing(1, to=2), (4, 4), (LOST_1, LOST_0), CUT_S),
    ),
    Fault(
        "machine 1 is stopped by a signal",
        *(lambda _, both: both[1].terminate(), (143, 143)),
        said=("stopped by SIGTERM on n2", "stopped by SIGTERM"),
        times=3,
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_each_fault_is_known_in_time_on_both_machines_with_the_right_culprit(
    net: Network, fault: Fault
) -> None:
    took = []
    for _ in range(fault.times):
        machines = both(net)
        wait_until(are_up(2), *machines)
        ranks = [psutil.Process(pid_of_rank(rank)) for rank in range(2)]
        began = time.monotonic()
        fault.cause(net, machines)
        told = ends(machines)
        took.append(time.monotonic() - began)
        net.mend()
        assert tuple(code for code, _ in told) == fault.codes, told
        for (_, errors), said in zip(told, fault.said, strict=True):
            assert said in errors
            assert "fix the script" not in errors
            assert ("launcher exited" in errors) == ("launcher exited" in said)
        _, alive = psutil.wait_procs(ranks, timeout=60)
        assert not alive
        assert took[-1] < fault.within_s
        for path in Path.cwd().glob("up_*"):
            path.unlink()
    print(f"\n{fault.name}: {fault.times} times, known after {min(took):.1f} to {max(took):.1f} s")


SAVES = """
import os, time
import torch
from headway import Accelerator
accelerator = Accelerator(cpu=True, project_dir="runs")
model = torch.nn.Linear(1, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-6))
accelerator.resume()
while True:
    accelerator.backward(model(torch.ones(1, 1)).mean())
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.1)
    accelerator.checkpoint(every="1h")
    open("up_0_" + os.environ["RANK"], "w").write(str(os.getpid()))
"""


def test_a_machine_that_is_lost_while_ranks_are_to_save_and_stop_ends_their_wait_and_is_named(
    net: Network,
) -> None:
    name = script(SAVES)
    machines = [begin(net, rank, name) for rank in range(2)]
    wait_until(are_up(2), *machines)
    net.cut(2)
    began = time.monotonic()
    machines[0].terminate()
    told = ends(machines)
    net.mend()
    assert [code for code, _ in told] == [4, 4], told
    assert "machine 1 (n2) was lost: it sent nothing" in told[0][1]
    assert time.monotonic() - began < TIMEOUT_S + 2 * _SLACK_S


NOTES_STEPS = """
import time, torch
from headway import Accelerator
accelerator = Accelerator(cpu=True)
data = torch.utils.data.TensorDataset(torch.ones(1_000_000, 4))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(data, batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
with open(f"ends_{accelerator.process_index}", "w", buffering=1) as ends:
    for (x,) in loader:
        time.sleep(0.05)
        accelerator.backward(model(x).mean())
        optimizer.step()
        print(time.time(), file=ends)
"""


def top(net: Network, *words: str, machine: int = 1) -> str:
    command = [sys.executable, "-m", "headway", "top", *words]
    out, errors = net.start(machine, command).communicate(timeout=60)
    assert not errors
    return out


def asked(net: Network, machine: int = 1) -> list[dict[str, Any]]:
    """Return the ranks that a launcher on a machine tells of."""
    runs = json.loads(top(net, "--json", machine=machine))["runs"]
    return [rank for run in runs if run["num_machines"] == 2 for rank in run["ranks"]]


def assert_is_current(net: Network, machines: Sequence[int]) -> None:
    """Assert that ranks on these machines are shown as they were within the last 2 s."""
    asked_at = time.time()
    ranks = asked(net)
    assert [(rank["rank"], rank["machine"]) for rank in ranks] == [*enumerate(machines)]
    for number, rank in enumerate(ranks):
        ends_of_steps = Path(f"ends_{number}").read_text().splitlines()
        assert float(ends_of_steps[rank["step"] - 1]) > asked_at - 2, rank
        assert rank["step_ms"] >= 50
        assert not rank["is_lost"]


def test_each_rank_is_as_it_was_within_2_s_and_a_machine_that_is_cut_off_is_shown_as_lost(
    net: Network,
) -> None:
    words = ["-q", "--cpu", "--num-processes", "2", "--num-machines", "1:2", "--main-address", "n1"]
    words += ["--set", "machine_timeout_s=5", "--set", "restart_delay=5"]
    name = script(NOTES_STEPS)
    machines = [net.launch(n, *words, "--machine-rank", str(n - 1), name) for n in (1, 2)]
    try:
        wait_until(lambda: len(asked(net)) == 4, *machines)
        for _ in range(8):
            assert_is_current(net, [0, 0, 1, 1])
        assert [row["rank"] for row in asked(net, 2)] == [2, 3]  # it knows its own

        net.cut(2)
        wait_until(lambda: [row for row in asked(net) if row["is_lost"]], machines[0])
        ranks = asked(net)
        assert [rank["is_lost"] for rank in ranks] == [False, False, True, True]
        assert {rank["samples_per_s"] for rank in ranks} == {None}  # none of them trains now
        rows = [line for line in top(net).splitlines() if " n1 " in line or " n2 " in line]
        assert ["(machine lost)" in row for row in rows] == [False, False, True, True]

        wait_until(lambda: len(asked(net)) == 2, machines[0])
        assert_is_current(net, [0, 0])  # the run goes on without machine 1
    finally:
        for machine in machines:
            machine.terminate()
            machine.communicate(timeout=60)
