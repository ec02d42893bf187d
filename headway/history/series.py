"""The figures of all ranks over a run of any length, in a bounded number of rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

from headway.contract.figures import Figures

_MOST_ROWS = 600  # of all ranks together
_LEAST_ROWS = 8  # of each


class Series:
    """Keeps figures; the older and the more, the more steps one row stands for.

    Sums stay exact: a row that stands for several has what they took together.
    """

    def __init__(self) -> None:
        self._rows: dict[int, list[Figures]] = {}

    def note(self, rank: int, figures: Figures) -> None:
        """Take the next figures of a rank; a loss that is no number counts as not known."""
        if figures.loss is not None and not math.isfinite(figures.loss):
            figures = figures._replace(loss=None)
        rows = self._rows.setdefault(rank, [])
        rows.append(figures)
        if len(rows) > 2 * max(_MOST_ROWS // (2 * len(self._rows)), _LEAST_ROWS):
            rows[:] = halved(rows)

    def rows(self) -> list[tuple[int, Figures]]:
        """Return all rows, each with its rank."""
        kept = dict(self._rows)
        return [(rank, row) for rank in sorted(kept) for row in [*kept[rank]]]


def halved(rows: Sequence[Figures]) -> list[Figures]:
    """Return half as many rows, each for two."""
    pairs = [rows[index : index + 2] for index in range(0, len(rows), 2)]
    return [together(pair) for pair in pairs]


def together(rows: Sequence[Figures]) -> Figures:
    """Return the row that stands for several, in their order."""
    last = rows[-1]
    devices = [row.device_bytes for row in rows if row.device_bytes is not None]
    losses = [row.loss for row in rows if row.loss is not None]
    return last._replace(
        num_steps=sum(row.num_steps for row in rows),
        seconds=sum(row.seconds for row in rows),
        data_s=sum(row.data_s for row in rows),
        forward_s=sum(row.forward_s for row in rows),
        backward_s=sum(row.backward_s for row in rows),
        sync_s=sum(row.sync_s for row in rows),
        save_s=sum(row.save_s for row in rows),
        stolen_s=sum(row.stolen_s for row in rows),
        samples=sum(row.samples for row in rows),
        rss_bytes=max(row.rss_bytes for row in rows),
        device_bytes=max(devices, default=None),
        loss=losses[-1] if losses else None,
    )
