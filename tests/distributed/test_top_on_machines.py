"""What `headway top` shows of a run on two machines, beside what its ranks themselves write."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launching import script
from tests.distributed.networks import Network, needs_namespaces, network
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.long,
    pytest.mark.usefixtures("executed_starts"),
    needs_namespaces,
]

TRAINS = """
import time, torch
from headway import Accelerator
accelerator = Accelerator(cpu=True)
data = torch.utils.data.TensorDataset(torch.ones(1_000_000, 4))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(data, batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
with open(f"steps_{accelerator.process_index}", "a", buffering=1) as told:
    for number, (x,) in enumerate(loader, 1):
        time.sleep(0.05)
        accelerator.backward(model(x).mean())
        optimizer.step()
        print(number, time.time(), file=told)
"""

Ranks = list[dict[str, Any]]


def asked(net: Network, machine: int = 1) -> Ranks:
    """Return the ranks that a launcher on a machine tells of."""
    words = [sys.executable, "-m", "headway", "top", "--json"]
    out, errors = net.start(machine, words).communicate(timeout=60)
    assert not errors
    runs = [one for one in json.loads(out)["runs"] if one["num_machines"] == 2]
    return [rank for run in runs for rank in run["ranks"]]


def screen(net: Network) -> str:
    words = [sys.executable, "-m", "headway", "top"]
    return net.start(1, words).communicate(timeout=60)[0]


def times_of_steps(rank: int) -> dict[int, float]:
    """Return when each step of a rank has ended, in the last attempt; by the rank itself."""
    path = Path(f"steps_{rank}")
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    pairs = (line.split() for line in lines if line.endswith("\n"))
    return {int(step): float(at) for step, at in pairs}


def test_each_rank_is_as_it_was_within_2_s_and_a_machine_that_is_cut_off_is_shown_as_lost(
    tmp_path: Path,
) -> None:
    words = ["-q", "--cpu", "--num-processes", "2", "--num-machines", "1:2", "--main-address", "n1"]
    words += ["--set", "machine_timeout_s=5", "--set", "restart_delay=5"]
    name = script(TRAINS)
    with network(2, tmp_path) as net:
        machines = [net.launch(one, *words, "--machine-rank", str(one - 1), name) for one in (1, 2)]
        try:
            wait_until(lambda: len(asked(net)) == 4, *machines)
            for _ in range(8):
                asked_at = time.time()
                ranks = asked(net)
                assert [(one["rank"], one["machine"]) for one in ranks] == [
                    *((0, 0), (1, 0), (2, 1), (3, 1))
                ]
                for one in ranks:
                    assert times_of_steps(one["rank"])[one["step"]] > asked_at - 2, one
                    assert one["step_ms"] >= 50
                    assert not one["is_lost"]
            assert [one["rank"] for one in asked(net, 2)] == [2, 3]  # it knows its own

            net.cut(2)
            wait_until(lambda: [one for one in asked(net) if one["is_lost"]], machines[0])
            ranks = asked(net)
            assert [one["is_lost"] for one in ranks] == [False, False, True, True]
            assert {one["samples_per_s"] for one in ranks} == {None}  # none of them trains now
            rows = [line for line in screen(net).splitlines() if " n1 " in line or " n2 " in line]
            assert ["(machine lost)" in row for row in rows] == [False, False, True, True]

            wait_until(lambda: len(asked(net)) == 2, machines[0])
            asked_at = time.time()
            ranks = asked(net)
            assert [one["rank"] for one in ranks] == [0, 1]  # the run goes on without machine 1
            for one in ranks:
                assert not one["is_lost"]
                assert times_of_steps(one["rank"])[one["step"]] > asked_at - 2, one
        finally:
            for machine in machines:
                machine.terminate()
                machine.communicate(timeout=60)
