"""Between two rounds the launcher waits, and notices what happens meanwhile."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
from torch.distributed.elastic.multiprocessing.api import SignalException

from headway.launcher.machines import rendezvous


def test_a_stop_signal_just_before_a_delay_is_obeyed_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        """Sleep to the end: the signal was there before the system's call, and ends none."""
        nonlocal now
        now += seconds
        raise SignalException("stopped", signal.SIGTERM)  # as its handler does after the call

    clock = SimpleNamespace(monotonic=lambda: now, sleep=sleep)
    monkeypatch.setattr(rendezvous, "time", clock)
    with pytest.raises(SignalException):
        rendezvous.Rendezvous("run").pause(60)
    assert now < 1


def test_a_delay_lasts_as_long_as_it_was_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr(rendezvous, "time", clock)
    rendezvous.Rendezvous("run").pause(2.5)
    assert sum(slept) == pytest.approx(2.5)
