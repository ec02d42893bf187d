"""The folder of records: one folder a run, which only its user may enter."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from headway.contract.user_folders import user_folder
from headway.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from headway.history.record import RunRecord

FORMAT = 1
"""Of records: raised with every change of their classes, as no other format is read."""

MAX_RUNS = 200
_SLACK = 50  # more than these are removed at once, so that few launches do it
_FILE = "run.json"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_FIX = "`headway runs` lists the runs that have a record"


def runs_folder(environ: Mapping[str, str] = os.environ) -> str:
    """Return the folder of all records, whether or not it exists."""
    return os.path.join(user_folder("state", environ), "runs")


def new_path(environ: Mapping[str, str] = os.environ) -> str:
    """Return the path of a new run's folder; nothing is created.

    Its name is the time in UTC and some letters: launches of one second, also in containers that
    share the home folder, have names of their own.
    """
    letters = "".join(_LETTERS[byte % len(_LETTERS)] for byte in os.urandom(6))
    name = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{letters}"
    return os.path.join(runs_folder(environ), name)


def write(path: str, record: Mapping[str, Any]) -> None:
    """Write the fields of a record in place of earlier ones; raises OSError."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    text = json.dumps({"format": FORMAT, **record}, separators=(",", ":"))
    partial = os.path.join(path, f".{_FILE}-{os.getpid()}")
    with open(partial, "w") as file:
        file.write(text)
    os.replace(partial, os.path.join(path, _FILE))


def lost(error: OSError) -> str:
    """Return the line that says that a run has no record, or not all of it."""
    return f"note: the record of this run is lost: {error.strerror} (--record off keeps none)"


def names_in(folder: str) -> list[str]:
    """Return the names of the runs in a folder, the newest last."""
    with suppress(OSError), os.scandir(folder) as entries:
        return sorted(one.name for one in entries if one.is_dir(follow_symlinks=False))
    return []


def prune(folder: str) -> None:
    """Remove the oldest of too many runs; one that is still running writes its record anew."""
    names = names_in(folder)
    if len(names) > MAX_RUNS + _SLACK:
        import shutil

        for name in names[:-MAX_RUNS]:
            shutil.rmtree(os.path.join(folder, name), ignore_errors=True)


def is_running(record: RunRecord) -> bool:
    """Return whether a run has not ended, as far as this machine knows."""
    start = record.start
    if record.end is not None or start.host != os.uname().nodename:
        return False
    import psutil

    with suppress(psutil.Error):
        return bool(psutil.Process(start.pid).create_time() <= start.began_at + 1)
    return False


def read_record(path: str) -> RunRecord:
    """Return the record in a run's folder; raises ConfigError if it cannot be read."""
    from headway.history.record import decode

    try:
        with open(os.path.join(path, _FILE), "rb") as file:
            return decode(file.read())._replace(path=path)
    except (OSError, ValueError) as error:
        reason = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else error
        what = f"the record of run {os.path.basename(path)} {reason}"
        raise ConfigError(what, where=path, fix=f"remove that folder; {_FIX}") from None


def read_all() -> tuple[list[RunRecord], list[str]]:
    """Return all runs, the newest last, and why others could not be read."""
    folder = runs_folder()
    found, refused = [], []
    for name in names_in(folder):
        try:
            found.append(read_record(os.path.join(folder, name)))
        except ConfigError as error:
            if os.path.lexists(os.path.join(folder, name, _FILE)):  # it has not just begun
                refused.append(error.problems[0].what)
    return sorted(found, key=lambda one: (one.start.began_at, one.name)), refused


def find(word: str | None) -> RunRecord:
    """Return the run that a word means: a name, or its beginning or end; None: the newest.

    Raises ConfigError where there is none, there are several, or its record cannot be read.
    """
    folder = runs_folder()
    names = names_in(folder)
    if word is None:
        found, _ = read_all()
        if not found:
            fix = "`headway launch` leaves one of each run, unless the setting record is off"
            raise ConfigError("no run has a record that can be read", where=folder, fix=fix)
        return found[-1]
    meant = [name for name in names if word and (name.startswith(word) or name.endswith(word))]
    if len(meant) == 1:
        return read_record(os.path.join(folder, meant[0]))
    what = f"{word!r} may mean {len(meant)} runs: {', '.join(meant[-5:])}"
    if not meant:
        close = did_you_mean(word, names)
        what = f"{word!r} is the name of no run" + (f"; did you mean {close!r}?" if close else "")
    raise ConfigError(what, where="the command line", fix=_FIX)


def last_good(record: RunRecord, others: Sequence[RunRecord]) -> RunRecord | None:
    """Return the last of other runs of the same script that ended well before this one began."""
    good = [
        one
        for one in others
        if one.has_ended_well
        and _script(one) == _script(record)
        and one.start.began_at < record.start.began_at
    ]
    return good[-1] if good else None


def _script(record: RunRecord) -> str:
    return record.start.script or record.start.program
