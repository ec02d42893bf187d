"""A signal reaches the process that it is meant for, and nobody who has been given its number."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from headway.ipc import forking
from headway.ipc.forking import ProcessHandle
from headway.launcher.processes.shutdown import terminate

pytestmark = pytest.mark.processes


@pytest.fixture
def bystander(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """Another process, in a session of its own as each rank is; a signal by its number fails."""
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:

        def guarded(send: Callable[[int, int], None]) -> Callable[[int, int], None]:
            def send_to_others(pid: int, number: int) -> None:
                assert pid != process.pid
                send(pid, number)

            return send_to_others

        for name in ("kill", "killpg"):
            monkeypatch.setattr(os, name, guarded(getattr(os, name)))
        yield process
        monkeypatch.undo()
        process.kill()


def give_number(ended: psutil.Process, process: subprocess.Popen[bytes]) -> None:
    """Make of a process that has ended what it looks like once another one has its number."""
    vars(ended)["_pid"] = process.pid


@pytest.mark.parametrize("has_pidfds", [True, False])
def test_a_handle_signals_its_process_and_no_later_one_of_that_number(
    has_pidfds: bool, monkeypatch: pytest.MonkeyPatch, bystander: subprocess.Popen[bytes]
) -> None:
    if not has_pidfds:
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    elif sys.platform != "linux":
        pytest.skip("pidfds are Linux's")
    with subprocess.Popen(["sleep", "60"]) as process:
        handle = ProcessHandle(process.pid)
        handle.send(signal.SIGTERM)
        assert process.wait(timeout=60) == -signal.SIGTERM
    if not has_pidfds:
        assert handle.process is not None
        give_number(handle.process, bystander)
    handle.send(signal.SIGKILL)
    handle.close()
    handle.send(signal.SIGKILL)


def test_what_ranks_have_left_is_not_signalled_by_a_number_that_another_process_has_now(
    bystander: subprocess.Popen[bytes],
) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        left = psutil.Process(process.pid)
        process.kill()
    give_number(left, bystander)
    looks = iter([[left], [left], None])
    terminate(lambda: next(looks), 0)
    assert next(looks, "all were taken") == "all were taken"


@pytest.mark.parametrize(
    ("version", "count"),
    [((3, 10, 14), 1), ((3, 10, 15), 0), ((3, 11, 9), 1), ((3, 11, 10), 0), ((3, 13, 0), 0)],
    ids=str,
)
def test_pythons_in_which_a_forked_child_may_hang_wait_before_forks(
    version: tuple[int, ...], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[object] = []
    monkeypatch.setattr(os, "register_at_fork", lambda before: registered.append(before))
    monkeypatch.setattr(sys, "version_info", version)
    forking.quiesce_before_fork.cache_clear()
    forking.quiesce_before_fork()
    forking.quiesce_before_fork()
    forking.quiesce_before_fork.cache_clear()
    assert len(registered) == count


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_fork_waits_for_threads_that_run_and_not_for_pythons(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data, hashes, looked = bytes(2**24), [0], threading.Event()

    def compute() -> None:  # without Python's lock
        while hashes[0] < 5 or not looked.is_set():
            hashlib.sha256(data)
            hashes[0] += 1

    busy = threading.Thread(target=compute, daemon=True)
    busy.start()
    idle = threading.Thread(target=looked.wait, daemon=True)
    idle.start()
    with monkeypatch.context() as context:
        asked: set[str] = set()
        context.setattr(forking, "_any_running", asked.update)
        forking._wait_for_idle_threads()
        assert {str(busy.native_id), str(idle.native_id)}.isdisjoint(asked)
    began = time.monotonic()
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.main_thread(), idle])
    forking._wait_for_idle_threads()
    waited_s = time.monotonic() - began
    looked.set()
    busy.join()
    assert waited_s >= forking._IDLE_TIMEOUT_S
    assert not forking._any_running({str(idle.native_id)})
    idle.join()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_fork_of_a_forked_process_does_not_wait_for_its_own_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: set[str] = set()
    monkeypatch.setattr(forking, "_any_running", asked.update)
    if (child := os.fork()) == 0:
        forking._wait_for_idle_threads()
        os._exit(str(os.getpid()) in asked)
    assert os.waitpid(child, 0)[1] == 0
