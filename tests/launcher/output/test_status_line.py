"""The status line is printed at its times, where there is something to report."""

from __future__ import annotations

import time

import pytest

from headway.launcher.output.console import StatusLine


class Console:
    """Keeps what is shown."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def warn(self, line: str) -> None:
        self.lines.append(line)


@pytest.mark.parametrize(
    ("every_s", "line", "lines"),
    [(None, "step 1", 2), (30.0, "step 1", 4), (30.0, "", 0)],  # no rank reports steps
)
def test_the_line_comes_once_a_minute_or_as_often_as_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, every_s: float | None, line: str, lines: int
) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    console = Console()
    status = StatusLine(console, lambda: line, every_s)  # type: ignore[arg-type]
    for second in range(121):
        status.show_due(float(second))
    assert len(console.lines) == lines
