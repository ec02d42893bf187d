"""Claims idle GPUs, so that no other launch on this machine uses them: one socket name per GPU.

A claim is a Unix socket bound to a name in Linux's abstract namespace, which only one process can
bind, of whichever user. A lock file would need a folder that all users may write to; flock(2) on
/dev/nvidiaN starts the driver, does not exist for a MIG slice, and does not show who holds it. The
kernel frees a name when the launch ends, also if it is killed; a script that replaces the launcher
inherits the socket. A container with its own network does not see claims of the host.

A launch that waits has such a name, too, with the time at which it began: GPUs go to the launch
that has waited longest, and to no other before it has what it asked for.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing

from headway.errors import MachineError
from headway.ipc.stderr import log
from headway.machine.facts import Machine
from headway.settings.table import Settings

NAMES = "headway-gpu"
"""What the names of all users' claims begin with."""

_WAITING = "waits-since-"
POLL_S = 2.0  # a look at all GPUs takes a part of a second
_HAS_NAMES = sys.platform == "linux"
_UCRED = struct.Struct("3i")  # pid, user and group; unix(7), SO_PEERCRED


def claim_idle(settings: Settings, poll: Callable[[], Machine], wait_s: float | None) -> Machine:
    """Claim the GPUs that `settings.devices` selects; return the snapshot that they are from.

    If too few are idle and waiting does not help, nothing is claimed: the plan reports why. `poll`
    returns a new snapshot, with the use of each GPU; with `wait_s` None nothing is waited for.

    Raises:
        MachineError: there are idle GPUs, and launches that wait for them.
    """
    if not _HAS_NAMES:
        raise MachineError(
            "devices is 'idle:...', which needs Linux: elsewhere launches cannot claim GPUs",
            where=f"system {sys.platform}",
            fix="name the GPUs: --devices 0,1",
        )
    began, place = time.monotonic(), f"{_WAITING}{time.monotonic_ns():020}-{os.getpid()}"
    told: int | None = None  # launches ahead of this one, when this was last printed
    with ExitStack() as kept:
        while True:
            machine = with_claims(poll())
            gpus = machine.gpus_of(settings.device)
            selection = settings.devices.select(gpus)
            ahead = [name for name in _waiting() if name < place]
            if not selection.problems and not ahead:
                chosen = selection.indices[: settings.num_processes]
                if _claim([gpus[index].uuid for index in chosen]):
                    return machine
                continue  # another launch was faster
            can_wait = wait_s is not None and settings.devices.may_become_idle(gpus)
            left_s = began + (wait_s or 0) - time.monotonic() if can_wait else 0
            if left_s <= 0 and ahead and not selection.problems:
                raise MachineError(
                    f"the idle GPUs are for {_launches(ahead)}",
                    where="GPUs are given to the launch that has waited longest",
                    fix="wait, too, with --wait, or name GPUs: --devices 0,1",
                )
            if left_s <= 0:
                return machine
            if told is None:
                kept.enter_context(_named(place))
            if told != len(ahead):
                told = len(ahead)
                behind = [f"behind {_launches(ahead)}"] if ahead else []
                log(f"waiting: {'; '.join([*selection.problems, *behind])}")
            time.sleep(min(POLL_S, left_s))


def waiting_launches() -> list[str]:
    """Return who waits for GPUs on this machine, the first in line first."""
    return [pid for name in _waiting() if (pid := _holder(name))] if _HAS_NAMES else []


def _launches(waiting: Sequence[str]) -> str:
    who = ", ".join(filter(None, map(_holder, waiting)))
    return f"{len(waiting)} waiting launch{'es' * (len(waiting) > 1)} ({who})"


def _waiting() -> list[str]:
    """Return the names of the launches that wait, the first in line first; proc(5), net/unix."""
    begin = f" @{NAMES}-{_WAITING}"
    with open("/proc/net/unix", encoding="utf-8", errors="replace") as file:
        found = {line.rpartition(f"@{NAMES}-")[2].rstrip() for line in file if begin in line}
    return sorted(found)


def with_claims(machine: Machine) -> Machine:
    """Return the machine with `claimed_by` set for GPUs that other launches have claimed."""
    return machine._replace(
        gpus=tuple(gpu._replace(claimed_by=_claimed_by(gpu.uuid)) for gpu in machine.gpus)
    )


def _claimed_by(uuid: str) -> str:
    holder = _holder(uuid) if _HAS_NAMES else ""
    return holder and f"another launch ({holder})"


def _holder(name: str) -> str:
    """Return the process that holds a name; empty if none does."""
    with closing(socket.socket(socket.AF_UNIX)) as asking:
        asking.setblocking(False)
        try:
            asking.connect(_address(name))
        except ConnectionRefusedError:  # the name is free
            return ""
        except OSError:  # more have asked since than the kernel keeps
            return "process unknown"
        credentials = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(credentials)
    process = f"process {pid}" if pid else "a process"  # 0: it is in another container
    return f"{process} of {_user(uid)}"


def _claim(uuids: Sequence[str]) -> bool:
    """Claim these GPUs until this process, or the script that replaces it, ends; all or none.

    In the order of their names: of two launches that want the same, one gets the first, and the
    other holds nothing that a third one would see as claimed.
    """
    with ExitStack() as undone:
        claims = []
        for uuid in sorted(uuids):
            try:
                claims.append(undone.enter_context(_named(uuid)))
            except FileExistsError:
                return False
        undone.pop_all()
    for claim in claims:
        claim.set_inheritable(True)
        claim.detach()
    return True


def _named(name: str) -> socket.socket:
    """Return a socket with this name; FileExistsError if another process has it."""
    named = socket.socket(socket.AF_UNIX)
    try:
        named.bind(_address(name))
        named.listen()
    except OSError as error:
        named.close()
        if error.errno == errno.EADDRINUSE:
            raise FileExistsError(error.errno, name) from None
        raise
    return named


def _address(name: str) -> str:
    return f"\0{NAMES}-{name}"


def _user(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
