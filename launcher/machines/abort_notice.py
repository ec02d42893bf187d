"""A launcher that fails before it joins tells the other machines, so that none waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from headway.contract import signals
from headway.contract.notes import say
from headway.contract.origin import Layer
from headway.errors import STOP_SIGNALS, HeadwayError, LaunchError, Stopped
from headway.launcher.clusters.table import WITH_ONE_OUTPUT
from headway.launcher.machines.connect import (
    connect_to,
    host_port,
    is_machine_0,
    listen_as_machine_0,
)
from headway.launcher.machines.coordinator import Coordinator, failure_of
from headway.launcher.machines.hub import Hub
from headway.launcher.machines.member import Member
from headway.launcher.machines.messages import Facts, Failed
from headway.launcher.machines.run_key import run_key_of_machine_0, wait_for_run_key
from headway.settings.table import NO_CLUSTER, Settings

_STARTS_WITHIN_S = 30.0  # each machine of a job that is started on all of them at once
_BY_HAND_WITHIN_S = 10.0  # by a tool that does the same; somebody may be waiting for the prompt
_STOPS_WITHIN_S = 5.0  # a launcher that was sent a stop signal
_ANSWER_WITHIN_S = 5.0
_POLL_INTERVAL_S = 0.2


def tell_machines(
    settings: Settings, environ: Mapping[str, str], error: HeadwayError | Stopped
) -> None:
    """Tell the other machines of a launch why this one cannot take part, as they start or wait.

    Machine 0 is told, and tells the others. Another stop signal ends this.
    """
    is_0 = is_machine_0(settings.machine_rank, settings.main_address or "")
    if not _are_waiting(settings, error, is_0=is_0):
        return
    within_s = _within_s(settings, error)
    failed = failure_of(_described(error), settings.machine_rank or 0)
    with _ended_by_signals(), suppress(HeadwayError, OSError):  # no key, or no port to listen on
        if is_0:
            _tell_others(settings, environ, failed, within_s)
        else:
            _tell_machine_0(settings, environ, failed, within_s)


def _are_waiting(settings: Settings, error: HeadwayError | Stopped, *, is_0: bool) -> bool:
    """Return whether other machines may wait for this one, and it is known where they are."""
    if settings.main_address is None or not settings.main_port:
        return False
    if (settings.machine_rank or 0) >= settings.num_machines:
        return False  # a mistyped number, which no machine of the run has
    has_no_place = settings.origin("machine_rank").layer is Layer.DETECTED
    if settings.cluster != NO_CLUSTER and has_no_place:
        return False  # a job's script, whose step has not begun
    if isinstance(error, Stopped) and settings.cluster in WITH_ONE_OUTPUT:
        return False  # it stops them as well
    return is_0 or not settings.num_machines.is_range


def _within_s(settings: Settings, error: HeadwayError | Stopped) -> float:
    """Return how long it is tried to tell the others, whose launchers may still be starting."""
    if isinstance(error, Stopped):
        return _STOPS_WITHIN_S
    return _BY_HAND_WITHIN_S if settings.cluster == NO_CLUSTER else _STARTS_WITHIN_S


def _described(error: HeadwayError | Stopped) -> HeadwayError:
    if isinstance(error, HeadwayError):
        return error
    stopped = LaunchError(str(error), where="its launcher", fix="start the run again")
    stopped.exit_code = error.exit_code
    return stopped


class _Ended(BaseException):
    """Another signal has ended the telling."""


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let the first stop signal end the block, whoever ignores or handles it outside."""

    def end(*_: object) -> None:
        signals.ignore(*STOP_SIGNALS)
        raise _Ended

    is_main = threading.current_thread() is threading.main_thread()
    with signals.trapped(end, *(STOP_SIGNALS if is_main else ())), suppress(_Ended):
        yield


def _say_telling(whom: str, within_s: float) -> None:
    say(
        f"telling {whom} that this machine cannot take part (up to {within_s:.0f} s; Ctrl-C ends "
        "this)"
    )


def _tell_machine_0(
    settings: Settings, environ: Mapping[str, str], failed: Failed, within_s: float
) -> None:
    """Tell machine 0, which may not listen yet."""
    main = host_port(str(settings.main_address), settings.main_port or 0)
    _say_telling(f"machine 0 at {main}", within_s)
    until = time.monotonic() + within_s
    while not _is_told(settings, environ, failed, until) and time.monotonic() < until:
        time.sleep(_POLL_INTERVAL_S)


def _is_told(settings: Settings, environ: Mapping[str, str], failed: Failed, until: float) -> bool:
    """Try to tell machine 0; return whether it was told, or will not listen to this machine."""
    try:
        link = connect_to(str(settings.main_address), settings.main_port or 0)
    except (OSError, UnicodeError):
        return False
    key = wait_for_run_key(environ, _left_s(until))
    member = Member(link, key.key, float(settings.machine_timeout_s), str)
    member.send(failed)
    member.wait(lambda: False, min(_ANSWER_WITHIN_S, _left_s(until)))
    member.close()
    return member.is_over and not member.is_closed_unanswered


def _left_s(until: float) -> float:
    return max(until - time.monotonic(), 0.0)


def _tell_others(
    settings: Settings, environ: Mapping[str, str], failed: Failed, within_s: float
) -> None:
    """Listen as machine 0 until all others have come, and tell them."""
    key = run_key_of_machine_0(environ, say)  # before anybody can connect
    try:
        listener = listen_as_machine_0(str(settings.main_address), settings.main_port or 0)
        main = host_port(str(settings.main_address), settings.main_port or 0)
        _say_telling(f"the machines that join at {main}", within_s)
        most, timeout_s = int(settings.num_machines), float(settings.machine_timeout_s)
        coordinator = Coordinator(
            least=most,
            most=most,
            max_restarts=0,
            join_timeout_s=within_s,
            machine_timeout_s=timeout_s,
            facts=Facts((), ()),
            say=lambda _: None,  # it was reported here
            now=time.monotonic(),
        )
        coordinator.give_up(failed)
        hub = Hub(listener, key.key, coordinator, timeout_s, say)
        hub.take_own_end().close()
        hub.close(within_s)
    finally:
        key.forget()
