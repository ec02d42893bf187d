"""Claims idle GPUs by binding one Unix socket name per GPU, so that other launches skip them.

A claim is a socket bound to a name in Linux's abstract namespace. Only one process can bind a name,
regardless of its user. A lock file would need a folder that all users can write to; flock(2)
on /dev/nvidiaN starts the driver, is unavailable for MIG slices, and does not identify the owner.
The kernel releases a name when the launch exits, even if the launch is killed. A script that
replaces the launcher inherits the socket. In a container with its own network, claims on the host
are invisible.

A waiting launch also binds a name, which contains the start time of the launch and the devices that
it waits for. The launch that has waited longest gets idle GPUs first; until it has enough, later
launches get none.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing

from headway.errors import Code, MachineError
from headway.ipc.stderr import log
from headway.launcher.diagnosis.run_socket import abstract_names, peer_of
from headway.machine.facts import Machine
from headway.settings.table import Settings

NAME_PREFIX = "headway-gpu"
"""The prefix of all socket names."""

_WAITING = "waits-since-"
POLL_S = 2.0  # querying all GPUs takes a fraction of a second
_HAS_NAMES = sys.platform == "linux"


def claim_idle(settings: Settings, poll: Callable[[], Machine], wait_s: float | None) -> Machine:
    """Claim the GPUs that `settings.devices` selects; return the machine used for the selection.

    If too few GPUs are idle and waiting cannot help, no GPU is claimed, and the plan reports the
    reason. `poll` returns the machine with each GPU's current usage. If `wait_s` is None, this
    function does not wait.

    Raises:
        MachineError: if other launches wait for the idle GPUs.
    """
    if not _HAS_NAMES:
        raise MachineError(
            "devices is 'idle:...', but launches can claim GPUs only on Linux",
            where=f"system {sys.platform}",
            fix="select the GPUs: --devices 0,1",
            code=Code.UNSUPPORTED_HERE,
        )
    began = time.monotonic()
    own_name = f"{_WAITING}{time.monotonic_ns():020}-{os.getpid()}-{settings.devices}"
    logged_ahead: int | None = None  # the last logged number of launches ahead
    with ExitStack() as stack:
        while True:
            machine = with_claims(poll())
            gpus = machine.gpus_of(settings.device)
            selection = settings.devices.select(gpus)
            ahead = [name for name in _waiting() if name < own_name]
            if not selection.problems and not ahead:
                chosen = selection.indices[: settings.num_processes]
                if _claim([gpus[index].uuid for index in chosen]):
                    return machine
                continue  # another launch claimed them first
            can_wait = wait_s is not None and settings.devices.may_become_idle(gpus)
            left_s = began + (wait_s or 0) - time.monotonic() if can_wait else 0
            if left_s <= 0 and ahead and not selection.problems:
                raise MachineError(
                    f"the idle GPUs are reserved for {_launches(ahead)}",
                    where="the queue of launches that wait for GPUs",
                    fix="wait with --wait, or select GPUs: --devices 0,1",
                    code=Code.TOO_FEW_GPUS,
                )
            if left_s <= 0:
                return machine
            if logged_ahead is None:
                _bind(stack.enter_context(socket.socket(socket.AF_UNIX)), own_name)
            if logged_ahead != len(ahead):
                logged_ahead = len(ahead)
                behind = [f"behind {_launches(ahead)}"] if ahead else []
                log(f"waiting: {'; '.join([*selection.problems, *behind])}")
            time.sleep(min(POLL_S, left_s))


def waiting_launches() -> list[str]:
    """Return the processes that wait for GPUs on this machine, and the GPUs, in queue order."""
    owners = {name: _owner(name) for name in _waiting()}
    return [f"{who}, for {name.rpartition('-')[2]}" for name, who in owners.items() if who]


def _launches(waiting: Sequence[str]) -> str:
    who = ", ".join(filter(None, map(_owner, waiting)))
    return f"{len(waiting)} waiting launch{'es' * (len(waiting) > 1)} ({who})"


def _waiting() -> list[str]:
    """Return the socket names of waiting launches, in queue order."""
    found = abstract_names(f"{NAME_PREFIX}-{_WAITING}")
    return [name.removeprefix(f"{NAME_PREFIX}-") for name in found]


def with_claims(machine: Machine) -> Machine:
    """Return a copy of `machine` in which GPUs claimed by other launches are marked."""
    return machine._replace(
        gpus=tuple(gpu._replace(claimed_by=_claimed_by(gpu.uuid)) for gpu in machine.gpus)
    )


def _claimed_by(uuid: str) -> str:
    owner = _owner(uuid) if _HAS_NAMES else ""
    return owner and f"another launch ({owner})"


def _owner(name: str) -> str:
    """Describe the process that has bound a name; return an empty string if the name is free."""
    with closing(socket.socket(socket.AF_UNIX)) as probe:
        probe.setblocking(False)
        try:
            probe.connect(_address(name))
        except ConnectionRefusedError:  # the name is free
            return ""
        except OSError:  # the socket's backlog is full
            return "process unknown"
        pid, uid = peer_of(probe)
    process = f"process {pid}" if pid else "a process"  # 0: in another container
    return f"{process} of {_user(uid)}"


def _claim(uuids: Sequence[str]) -> bool:
    """Claim all of the GPUs or none; return whether they were claimed.

    Claims last until this process, or the script that replaces it, exits. Names are bound in sorted
    order: if two launches want the same GPUs, one of them fails at the first name, before it claims
    a GPU that a third launch could use.
    """
    with ExitStack() as on_error:
        claims = [on_error.enter_context(socket.socket(socket.AF_UNIX)) for _ in uuids]
        try:
            for claim, uuid in zip(claims, sorted(uuids), strict=True):
                _bind(claim, uuid)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
        on_error.pop_all()
    for claim in claims:
        claim.set_inheritable(True)
        claim.detach()
    return True


def _bind(named: socket.socket, name: str) -> None:
    named.bind(_address(name))
    named.listen()


def _address(name: str) -> str:
    return f"\0{NAME_PREFIX}-{name}"


def _user(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
