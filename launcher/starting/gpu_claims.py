"""Claims idle GPUs, so that no other launch on this machine uses them: one lock file per GPU.

A lock belongs to an open file: the kernel releases it when the launch ends, also if it is killed.
A script that replaces the launcher inherits it. A launch holds the folder's lock while it chooses,
so that two launches never choose at the same time.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headway.errors import MachineError
from headway.launcher.reporting.waiting import waiting_for
from headway.machine.facts import Gpu, Machine
from headway.settings.table import Settings

FOLDER = "/tmp/headway-gpus"
"""The same for all users and independent of TMPDIR, as all launches must see the same files."""

POLL_S = 2.0


def claim_idle(
    settings: Settings,
    look: Callable[[], Machine],
    wait_s: float | None,
    folder: str = FOLDER,
) -> Machine:
    """Claim the GPUs that `settings.devices` selects; return the snapshot that they are from.

    If too few are idle and waiting does not help, nothing is claimed: the plan reports why.

    Args:
        settings: resolved, with `devices: idle:N`.
        look: returns a new snapshot of the machine, with the use of each GPU.
        wait_s: how long to wait for GPUs that become idle; None: not at all.
        folder: where the lock files are.

    Raises:
        MachineError: the lock files cannot be written.
    """
    began = time.monotonic()
    is_waiting = False
    while True:
        with _folder_lock(folder, is_quiet=is_waiting):
            machine = with_claims(look(), folder)
            selection = settings.devices.select(machine.visible_gpus)
            if not selection.problems:
                for index in selection.indices[: settings.num_processes]:
                    _lock_gpu(machine.visible_gpus[index], folder)
                return machine
        can_wait = settings.devices.may_become_idle(machine.visible_gpus)
        if wait_s is None or not can_wait or time.monotonic() - began >= wait_s:
            return machine
        if not is_waiting:
            print(f"headway: waiting: {'; '.join(selection.problems)}", file=sys.stderr, flush=True)
            is_waiting = True
        time.sleep(min(POLL_S, max(0.0, began + wait_s - time.monotonic())))


def with_claims(machine: Machine, folder: str = FOLDER) -> Machine:
    """Return the machine with `claimed_by` set for GPUs that other launches have claimed."""
    return machine._replace(
        gpus=tuple(
            gpu._replace(
                claimed_by=_claimed_by(gpu.uuid, folder),
                slices=tuple(
                    part._replace(claimed_by=_claimed_by(part.uuid, folder)) for part in gpu.slices
                ),
            )
            for gpu in machine.gpus
        )
    )


def _claimed_by(uuid: str, folder: str) -> str:
    import fcntl

    path = _path(uuid, folder)
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # a shared lock, which claims nothing
    except FileNotFoundError:
        return ""
    except BlockingIOError:
        return f"another launch ({path})"
    except OSError as error:
        raise _unusable(path, error) from None
    return ""


def _lock_gpu(gpu: Gpu, folder: str) -> None:
    """Lock this GPU's file until this process, or the script that replaces it, ends."""
    import fcntl

    path = _path(gpu.uuid, folder)
    try:
        lock = _open(path)
    except OSError as error:
        raise _unusable(path, error) from None
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.set_inheritable(lock, True)


@contextmanager
def _folder_lock(folder: str, is_quiet: bool) -> Iterator[None]:
    """Hold the folder's lock while GPUs are selected."""
    try:
        import fcntl
    except ImportError:
        raise MachineError(
            "devices is 'idle:...', which needs file locks that this system does not have",
            where=f"system {sys.platform}",
            fix="name the GPUs: --devices 0,1",
        ) from None
    try:
        os.makedirs(folder, exist_ok=True)
        if os.stat(folder).st_uid == os.getuid():
            os.chmod(folder, 0o1777)  # for all users
        lock = _open(_path("turn", folder))
    except OSError as error:
        raise _unusable(_path("turn", folder), error) from None
    try:
        holder = f"another launch that is selecting GPUs ({_path('turn', folder)})"
        with waiting_for(holder, is_quiet=is_quiet):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _path(name: str, folder: str) -> str:
    return os.path.join(folder, name.replace("/", "_") + ".lock")


def _open(path: str) -> int:
    """Open a lock file read-only: enough for a lock, and allowed for another user's file."""
    flags = os.O_RDONLY | os.O_NOFOLLOW
    try:
        lock = os.open(path, flags)
    except FileNotFoundError:
        lock = os.open(path, flags | os.O_CREAT, 0o644)
    if os.fstat(lock).st_uid == os.getuid():
        os.fchmod(lock, 0o644)  # regardless of the umask
    return lock


def _unusable(path: str, error: OSError) -> MachineError:
    """Return the error for a lock file that cannot be used, with the owner who can fix it."""
    folder = os.path.dirname(path)
    path_at_fault, fix = folder, f"`chmod 1777 {folder}`"
    if not os.path.lexists(folder):
        fix = f"`mkdir -m 1777 {folder}`, as a user with permission"
    elif not os.path.isdir(folder):
        fix = f"`rm {folder}`"
    elif os.path.lexists(path):
        path_at_fault, fix = path, f"`rm {path}`" if os.path.islink(path) else f"`chmod 644 {path}`"
    owner = ""
    if os.path.lexists(path_at_fault) and (uid := os.lstat(path_at_fault).st_uid) != os.getuid():
        owner, fix = f" of {_user(uid)}", f"ask {_user(uid)} for {fix}"
    return MachineError(
        f"idle GPUs cannot be claimed: {path_at_fault}{owner}: {error.strerror}",
        where="devices: idle:N needs a lock file for each GPU",
        fix=f"{fix}; or name the GPUs: --devices 0,1",
    )


def _user(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
