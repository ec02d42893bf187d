"""A launcher tells its own user where the ranks are, and nobody else. No rank is started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from headway.commands import stack
from headway.errors import ConfigError, LaunchError
from headway.launcher.diagnosis import run_socket
from headway.launcher.diagnosis.run_socket import ActiveRun, RunSocket, list_runs, request_stacks
from tests.another_user import NOBODY, fork_as, needs_root
from tests.commands.running import run
from tests.distributed.launching import environment
from tests.waiting import wait_until

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="peer credentials of Linux")


@contextmanager
def running() -> Iterator[ActiveRun]:
    launch = ActiveRun(os.getpid(), "train.py", 2, 0, 1, 1e9)
    opened = RunSocket(launch)
    opened.describe = lambda: "where they are"
    try:
        yield launch
    finally:
        opened.close()


def ours() -> list[ActiveRun]:
    """Return the runs of this test: others of the same user may be running."""
    return [run for run in list_runs() if run.pid == os.getpid()]


def own_address() -> str:
    """Return the address of the run of this test; others of the same user may be ending."""
    runs = ((address, run_socket._ask(address)[0]) for address in run_socket._list_addresses())
    return next(address for address, run in runs if run and run.pid == os.getpid())


@pytest.fixture(params=[True, False], ids=["abstract", "folder"])
def kind(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[None]:
    """Both kinds of addresses; that of a Mac works on Linux, too."""
    if not request.param:
        monkeypatch.setattr(run_socket, "_HAS_ABSTRACT_NAMES", False)
        monkeypatch.setattr(run_socket, "runtime_folder", lambda: str(tmp_path / "runs"))
    yield
    if not request.param:
        os.rmdir(tmp_path / "runs")


SUSPENDED = """
import os, signal
from headway.launcher.diagnosis.run_socket import ActiveRun, RunSocket
opened = RunSocket(ActiveRun(os.getpid(), "train.py", 2, 0, 1, 1e9))
print("opened", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
opened.close()
"""


@on_linux
@pytest.mark.processes
def test_a_launch_whose_launcher_is_suspended_is_listed_as_such(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_socket, "_TIMEOUT_S", 0.5)
    command = [sys.executable, "-c", SUSPENDED]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE) as process:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        try:
            assert [one for one in list_runs() if one.pid == process.pid and one.is_suspended]
            with pytest.raises(LaunchError, match="the launcher is suspended"):
                stack.main([str(process.pid)])
            assert "its launcher is suspended" in run("top")[1]
        finally:
            process.send_signal(signal.SIGCONT)


def test_a_launcher_that_ends_before_it_answers_is_not_said_to_be_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = ActiveRun(os.getpid(), "train.py", 2, 0, 1, 1e9)  # its process is still there
    monkeypatch.setattr(stack, "list_runs", lambda: [own])
    with pytest.raises(LaunchError, match="exited before it responded"):
        stack.main([])


@pytest.mark.usefixtures("kind")
def test_a_launch_is_listed_and_asked_until_it_ends() -> None:
    with running() as run:
        assert ours() == [run]
        assert request_stacks(run.pid, timeout_s=20) == "where they are"
        assert request_stacks(run.pid + 1, timeout_s=20) is None
    assert ours() == []


def as_user(uid: int, call: Callable[[], object]) -> bool:
    """Return whether `call` returned something true in a child process of another user."""
    return os.waitpid(fork_as(uid, call), 0)[1] == 0


@on_linux
@needs_root
@pytest.mark.processes
def test_another_user_is_told_nothing_and_cannot_pass_for_a_launch_of_ours() -> None:
    with running():
        theirs = run_socket._list_addresses()
        assert as_user(0, lambda: ours_of(theirs))
        assert not as_user(NOBODY, lambda: ours_of(theirs))
    reading, writing = os.pipe()
    address = run_socket._new_address()

    def pretend() -> None:  # another user takes a name that looks like one of ours
        fake = socket.socket(socket.AF_UNIX)
        fake.bind(address)
        fake.listen()
        os.write(writing, b"bound")
        fake.accept()

    child = fork_as(NOBODY, pretend)
    try:
        assert os.read(reading, 5) == b"bound"
        assert child not in [run.pid for run in list_runs()]
    finally:
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)


def ours_of(addresses: list[str]) -> bool:
    """Return whether a launcher at one of these addresses answers this process."""
    answers = [run_socket._send_request(address, {}, 20)[0] for address in addresses]
    return any(run is not None for run in answers)


def is_answered(address: str) -> bool:
    """Return whether what listens there answers a request, asked without any check of ours."""
    with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):  # it may hang up
        connection.connect(address)
        connection.sendall(b"{}")
        return bool(connection.recv(1))
    return False


@on_linux
@needs_root
@pytest.mark.processes
def test_a_launcher_hangs_up_on_another_user_who_asks_in_a_way_of_their_own() -> None:
    with running():
        address = own_address()
        assert as_user(0, lambda: is_answered(address))
        assert not as_user(NOBODY, lambda: is_answered(address))


@on_linux
@needs_root
@pytest.mark.processes
def test_stack_refuses_the_process_of_another_user() -> None:
    child = fork_as(NOBODY, threading.Event().wait)
    try:
        wait_until(lambda: os.stat(f"/proc/{child}").st_uid == NOBODY)
        code, error = run("stack", str(child))
        assert (code, "nobody" in error) == (LaunchError.exit_code, True)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


@pytest.mark.parametrize("more", [{"later": 1}, {"pid": "7"}])
def test_a_launch_of_another_version_is_passed_over(
    more: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = ActiveRun._asdict
    with running():
        monkeypatch.setattr(ActiveRun, "_asdict", lambda self: {**fields(self), **more})
        assert ours() == []


@pytest.mark.parametrize("request_", [b"", b"hello", b"{}", b"[]", b"[" * 4000])
def test_a_request_that_is_none_holds_up_no_other(request_: bytes) -> None:
    with running() as run, socket.socket(socket.AF_UNIX) as connection:
        connection.connect(own_address())
        connection.sendall(request_)
        assert ours() == [run]


def test_a_request_that_never_comes_is_not_waited_for_at_the_end() -> None:
    with socket.socket(socket.AF_UNIX) as silent, running() as run:
        silent.connect(own_address())
        assert ours() == [run]
    assert threading.enumerate() == [threading.main_thread()]


def test_a_folder_that_others_may_enter_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run_socket, "_HAS_ABSTRACT_NAMES", False)
    folder = tmp_path / "runs"
    monkeypatch.setattr(run_socket, "runtime_folder", lambda: str(folder))
    folder.mkdir(mode=0o755)
    with pytest.raises(PermissionError), running():
        pass
    assert list_runs() == []
    folder.rmdir()
    folder.symlink_to("elsewhere")
    with pytest.raises(PermissionError), running():
        pass
    folder.unlink()


def only(monkeypatch: pytest.MonkeyPatch, *runs: ActiveRun) -> None:
    monkeypatch.setattr(stack, "list_runs", lambda: [*runs])


def test_stack_without_a_pid_asks_the_only_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as launch:
        only(monkeypatch, launch)
        assert run("stack") == (0, f"launch {launch.pid}, {launch.program}: where they are\n")


def test_stack_without_a_pid_lists_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = ActiveRun(11, "a.py", 2, 0, 1, 0.0), ActiveRun(12, "b.py", 8, 1, 2, 0.0)
    only(monkeypatch, *runs)
    code, text = run("stack")
    assert code == ConfigError.exit_code
    _, first, second, error, *_ = text.splitlines()
    assert first.split()[:3] == ["11", "a.py", "2"]
    assert second.split()[:6] == ["12", "b.py", "8", "(machine", "1", "of"]
    assert "2 launches are running on this machine" in error


def test_stack_without_a_pid_and_without_a_launch_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch)
    assert run("stack")[0] == LaunchError.exit_code
