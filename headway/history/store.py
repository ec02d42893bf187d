"""The folder of records: one folder a run, which only its user may enter."""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

from headway.errors import ConfigError, did_you_mean
from headway.history.place import STAMP, runs_folder
from headway.history.record import MAX_BYTES, End, Line, Record, Row, Unreadable, encode, record_of

MAX_RUNS = 200
MAX_AGE_S = 30 * 86400
_KEPT = 20  # also where a clock that jumps makes all runs old
_NAME = re.compile(r"(\d{8}-\d{6})-[0-9a-f]{6}")
_LINES, _FIGURES = "record.jsonl", "figures.jsonl"
_FIGURES_BYTES = MAX_BYTES // 4
_END_BYTES = MAX_BYTES // 16  # left for how the run ends


def create(path: str) -> None:
    """Create a run's folder, unless it is there; OSError, too, in a folder of another user's.

    The folder of all runs may be a link of this user's to another folder of theirs.
    """
    parent = os.path.dirname(path)
    os.makedirs(os.path.dirname(parent), exist_ok=True)
    for folder in (parent, path):
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        link, status = os.lstat(folder), os.stat(folder)
        is_own = link.st_uid == status.st_uid == os.geteuid()
        if not stat.S_ISDIR(status.st_mode) or not is_own:
            raise PermissionError(1, f"{folder} is not a folder of yours")
        if status.st_mode & 0o077:
            os.chmod(folder, 0o700)


def append(path: str, line: Line) -> None:
    """Add a line to a run's record, unless that would be too large; its end still fits then."""
    data = encode(line)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(os.path.join(path, _LINES), flags, 0o600)
    try:
        most = MAX_BYTES - _FIGURES_BYTES - (0 if isinstance(line, End) else _END_BYTES)
        if os.fstat(handle).st_size + len(data) <= most:
            while data:
                data = data[os.write(handle, data) :]
    finally:
        os.close(handle)


def replace_figures(path: str, rows: Iterable[Row]) -> None:
    """Write the figures of a run in place of earlier ones, as many as fit."""
    data = b""
    for row in rows:
        line = encode(row)
        if len(data) + len(line) > _FIGURES_BYTES:
            break
        data += line
    partial = os.path.join(path, f".{_FIGURES}-{os.urandom(4).hex()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(partial, flags, 0o600), "wb") as file:
            file.write(data)
        os.replace(partial, os.path.join(path, _FIGURES))
    except OSError:
        with suppress(OSError):
            os.unlink(partial)
        raise


def names_in(folder: str) -> list[str]:
    """Return the names of the runs in a folder, the newest last."""
    with suppress(OSError), os.scandir(folder) as entries:
        return sorted(
            one.name
            for one in entries
            if _NAME.fullmatch(one.name) and one.is_dir(follow_symlinks=False)
        )
    return []


def prune(folder: str, now: float, keep: str = "") -> None:
    """Remove the runs that are too many or too old, but not `keep`; what cannot be stays, too."""
    import shutil

    names = names_in(folder)
    oldest = time.strftime(STAMP, time.gmtime(max(now - MAX_AGE_S, 0)))
    many, few = names[:-MAX_RUNS], names[:-_KEPT]
    for name in {*many, *(one for one in few if one[: len(oldest)] < oldest)} - {keep}:
        path = os.path.join(folder, name)
        if not _runs(path):
            shutil.rmtree(path, ignore_errors=True)


def _runs(path: str) -> bool:
    with suppress(Unreadable, OSError):
        return is_running(read_record(path))
    return False


def is_running(record: Record) -> bool:
    """Return whether a run goes on, as far as this machine knows."""
    import socket

    start = record.start
    if record.end is not None or start.host != socket.gethostname():
        return False
    import psutil

    try:
        process = psutil.Process(start.pid)
        is_left = process.status() == psutil.STATUS_ZOMBIE  # killed, and its parent has not seen it
        return bool(not is_left and process.create_time() <= start.began_at + 1)
    except psutil.Error:
        return False


def read_record(path: str) -> Record:
    """Return the record in a run's folder, as far as it goes, or raise Unreadable."""
    data = _read(path, _LINES)
    if not data:
        raise FileNotFoundError(errno.ENOENT, "is empty", path)
    with suppress(FileNotFoundError):
        data += b"\n" + _read(path, _FIGURES)
    return record_of(os.path.basename(path), path, data)


def _read(path: str, name: str) -> bytes:
    """Return what a file of a run holds: of this user's own, and no more than a record may have."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(os.path.join(path, name), flags), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise Unreadable(f"has {name}, which is no file of yours")
        return file.read(MAX_BYTES)


def read_all() -> tuple[list[Record], list[str]]:
    """Return all runs, the newest last, and why others could not be read."""
    folder = runs_folder()
    found, refused = [], []
    for name in names_in(folder):
        try:
            found.append(read_record(os.path.join(folder, name)))
        except Unreadable as error:
            refused.append(f"the record of run {name} {error}")
        except OSError as error:
            # it has just begun, been removed, or its launch has told that it was lost
            if not isinstance(error, FileNotFoundError):
                refused.append(f"the record of run {name} cannot be read: {error.strerror}")
    return sorted(found, key=lambda one: (one.start.began_at, one.name)), refused


def find(word: str | None) -> Record:
    """Return the run that a word means: a name, or its beginning or end; None: the newest.

    Raises ConfigError where there is none, there are several, or its record cannot be read.
    """
    folder = runs_folder()
    names = names_in(folder)
    fix = "`headway runs` lists the runs that have a record"
    if not names:
        raise ConfigError(
            "no run has a record",
            where=folder,
            fix="`headway launch` leaves one of each run, unless the setting record is off",
        )
    if word is None:
        found, _ = read_all()
        if not found:
            raise ConfigError("no record can be read", where=folder, fix=fix)
        return found[-1]
    meant = [name for name in names if word and (name.startswith(word) or name.endswith(word))]
    if len(meant) != 1:
        close = did_you_mean(word, names)
        raise ConfigError(
            f"{word!r} is the name of no run" + (f"; did you mean {close!r}?" if close else "")
            if not meant
            else f"{word!r} may mean {len(meant)} runs: {', '.join(meant[-5:])}",
            where="the command line",
            fix=fix,
        )
    try:
        return read_record(os.path.join(folder, meant[0]))
    except (Unreadable, OSError) as error:
        reason = error if isinstance(error, Unreadable) else f"cannot be read: {error.strerror}"
        raise ConfigError(
            f"the record of run {meant[0]} {reason}",
            where=os.path.join(folder, meant[0]),
            fix=fix,
        ) from None


def last_good(record: Record, others: Sequence[Record]) -> Record | None:
    """Return the last of other runs of the same script that ended well before this one began."""
    script = record.start.script or record.start.program
    good = [
        one
        for one in others
        if one.has_ended_well
        and (one.start.script or one.start.program) == script
        and one.start.began_at < record.start.began_at
        and one.name != record.name
    ]
    return good[-1] if good else None
