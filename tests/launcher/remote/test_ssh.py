"""A launch over ssh when hosts hang, flood or go: how it ends, and which of them is to blame."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from headway.errors import LaunchError
from headway.ipc.typed import encode
from headway.launcher.remote import agents as connection
from headway.launcher.remote import ssh
from headway.launcher.remote.protocol import AgentSetup, HostReply, LaunchEnd
from headway.launcher.remote.ssh import RemoteLaunch, main_address_of, run_on_hosts
from headway.settings.setting import read_hosts
from tests.waiting import wait_until

pytestmark = pytest.mark.processes

HERE = HostReply()

# `ssh -T -o... HOST COMMAND`: notes its process, and does what HOST says
SSH = """\
#!{python} -SE
import json, os, pathlib, signal, sys, time
host = sys.argv[-2]
def note(name):
    pathlib.Path(name + ".part").write_text(str(os.getpid()))
    os.rename(name + ".part", name)
def has_come(name):
    while not os.path.exists(name):
        time.sleep(0.01)
def tell(exit_code, report=""):
    print(mark + json.dumps(["LaunchEnd", exit_code, report]), flush=True)
note(host)
def join():
    global mark
    mark = json.loads(sys.stdin.readline())[1]
    print(mark + {found!r}, flush=True)
    sys.stdin.readline()
{does}
"""

Launch = Callable[..., int]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """Run a launch on hosts with an ssh that does what each host's Python says."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")

    def run(stops_within_s: float = 600.0, **does: str) -> int:
        write_ssh(tmp_path / "bin" / "ssh", does)
        return run_on_hosts(
            RemoteLaunch(
                hosts=read_hosts(list(does)),
                agent=["agent"],
                setup=AgentSetup("the-mark", "", None, {}),
                words=lambda *_: [],
                main_address="127.0.0.1",
                main_port=1,
                stops_within_s=stops_within_s,
            )
        )

    return run


def write_ssh(path: Path, does: dict[str, str]) -> None:
    path.parent.mkdir()
    cases = "".join(
        f"if host == {host!r}:\n    " + text.replace("\n", "\n    ") + "\n"
        for host, text in does.items()
    )
    found = encode(HERE).decode().rstrip()
    path.write_text(SSH.format(python=sys.executable, found=found, does=cases))
    path.chmod(0o755)


def is_gone(host: str) -> bool:
    try:
        return psutil.Process(int(Path(host).read_text())).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


HANGS = "time.sleep(600)"
ORDERED = "sys.stdin.readline()"  # returns once the command is connected to all hosts
STOPPED_BY_US = "join()\nsys.stdin.read()\ntell(143)"


def test_a_lost_connection_is_to_blame_not_the_launches_that_were_stopped_for_it(
    run: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(a=STOPPED_BY_US, b="join()\nos.kill(os.getpid(), signal.SIGKILL)", c=STOPPED_BY_US)
    assert code == LaunchError.exit_code
    errors = capsys.readouterr().err
    assert "error: the connection to b was lost" in errors
    assert "stops its launch when the connection is back" in errors  # it may still train


def test_an_agent_that_only_shows_that_it_is_there_has_not_ended(run: Launch) -> None:
    beats = "join()\nprint(mark, flush=True)\nprint(mark, flush=True)\n"
    assert run(a=beats + "tell(7)") == 7


def test_a_long_report_is_shown_whole(run: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    report = "error: " + 3 * connection._MAX_LINE_BYTES * "x"
    code = run(a=f"join()\ntell(7, {report!r})")
    assert code == 7
    assert report in capsys.readouterr().err


LOST, FAILED, TERMINATED = LaunchEnd(4, "lost"), LaunchEnd(7, ""), LaunchEnd(143, "")
UNABLE, SAVED, DONE = LaunchEnd(4, ""), LaunchEnd(75, ""), LaunchEnd(0, "")


@pytest.mark.parametrize(
    ("ends", "lost", "is_stopped", "blamed"),
    [
        ({0: TERMINATED}, [LOST], False, LOST),  # n2's agent has told n1 before it was noticed
        ({0: FAILED, 1: TERMINATED}, [LOST], False, FAILED),
        ({0: DONE, 1: SAVED}, [LOST], False, LOST),
        ({0: TERMINATED}, [LOST], True, TERMINATED),
        ({0: TERMINATED, 1: SAVED}, [], False, TERMINATED),  # sent to a launcher there
        ({1: UNABLE, 0: FAILED}, [], False, FAILED),  # machine 0 knows why
        ({2: FAILED, 1: UNABLE}, [], False, FAILED),  # it could not join
        ({0: DONE, 1: FAILED}, [], False, FAILED),
        ({0: DONE, 1: SAVED}, [], False, SAVED),
    ],
)
def test_the_blame_is_where_the_failure_began(
    ends: dict[int, LaunchEnd], lost: list[LaunchEnd], is_stopped: bool, blamed: LaunchEnd
) -> None:
    assert ssh._root_cause(ends, lost, is_stopped=is_stopped) is blamed


def test_all_connections_are_closed_at_the_same_time(run: Launch) -> None:
    meet = "note(host + '-closed')\nfor other in 'abc':\n    has_come(other + '-closed')"
    refuses = f"sys.stdin.read()\n{meet}\nnote(host + '-ended')"
    with pytest.raises(LaunchError, match="on d"):
        run(a=f"join()\n{refuses}", b=f"join()\n{refuses}", c=f"join()\n{refuses}", d="pass")
    assert all(Path(f"{host}-ended").exists() for host in "abc")


def test_a_stop_signal_ends_a_launch_whose_host_does_not_answer(
    run: Launch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(connection, "CLOSE_WITHIN_S", 0.2)
    monkeypatch.setattr(ssh, "_NOTICE_AFTER_S", 0.1)
    stops = f"{ORDERED}\nos.kill(os.getppid(), signal.SIGTERM)"
    assert run(a=HANGS, b=f"{stops}\n{HANGS}") == 143
    wait_until(lambda: is_gone("b"))
    assert "waiting for a, b to close the connection" in capsys.readouterr().err


def test_a_second_stop_signal_ends_the_command_and_its_ssh_at_once(
    run: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "CLOSE_WITHIN_S", 600.0)
    stops = f"{ORDERED}\nos.kill(os.getppid(), signal.SIGINT)"
    again = f"sys.stdin.read()\nos.kill(os.getppid(), signal.SIGTERM)\n{HANGS}"
    assert run(a=f"{stops}\n{HANGS}", b=again) == 130
    wait_until(lambda: is_gone("a") and is_gone("b"))


def test_a_host_that_does_not_stop_its_launch_is_given_up(
    run: Launch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(connection, "CLOSE_WITHIN_S", 0.2)
    stops = f"join()\nos.kill(os.getppid(), signal.SIGINT)\n{HANGS}"
    assert run(0.1, a=stops) == LaunchError.exit_code
    assert "error: the connection to a was lost" in capsys.readouterr().err


def test_no_room_for_another_ssh_is_an_error(run: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("asyncio.create_subprocess_exec", refuse)
    with pytest.raises(LaunchError, match="Too many open files"):
        run(a=HANGS)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends ssh on Linux alone")
def test_a_killed_command_leaves_no_ssh_that_still_connects(tmp_path: Path) -> None:
    write_ssh(tmp_path / "bin" / "ssh", {"a": HANGS, "b": HANGS})
    Path("train.py").write_text("")
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    words = [sys.executable, "-m", "headway", "launch", "--hosts", "a,b", "train.py"]
    with subprocess.Popen(words, env={**os.environ, "PATH": path}) as process:
        wait_until(lambda: all(Path(host).exists() for host in "ab"))
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: is_gone("a") and is_gone("b"))


def test_machine_0_that_ssh_has_reached_by_loopback_is_named_as_the_others_see_it() -> None:
    own, peer = HostReply("", "127.0.1.1", 1, "127.0.1.1"), HostReply("", "10.0.0.2", 1, "10.0.0.1")
    assert main_address_of([own, peer]) == "10.0.0.1"
    assert main_address_of([peer, own]) == "10.0.0.2"
    assert main_address_of([own]) == "127.0.1.1"
