"""`headway launch --hosts`: what is refused before a connection is made, and what is compared."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from headway.commands.host_agent import probe_host
from headway.ipc.typed import decode, encode
from headway.launcher.remote.protocol import (
    AgentSetup,
    LaunchEnd,
    StartLaunch,
    forwarded_env,
    remote_env,
)
from tests.commands.running import run


@pytest.fixture
def script() -> str:
    Path("train.py").write_text("print(1)")
    return "train.py"


def test_a_dry_run_shows_the_launch_of_each_host_without_secrets(script: str) -> None:
    words = ["--cpu", "--env", "A_KEY=dont-tell", script, "--lr", "1"]
    code, text = run("launch", "--hosts", "a:2,b", "--dry-run", *words)
    assert code == 0
    first, second = text.splitlines()
    assert first.startswith("a: headway launch --num-machines=2 --machine-rank=0 --main-address=a ")
    assert "--num-processes=2" in first
    assert second.startswith("b: headway launch --num-machines=2 --machine-rank=1 ")
    assert "--num-processes" not in second
    assert second.endswith(" train.py --lr 1")
    assert "dont-tell" not in text


def test_a_flag_is_stronger_than_the_hosts_of_a_profile_and_none_stays_here(script: str) -> None:
    Path("headway.yaml").write_text("hosts: [of-the-profile]\n")
    code, text = run("launch", "--hosts", "of-the-flag", "--dry-run", script)
    assert (code, text.partition(":")[0]) == (0, "of-the-flag")
    code, text = run("launch", "--dry-run", script)
    assert (code, text.partition(":")[0]) == (0, "of-the-profile")
    code, text = run("launch", "--hosts", "none", "--dry-run", script)
    assert (code, text.partition(":")[0]) == (0, script)


@pytest.mark.processes
def test_without_ssh_that_is_said(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert run("launch", "--hosts", "a", script)[0] == 3


def test_a_host_has_to_have_the_folder_and_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # and back at the end
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "train.py").write_text("1")
    order = AgentSetup("", str(tmp_path / "work"), "train.py", {})
    sshd = {"SSH_CONNECTION": "10.0.0.9 5 10.0.0.1 22"}
    found = probe_host(order, sshd)
    assert (found.client_address, found.address, found.problem) == ("10.0.0.9", "10.0.0.1", "")
    assert found.port > 0
    assert probe_host(order._replace(folder=str(tmp_path / "missing")), sshd).problem
    assert probe_host(order._replace(script="missing.py"), sshd).problem


def agent_of(code: str, orders: bytes = b"") -> subprocess.Popen[bytes]:
    """Begin an agent that has got its order, and these."""
    command = [sys.executable, "-c", code]
    agent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert agent.stdin is not None
    agent.stdin.write(encode(AgentSetup("the-mark", os.getcwd(), None, {})) + orders)
    agent.stdin.flush()
    return agent


IMPATIENT_AGENT = """
from headway.commands import host_agent
host_agent._BEAT_EVERY_S = 0.01
host_agent.main()
"""


@pytest.mark.processes
def test_a_silent_agent_writes_at_times_so_that_a_cut_connection_is_noticed() -> None:
    with agent_of(IMPATIENT_AGENT) as agent:
        assert agent.stdin is not None
        assert agent.stdout is not None
        assert agent.stdout.readline() != b"the-mark\n"  # the facts
        assert agent.stdout.readline() == b"the-mark\n"
        agent.stdin.close()
        assert agent.stdout.read().replace(b"the-mark\n", b"") == b""
    assert agent.returncode == 0


KILLED_LAUNCHER = """
import os
from headway.commands import host_agent
host_agent._launch = lambda *_: os.kill(os.getpid(), 9)
host_agent.main()
"""


@pytest.mark.processes
def test_a_launcher_that_is_killed_on_a_host_is_reported_by_its_agent() -> None:
    with agent_of(KILLED_LAUNCHER, encode(StartLaunch((), "k", 60.0))) as agent:
        assert agent.stdin is not None
        assert agent.stdout is not None
        _, answer = agent.stdout.readline(), agent.stdout.readline()
        agent.stdin.close()
    end = decode(LaunchEnd, answer.removeprefix(b"the-mark"))
    assert end.exit_code == 137
    assert f"error: the launcher on {socket.gethostname()} was killed by signal 9" in end.report


def test_the_environment_goes_along_but_for_what_belongs_to_one_host() -> None:
    caller = {"A": "1", "HOME": "/me", "SSH_AUTH_SOCK": "x", "HEADWAY_RUN_KEY": "k", "PATH": "p"}
    assert forwarded_env(caller) == {"A": "1", "PATH": "p"}
    own = {"HOME": "/there", "PATH": "short", "B": "2"}
    assert remote_env(own, forwarded_env(caller)) == {"HOME": "/there", "A": "1", "PATH": "p"}
