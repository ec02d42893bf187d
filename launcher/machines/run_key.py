"""The run's key: from the environment, or from a file in the folder that a SLURM job came from."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from headway.contract.run import KEY_VARIABLE
from headway.errors import ConfigError
from headway.launcher.machines.connect import CHECK_EVERY_S

_MIN_LENGTH = 16
_FILE_WITHIN_S = 30.0  # on a network file system
_JOB = ("SLURM_SUBMIT_DIR", "SLURM_JOB_ID", "SLURM_STEP_ID")
HOW_TO_SET = f"`export {KEY_VARIABLE}=$(openssl rand -hex 16)`, and the same value on every machine"


class RunKey(NamedTuple):
    """What authenticates the machines of a run to each other."""

    key: bytes  # empty: nothing does
    origin: str  # for messages
    path: str | None = None  # the file that holds it, to be removed

    def forget(self) -> None:
        """Remove the file that holds it."""
        if self.path is not None:
            with suppress(OSError):
                os.unlink(self.path)


def describe_run_key(environ: Mapping[str, str]) -> str:
    """Return how the machines of a run with this environment know each other, as a sentence."""
    if KEY_VARIABLE in environ:
        return f"machines know each other by {KEY_VARIABLE}"
    if path := key_file(environ):
        return f"machines know each other by a key that machine 0 writes to {path}"
    return f"nothing keeps other programs of the network out of the run: {HOW_TO_SET}"


def run_key_of_machine_0(environ: Mapping[str, str], say: Callable[[str], None]) -> RunKey:
    """Return the key, after writing it where the other machines can read it."""
    path = key_file(environ)
    if KEY_VARIABLE in environ or path is None:
        return _of_environment(environ)
    key = secrets.token_hex(32)
    new = f"{path}.new"
    try:
        with suppress(FileNotFoundError):
            os.unlink(new)  # of a launcher that was killed
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(key)
        os.replace(new, path)
    except OSError as error:
        say(f"note: the run has no key: {path} cannot be written: {error.strerror}; {HOW_TO_SET}")
        return RunKey(b"", "none")
    return RunKey(key.encode(), path, path)


def run_key_of_other(environ: Mapping[str, str]) -> RunKey | None:
    """Return the key; None while machine 0's file is not there.

    Raises ConfigError where that of the environment is too short, or another user's file is there.
    """
    path = key_file(environ)
    if KEY_VARIABLE in environ or path is None:
        return _of_environment(environ)
    with suppress(OSError):
        os.listdir(os.path.dirname(path))  # has NFS look for new files
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)  # it may be anything
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _not_private(path) from None
        return None
    status = os.fstat(handle)
    is_readable_by_others = stat.S_IMODE(status.st_mode) & 0o077
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or is_readable_by_others:
        os.close(handle)
        raise _not_private(path)
    with open(handle) as file:
        return RunKey(file.read().encode(), path)


def _not_private(path: str) -> ConfigError:
    return ConfigError(
        "the file with the run's key is not one that only you can read",
        where=path,
        fix=f"submit the job from a folder that only you can write to, or {HOW_TO_SET}",
    )


def wait_for_run_key(environ: Mapping[str, str], within_s: float = _FILE_WITHIN_S) -> RunKey:
    """Return the key; machine 0, which has been reached, has written it before it listened."""
    until = time.monotonic() + within_s
    while (key := run_key_of_other(environ)) is None and time.monotonic() < until:
        time.sleep(CHECK_EVERY_S)
    return key or RunKey(b"", "none")


def key_file(environ: Mapping[str, str]) -> str | None:
    """Return the file for the key of a SLURM job's step; None outside of one."""
    if any(not environ.get(name) for name in _JOB):
        return None
    folder, job, step = (environ[name] for name in _JOB)
    attempt = environ.get("SLURM_RESTART_COUNT", "0")
    return os.path.join(folder, f".headway-{job}.{step}.{attempt}.key")


def _of_environment(environ: Mapping[str, str]) -> RunKey:
    key = environ.get(KEY_VARIABLE, "")
    if KEY_VARIABLE in environ and len(key) < _MIN_LENGTH:
        raise ConfigError(
            f"{KEY_VARIABLE} has {len(key)} characters, which is too short for a key",
            where=f"environment {KEY_VARIABLE}",
            fix=HOW_TO_SET,
        )
    return RunKey(key.encode(), f"environment {KEY_VARIABLE}" if key else "none")
