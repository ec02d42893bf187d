"""The restarts of one machine's ranks: the line about each, and the delay before it."""

from __future__ import annotations

MAX_DELAY_S = 60  # longer would waste the machines once their fault is over


class Restarts:
    """Doubles the delay with every failure until an attempt makes progress, which resets it."""

    def __init__(self, max_restarts: int, delay_s: float) -> None:
        self._max_restarts = max_restarts
        self._first_delay_s = delay_s
        self._delay_s = delay_s

    def after(
        self, cause: str, number: int, made_progress: bool, *, where: str = ""
    ) -> tuple[str, float]:
        """Return the line to print, and the delay in seconds of restart `number`, from 1.

        The restart 0 is not counted: the run continues without a machine that was lost.
        """
        if made_progress:
            self._delay_s = self._first_delay_s
        delay_s = min(self._delay_s, MAX_DELAY_S)
        self._delay_s = delay_s * 2
        when = f" in {delay_s:.0f} s" if delay_s else ""
        if not number:
            return f"{cause}; going on with the machines that are there{when}", delay_s
        return f"{cause}; restart {number} of {self._max_restarts}{where}{when}", delay_s
