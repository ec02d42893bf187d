"""Writes the record of a run beside its ranks, until it has ended."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from headway.contract.notes import say
from headway.contract.records import Figures, Kept
from headway.contract.secrets import masked_output
from headway.contract.typed import plain
from headway.history import store
from headway.history.beginning import Launch, begin
from headway.history.record import MAX_TEXT, Outcome, Series

TAIL_LINES = 200
"""Kept of each rank."""
_EVERY_S = 60.0
_CLOSE_WITHIN_S = 2.0
_DIFF_WITHIN_S = 20.0  # in a thread
_TAIL_CHARS = 2**18  # of all ranks together
_LINE_CHARS = 2000


class Recorder:
    """Writes one record in its own thread, in which `start` is called, too.

    No rank and no launch ever waits for it. Secrets in recorded output are masked.
    """

    def __init__(self, path: str, start: Callable[[], Launch], secrets: Sequence[str] = ()) -> None:
        self.path = path
        self.exit_code = 1
        self.report = ""  # why the run has failed, as it is printed
        self.tails: Callable[[], Mapping[int, Sequence[str]]] = dict  # the last lines of each rank
        self.kept: Callable[[], Iterable[Kept]] = tuple  # by the ranks
        self.step: Callable[[], int] = int  # the last one that a rank has reported; 0: none has
        self._secrets = secrets
        self._series = Series()
        self._kept: list[Kept] = []
        self._tails: Mapping[int, Sequence[str]] = {}
        self._end: Outcome | None = None
        self._has_news = threading.Event()
        self._thread = threading.Thread(
            target=self._write, args=(start,), name="headway-record", daemon=True
        )
        self._thread.start()

    def note(self, rank: int, figures: Figures) -> None:
        """Add figures of a rank; they are written periodically."""
        self._series.note(rank, figures)

    def keep(self, what: str, path: str) -> None:
        self._kept.append(Kept(what, os.path.abspath(path)))
        self._has_news.set()

    def close(self) -> None:
        """Record the outcome of the run; takes at most some seconds."""
        self._kept += self.kept()
        self._tails = _cut(self.tails(), self._secrets)
        report = masked_output(self.report[-MAX_TEXT:], self._secrets)
        self._end = Outcome(time.time(), self.exit_code, report, self.step())
        self._has_news.set()
        self._thread.join(_CLOSE_WITHIN_S)
        if self._thread.is_alive():
            say(f"note: the record of this run is not complete: {self.path} does not answer")

    def _write(self, start: Callable[[], Launch]) -> None:
        try:
            record = begin(self.path, start(), _DIFF_WITHIN_S)
            while record["end"] is None:
                self._has_news.wait(_EVERY_S)
                self._has_news.clear()
                record["end"] = plain(self._end)  # set after all the rest
                record["kept"] = plain(self._kept)
                record["ranks"] = plain(self._series.ranks(self._tails))
                store.write(self.path, record)
        except OSError as error:
            say(store.lost(error))


def _cut(tails: Mapping[int, Sequence[str]], secrets: Sequence[str]) -> dict[int, list[str]]:
    """Return the last lines of all ranks, limited to the maximal size."""
    most = _TAIL_CHARS // max(len(tails), 1)
    cut = {}
    for rank, lines in tails.items():
        text = "\n".join(line[:_LINE_CHARS] for line in lines[-TAIL_LINES:])
        cut[rank] = masked_output(text, secrets)[-most:].split("\n")
    return cut
