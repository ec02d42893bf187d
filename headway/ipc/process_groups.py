"""Reports the collectives of process groups, and gives each default group its own key prefix."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from headway.errors import Code, UsageError
from headway.ipc.forking import quiesce_before_fork
from headway.ipc.progress import process_progress
from headway.ipc.records import Collective, Group
from headway.ipc.run_contract import port_of_store

_C10D = "torch.distributed.distributed_c10d"
_MAX_COLLECTIVES = 16  # reported for each group


def prefix_group_stores(c10d: ModuleType, port: str | None = None) -> None:
    """Use a separate key prefix in the launcher's store for each default group after the first.

    torch names every default group `default_pg/0`, and the store outlives the groups: a rank that
    creates the second group early would read a peer's address from the first group and fail to
    connect. Only groups with a store from torch's rendezvous (`init_method`) are counted.

    Raises UsageError if the script changed MASTER_PORT from `port`, the port of the store.

    Relies on two private functions of `c10d`, torch.distributed.distributed_c10d:
    `init_process_group` gets the store from `rendezvous`, then creates the group with
    `_new_process_group_helper`.
    """
    if getattr(c10d.rendezvous, "has_prefixes", False):
        return
    find, make = c10d.rendezvous, c10d._new_process_group_helper
    formed, is_forming = 0, False

    @functools.wraps(find)
    def rendezvous_with_prefix(*args: Any, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        nonlocal is_forming
        if args[:1] == ("env://",) and port and (port_of_store() or port) != port:
            raise UsageError(
                f"the script has set MASTER_PORT to {port_of_store()}, but the launcher's store"
                f" listens on {port}",
                where="the script's os.environ",
                fix="remove the line that sets MASTER_PORT: `headway launch` sets it",
                code=Code.RANK_VARIABLES,
            )
        for store, rank, size in find(*args, **kwargs):
            _claim_rank(rank, store)
            is_forming = True
            yield c10d.PrefixStore(f"group_{formed}", store) if formed else store, rank, size

    @functools.wraps(make)
    def create_and_count(*args: Any, **kwargs: Any) -> Any:
        nonlocal formed, is_forming
        process_progress().note_use(group=True)
        made = make(*args, **kwargs)
        formed, is_forming = formed + is_forming, False
        quiesce_before_fork()
        return made

    rendezvous_with_prefix.has_prefixes = True  # type: ignore[attr-defined]
    c10d.rendezvous = rendezvous_with_prefix  # type: ignore[attr-defined]
    c10d._new_process_group_helper = create_and_count  # type: ignore[attr-defined]


def _claim_rank(rank: int, store: Any) -> None:
    """Raise UsageError if another process, such as this one's parent, already has this rank."""
    key, own = f"headway/process/{rank}", process_address()
    owner = store.get(key).decode() if store.check([key]) else own
    if owner != own and has_exited(owner) is False:
        raise UsageError(
            f"rank {rank} is process {owner.rpartition(':')[2]}, but process {os.getpid()} has the"
            " same RANK; a process that a rank starts inherits RANK, and two jobs may use the same"
            " MASTER_PORT",
            where=f"environment RANK={rank}",
            fix="start that process without RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE; or"
            " set another MASTER_PORT for each job",
            code=Code.RANK_VARIABLES,
        )
    store.set(key, own)


def process_address() -> str:
    """Return "MACHINE:PID"; MACHINE identifies the pid namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            machine = file.read().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        machine = os.uname().nodename
    return f"{machine}:{os.getpid()}"


def has_exited(place: str) -> bool | None:
    """Return whether a process is known to have exited; None if it is on another machine."""
    machine, _, number = place.rpartition(":")
    if machine != process_address().rpartition(":")[0]:
        return None
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except OSError:  # another user's process
        pass
    return False


def read_groups() -> tuple[Group, ...]:
    """Return this rank's process groups, each with its most recent collectives."""
    members = _members_by_group()
    entered: dict[str, list[Collective]] = {name: [] for name in members}
    for group, collective in _flight_records():
        entries = entered.setdefault(group, [])
        if entries and collective.number < entries[-1].number:  # another group reuses the name
            entries.clear()
        entries.append(collective)
    return tuple(
        Group(name, members.get(name), tuple(entries[-_MAX_COLLECTIVES:]))
        for name, entries in entered.items()
    )


def _flight_records() -> Iterator[tuple[str, Collective]]:
    """Yield the group and collective of each entry in torch's flight recorders, oldest first.

    Yields nothing if the recorders are disabled. Relies on private torch functions that are
    documented for debugging; NCCL has a separate recorder.
    """
    module = sys.modules.get("torch._C._distributed_c10d")
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(module, name, None)
        for entry in json.loads(dump()).get("entries", []) if dump is not None else ():
            if not entry["is_p2p"]:
                yield (
                    entry["process_group"][0],
                    Collective(
                        number=entry["collective_seq_id"],
                        name=entry["profiling_name"].rpartition(":")[2],
                        input_sizes=", ".join(map(str, entry["input_sizes"])),
                        is_done=entry["retired"],
                        entered_at=entry["time_created_ns"] / 1e9,
                    ),
                )


def _members_by_group() -> dict[str, tuple[int, ...]]:
    """Return the global ranks of each of this process's groups; uses a private torch attribute."""
    c10d = sys.modules.get(_C10D)
    known = {} if c10d is None else c10d._world.pg_group_ranks
    return {
        group.group_name: tuple(sorted(ranks))
        for group, ranks in list(known.items())
        if not isinstance(group, int)  # GroupMember.NON_GROUP_MEMBER
    }
