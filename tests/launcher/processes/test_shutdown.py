"""How ranks are stopped: time, processes and periods -> the signals to send, as one table."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from headway.launcher.processes.shutdown import Grace, Shutdown, grace_of
from headway.settings.resolve import environment_layer, resolve
from tests.machines.recorded import load

INT, TERM, KILL = signal.SIGINT, signal.SIGTERM, signal.SIGKILL
NOW = 1_000_000

PERIODS: list[tuple[str, str | None, int | None, tuple[float, float, float]]] = [
    # grace_period_s as the user set it, seconds until the job's end: usual, victims, a save
    ("by default", None, None, (30, 5, 600)),
    ("a save has until the job's end", None, 3600, (30, 5, 3595)),
    ("a short job", None, 125, (30, 5, 120)),
    ("the job ends at once", None, 10, (30, 5, 30)),
    ("the user's holds for all", "60", 3600, (60, 60, 60)),
    ("the default, but the user's", "30", None, (30, 30, 30)),
    ("no grace", "0", None, (0, 0, 0)),
]


@pytest.mark.parametrize(
    ("set_to", "job_ends_in_s", "periods"),
    [row[1:] for row in PERIODS],
    ids=[row[0] for row in PERIODS],
)
def test_the_grace_periods(
    set_to: str | None, job_ends_in_s: int | None, periods: tuple[float, float, float]
) -> None:
    variables = {} if set_to is None else {"HEADWAY_GRACE_PERIOD_S": set_to}
    settings = resolve([environment_layer(variables)], load("gpu_8_h100"), {})
    environ = {} if job_ends_in_s is None else {"SLURM_JOB_END_TIME": str(NOW + job_ends_in_s)}
    grace = grace_of(settings, environ)
    assert grace.at(NOW)[:3] == periods


SAVES = {"will_save": True}
GRACE, NONE = Grace(30, 5, 600), Grace(0, 5, 600)
TABLE: list[tuple[str, dict[str, Any], float, dict[int, int], dict[int, int]]] = [
    # what is known of the stop, which began at 100; the time; the last signals; those to send
    ("ranks are asked first", {}, 100, {}, {0: TERM, 1: TERM}),
    ("they are asked once", {}, 101, {0: TERM, 1: TERM}, {}),
    ("one that is not asked yet", {}, 101, {0: TERM}, {1: TERM}),
    ("within the grace period", {}, 129.9, {0: TERM, 1: TERM}, {}),
    ("after it", {}, 130, {0: TERM, 1: TERM}, {0: KILL, 1: KILL}),
    ("ranks are killed once", {}, 131, {0: KILL, 1: TERM}, {1: KILL}),
    ("even without grace they are asked", {"grace": NONE}, 100, {}, {0: TERM, 1: TERM}),
    ("and then killed", {"grace": NONE}, 100, {0: TERM, 1: TERM}, {0: KILL, 1: KILL}),
    ("victims of a failure", {"failed_at": 100}, 104.9, {0: TERM, 1: TERM}, {}),
    ("victims for long", {"failed_at": 100}, 105, {0: TERM, 1: TERM}, {0: KILL, 1: KILL}),
    ("victims that would save", {**SAVES, "failed_at": 100}, 105, {0: TERM}, {0: KILL, 1: KILL}),
    ("an exit code amid a stop", {"failed_at": 101}, 129, {0: TERM, 1: TERM}, {}),
    ("a save", SAVES, 699, {0: TERM, 1: TERM}, {}),
    ("a save for too long", SAVES, 700, {0: TERM, 1: TERM}, {0: KILL, 1: KILL}),
    ("a save that has lost a rank", {**SAVES, "failed_at": 200}, 204, {0: TERM, 1: TERM}, {}),
    ("and waits for it", {**SAVES, "failed_at": 200}, 205, {0: TERM, 1: TERM}, {0: KILL, 1: KILL}),
    ("Ctrl-C twice", {"number": INT, "is_cut_short": True}, 101, {0: INT}, {0: KILL, 1: KILL}),
    (
        "Ctrl-C twice amid a save",
        {**SAVES, "is_cut_short": True},
        101,
        {0: TERM},
        {0: KILL, 1: KILL},
    ),
]


@pytest.mark.parametrize(
    ("known", "now", "sent", "signals"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_which_signals_ranks_are_sent(
    known: dict[str, Any], now: float, sent: dict[int, int], signals: dict[int, int]
) -> None:
    stop = Shutdown(TERM, began_at=100, grace=GRACE)
    assert stop._replace(**known).signals(now, [0, 1], sent) == signals


def test_a_victim_that_has_nothing_to_do_is_killed_once_it_has_said_so() -> None:
    stop = Shutdown(TERM, 100, GRACE, failed_at=100)
    assert stop.signals(100, [0, 1], {}, [1]) == {0: TERM, 1: TERM}
    assert stop.signals(100, [0, 1], {0: TERM, 1: TERM}, [1]) == {1: KILL}
    assert stop._replace(failed_at=101).signals(100, [0, 1], {0: TERM, 1: TERM}, [1]) == {}


def test_ranks_that_sigkill_does_not_end_are_given_up() -> None:
    stop = Shutdown(TERM, 100, GRACE)
    assert [stop.is_abandoned(now) for now in (139, 140)] == [False, True]
