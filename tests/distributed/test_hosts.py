"""`headway launch --hosts a,b`: over a real ssh, two hosts are one run with one end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.distributed.launching import HEADWAY, launch, script, start, wait_for_end, wait_for_pids
from tests.distributed.networks import needs_namespaces, network
from tests.distributed.ssh_server import prepare, serve, ssh_server, why_no_server
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.usefixtures("executed_starts", "hosts"),
    pytest.mark.skipif(bool(why_no_server()), reason=why_no_server()),
]

SECRET = "dont-tell-anyone"

# what each rank finds, and whether any process shows a secret
RANK = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
commands = ""
for pid in filter(str.isdecimal, os.listdir("/proc")):
    try:
        commands += open(f"/proc/{pid}/cmdline").read()
    except OSError:
        pass
secrets = (os.environ["A_TOKEN"], os.environ["B_TOKEN"])
shown = [secret for secret in secrets if secret in commands]
print(int(total), os.environ["LOCAL_RANK"], os.getcwd(), os.environ["HOME"], sys.argv[1:], shown)
assert "HEADWAY_RUN_KEY" not in os.environ
"""

FAILS = """
import os, sys, time
if os.environ["RANK"] == "2":
    sys.exit(7)
time.sleep(600)
"""

WAITS = """
import os, time
open("up_" + os.environ["RANK"], "w").write(str(os.getpid()))
time.sleep(600)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[psutil.Process, Path]]:
    folder = tmp_path_factory.mktemp("ssh")
    with ssh_server(folder) as process:
        yield process, folder


@pytest.fixture
def hosts(server: tuple[psutil.Process, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let `ssh a` and `ssh b` work, and wait until no connection is left."""
    process, folder = server
    monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    yield
    wait_until(lambda: not process.children())


def test_two_hosts_are_one_run_with_one_output_and_no_secret_is_in_sight() -> None:
    words = ["--hosts", "a:2,b", "--cpu", script(RANK), "x y", "$HOME"]
    done = launch(*words, HEADWAY_ENV=f"A_TOKEN={SECRET}", B_TOKEN="of-the-shell", code=0)
    lines = sorted(line for line in done.stdout.splitlines() if line)
    for rank, local_rank in ((0, 0), (1, 1), (2, 0)):
        assert lines[rank].startswith(f"[{rank}] 3 {local_rank} {os.getcwd()} ")
        assert lines[rank].endswith(" ['x y', '$HOME'] []")
        home = lines[rank].split()[4]  # of the account, which sshd looks up
        assert home != os.environ["HOME"]


def test_the_code_of_the_rank_that_failed_is_that_of_the_run_and_there_is_one_report() -> None:
    done = launch("-q", "--cpu", "--hosts", "a:2,b", script(FAILS), code=7)
    assert done.stderr.count("error: ") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_end_of_the_caller_is_the_end_on_all_hosts(number: signal.Signals) -> None:
    with start("-q", "--cpu", "--hosts", "a,b:2", script(WAITS)) as process:
        pids = wait_for_pids("up_*", 3)
        process.send_signal(number)
        process.communicate(timeout=120)
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    wait_for_end(*pids)


@pytest.mark.long
def test_a_lost_connection_is_the_reason_that_is_given_and_all_hosts_end() -> None:
    with start("--cpu", "--hosts", "a,b", script(WAITS)) as process:
        pids = wait_for_pids("up_*", 2)
        clients = psutil.Process(process.pid).children(recursive=True)
        next(p for p in clients if p.name() == "ssh" and "b" in p.cmdline()).kill()
        errors = process.communicate(timeout=120)[1]
    assert process.returncode == 4, errors
    assert "error: the connection to b was lost" in errors
    wait_for_end(*pids)


def test_hosts_that_cannot_take_part_are_all_named_before_anything_starts() -> None:
    ssh = Path("bin") / "ssh"
    ssh.parent.mkdir()
    real = os.environ["PATH"].partition(os.pathsep)[0]
    refusal = '*" refuses exec "*) echo "Permission denied" >&2; exit 255;;'
    ssh.write_text(f'#!/bin/sh\ncase "$*" in {refusal} esac\nexec {real}/ssh "$@"\n')
    ssh.chmod(0o755)
    path = f"{ssh.parent.absolute()}{os.pathsep}{os.environ['PATH']}"
    done = launch("--hosts", "a,refuses", "--cpu", script(WAITS), PATH=path, code=4)
    assert "Permission denied" in done.stderr
    assert "refuses" in done.stderr
    assert not Path("up_0").exists()


WHERE = """
import os, socket, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(os.environ["RANK"], socket.gethostname(), int(total))
dist.destroy_process_group()
"""


@pytest.mark.long
@needs_namespaces
def test_three_machines_with_a_network_of_their_own_are_one_run(tmp_path: Path) -> None:
    """The launch is typed on the first of them, which ssh reaches at a loopback address there."""
    with network(3, tmp_path) as net, ExitStack() as stack:
        addresses = {number: f"10.79.0.{number}" for number in net.numbers} | {1: "127.0.1.1"}
        prepare(tmp_path, {f"n{number}": address for number, address in addresses.items()}, 2222)
        for number, address in addresses.items():
            stack.enter_context(serve(tmp_path, [address], 2222, net.prefix(number)))
        path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
        words = ["-q", "--cpu", "--hosts", "n1,n2:2,n3", script(WHERE)]
        out, errors = net.start(1, [*HEADWAY, *words], PATH=path).communicate(timeout=120)
    lines = sorted(line.partition("] ")[2] for line in out.splitlines())
    assert lines == ["0 n1 4", "1 n2 4", "2 n2 4", "3 n3 4"], errors
