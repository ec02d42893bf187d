"""An event that signal handlers set, and signals that are collected."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from headway.ipc.signals import PREEMPTION_SIGNALS, SignalSafeEvent, collect_signals, trapped

pytestmark = pytest.mark.processes


def test_a_wait_ends_at_its_time_although_a_signal_handler_took_longer() -> None:
    event = SignalSafeEvent()
    watchdog = threading.Timer(10, event.set)
    watchdog.start()
    with trapped(lambda *_: time.sleep(0.3), signal.SIGALRM):
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        assert not event.wait(0.2)
    watchdog.cancel()
    watchdog.join()


def test_a_signal_is_held_unless_it_is_ignored_and_a_second_ctrl_c_interrupts() -> None:
    with trapped(signal.SIG_IGN, signal.SIGUSR1), collect_signals(*PREEMPTION_SIGNALS) as received:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.raise_signal(number)
        assert received == [signal.SIGTERM, signal.SIGINT]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_signal_handler_and_a_thread_ring_and_no_ring_before_a_wait_is_lost() -> None:
    event = SignalSafeEvent()
    with trapped(lambda *_: event.set(), signal.SIGALRM):
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        assert event.wait(60)
    event.set()
    event.set()
    assert event.wait(0)
    assert not event.wait(0)
    thread = threading.Timer(0.05, event.set)
    thread.start()
    assert event.wait(60)
    thread.join()
