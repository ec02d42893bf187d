"""Each test leaves the usual signal handlers: a training that resumes has its own."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from headway.ipc.signals import PREEMPTION_SIGNALS


@pytest.fixture(autouse=True)
def usual_signals() -> Iterator[None]:
    """Let signals do what they did, whatever a test has left."""
    numbers = PREEMPTION_SIGNALS
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
