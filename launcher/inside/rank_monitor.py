"""In a rank: what it says about itself when asked, also while the script is deep in C++.

Python's faulthandler writes all stacks on SIGQUIT, and when the process crashes, without help from
the interpreter. A thread that begins with the process group tells, when asked, which collectives
this rank has entered: torch's flight recorder knows. No torch is imported here.
"""

from __future__ import annotations

import _thread
import faulthandler
import fcntl
import functools
import importlib.util
import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

from headway.contract import records
from headway.contract.process_groups import keep_groups_apart

_C10D = "torch.distributed.distributed_c10d"
_LAST_OPERATIONS = 16  # of each group, that are told
_OUR_DESCRIPTORS = 8  # are at most so many below the limit


_MAIN_THREAD = threading.main_thread().ident or 0


def stand_by(channel: int, stacks: int) -> None:
    """Be ready to say where this process is.

    Args:
        channel: the status channel; whatever comes down it is a question.
        stacks: the pipe that stacks are written to.
    """
    # out of the way of a script that closes what it does not know, and opens files of its own
    channel, stacks = _high(channel), _high(stacks)
    records.open_channel(channel)
    if not faulthandler.is_enabled():
        faulthandler.enable(stacks)
    faulthandler.register(signal.SIGQUIT, stacks, all_threads=True)
    records.tell(shows_stacks=True)
    answer = functools.partial(_answer_from_the_first_group_on, channel)
    if _C10D in sys.modules:
        answer(sys.modules[_C10D])
    else:
        sys.meta_path.insert(0, AfterImport(_C10D, answer))


def _high(fd: int) -> int:
    """Return `fd` under a number that few programs come to use, and none by chance early on."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, min(limit, 65536) - _OUR_DESCRIPTORS)
    except OSError:
        return fd
    os.close(fd)
    return moved


class AfterImport:
    """Calls a function with one module, once that has been imported; then it is gone."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> Any:
        if name != self._name:
            return None
        with suppress(ValueError):  # the script may have taken it out itself
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = spec and spec.loader
        if loader is None:
            return spec
        execute = loader.exec_module

        def execute_and_tell(module: ModuleType) -> None:
            execute(module)
            self._then(module)

        loader.exec_module = execute_and_tell
        return spec


def _answer_from_the_first_group_on(channel: int, c10d: ModuleType) -> None:
    """Start to answer when the script makes its first process group, which starts threads anyway.

    Before that, a script finds only its own threads; `threading` never knows the one that answers.
    Relies on a private name of torch's: all process groups are made by `_new_process_group_helper`.
    """
    keep_groups_apart(c10d)
    make = c10d._new_process_group_helper

    @functools.wraps(make)
    def make_and_answer(*args: Any, **kwargs: Any) -> Any:
        c10d._new_process_group_helper = make  # type: ignore[attr-defined]
        _thread.start_new_thread(_answer, (channel,))
        records.tell(answers=True)
        return make(*args, **kwargs)

    c10d._new_process_group_helper = make_and_answer  # type: ignore[attr-defined]


def _answer(channel: int) -> None:
    with suppress(OSError):
        while records.is_heard() and os.read(channel, 4096):  # nothing: the launcher is gone
            records.tell(
                groups=collectives(),
                progress=records.progress(),
                shows_stacks=signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL,
                main=_main_stack(),
            )


def _main_stack() -> list[tuple[str, int, str]]:
    """Return file, line and function of the main thread's calls, the most recent one last."""
    frame = sys._current_frames().get(_MAIN_THREAD)
    calls: list[tuple[str, int, str]] = []
    while frame is not None:
        calls.insert(0, (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return calls


def collectives() -> list[dict[str, Any]]:
    """Return this rank's process groups, each with the last collectives that it has entered.

    Returns:
        For each group its `name`, the `ranks` in it (None where torch has forgotten them), and
        `operations`: [sequence number, name, input sizes, whether it is done], oldest first.
    """
    ranks = _ranks_by_group()
    operations: dict[str, list[list[Any]]] = {name: [] for name in ranks}
    for entry in _flight_records():
        if not entry["is_p2p"]:
            number, is_done = entry["collective_seq_id"], entry["retired"]
            name = entry["profiling_name"].rpartition(":")[2]
            group, _ = entry["process_group"]
            those = operations.setdefault(group, [])
            if those and number < those[-1][0]:  # it was destroyed, and another has its name
                those.clear()
            those.append([number, name, entry["input_sizes"], is_done])
    return [
        {"name": group, "ranks": ranks.get(group), "operations": those[-_LAST_OPERATIONS:]}
        for group, those in operations.items()
    ]


def _flight_records() -> list[dict[str, Any]]:
    """Return what torch's flight recorders hold, oldest first; nothing where they are off.

    They are private in torch, and documented as its debugging aid. NCCL has one of its own.
    """
    module = sys.modules.get("torch._C._distributed_c10d")
    entries: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(module, name, None)
        if dump is not None:
            entries += json.loads(dump()).get("entries", [])
    return entries


def _ranks_by_group() -> dict[str, list[int]]:
    """Return the global ranks in each group that this process is a member of; private in torch."""
    c10d = sys.modules.get(_C10D)
    known = {} if c10d is None else c10d._world.pg_group_ranks
    return {
        group.group_name: sorted(ranks)
        for group, ranks in list(known.items())
        if not isinstance(group, int)  # a mark for: not a member
    }
