"""Detects a failure that a restart or a requeued job would only repeat.

A failure counts as repeated if its exception, message, script line and step equal those of the
previous failure, and no new step was completed in between. Unless the exception is a UsageError,
the step must be 1 or later.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress

from headway.ipc.paths import read_plain, write_atomic
from headway.ipc.records import CrashSite
from headway.ipc.stderr import log
from headway.ipc.typed import plain, read

FILE = "_headway-failure.json"  # Trainer's push_to_hub skips names that start with `_`
_MAX_BYTES = 2**16


class RepeatDetector:
    """Compares each failure of a training run with the previous one.

    A file in the project folder stores the last failure. `project` returns the folder, or an empty
    string if it is unknown. `restarts_anyway` disables the comparison.
    """

    def __init__(self, project: Callable[[], str], restarts_anyway: bool = False) -> None:
        self._project = project
        self._restarts_anyway = restarts_anyway
        self._has_failed = False  # in this launch
        self._last: CrashSite | None = None

    def check(self, site: CrashSite | None) -> str:
        """Store a failure; return why it counts as a repeat, or an empty string if it does not."""
        is_earlier = not self._has_failed
        before = self._read() if is_earlier else self._last
        self._has_failed, self._last = True, site
        self._keep(site)
        if site is None or site != before or self._restarts_anyway:
            return ""
        kept = f" of an earlier launch, stored in {self._path}" if is_earlier else ""
        again = f"as in the previous failure{kept}, with no new step in between"
        return f"{site.kind} at {site.frame} after step {site.step}, {again}"

    def note_success(self, step: int, *, is_success: bool = False) -> None:
        """Remove the stored failure if the run succeeded or has passed the step of that failure."""
        before = self._last if self._has_failed else self._read()
        if before is not None and (is_success or step > before.step):
            self._keep(None)

    @property
    def _path(self) -> str:
        folder = self._project()
        return os.path.join(folder, FILE) if folder else ""

    def _read(self) -> CrashSite | None:
        with suppress(OSError, ValueError):
            return read(CrashSite, json.loads(read_plain(self._path, _MAX_BYTES)))
        return None

    def _keep(self, site: CrashSite | None) -> None:
        path = self._path
        try:
            if site is None:
                os.unlink(path)
            elif path:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                write_atomic(path, json.dumps(plain(site)))
        except FileNotFoundError:  # no file to remove
            pass
        except OSError as error:
            log(f"note: a repeated failure will not be recognized: {path}: {error.strerror}")
