"""The wait that signal handlers ring, and what they do to it."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from headway.ipc.signals import STOPS, Bell, held, trapped

pytestmark = pytest.mark.processes


def test_a_wait_ends_at_its_time_although_a_signal_handler_took_longer() -> None:
    bell = Bell()
    watchdog = threading.Timer(10, bell.ring)
    watchdog.start()
    with trapped(lambda *_: time.sleep(0.3), signal.SIGALRM):
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        assert not bell.wait(0.2)
    watchdog.cancel()
    watchdog.join()


def test_a_signal_is_held_unless_it_is_ignored_and_a_second_ctrl_c_interrupts() -> None:
    with trapped(signal.SIG_IGN, signal.SIGUSR1), held(*STOPS) as came:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.raise_signal(number)
        assert came == [signal.SIGTERM, signal.SIGINT]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_signal_handler_and_a_thread_ring_and_no_ring_before_a_wait_is_lost() -> None:
    bell = Bell()
    with trapped(lambda *_: bell.ring(), signal.SIGALRM):
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        assert bell.wait(60)
    bell.ring()
    bell.ring()
    assert bell.wait(0)
    assert not bell.wait(0)
    thread = threading.Timer(0.05, bell.ring)
    thread.start()
    assert bell.wait(60)
    thread.join()
