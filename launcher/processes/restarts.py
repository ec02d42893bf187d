"""The restarts of one machine's ranks: what is said of each, and how long it is put off."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.launcher.diagnosis.failures import Failure, ServerDeath
from headway.launcher.diagnosis.hang import Hang

if TYPE_CHECKING:
    from headway.launcher.machines.messages import Restart

MAX_DELAY_S = 60  # longer would waste the machines once their fault is over


class Restarts:
    """Doubles the delay with every failure until an attempt makes progress, which begins anew."""

    def __init__(self, max_restarts: int, delay_s: float) -> None:
        self._max_restarts = max_restarts
        self._first_delay_s = delay_s
        self._delay_s = delay_s
        self._last_failure: Failure | Hang | ServerDeath | None = None

    def as_ordered(self, restart: Restart, made_progress: bool) -> tuple[str, float]:
        """Return the same as `after` for a restart of several machines, which machine 0 orders."""
        delay_s, when = self._next_delay(made_progress)
        if not restart.number:
            return f"{restart.cause}; going on with the machines that are there{when}", delay_s
        of = f"{restart.number} of {self._max_restarts}"
        return f"{restart.cause}; restart {of} on all machines{when}", delay_s

    def after(
        self, failure: Failure | Hang | ServerDeath, number: int, made_progress: bool
    ) -> tuple[str, float]:
        """Return the line to print, and the delay in seconds of restart `number`, from 1."""
        delay_s, when = self._next_delay(made_progress)
        of = f"{number} of {self._max_restarts}"
        is_repeat = failure.is_repeat_of(self._last_failure)
        self._last_failure = failure
        if is_repeat:
            return f"same failure as before ({of}): {failure.cause}; restart{when}", delay_s
        return f"{failure.cause}; restart {of}{when}", delay_s

    def _next_delay(self, made_progress: bool) -> tuple[float, str]:
        """Return the delay of the next restart, and its end of the line."""
        if made_progress:
            self._delay_s = self._first_delay_s
        delay_s = min(self._delay_s, MAX_DELAY_S)
        self._delay_s = delay_s * 2
        return delay_s, f" in {delay_s:.0f} s" if delay_s else ""
