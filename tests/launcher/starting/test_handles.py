"""A signal reaches the process that it is meant for, and nobody who has been given its number."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from headway.contract.records import Ended
from headway.launcher.planning.grace import Grace
from headway.launcher.starting.handles import ProcessHandle

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
        assert process.wait(timeout=10) == -signal.SIGTERM
    if not has_pidfds:  # what another process of this number looks like
        assert handle._process is not None
        vars(handle._process)["_pid"] = bystander.pid
    handle.send(signal.SIGKILL)
    handle.close()
    handle.send(signal.SIGKILL)


def test_the_end_of_a_run_does_not_signal_a_group_that_has_a_reaped_ranks_number(
    bystander: subprocess.Popen[bytes],
) -> None:
    pytest.importorskip("torch")
    from headway.launcher.starting.ranks import RankProcesses

    # the system has given its number to somebody else
    ended = Ended(bystander.pid, 1, 1.0, left_processes=False)
    starter: Any = SimpleNamespace(
        ends={ended.pid: ended},
        woken=queue.SimpleQueue(),
        resume_server=lambda: None,
        end_left_processes=lambda: None,
    )
    watch: Any = SimpleNamespace(
        end=lambda *_: [], hang=None, begin_to_stop=lambda: None, will_save=lambda: False
    )
    nothing: Any = None
    ranks = RankProcesses(
        starter,
        {0: {"RANK": "0"}},
        nothing,
        watch,
        attempt=0,
        reports_its_end=True,
        debug_rank=None,
        grace=Grace(0, 0, 0),
    )
    ranks._local_ranks[bystander.pid] = 0
    ranks.close()
