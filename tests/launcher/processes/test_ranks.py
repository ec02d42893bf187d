"""The processes of one attempt: each end is recorded once, and they are stopped by the table."""

from __future__ import annotations

import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from headway.ipc.records import ProcessExit, ScriptEnd
from headway.ipc.signals import SignalSafeEvent
from headway.launcher.diagnosis.watch import RankChannel
from headway.launcher.processes import ranks
from headway.launcher.processes.ranks import RankProcesses
from headway.launcher.processes.shutdown import Grace


class Run:
    """The processes of a run with one rank, of process 7, with nothing around them."""

    def __init__(self, grace: Grace, *ends: ScriptEnd, **watch: Any) -> None:
        def nothing(*_: object) -> None:
            pass

        self.ended: dict[int, ProcessExit] = {}
        self.sent: list[int] = []
        self.elsewhere: Any = None
        starter: Any = SimpleNamespace(
            exits=self.ended,
            exit_event=SignalSafeEvent(),
            resume_guardian=nothing,
            resume_server=nothing,
            terminate_leftovers=nothing,
        )
        quiet: dict[str, Any] = {"end": lambda *_: [], "hang": None, "begin_stop": nothing}
        made = RankProcesses(
            starter,
            {at: {"RANK": str(at), "WORLD_SIZE": "1"} for at in (0, 1)},
            output=SimpleNamespace(set_timeout=nothing),  # type: ignore[arg-type]
            watch=SimpleNamespace(**{**quiet, **watch}),  # type: ignore[arg-type]
            attempt=0,
            reports_exit=True,
            debug_rank=None,
            grace=grace,
            remote_failure=lambda: self.elsewhere,
        )
        made.channels[0] = RankChannel(0, 7, channel=-1)
        made.channels[0].ends += ends
        made.handles[0] = SimpleNamespace(send=self.send, close=nothing)  # type: ignore[assignment]
        self.ranks = made

    def send(self, number: int) -> None:
        self.sent.append(number)
        if number == signal.SIGKILL:
            self.ended[7] = ProcessExit(7, -number, time.time(), leftovers=False)


def test_an_end_that_is_being_taken_in_when_a_signal_comes_is_not_lost() -> None:
    calls = iter([KeyboardInterrupt, None])

    def end(rank: int, code: int) -> list[ScriptEnd]:
        if (stop := next(calls)) is not None:
            raise stop  # what a signal's handler raises
        return []

    run = Run(Grace(30, 5, 600), end=end)
    run.ended[7] = ProcessExit(7, 3, 1.0, leftovers=False)
    with pytest.raises(KeyboardInterrupt):
        run.ranks.collect()
    run.ranks.collect()
    assert run.ranks.exits[0].code == 3


def test_the_end_of_a_run_signals_no_rank_whose_number_another_process_may_have() -> None:
    run = Run(Grace(0, 0, 0), will_save=lambda: False)
    run.ended[7] = ProcessExit(7, 1, 1.0, leftovers=False)
    run.ranks.close()
    assert not run.sent


@pytest.mark.parametrize("has_ended", [False, True])
def test_ranks_whose_script_has_ended_are_not_said_to_be_waited_for(
    has_ended: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ranks, "SILENT_S", 0)
    run = Run(Grace(0.1, 0, 0), *[ScriptEnd(1.0, 0)] * has_ended, will_save=lambda: False)
    run.ranks.close()
    assert ("waiting for rank 0 to stop" in capsys.readouterr().err) is not has_ended


@pytest.mark.parametrize(("hang", "task"), [(None, "save and stop"), (object(), "stop")])
def test_ranks_that_hang_are_not_said_to_save(
    hang: object, task: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ranks, "SILENT_S", 0)
    run = Run(Grace(0, 0.1, 0.1), will_save=lambda: True, hang=hang)
    run.ranks.close()
    assert f"waiting for rank 0 to {task}, " in capsys.readouterr().err


@pytest.mark.parametrize("is_machine", [True, False])
def test_ranks_that_save_before_they_stop_are_not_waited_for_once_another_is_lost(
    is_machine: bool,
) -> None:
    run = Run(Grace(usual_s=0, victim_s=0, to_save_s=600), will_save=lambda: True)
    if is_machine:
        run.elsewhere = object()
    else:  # a rank has called os._exit(0), and its child keeps the connection
        left = SimpleNamespace(code=0, is_failure=False, crash=None)
        run.ranks.channels[1] = RankChannel(1, 8, channel=-1)
        run.ranks.exits[1] = left  # type: ignore[assignment]
    run.ranks.close()
    assert run.sent == [signal.SIGTERM, signal.SIGCONT, signal.SIGKILL]
    assert run.ranks.exits[0].killed_after_s is not None
    assert run.ranks.failure_during_stop is run.elsewhere
