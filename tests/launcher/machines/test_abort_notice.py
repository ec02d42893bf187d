"""A launch that fails before it joins is known to the machines that would wait for it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from headway.commands.launch import give_up, make_parser
from headway.commands.main import main
from headway.errors import ConfigError
from headway.launcher.machines import abort_notice
from headway.launcher.machines.member import Member
from headway.launcher.machines.messages import Join
from tests.distributed.launching import free_port
from tests.launcher.machines.hubs import open_hub
from tests.waiting import wait_for_lines

KEY = "the key of this run"

BY_HAND = ["--num-machines", "2", "--machine-rank", "{}", "--main-address", "127.0.0.1"]
BY_SCHEDULER = {"PET_NNODES": "2", "PET_NODE_RANK": "{}", "PET_MASTER_ADDR": "127.0.0.1"}


class Main:
    """Machine 0 of two, which waits for machine 1."""

    def __init__(self, port: int) -> None:
        listener = socket.create_server(("127.0.0.1", port))
        self.hub, _ = open_hub(listener, key=KEY.encode())
        self.member = Member(self.hub.take_own_end(), KEY.encode(), 60, str)
        self.member.send(Join(0, 2, 2, "n0", 1, time.time()))

    def cause(self) -> str:
        """Return why the run has ended."""
        assert self.member.wait(lambda: self.member.ended_by is not None, 60)
        assert self.member.ended_by is not None
        return self.member.ended_by.cause

    def __enter__(self) -> Main:
        return self

    def __exit__(self, *_: object) -> None:
        self.member.close()
        self.hub.close(0.5)


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """Return a free port, for machine 0 of a run with a key, in which it is told for long."""
    monkeypatch.setenv("HEADWAY_RUN_KEY", KEY)
    monkeypatch.setattr(abort_notice, "_within_s", lambda *_: 600)
    return free_port()


def launch(port: int, *words: str) -> int:
    return main(["launch", "--main-port", str(port), *words])


@pytest.mark.wording
def test_a_wrong_script_or_setting_on_one_machine_ends_the_wait_of_machine_0(port: int) -> None:
    for words, said in (
        (("missing.py",), "cannot take part: script 'missing.py' not found"),
        (("--devices", "7", "--device", "cpu", __file__), "cannot take part: devices is '7'"),
    ):
        with Main(port) as waiting:
            code = launch(port, *place(1, "hand")[0], *words)
            assert code == 2
            assert said in waiting.cause()
            assert waiting.member.ended_by is not None
            assert waiting.member.ended_by.exit_code == code


def place(rank: int, by: str) -> tuple[list[str], dict[str, str]]:
    """Return the flags and the variables of a launch on one of two machines."""
    if by == "hand":
        return [word.format(rank) for word in BY_HAND], {}
    return [], {name: value.format(rank) for name, value in BY_SCHEDULER.items()}


@pytest.mark.parametrize("by", ["hand", "scheduler"])
def test_a_machine_0_that_starts_more_slowly_is_told_too_once_the_error_is_printed(
    by: str,
    port: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    printed: list[str] = []
    begins = threading.Event()

    def say(_: str) -> None:
        printed.append(capsys.readouterr().err)
        begins.set()

    monkeypatch.setattr(abort_notice, "say", say)
    words, variables = place(1, by)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    failing = threading.Thread(target=launch, args=(port, *words, "missing.py"))
    failing.start()
    assert begins.wait(60)
    assert "missing.py" in printed[0]
    with Main(port) as waiting:
        assert "missing.py" in waiting.cause()
        failing.join()


def give_up_as(rank: int, port: int, by: str = "scheduler", *more: str) -> threading.Thread:
    """Begin what a launch does that has failed on one of two machines."""
    flags, variables = place(rank, by)
    environ = {"HEADWAY_RUN_KEY": os.environ["HEADWAY_RUN_KEY"], **variables}
    words = ["--main-port", str(port), *flags, *more, "missing.py"]
    error = ConfigError(f"no script on {rank}", where="here", fix="write it")
    giving_up_here = threading.Thread(target=give_up, args=(words, make_parser(), environ, error))
    giving_up_here.start()
    return giving_up_here


def joining(
    port: int,
    rank: int | None = 1,
    num_machines: tuple[int, int] = (2, 2),
    key: str = KEY,
) -> Member:
    """Return a machine that asks to join."""
    other = Member(connected(port), key.encode(), 60, str)
    other.send(Join(rank, *num_machines, "n1", 1, time.time()))
    return other


def cause_told(member: Member) -> str:
    assert member.wait(lambda: member.ended_by is not None, 60)
    member.close()
    assert member.ended_by is not None
    return member.ended_by.cause


@pytest.mark.parametrize("by", ["hand", "scheduler"])
def test_a_machine_0_that_fails_before_it_listens_tells_those_that_wait_for_it(
    by: str, port: int
) -> None:
    failing = give_up_as(0, port, by)
    cause = cause_told(joining(port))
    assert "machine 0" in cause
    assert "no script on 0" in cause
    failing.join(60)
    assert not failing.is_alive()


def test_a_machine_0_of_a_range_tells_as_many_as_can_join(port: int) -> None:
    failing = give_up_as(0, port, "hand", "--num-machines=2:3", "--machine-rank=auto")
    for _ in range(2):
        assert failing.is_alive()
        assert "no script on 0" in cause_told(joining(port, None, (2, 3)))
    failing.join(60)
    assert not failing.is_alive()


def test_machines_that_all_fail_alike_do_not_wait_for_each_other(port: int) -> None:
    for failing in [give_up_as(rank, port) for rank in (1, 0)]:
        failing.join(120)
        assert not failing.is_alive()


def test_a_stranger_without_the_key_ends_no_wait_by_what_it_tells(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Main(port) as waiting:
        monkeypatch.setenv("HEADWAY_RUN_KEY", "that of another run")
        give_up_as(1, port, "hand").join(60)
        assert waiting.member.wait(lambda: waiting.member.accepted is not None, 60)
        assert not waiting.member.is_over
    other = free_port()
    forging = give_up_as(0, other, "hand")
    member = joining(other)
    assert not member.wait(lambda: member.ended_by is not None, 60)
    assert member.unacceptable is not None
    member.close()
    cause_told(joining(other, key="that of another run"))
    forging.join(60)


def started(port: int, *words: str, before: str = "") -> subprocess.Popen[str]:
    """Start a launch in a process of its own that may tell for long."""
    code = f"""
import sys
from headway.launcher.machines import abort_notice
abort_notice._within_s = lambda *_: 600
from headway.commands.main import run_command
sys.argv[0] = "headway"
{before}
run_command()
"""
    command = [sys.executable, "-c", code, "launch", "--cpu", "--main-port", str(port), *words]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def script() -> str:
    Path("waits.py").write_text("import time; time.sleep(600)")
    return "waits.py"


@pytest.mark.processes
@pytest.mark.wording
def test_a_failure_that_is_found_after_the_plan_ends_the_wait_of_machine_0(port: int) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))"
    words, _ = place(1, "hand")
    with Main(port) as waiting, started(port, *words, script(), before=limit) as failing:
        assert "20 open files are too few" in waiting.cause()
        assert failing.wait(60) == 4


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_ends_the_telling_with_the_exit_code_of_the_error(
    number: signal.Signals, port: int
) -> None:
    words, _ = place(1, "hand")
    with started(port, *words, "missing.py") as failing:
        wait_for_lines(failing, "telling machine 0")
        failing.send_signal(number)
        assert failing.wait(60) == 2


@pytest.mark.processes
def test_a_machine_that_is_stopped_before_it_joins_ends_the_wait_of_machine_0(port: int) -> None:
    pytest.importorskip("torch")
    words, _ = place(1, "hand")
    with started(port, *words, script()) as stopped:
        wait_for_lines(stopped, "waiting for machine 0")
        stopped.terminate()
        wait_for_lines(stopped, "telling machine 0")
        with Main(port) as waiting:
            assert "stopped by SIGTERM" in waiting.cause()
            assert stopped.wait(60) == 128 + signal.SIGTERM


@pytest.mark.processes
def test_a_machine_that_is_stopped_before_it_has_a_plan_ends_the_wait_of_machine_0(
    port: int,
) -> None:
    signals = """
import os, signal
from headway.commands import launch
launch.program_from = lambda *_: os.kill(os.getpid(), signal.SIGTERM)
"""
    words, _ = place(1, "hand")
    with Main(port) as waiting, started(port, *words, script(), before=signals) as stopped:
        assert "stopped by SIGTERM" in waiting.cause()
        assert stopped.wait(60) == 128 + signal.SIGTERM


@pytest.mark.processes
def test_a_stop_signal_amid_the_import_of_torch_is_told_and_ends_the_launcher() -> None:
    code = """
import os, signal, time
from types import SimpleNamespace
from headway.launcher.early_signals import interrupts_exit_at_once, raise_stopped
raise_stopped()
with interrupts_exit_at_once(SimpleNamespace(close=lambda: None), lambda s: print("told:", s)):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)
    except BaseException:  # as imports do
        print("swallowed")
"""
    done = subprocess.run([sys.executable, "-uc", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 128 + signal.SIGTERM
    assert done.stdout == "told: stopped by SIGTERM\n"


def connected(port: int) -> socket.socket:
    deadline = time.monotonic() + 60
    while True:
        with suppress(ConnectionRefusedError):
            return socket.create_connection(("127.0.0.1", port))
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    "words",
    [
        ("missing.py",),
        ("--num-machines", "2", "--machine-rank", "0", "missing.py"),
        ("--hosts", "a,b", "--num-machines", "2", "--main-address", "127.0.0.1", "missing.py"),
        ("--num-machines", "2:3", "--main-address", "a", "missing.py"),
        ("--num-machines", "2", "--machine-rank", "1", "--main-address", "a", "--dry-run", "x.py"),
    ],
)
def test_nobody_is_told_by_a_launch_that_no_machine_waits_for(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []
    for name in ("_tell_machine_0", "_tell_others"):
        monkeypatch.setattr(abort_notice, name, lambda *args: told.append(args))
    assert main(["launch", *words]) == 2
    assert not told


def test_a_number_that_no_machine_of_the_run_has_is_refused_and_told_to_nobody(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(abort_notice, "say", told.append)
    with Main(port) as waiting:
        assert launch(port, *place(2, "hand")[0], __file__) == 2
        assert waiting.member.ended_by is None
    assert told == []
