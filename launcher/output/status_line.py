"""How the run is doing, in one line: below a terminal's output, or once a minute in a file."""

from __future__ import annotations

import time
from collections.abc import Callable

from headway.launcher.output.console import Console

_BELOW_FROM_S, _BELOW_EVERY_S = 10.0, 1.0  # on a terminal
_LINE_EVERY_S = 60.0
_NEVER = float("inf")


class StatusLine:
    """Shows a line at its times; the thread that reads the ranks' output calls it.

    Args:
        console: where it is shown.
        describe: returns the line; empty while there is nothing to tell.
        every_s: a line of its own so often, also on a terminal; None: below the output of a
            terminal from the tenth second on, and once a minute elsewhere.
    """

    def __init__(
        self, console: Console, describe: Callable[[], str], every_s: float | None
    ) -> None:
        self._console = console
        self._describe = describe
        self._is_below = every_s is None and console.has_terminal
        self._every_s = _BELOW_EVERY_S if self._is_below else every_s or _LINE_EVERY_S
        self.due = time.monotonic() + (_BELOW_FROM_S if self._is_below else self._every_s)

    def show_due(self, now: float) -> None:
        """Show the line, if it is time."""
        if now < self.due:
            return
        self.due = now + self._every_s
        line = self._describe()
        if self._is_below:
            self._console.show_below(line)
        elif line:
            self._console.warn(line)
