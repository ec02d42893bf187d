"""Barriers that run before collectives, communicate over the store, and detect mismatched calls.

If a rank is in another call, or cannot reach this call, the error shows both ranks' script lines.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any, Literal, NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist

from headway.devices.table import kind_of
from headway.distributed.world import before_leaving, default_store, group_timeout, rank_and_size
from headway.errors import Code, UsageError
from headway.ipc.process_groups import has_exited, process_address, read_groups
from headway.ipc.progress import process_progress
from headway.ipc.records import HEADWAY_GROUP, Collective, Group
from headway.ipc.stderr import named
from headway.ipc.step_clock import SYNC

_CHECK_EVERY_S = 0.5  # interval for checking the other ranks' positions, per _RANKS_PER_CHECK ranks
_RANKS_PER_CHECK = 64
_LONGEST_SLEEP_S = 0.02  # between polls of the store
_COUNT_BITS = 16  # low bits of a barrier's sum count ranks; the high bits add checksums of calls
_EQUAL, _DIFFERENT = b"same", b"differ"
_FIX_BACKWARD = (
    "if this rank skipped a backward(), for example for a NaN loss, skip the batch on all ranks:"
    " `if accelerator.reduce(loss.isfinite().float(), 'mean') < 1: continue`; each loss must depend"
    " on the model; if the ranks have different numbers of batches, omit even_batches=False, or run"
    " the loop in `with accelerator.join_uneven_inputs([model]):` (not with sharded models);"
    " otherwise, "
)
_FIX_SHARDED = "call sharded models equally often (in generate(): synced_gpus=True); or "
_NOT_THE_SCRIPT = (
    "<",
    str(Path(__file__).parents[1]),
    str(Path(torch.__file__).parent),
    sysconfig.get_path("stdlib"),
)


class RankCall(NamedTuple):
    number: int = 0  # of the last barrier that the rank has reached
    call: str = ""  # the call that it waits in; empty if none
    detail: str = ""  # must be equal on all ranks
    place: str = ""  # the script's file and line
    waits_in: tuple[tuple[str, int], ...] = ()  # group and sequence number of torch collectives
    has_left: bool = False
    process: str = ""  # from `process_address`
    error: str = ""  # the type of the rank's unhandled exception

    def __str__(self) -> str:
        at = f" at {self.place}" if self.place else ""
        if self.error:
            return f"has failed with {self.error}"
        if self.has_left:
            return f"has left{at}"
        if self.call:
            return f"is in {self.call}{at}"
        return f"is in a torch collective (for example, in a backward pass){at}"


def call_barrier(call: str, detail: str = "") -> list[str] | None:
    """Wait until every rank has called this; if details differ, return the details of all ranks.

    This is cheaper than a collective, because the store counts the ranks atomically. `call` is the
    script's call, as shown in messages, and must be equal on all ranks.

    Raises UsageError if a rank has left, is in another call, or is in a torch collective that this
    rank has not entered, because the ranks would hang. If that rank has failed, raises
    DistNetworkError instead.
    """
    barriers = _barriers()
    if barriers is None:
        return None
    name = _name.get()  # the same for calls whose details cannot be compared
    everyone = barriers.enter(f"{name}, in {call}" if name else call, detail)
    return [rank.detail for rank in everyone] if everyone else None


def runs_ahead(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether ranks may run ahead of the GPUs of these tensors; a barrier would delay them.

    With TORCH_DISTRIBUTED_DEBUG=INFO, return False, because torch's own checks delay ranks.
    """
    are_on_gpus = any(kind_of(tensor.device.type).is_numbered for tensor in tensors)
    return are_on_gpus and dist.get_debug_level() == dist.DebugLevel.OFF


def final_barrier(call: str) -> bool:
    """Wait until every rank has called this or has left, and return whether all have called it.

    While an exception is being handled, this does not wait.
    """
    barriers = _barriers()
    if barriers is not None and sys.exc_info()[0] is None:
        # a rank exceeded the timeout, or the rank that hosts the store has left
        with suppress(dist.DistStoreError, dist.DistNetworkError):
            return barriers.enter(call, final=True) is None
    return False


def has_real_ranks() -> bool:
    """Return whether there are several ranks, not counting the fake ranks of `headway estimate`."""
    return _barriers() is not None


@contextmanager
def named_call(call: str) -> Iterator[None]:
    token = _name.set(_name.get() or call)
    try:
        yield
    finally:
        _name.reset(token)


_name: ContextVar[str] = ContextVar("name", default="")


def barrier(device: torch.device) -> None:
    call_barrier("wait_for_everyone()")
    if rank_and_size()[1] > 1 and kind_of(device.type).is_numbered:  # pragma: needs a GPU
        dist.barrier(device_ids=[device.index])


def watch(*groups: dist.ProcessGroup) -> None:
    """Report this rank's position to the other ranks while this rank does not advance.

    All ranks must enter the collectives of these groups in the same order.
    """
    barriers = _barriers()
    if barriers is not None:
        barriers.groups += [group for group in groups if group not in barriers.groups]


def last_barrier() -> tuple[Group, ...]:
    """Return a group whose collective is the last barrier; empty before the first barrier."""
    if current is None:
        return ()
    number, is_done = current.number + current.is_waiting, not current.is_waiting
    last = Collective(number, current.last.call, "", is_done, entered_at=0.0)
    return (Group(HEADWAY_GROUP, None, (last,)),)


def script_location(frame: FrameType | None = None) -> str:
    """Return this thread's innermost line in the user's code or, if there is none, in a package."""
    found = ""
    for caller, line in walk_stack(frame or sys._getframe()):
        file = caller.f_code.co_filename
        if not file.startswith(_NOT_THE_SCRIPT):
            found = found or f"{file}:{line}"
            if "-packages" not in file:
                return f"{file}:{line}"
    return found


def _late(mine: RankCall, everyone: list[RankCall]) -> UsageError:
    late = [rank for rank, other in enumerate(everyone) if other.number < mine.number]
    late = late or [*range(len(everyone))]  # the last one has just arrived
    return UsageError(
        f"{named(late)} did not reach {mine.call} within the timeout of {group_timeout()}",
        where=script_location() or f"rank {rank_and_size()[0]}",
        fix="if the ranks need longer, pass Accelerator(kwargs_handlers="
        "[InitProcessGroupKwargs(timeout=timedelta(hours=1))])",
        code=Code.CALLS_DIFFER,
    )


def _barriers() -> _CallBarriers | None:
    global current
    if rank_and_size()[1] == 1:
        return None
    if current is None or current.groups[0] is not dist.group.WORLD:
        if str(dist.get_backend_config()).endswith("fake"):  # no real ranks
            return None
        current = _CallBarriers()
    return current


current: _CallBarriers | None = None


class _CallBarriers:
    """The barriers of a process group, which all ranks reach in the same order.

    Each rank adds to a barrier's sum, and the last rank publishes whether all calls are equal.
    Ranks that wait for a long time report their positions. On a rank that others are waiting for, a
    thread reports the call that blocks the rank, such as a torch collective.
    """

    def __init__(self) -> None:
        self.groups: list[Any] = [dist.group.WORLD]
        self._rank, self._size = rank_and_size()
        store: Any = dist.PrefixStore("meetings", default_store())
        self._store = store
        self._pid, self._caller = os.getpid(), threading.get_ident()
        self._process = process_address()
        self.number = 0  # of the last barrier that all ranks have reached
        self.last, self.is_waiting = RankCall(), False
        self._has_reported = False
        self._report(self.last)
        self._is_over = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, args=(store.clone(),), name="headway-where", daemon=True
        )
        self._thread.start()
        before_leaving[self._leave] = None
        atexit.register(self._leave)

    def enter(self, call: str, detail: str = "", *, final: bool = False) -> list[RankCall] | None:
        """Enter the next barrier; return None if all ranks made the same call.

        If the details differ or, with `final`, ranks have left, return all ranks' positions.
        """
        mine = RankCall(self.number + 1, call, detail)
        key, go = f"{mine.number}", f"{mine.number}/go"
        own = 1 + (crc32(f"{call}\n{detail}".encode()) << _COUNT_BITS)
        with self._in_call(mine):
            total = self._store.add(key, own)
            if total % (1 << _COUNT_BITS) == self._size:
                outcome = _EQUAL if total == own * self._size else _DIFFERENT
                for old in (f"{mine.number - 2}{end}" for end in ("", "/go", "/awaited")):
                    self._store.delete_key(old)
                self._store.set(go, outcome)  # last: the store's rank may exit afterwards
            else:
                everyone = self._wait(mine, go)
                if everyone is not None:
                    self._store.add(key, -own)
                    missing = self._missing_ranks(mine, everyone)
                    if final and all(everyone[rank].has_left for rank in missing):
                        return everyone
                    if not missing:
                        raise _late(mine, everyone)
                    raise self._error(call, everyone, missing[0])
                outcome = self._store.get(go)
            self.number = mine.number
            if outcome == _EQUAL:
                return None
            everyone = self._exchange(mine)
        for rank, where in enumerate(everyone):
            if where.call != call:
                raise self._error(call, everyone, rank)
        return everyone

    @contextmanager
    def _in_call(self, mine: RankCall) -> Iterator[None]:
        self.last, self.is_waiting = mine, True
        try:
            with process_progress().clock.counting(SYNC):
                yield
        finally:
            self.is_waiting = False
            if self._has_reported:
                self._report(RankCall(self.number))
                self._has_reported = False

    def _wait(self, mine: RankCall, key: str) -> list[RankCall] | None:
        """Wait until a key is set; if a rank cannot arrive or is late, return the ranks' positions.

        The store is polled, because torch logs a warning whenever its own wait times out.
        """
        limit, scale = group_timeout(), max(1, self._size / _RANKS_PER_CHECK)
        began_at = time.monotonic()
        check_at = began_at + _CHECK_EVERY_S * scale
        while not self._store.check([key]):
            now = time.monotonic()
            if now - began_at > limit.total_seconds():
                return self._all_ranks(mine)
            if now >= check_at:
                everyone = self._all_ranks(mine)
                if self._missing_ranks(mine, everyone) and not self._store.check([key]):
                    return everyone
                check_at = now + _CHECK_EVERY_S * scale
            time.sleep(min((now - began_at) / 10, _LONGEST_SLEEP_S * scale))
        return None

    def _all_ranks(self, mine: RankCall) -> list[RankCall]:
        """Report that this rank is waiting; return the reported positions of all ranks."""
        self._report(mine._replace(place=script_location()))
        self._has_reported = True
        self._store.set(f"{self.number}/awaited", "")
        keys = [f"where/{rank}" for rank in range(self._size)]
        if not self._store.check(keys):  # a rank is still starting
            return [RankCall()] * self._size
        found = [RankCall(*json.loads(text)) for text in self._store.multi_get(keys)]
        # a rank on this machine may have exited without a report, for example with os._exit()
        return [
            r._replace(has_left=True, place="") if not r.has_left and has_exited(r.process) else r
            for r in found
        ]

    def _exchange(self, mine: RankCall) -> list[RankCall]:
        keys = [f"{mine.number}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], json.dumps(mine._replace(place=script_location())))
        return [RankCall(*json.loads(text)) for text in self._store.multi_get(keys)]

    def _missing_ranks(self, mine: RankCall, everyone: list[RankCall]) -> list[int]:
        """Return the ranks that cannot reach this barrier while this rank is waiting in it."""
        entered = self._collectives("last_entered") if any(r.waits_in for r in everyone) else {}

        def is_missing(r: RankCall) -> bool:
            if r.has_left or r.number > mine.number:
                return True
            if r.number == mine.number and r.call:
                return r.call != mine.call
            return any(number > entered.get(group, 0) for group, number in r.waits_in)

        others = (rank for rank in range(self._size) if rank != self._rank)
        return [rank for rank in others if is_missing(everyone[rank])]

    def _collectives(self, which: Literal["first_pending", "last_entered"]) -> dict[str, int]:
        """Return the field `which` of each group, read from torch's flight recorder."""
        names = {group.group_name for group in self.groups}
        numbers = {g.name: getattr(g, which) for g in read_groups() if g.name in names}
        return {name: number for name, number in numbers.items() if number is not None}

    def _error(self, call: str, everyone: list[RankCall], other: int) -> Exception:
        what = f"rank {self._rank} is waiting in {call}, but rank {other} {everyone[other]}"
        if everyone[other].error:  # shown by that rank
            return dist.DistNetworkError(what)
        is_in_torch = not (everyone[other].call or everyone[other].has_left)
        return UsageError(
            what,
            where=everyone[self._rank].place or script_location() or f"rank {self._rank}",
            fix=(_FIX_BACKWARD + _FIX_SHARDED * ("headway.strategies.fsdp" in sys.modules))
            * is_in_torch
            + "run this line on all ranks or on none: move it out of conditions that differ"
            " between ranks, such as `if accelerator.is_main_process`; to leave a loop together,"
            " call accelerator.set_trigger() on one rank, and run"
            " `if accelerator.check_trigger(): break` on all ranks",
            code=Code.CALLS_DIFFER,
        )

    def _report(self, where: RankCall, store: Any = None) -> None:
        text = json.dumps(where._replace(process=self._process))
        with suppress(RuntimeError):  # the store is closed
            (store or self._store).set(f"where/{self._rank}", text)

    def _watch(self, store: Any) -> None:
        """Run in a thread: while other ranks wait, report the collective that blocks this rank.

        A late report is harmless, because all ranks complete a collective together.
        """
        process_progress().own_threads.add(threading.get_ident())
        before = None
        while not self._is_over.wait(_CHECK_EVERY_S):
            is_still, before = self.last is before, self.last
            if not is_still or self.is_waiting:
                continue
            with suppress(RuntimeError):  # the store is closed
                if store.check([f"{self.number}/awaited"]):
                    waits_in = (*self._collectives("first_pending").items(),)
                    place = script_location(sys._current_frames().get(self._caller))
                    self._report(RankCall(self.number, waits_in=waits_in, place=place), store)

    def _leave(self) -> None:
        if os.getpid() != self._pid:  # a child process forked by the script
            return
        atexit.unregister(self._leave)
        before_leaving.pop(self._leave, None)
        self._is_over.set()
        self._thread.join()
        process_progress().own_threads.discard(self._thread.ident or 0)
        kind = getattr(sys, "last_type", None)
        error = "" if kind is None else kind.__name__
        self._report(RankCall(self.number, place=script_location(), has_left=True, error=error))
