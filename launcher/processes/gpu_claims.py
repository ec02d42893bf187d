"""Claims idle GPUs, so that no other launch on this machine uses them: one socket name per GPU.

A claim is a Unix socket bound to a name in Linux's abstract namespace, which only one process can
bind, of whichever user. A lock file would need a folder that all users may write to; flock(2) on
/dev/nvidiaN starts the driver, does not exist for a MIG slice, and does not tell who holds it. The
kernel frees a name when the launch ends, also if it is killed; a script that replaces the launcher
inherits the socket. A container with a network of its own does not see claims of the host.
"""

from __future__ import annotations

import errno
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing

from headway.contract.notes import say
from headway.errors import MachineError
from headway.machine.facts import Machine
from headway.settings.table import Settings

NAMES = "headway-gpu"
"""What the names of all users' claims begin with."""

POLL_S = 2.0  # a look at all GPUs takes a part of a second
_HAS_NAMES = sys.platform == "linux"
_UCRED = struct.Struct("3i")  # pid, user and group; unix(7), SO_PEERCRED


def claim_idle(settings: Settings, look: Callable[[], Machine], wait_s: float | None) -> Machine:
    """Claim the GPUs that `settings.devices` selects; return the snapshot that they are from.

    If too few are idle and waiting does not help, nothing is claimed: the plan reports why. `look`
    returns a new snapshot, with the use of each GPU; with `wait_s` None nothing is waited for.
    """
    if not _HAS_NAMES:
        raise MachineError(
            "devices is 'idle:...', which needs Linux: elsewhere launches cannot claim GPUs",
            where=f"system {sys.platform}",
            fix="name the GPUs: --devices 0,1",
        )
    began = time.monotonic()
    is_waiting = False
    while True:
        machine = with_claims(look())
        gpus = machine.gpus_of(settings.device)
        selection = settings.devices.select(gpus)
        if not selection.problems:
            chosen = selection.indices[: settings.num_processes]
            if _claim([gpus[index].uuid for index in chosen]):
                return machine
            continue  # another launch was faster
        can_wait = settings.devices.may_become_idle(gpus)
        if wait_s is None or not can_wait or time.monotonic() - began >= wait_s:
            return machine
        if not is_waiting:
            say(f"waiting: {'; '.join(selection.problems)}")
            is_waiting = True
        time.sleep(min(POLL_S, max(0.0, began + wait_s - time.monotonic())))


def with_claims(machine: Machine) -> Machine:
    """Return the machine with `claimed_by` set for GPUs that other launches have claimed."""
    return machine._replace(
        gpus=tuple(gpu._replace(claimed_by=_claimed_by(gpu.uuid)) for gpu in machine.gpus)
    )


def _claimed_by(uuid: str) -> str:
    if not _HAS_NAMES:
        return ""
    with closing(socket.socket(socket.AF_UNIX)) as asking:
        asking.setblocking(False)
        try:
            asking.connect(_address(uuid))
        except ConnectionRefusedError:  # nobody has the name
            return ""
        except OSError:  # more have asked since than the kernel keeps
            return "another launch"
        credentials = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(credentials)
    process = f"process {pid} " if pid else ""  # 0: it is in another container
    return f"another launch ({process}of {_user(uid)})"


def _claim(uuids: Sequence[str]) -> bool:
    """Claim these GPUs until this process, or the script that replaces it, ends; all or none.

    In the order of their names: of two launches that want the same, one gets the first, and the
    other holds nothing that a third one would see as claimed.
    """
    with ExitStack() as undone:
        claims = []
        for uuid in sorted(uuids):
            claim = _bind(uuid)
            if claim is None:
                return False
            claims.append(undone.enter_context(claim))
        undone.pop_all()
    for claim in claims:
        claim.set_inheritable(True)
        claim.detach()
    return True


def _bind(name: str) -> socket.socket | None:
    """Return a socket with this name; None if another process has it."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(_address(name))
        claim.listen()
    except OSError as error:
        claim.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return claim


def _address(name: str) -> str:
    return f"\0{NAMES}-{name}"


def _user(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
