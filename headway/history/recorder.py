"""Writes the record of a run while it goes on; no rank and no launch ever waits for it."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from headway.contract.notes import say
from headway.contract.records import Figures, Kept
from headway.contract.secrets import masked_output
from headway.history import store
from headway.history.record import (
    MAX_TEXT,
    TAIL_LINES,
    End,
    Line,
    Restart,
    Row,
    Series,
    Start,
    Tail,
    lost,
)
from headway.history.snapshot import read_commit, snapshot_of
from headway.history.surroundings import surroundings_of

_FIGURES_EVERY_S = 60.0
_CLOSE_WITHIN_S = 2.0
_TAIL_CHARS = 2**18  # of all ranks together
_LINE_CHARS = 2000


class Recorder:
    """Writes one record, by a thread of its own, in which `start` is called, too.

    The arguments are the script's, as they were typed; no output on record has one of the secrets.
    """

    def __init__(
        self,
        path: str,
        start: Callable[[], Start],
        arguments: Sequence[str],
        secrets: Sequence[str] = (),
    ) -> None:
        self.path = path
        self._secrets = secrets
        self.exit_code = 1
        self.report = ""  # why the run has failed, as it is printed
        self.tails: Callable[[], Mapping[int, Sequence[str]]] = dict  # the last lines of each rank
        self.kept: Callable[[], Iterable[Kept]] = tuple  # by the ranks
        self.step: Callable[[], int] = int  # the last one that a rank has told of; 0: none has
        self._series = Series()
        self._lines: queue.SimpleQueue[Line | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._write, args=(start, arguments), name="headway-record", daemon=True
        )
        self._thread.start()

    def note(self, rank: int, figures: Figures) -> None:
        """Keep figures of a rank; they are written now and then."""
        self._series.note(rank, figures)

    def keep(self, what: str, path: str) -> None:
        """Record where something of the run is kept."""
        self._lines.put(Kept(what, os.path.abspath(path)))

    def restart(self, line: str) -> None:
        """Record that an attempt has ended, and another one begins."""
        self._lines.put(Restart(time.time(), line))

    def close(self) -> None:
        """Record how the run has ended, and finish within some seconds."""
        for tail in _cut(self.tails(), self._secrets):
            self._lines.put(tail)
        for kept in self.kept():
            self._lines.put(kept)
        report = masked_output(self.report[-MAX_TEXT:], self._secrets)
        self._lines.put(End(time.time(), self.exit_code, report, self.step()))
        self._lines.put(None)
        self._thread.join(_CLOSE_WITHIN_S)
        if self._thread.is_alive():
            say(f"note: the record of this run is not complete: {self.path} does not answer")

    def wait(self) -> None:
        """Wait until all is written, however long that takes."""
        self._thread.join()

    def _write(self, start: Callable[[], Start], arguments: Sequence[str]) -> None:
        try:
            begin(self.path, start(), arguments)
            while (line := self._next()) is not None:
                store.append(self.path, line)
            self._write_figures()
        except OSError as error:
            say(lost(error))

    def _next(self) -> Line | None:
        """Return the next line to write; None at the end."""
        while True:
            with suppress(queue.Empty):
                return self._lines.get(timeout=_FIGURES_EVERY_S)
            self._write_figures()

    def _write_figures(self) -> None:
        if rows := self._series.rows():
            store.replace_figures(self.path, [Row(rank, one) for rank, one in rows])


def begin(path: str, start: Start, arguments: Iterable[str], *, pause_s: float = 0.0) -> None:
    """Begin a record: what was launched, and then what takes a moment to find out.

    There is a pause before that moment, so that the start of the script has the cores.
    """
    store.create(path)
    store.append(path, start)
    time.sleep(pause_s)
    copy = snapshot_of(start.code)
    script = start.script if copy is None else copy.copy(start.script)
    store.append(path, surroundings_of(script, [*arguments], copy))
    commit = read_commit(os.path.dirname(script) or start.folder) if copy is None else copy.commit
    if commit is not None:
        store.append(path, commit)
    store.prune(os.path.dirname(path), time.time(), keep=os.path.basename(path))


def _cut(tails: Mapping[int, Sequence[str]], secrets: Sequence[str]) -> list[Tail]:
    """Return the last lines of all ranks, as many as fit."""
    most = _TAIL_CHARS // max(len(tails), 1)
    cut = []
    for rank, lines in tails.items():
        text = "\n".join(line[:_LINE_CHARS] for line in lines[-TAIL_LINES:])
        text = masked_output(text, secrets)
        cut.append(Tail(rank, tuple(text[-most:].split("\n"))))
    return cut
