"""Meetings of all ranks before they exchange anything, by the store in which they joined.

A rank in another call, or one that cannot come, is an error that names both places in the script.
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
from types import FrameType
from typing import Any, Literal, NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist

from headway.devices.table import kind_of
from headway.distributed.world import before_leaving, default_store, group_timeout, rank_and_size
from headway.errors import UsageError
from headway.ipc.process_groups import has_exited, place_of_process, read_groups
from headway.ipc.progress import process_progress
from headway.ipc.step_clock import SYNC

_LOOK_EVERY_S = 0.5  # where the other ranks are; for each so many of them
_RANKS_AT_A_LOOK = 64
_LONGEST_SLEEP_S = 0.02  # between two questions to the store
_COUNT_BITS = 16  # of a meeting's sum; above are the sums of what the ranks have called
_ALL_SAME, _ALL_CAME = b"same", b"differ"
_NOT_THE_SCRIPT = (
    "<",
    str(Path(__file__).parents[1]),
    str(Path(torch.__file__).parent),
    sysconfig.get_path("stdlib"),
)


class Where(NamedTuple):
    number: int = 0  # of the last meeting that it has come to
    call: str = ""  # in which it waits; empty: in none
    detail: str = ""  # what all ranks must have alike
    place: str = ""  # the line of the script
    waits_in: tuple[tuple[str, int], ...] = ()  # group and number of collectives of torch's
    has_left: bool = False
    process: str = ""  # as `place_of_process` names it
    error: str = ""  # the type of the exception by which it has left

    def __str__(self) -> str:
        at = f" at {self.place}" if self.place else ""
        if self.error:
            return f"has failed with {self.error}"
        if self.has_left:
            return f"has left{at}"
        if self.call:
            return f"is in {self.call}{at}"
        return f"is in a collective of torch's, as a backward pass is,{at}"


def meet(call: str, detail: str = "") -> list[str] | None:
    """Wait until every rank has called this, and return the details of all if they differ.

    It costs less than a collective: the store counts the ranks, in one step. `call` is the script's
    call, for messages, the same on all ranks.

    Raises UsageError if a rank is in another call, or in a collective of torch's that this rank has
    not entered, or has left: each would wait for ever. DistNetworkError if it has failed.
    """
    meetings = _meetings()
    if meetings is None:
        return None
    everyone = meetings.hold(_name.get() or call, detail)
    return [rank.detail for rank in everyone] if everyone else None


def runs_ahead(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether ranks run ahead of these tensors' GPUs, so that a meeting delays them.

    Not with TORCH_DISTRIBUTED_DEBUG=INFO, under which torch's own checks delay them, too.
    """
    are_on_gpus = any(kind_of(tensor.device.type).is_numbered for tensor in tensors)
    return are_on_gpus and dist.get_debug_level() == dist.DebugLevel.OFF


def final_barrier(call: str) -> bool:
    """Wait until every rank has called this or has left; not while an exception is handled.

    Return whether all have called it.
    """
    meetings = _meetings()
    if meetings is not None and sys.exc_info()[0] is None:
        # a rank works for longer than ranks wait, or the one that had the store has left
        with suppress(dist.DistStoreError, dist.DistNetworkError):
            return meetings.hold(call, may_leave=True) is None
    return False


def has_real_ranks() -> bool:
    """Return whether there are several ranks, and not those that `headway estimate` imagines."""
    return _meetings() is not None


@contextmanager
def named(call: str) -> Iterator[None]:
    token = _name.set(_name.get() or call)
    try:
        yield
    finally:
        _name.reset(token)


_name: ContextVar[str] = ContextVar("name", default="")


def barrier(device: torch.device) -> None:
    meet("wait_for_everyone()")
    if rank_and_size()[1] > 1 and kind_of(device.type).is_numbered:  # pragma: needs a GPU
        dist.barrier(device_ids=[device.index])


def watch(*groups: dist.ProcessGroup) -> None:
    """Report this rank's place to the other ranks whenever it stands still.

    All ranks enter the collectives of these groups in the same order.
    """
    meetings = _meetings()
    if meetings is not None:
        meetings.groups += [group for group in groups if group not in meetings.groups]


def last_meeting() -> tuple[int, str, bool] | None:
    if current is None:
        return None
    return current.number + current.is_waiting, current.last.call, current.is_waiting


def script_location(frame: FrameType | None = None) -> str:
    """Return this thread's innermost line of the user's, or else of another package."""
    found = ""
    frame = frame or sys._getframe()
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_NOT_THE_SCRIPT):
            found = found or f"{file}:{frame.f_lineno}"
            if "-packages" not in file:
                return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return found


def _meetings() -> _Meetings | None:
    global current
    if rank_and_size()[1] == 1:
        return None
    if current is None or current.groups[0] is not dist.group.WORLD:
        if str(dist.get_backend_config()).endswith("fake"):  # its ranks do not exist
            return None
        current = _Meetings()
    return current


current: _Meetings | None = None


class _Meetings:
    """The meetings of one process group's ranks: every rank comes to all, in the same order.

    Each rank adds to the sum of a meeting, and the last one reports whether all called the same.
    Ranks that wait for long report their place; a thread reports where an awaited rank stands
    still, such as in a collective of torch's.
    """

    def __init__(self) -> None:
        self.groups: list[Any] = [dist.group.WORLD]
        self._rank, self._size = rank_and_size()
        store: Any = dist.PrefixStore("meetings", default_store())
        self._store = store
        self._pid, self._caller = os.getpid(), threading.get_ident()
        self._process = place_of_process()
        self.number = 0  # of the last meeting that all have come to
        self.last, self.is_waiting = Where(), False
        self._has_reported = False
        self._report(self.last)
        self._is_over = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, args=(store.clone(),), name="headway-where", daemon=True
        )
        self._thread.start()
        before_leaving.append(self._leave)
        atexit.register(self._leave)

    def hold(self, call: str, detail: str = "", *, may_leave: bool = False) -> list[Where] | None:
        """Come to the next meeting; return None if all ranks have called the same.

        Otherwise return all ranks' places: only details differ, or ranks may leave (`may_leave`).
        """
        mine = Where(self.number + 1, call, detail)
        key, go = f"{mine.number}", f"{mine.number}/go"
        own = 1 + (crc32(f"{call}\n{detail}".encode()) << _COUNT_BITS)
        with self._in_call(mine):
            total = self._store.add(key, own)
            if total % (1 << _COUNT_BITS) == self._size:
                outcome = _ALL_SAME if total == own * self._size else _ALL_CAME
                for old in (f"{mine.number - 2}{end}" for end in ("", "/go", "/awaited")):
                    self._store.delete_key(old)
                self._store.set(go, outcome)  # the last word: the rank with the store may leave now
            else:
                everyone = self._wait(mine, go)
                if everyone is not None:
                    self._store.add(key, -own)
                    elsewhere = self._elsewhere(mine, everyone)
                    if may_leave and all(everyone[rank].has_left for rank in elsewhere):
                        return everyone
                    raise self._error(call, everyone, elsewhere[0])
                outcome = self._store.get(go)
            self.number = mine.number
            if outcome == _ALL_SAME:
                return None
            everyone = self._exchange(mine)
        for rank, where in enumerate(everyone):
            if where.call != call:
                raise self._error(call, everyone, rank)
        return everyone

    @contextmanager
    def _in_call(self, mine: Where) -> Iterator[None]:
        self.last, self.is_waiting = mine, True
        try:
            with process_progress().clock.counting(SYNC):
                yield
        finally:
            self.is_waiting = False
            if self._has_reported:
                self._report(Where(self.number))
                self._has_reported = False

    def _wait(self, mine: Where, key: str) -> list[Where] | None:
        """Wait until a key is set; return the ranks' places if one cannot come before.

        The store is polled: torch logs a warning of each of its own waits that times out.
        """
        limit, scale = group_timeout(), max(1, self._size / _RANKS_AT_A_LOOK)
        began_at = time.monotonic()
        look_at = began_at + _LOOK_EVERY_S * scale
        while not self._store.check([key]):
            now = time.monotonic()
            if now - began_at > limit.total_seconds():
                raise dist.DistStoreError(f"{mine.call}: not all ranks have come within {limit}")
            if now >= look_at:
                everyone = self._all_ranks(mine)
                if self._elsewhere(mine, everyone) and not self._store.check([key]):
                    return everyone
                look_at = now + _LOOK_EVERY_S * scale
            time.sleep(min((now - began_at) / 10, _LONGEST_SLEEP_S * scale))
        return None

    def _all_ranks(self, mine: Where) -> list[Where]:
        """Report that this rank waits; return the reported places of all ranks."""
        self._report(mine._replace(place=script_location()))
        self._has_reported = True
        self._store.set(f"{self.number}/awaited", "")
        keys = [f"where/{rank}" for rank in range(self._size)]
        if not self._store.check(keys):  # a rank is still starting
            return [Where()] * self._size
        found = [Where(*json.loads(text)) for text in self._store.multi_get(keys)]
        # a rank of this machine may have ended without a report, as by os._exit()
        left = [rank.has_left or bool(has_exited(rank.process)) for rank in found]
        return [rank._replace(has_left=is_so) for rank, is_so in zip(found, left, strict=True)]

    def _exchange(self, mine: Where) -> list[Where]:
        keys = [f"{mine.number}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], json.dumps(mine._replace(place=script_location())))
        return [Where(*json.loads(text)) for text in self._store.multi_get(keys)]

    def _elsewhere(self, mine: Where, everyone: list[Where]) -> list[int]:
        """Return the ranks that cannot come to this meeting before this rank leaves it."""
        entered = self._collectives("last_entered") if any(r.waits_in for r in everyone) else {}

        def is_missing(r: Where) -> bool:
            if r.has_left or r.number > mine.number:
                return True
            if r.number == mine.number and r.call:
                return r.call != mine.call
            return any(number > entered.get(group, 0) for group, number in r.waits_in)

        others = (rank for rank in range(self._size) if rank != self._rank)
        return [rank for rank in others if is_missing(everyone[rank])]

    def _collectives(self, which: Literal["waits_for", "last_entered"]) -> dict[str, int]:
        """Return each group's number of one collective, from torch's flight recorder."""
        names = {group.group_name for group in self.groups}
        numbers = {g.name: getattr(g, which) for g in read_groups() if g.name in names}
        return {name: number for name, number in numbers.items() if number is not None}

    def _error(self, call: str, everyone: list[Where], other: int) -> Exception:
        what = f"rank {self._rank} waits in {call}, and rank {other} {everyone[other]}"
        if everyone[other].error:  # that rank shows it
            return dist.DistNetworkError(what)
        return UsageError(
            what,
            where=everyone[self._rank].place or script_location(),
            fix="let all ranks run this line, or none: move it out of conditions that differ"
            " between ranks, such as `if accelerator.is_main_process`; to leave a loop together,"
            " accelerator.set_trigger() on one, `if accelerator.check_trigger(): break` on all",
        )

    def _report(self, where: Where, store: Any = None) -> None:
        text = json.dumps(where._replace(process=self._process))
        with suppress(RuntimeError):  # the store has ended
            (store or self._store).set(f"where/{self._rank}", text)

    def _watch(self, store: Any) -> None:
        """Report the collective that this rank stands still in, if others wait; in a thread.

        A late report does no harm: all ranks pass a collective together.
        """
        process_progress().own_threads.add(threading.get_ident())
        before = None
        while not self._is_over.wait(_LOOK_EVERY_S):
            is_still, before = self.last is before, self.last
            if not is_still or self.is_waiting:
                continue
            with suppress(RuntimeError):  # the store has ended
                if store.check([f"{self.number}/awaited"]):
                    waits_in = (*self._collectives("waits_for").items(),)
                    place = script_location(sys._current_frames().get(self._caller))
                    self._report(Where(self.number, waits_in=waits_in, place=place), store)

    def _leave(self) -> None:
        if os.getpid() != self._pid:  # a child that the script has forked
            return
        atexit.unregister(self._leave)
        if self._leave in before_leaving:
            before_leaving.remove(self._leave)
        self._is_over.set()
        self._thread.join()
        process_progress().own_threads.discard(self._thread.ident or 0)
        kind = getattr(sys, "last_type", None)
        error = "" if kind is None else kind.__name__
        self._report(Where(self.number, place=script_location(), has_left=True, error=error))
