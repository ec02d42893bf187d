"""The wait that signal handlers ring, and what they do to it."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from headway.contract.signals import Bell, put_off, trapped

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


def test_signals_that_are_put_off_come_again_and_those_with_a_handler_come_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raise_signal, heard, again = signal.raise_signal, list[int](), list[int]()
    monkeypatch.setattr(signal, "raise_signal", again.append)
    with trapped(lambda number, _: heard.append(number), signal.SIGUSR1):
        with put_off():
            raise_signal(signal.SIGTERM)
            raise_signal(signal.SIGUSR1)
            assert (heard, again) == ([signal.SIGUSR1], [])
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert again == [signal.SIGTERM]
    with put_off():
        raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            raise_signal(signal.SIGINT)


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
