"""Several machines are one run: what ends one of them is known, blamed and answered on all."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from tests.distributed.launching import (
    finished,
    free_port,
    on_linux,
    script,
    start,
    wait_for_end,
    wait_for_pids,
)
from tests.distributed.networks import Network, needs_namespaces, network
from tests.waiting import wait_for_lines, wait_until

pytestmark = on_linux

TRAINS = """
import os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
with open(f"up_{attempt}_{rank}.new", "w") as file:
    file.write(f"{os.getpid()} {dist.get_world_size()}")
os.rename(file.name, f"up_{attempt}_{rank}")
ends = torch.zeros(1)
while not ends:  # none ends before the others know of it
    time.sleep(0.05)
    ends[0] = os.path.exists(f"end_{attempt}")
    dist.all_reduce(ends)
print("of", dist.get_world_size())
os._exit(0)
"""
"""Ranks that depend on each other, until they may end."""


def on_loopback(machines: str, *words: str) -> list[str]:
    place = ["--main-address", "127.0.0.1", "--main-port", str(free_port())]
    return ["-q", "--cpu", "--num-machines", machines, *place, *words]


def are_up(count: int, attempt: int = 0) -> Callable[[], bool]:
    return lambda: all(Path(f"up_{attempt}_{rank}").exists() for rank in range(count))


def ends(machines: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Return exit code and stderr of each machine."""
    told = [machine.communicate(timeout=120)[1] for machine in machines]
    return [(m.returncode, errors) for m, errors in zip(machines, told, strict=True)]


def two(*words: str, name: str = "") -> list[subprocess.Popen[str]]:
    """Start two machines on the loopback device."""
    place = on_loopback("2", *words)
    name = name or script(TRAINS)
    return [start(*place, "--machine-rank", str(rank), name) for rank in range(2)]


STOPS_FOR_EVER = """
import os, signal, time
def stop(*_):
    open("stopping_" + os.environ["RANK"], "w").close()
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, stop)
open("up_0_" + os.environ["RANK"], "w").close()
while True:
    time.sleep(0.05)
"""


def test_the_second_ctrl_c_on_one_machine_ends_the_grace_period_on_both_and_fails_no_rank() -> None:
    machines = two("--grace-period-s", "600", name=script(STOPS_FOR_EVER))
    wait_until(are_up(2), *machines)
    machines[1].send_signal(signal.SIGINT)
    wait_until(lambda: all(Path(f"stopping_{rank}").exists() for rank in range(2)), *machines)
    machines[1].send_signal(signal.SIGINT)
    for code, errors in ends(machines):
        assert code == 130
        assert "headway: interrupted" in errors
        assert "error: " not in errors


WAITS_FOR_ALL = """
import time
from headway import Accelerator
accelerator = Accelerator(cpu=True)
accelerator.wait_for_everyone()
open(f"up_0_{accelerator.process_index}", "w").close()
if accelerator.is_main_process:
    time.sleep(600)
accelerator.wait_for_everyone()
"""


@pytest.mark.long
def test_the_end_of_machine_0_is_no_fault_of_the_call_in_which_a_rank_waits() -> None:
    machines = two(name=script(WAITS_FOR_ALL))
    wait_until(are_up(2), *machines)
    machines[0].kill()
    _, (code, errors) = ends(machines)
    assert code == 4
    assert "machine 0 (127.0.0.1) was lost: its launcher exited" in errors
    assert "is waiting in" not in errors


FAILS_LATE = """
import os, time
from pathlib import Path
if os.environ["RANK"] == "1":
    while not (main := Path("pid_0")).exists() or not main.read_text():
        time.sleep(0.05)
    while Path("/proc", main.read_text()).exists():
        time.sleep(0.05)
    raise ValueError("zu spät")
Path("pid_0").write_text(str(os.getpid()))
"""


def test_a_failure_after_the_ranks_of_machine_0_have_ended_well_is_reported_on_both() -> None:
    """Nothing waits for the machine that has failed: torch's exit barrier would, for 300 s."""
    machines = two("--log-dir", "logs", name=script(FAILS_LATE))
    both = ends(machines)
    assert [code for code, _ in both] == [1, 1]
    (log,) = Path("logs").glob(f"*-{socket.gethostname()}/rank_1_attempt_0.log")
    assert "zu spät" in log.read_text()
    for _, errors in both:
        assert "ValueError: zu spät" in errors
        assert f"logs in logs/{log.parent.name}" in errors


def test_machines_with_different_scripts_are_refused_before_a_rank_starts() -> None:
    place = on_loopback("2")
    names = [script("open('up', 'w')"), script("open('up', 'w')  # changed", "other.py")]
    machines = [start(*place, "--machine-rank", str(rank), names[rank]) for rank in range(2)]
    for code, errors in ends(machines):
        assert code == 4
        assert "the machines differ in script" in errors
    assert not Path("up").exists()


def test_a_range_of_machines_goes_on_with_those_that_are_left() -> None:
    place = on_loopback("2:3", "--set", "restart_delay=0")
    machines = [start(*place, script(TRAINS)) for _ in range(3)]
    wait_until(are_up(1), *machines)
    world = int(Path("up_0_0").read_text().split()[1])  # 2 where the third came late
    wait_until(are_up(world), *machines)
    rank_1 = int(Path("up_0_1").read_text().split()[0])
    launchers = {parent.pid for parent in psutil.Process(rank_1).parents()}
    (lost,) = [machine for machine in machines if machine.pid in launchers]
    machines.remove(lost)
    lost.kill()
    lost.communicate()
    wait_until(are_up(2, attempt=1), *machines)
    spare = start(*place, script(TRAINS))
    wait_for_lines(spare, "waiting for the next restart, because the run has started")
    Path("end_1").touch()
    ((code, errors),) = ends([spare])
    assert (code, errors) == (0, "headway: the run succeeded without ranks on this machine\n")
    for machine in machines:
        out, errors = finished(machine, 0)
        assert "of 2" in out
        assert "was lost; restart with the available machines\n" in errors


def test_a_machine_with_another_key_is_refused_and_no_script_sees_the_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = on_loopback("2")
    name = script("import os\nprint('key', os.environ.get('HEADWAY_RUN_KEY'))")

    def begin(rank: int, key: str) -> subprocess.Popen[str]:
        monkeypatch.setenv("HEADWAY_RUN_KEY", key)
        return start(*place, "--machine-rank", str(rank), name, *["--own"] * rank)

    main, other = begin(0, "the key of this run"), begin(1, "the key of another one")
    ((code, errors),) = ends([other])
    assert code == 4
    assert "does not accept the key of machine 1" in errors
    assert "another one" not in errors
    machines = [main, begin(1, "the key of this run")]
    told = [machine.communicate(timeout=120) for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], told
    assert all("key None" in out for out, _ in told)
    assert "refused a connection from 127.0.0.1" in told[0][1]
    for _, errors in told:
        assert ": the script's arguments differ from machine 0's\n" in errors


@pytest.fixture
def three_machines(tmp_path: Path) -> Iterator[Network]:
    with network(3, tmp_path) as made:
        yield made


def in_network(
    net: Network, main_address: str = "n1", timeout_s: int = 5
) -> list[subprocess.Popen[str]]:
    """Start the same command on machines 1 and 2."""
    place = ["--main-address", main_address, "--set", f"machine_timeout_s={timeout_s}"]
    words = ["-q", "--cpu", "--num-machines", "2", *place, script(TRAINS)]
    return [net.launch(number, *words) for number in (1, 2)]


@needs_namespaces
def test_machines_whose_own_names_are_loopback_meet_and_a_cut_link_is_known_on_both(
    three_machines: Network,
) -> None:
    machines = in_network(three_machines)
    wait_until(are_up(2), *machines)
    three_machines.cut(2)
    main, other = ends(machines)
    assert (main[0], other[0]) == (4, 4)
    assert "machine 1 (n2) was lost: it sent nothing for" in main[1]
    assert "machine 0 (n1) was lost: it sent nothing for" in other[1]


@needs_namespaces
@pytest.mark.parametrize(
    "address", ["[fd79::1]", pytest.param("fe80::1%eth0", marks=pytest.mark.long)]
)
def test_machines_meet_at_an_ipv6_address(three_machines: Network, address: str) -> None:
    machines = in_network(three_machines, address, timeout_s=60)
    wait_until(are_up(2), *machines)
    Path("end_0").touch()
    assert [code for code, _ in ends(machines)] == [0, 0]


SLEEPS = """
import os, sys, time
rank = os.environ["RANK"]
open("up_" + rank, "w").write(str(os.getpid()))
while not os.path.exists("end_" + rank):
    time.sleep(0.05)
sys.exit(3 * os.path.exists("fail_" + rank))
"""


def machine(rank: int, port: int, num_machines: int = 2) -> subprocess.Popen[str]:
    where = ["--main-address", "127.0.0.1", "--main-port", str(port)]
    place = ["--num-machines", str(num_machines), "--machine-rank", str(rank)]
    return start("-q", "--cpu", "--grace-period-s", "1", *place, *where, script(SLEEPS))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_ends_a_machine_whose_machine_0_is_another_silent_program(
    number: signal.Signals,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts, nobody answers
        process = machine(1, silent.getsockname()[1])
        wait_for_lines(process, "a program is listening there, but has not answered yet")
        process.send_signal(number)
        process.communicate(timeout=120)
    assert process.returncode == 128 + number


def test_stops_and_a_failure_end_machines_whose_machine_0_is_suspended() -> None:
    port = free_port()
    main, interrupted, failing, done = (machine(rank, port, num_machines=4) for rank in range(4))
    wait_for_pids("up_?", 4)
    main.send_signal(signal.SIGSTOP)
    interrupted.send_signal(signal.SIGINT)
    for name in ("fail_2", "end_2", "end_3"):
        Path(name).touch()
    finished(interrupted, 130)
    _, errors = finished(failing, 3)
    assert "rank 2 of 4 exited with code 3" in errors
    wait_for_end(int(Path("up_3").read_text()))
    done.send_signal(signal.SIGTERM)  # while it waits for machine 0
    finished(done, 0)
    main.send_signal(signal.SIGCONT)
    main.terminate()
    main.communicate(timeout=120)
