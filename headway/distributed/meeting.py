"""Lets all ranks meet at a call before they exchange anything, by the store in which they joined.

A rank at another call, or one that cannot come, is an error that names both places in the script.
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
from typing import Any, NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist

from headway.contract.process_groups import read_groups
from headway.contract.progress import process_progress
from headway.contract.step_clock import SYNC
from headway.devices.table import kind_of
from headway.distributed.world import (
    alone,
    before_leaving,
    default_store,
    group_timeout,
    rank_and_size,
    rank_and_size_without_group,
)
from headway.errors import UsageError

_LOOK_EVERY_S = 0.5  # for each so many ranks
_RANKS_AT_A_LOOK = 64
_LONGEST_PAUSE_S = 0.5  # between two questions whether all have come
_READ_SHARE = 20  # it reads what it waits in for a twentieth of the time, at most
_COUNT_BITS = 16  # of a meeting's sum; above are the sums of what the ranks have called
_ALL_SAME, _ALL_CAME, _SOME_WAIT = b"same", b"differ", b"wait"
_NOT_THE_SCRIPT = (
    "<",
    str(Path(__file__).parents[1]),
    str(Path(torch.__file__).parent),
    sysconfig.get_path("stdlib"),
)


class Where(NamedTuple):
    """Where a rank is, for the others."""

    number: int = 0  # of the last meeting that it has come to
    call: str = ""  # in which it waits; empty: in none
    detail: str = ""  # what all ranks must have alike
    may_go_alone: bool = False  # on rank 0
    place: str = ""  # the line of the script
    waits_in: tuple[tuple[str, int], ...] = ()  # group and number of collectives of torch's
    has_left: bool = False
    times_alone: int = 0  # how often it has gone on alone since that meeting

    def __str__(self) -> str:
        at = f" at {self.place}" if self.place else ""
        if self.has_left:
            return f"has left{at}"
        if self.call:
            return f"is in {self.call}{at}"
        return f"is in a collective of torch's, as a backward pass is,{at}"

    def goes_alone(self, main: Where) -> bool:
        """Return whether it need not come to a meeting: rank 0 goes alone, or has for this call."""
        return self.may_go_alone and (main.may_go_alone or main.times_alone > self.times_alone)


def meet(call: str, detail: str = "") -> list[str] | None:
    """Wait until every rank has called this, and return the details of all if they differ.

    It costs less than a collective: the store adds up who has come, in one step. `call` is what the
    script has called, for messages; it is the same on all ranks.

    Raises UsageError where a rank is in another call, or in a collective of torch's that this rank
    has not entered, or has left: each would wait for ever.
    """
    meetings = _meetings()
    if meetings is None:
        return None
    everyone = meetings.hold(_name.get() or call, detail)
    return [one.detail for one in everyone] if everyone else None


def run_ahead(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether ranks run ahead of the GPUs of these tensors, and a meeting holds them up.

    Not while torch's own checks are on (TORCH_DISTRIBUTED_DEBUG=INFO): these do so, too.
    """
    are_on_gpus = any(kind_of(one.device.type).is_numbered for one in tensors)
    return are_on_gpus and dist.get_debug_level() == dist.DebugLevel.OFF


def meet_to_end(call: str) -> None:
    """Wait until every rank has called this, or has left; not while an exception is under way."""
    meetings = _meetings()
    if meetings is not None and sys.exc_info()[0] is None:
        with suppress(dist.DistStoreError):  # a rank works alone for longer than ranks wait
            meetings.hold(call, may_leave=True)


@contextmanager
def by_all_or_rank_0(call: str) -> Iterator[bool]:
    """Wait until every rank has called this; where some cannot come, rank 0 goes on alone.

    So it does once the process group has ended. The context gives True on the ranks that take part.
    If rank 0 is among those that cannot come, it is a UsageError.
    """
    meetings = _meetings()
    if meetings is None:
        yield rank_and_size_without_group()[0] == 0
    elif meetings.hold(call, may_go_alone=True) is None:
        yield True
    else:
        try:
            with alone():
                yield meetings.is_main
        finally:
            meetings.go_on()


@contextmanager
def named(call: str) -> Iterator[None]:
    """Let meetings in the block be those of this call of the script."""
    token = _name.set(_name.get() or call)
    try:
        yield
    finally:
        _name.reset(token)


_name: ContextVar[str] = ContextVar("name", default="")


def barrier(device: torch.device) -> None:
    """Wait until every rank has called this."""
    meet("wait_for_everyone()")
    if rank_and_size()[1] > 1 and kind_of(device.type).is_numbered:  # pragma: needs a GPU
        dist.barrier(device_ids=[device.index])


def watch(*groups: dist.ProcessGroup) -> None:
    """Tell the other ranks where this one is, whenever it stands still.

    All ranks enter the collectives of these groups, too, in the same order as all else.
    """
    meetings = _meetings()
    if meetings is not None:
        meetings.groups += [one for one in groups if one not in meetings.groups]


def last_meeting() -> tuple[int, str, bool] | None:
    """Return the number of the last meeting, its call, and whether this rank waits in it."""
    return None if current is None else (*current.last, bool(current.now.call))


def place_in_script(frame: FrameType | None = None) -> str:
    """Return the innermost line that is not Headway's, torch's or Python's; of this thread.

    One of another package counts where there is none of the user's own.
    """
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
    """Return the meetings of the default process group's ranks; None for a single rank."""
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
    """Where the ranks of one process group meet: every rank comes to all, in the same order.

    Each adds to the sum of a meeting; the last one says whether all called the same. A thread tells
    the others where a rank stands still, as in a collective of torch's; those who wait read it.
    """

    def __init__(self) -> None:
        self.groups: list[Any] = [dist.group.WORLD]
        self._rank, self._size = rank_and_size()
        self.is_main = self._rank == 0
        store: Any = dist.PrefixStore("meetings", default_store())
        self.store = store
        self._pid, self._caller = os.getpid(), threading.get_ident()
        self.now = Where()  # without what changes while it stands there
        self.last = (0, "")
        self._told: Where | None = None
        self._telling = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(
            target=self._tell, args=(store.clone(),), name="headway-where", daemon=True
        )
        self._thread.start()
        before_leaving.append(self._leave)
        atexit.register(self._leave)

    def hold(
        self, call: str, detail: str = "", *, may_go_alone: bool = False, may_leave: bool = False
    ) -> list[Where] | None:
        """Come to the next meeting; return None if all ranks have called the same.

        Else return where they are, if it is not an error: where some ranks cannot come, and rank 0
        goes on alone (`may_go_alone`), or ranks that have left are not missed (`may_leave`).
        """
        while True:
            before = self.now
            self.now = before._replace(
                number=before.number + 1, call=call, detail=detail, may_go_alone=may_go_alone
            )
            try:
                with process_progress().clock.counting(SYNC):
                    found = self._come(self.now)
            except dist.DistNetworkError:
                if dist.is_torchelastic_launched():  # a launcher had the store, and will be named
                    raise
                left = [Where(has_left=True)] * self._size
                found = False, [*left[: self._rank], self.now, *left[self._rank + 1 :]]
            if found is None:
                self.now = Where(before.number + 1)
                return None
            have_come, everyone = found
            mine, main = everyone[self._rank], everyone[0]
            self.now = Where(before.number + 1) if have_come else before
            if mine.goes_alone(main):
                times = self.now.times_alone + (not have_come)
                self.now = self.now._replace(call=call, may_go_alone=True, times_alone=times)
                return everyone
            self.go_on()
            if have_come and len({one.call for one in everyone}) == 1:
                return everyone
            if may_leave and all(everyone[one].has_left for one in self._elsewhere(mine, everyone)):
                return everyone
            others = {one.call for one in everyone if not one.goes_alone(main)}
            if not have_come or len(others) > 1:
                raise self._error(call, everyone)
            # those that go alone come to the next meeting later

    def go_on(self) -> None:
        """Be in no call, and let no other rank read on that this one is in the one that it left."""
        with self._telling, suppress(RuntimeError):  # the store has ended
            self.now = self._told = Where(self.now.number, times_alone=self.now.times_alone)
            self.store.set(f"where/{self._rank}", json.dumps(self.now))

    def _come(self, mine: Where) -> tuple[bool, list[Where]] | None:
        """Return None if all ranks have called the same, else whether all came, and from where."""
        key, go = f"{mine.number}", f"{mine.number}/go"
        self.last = mine.number, mine.call
        own = 1 + (crc32(f"{mine.call}\n{mine.detail}".encode()) << _COUNT_BITS)
        total = self.store.add(key, own)
        if total % (1 << _COUNT_BITS) == self._size:
            outcome = _ALL_SAME if total == own * self._size else _ALL_CAME
            for old in (f"{mine.number - 2}", f"{mine.number - 2}/go"):
                self.store.delete_key(old)
            self.store.set(go, outcome)  # the last word: the rank that has the store may leave now
        else:
            self.store.wait([go], group_timeout())
            outcome = self.store.get(go)
            if outcome == _SOME_WAIT:
                outcome, elsewhere = self._look_for_others(mine, go)
                if elsewhere:
                    self.store.add(key, -own)
                    return False, elsewhere
        return None if outcome == _ALL_SAME else (True, self._exchange(mine))

    def _look_for_others(self, mine: Where, go: str) -> tuple[bytes, list[Where]]:
        """Wait on; return how the meeting ended, or where the ranks are if some cannot come."""
        began_at = looked_at = time.monotonic()
        suspects: list[int] = []
        while True:
            outcome = self.store.get(go)
            now, limit = time.monotonic(), group_timeout()
            if outcome != _SOME_WAIT:
                return outcome, []
            if now - began_at > limit.total_seconds():
                raise dist.DistStoreError(f"{mine.call}: not all ranks have come within {limit}")
            if now - looked_at > _LOOK_EVERY_S * max(1, self._size / _RANKS_AT_A_LOOK):
                everyone = self._everyone(mine)
                before, suspects = suspects, self._elsewhere(mine, everyone)
                if mine.may_go_alone and not everyone[0].may_go_alone:
                    suspects = [one for one in suspects if one == 0]  # it decides for all
                if suspects and suspects == before:
                    return outcome, everyone
                looked_at = time.monotonic()
            time.sleep(min(max((now - began_at) / 20, 0.001), _LONGEST_PAUSE_S))

    def _elsewhere(self, mine: Where, everyone: list[Where]) -> list[int]:
        """Return the ranks that cannot come to this meeting before this one leaves it."""
        entered = self.collectives(waiting=False) if any(one.waits_in for one in everyone) else {}

        def is_past(one: Where) -> bool:
            return any(number > entered.get(group, 0) for group, number in one.waits_in)

        return [
            rank
            for rank, one in enumerate(everyone)
            if rank != self._rank
            and (
                one.has_left
                or (one.number < mine.number and is_past(one))
                or (
                    (one.number == mine.number and one.call not in ("", mine.call))
                    and not (one.may_go_alone or mine.may_go_alone)
                )
            )
        ]

    def _everyone(self, mine: Where) -> list[Where]:
        """Return where the ranks are, as far as they have told."""
        keys = [f"where/{rank}" for rank in range(self._size)]
        have_all_told = self.store.check(keys)
        told = {key: key for key in keys if have_all_told or self.store.check([key])}
        texts = dict(zip(told, self.store.multi_get([*told]), strict=True)) if told else {}
        everyone = [_read(texts[key]) if key in texts else Where() for key in keys]
        everyone[self._rank] = mine._replace(place=place_in_script())
        return everyone

    def _exchange(self, mine: Where) -> list[Where]:
        """Return where the ranks are, which have all come."""
        keys = [f"{mine.number}/{rank}" for rank in range(self._size)]
        self.store.set(keys[self._rank], json.dumps(mine._replace(place=place_in_script())))
        return [_read(text) for text in self.store.multi_get(keys)]

    def collectives(self, *, waiting: bool) -> dict[str, int]:
        """Return the number of the collective that it waits in, or entered last, by group.

        It is read from torch's flight recorder. Messages from rank to rank do not count.
        """
        names = {one.group_name for one in self.groups}
        numbers = {
            one.name: one.waits_for if waiting else one.last_entered for one in read_groups()
        }
        return {name: one for name, one in numbers.items() if name in names and one is not None}

    def _error(self, call: str, everyone: list[Where]) -> UsageError:
        mine = everyone[self._rank]
        suspects = self._elsewhere(mine, everyone) or [
            rank for rank, one in enumerate(everyone) if one.call != call
        ]
        other = suspects[0]
        return UsageError(
            f"rank {self._rank} waits in {call}, and rank {other} {everyone[other]}",
            where=mine.place or place_in_script(),
            fix="let all ranks run this line, or none: move it out of conditions that differ"
            " between ranks, such as `if accelerator.is_main_process`",
        )

    def _tell(self, store: Any) -> None:
        """Tell the others where this rank is, whenever it stands still; runs in a thread."""
        process_progress().own_threads.add(threading.get_ident())
        before = None
        read_next_at = 0.0
        while not self._is_over.wait(_LOOK_EVERY_S):
            with self._telling, suppress(RuntimeError):  # the store has ended
                is_still, now, before = before is self.now, self.now, self.now
                if is_still and now.call:
                    store.compare_set(f"{now.number}/go", "", _SOME_WAIT.decode())
                    where = now
                elif (
                    is_still
                    and (began_at := time.monotonic()) > read_next_at
                    and store.check([f"{now.number + 1}/go"])  # others wait for this rank
                ):
                    where = now._replace(waits_in=(*self.collectives(waiting=True).items(),))
                    read_next_at = began_at + _READ_SHARE * (time.monotonic() - began_at)
                else:
                    continue
                if where != self._told:
                    self._told = where
                    place = place_in_script(sys._current_frames().get(self._caller))
                    store.set(f"where/{self._rank}", json.dumps(where._replace(place=place)))

    def _leave(self) -> None:
        """Tell the others that this rank comes to no further meeting."""
        if os.getpid() != self._pid:  # a child that the script has forked
            return
        atexit.unregister(self._leave)
        if self._leave in before_leaving:
            before_leaving.remove(self._leave)
        self._is_over.set()
        self._thread.join()
        process_progress().own_threads.discard(self._thread.ident or 0)
        with suppress(RuntimeError):
            here = Where(self.now.number, times_alone=self.now.times_alone)
            left = here._replace(place=place_in_script(), has_left=True)
            self.store.set(f"where/{self._rank}", json.dumps(left))


def _read(text: bytes) -> Where:
    return Where(*json.loads(text))
