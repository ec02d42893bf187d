"""Runs in a rank and answers the launcher's questions, also while the script is in C++ code.

Python's faulthandler writes all stacks on SIGQUIT, and when the process crashes, without help from
the interpreter. A thread that starts with the first process group answers which collectives this
rank has entered, as torch's flight recorder has them. No torch is imported here.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

from headway.contract import records
from headway.contract.process_groups import keep_groups_apart
from headway.contract.records import Answer, AnswersQuestions, Collective, Frame, Group, Ready

_C10D = "torch.distributed.distributed_c10d"
_MAX_COLLECTIVES = 16  # of each group, in an answer
_NUM_RESERVED_FDS = 8  # at the upper end of the allowed range

_MAIN_THREAD = threading.main_thread().ident or 0


def start(channel: int, stacks: int) -> None:
    """Open the status channel, print stacks on SIGQUIT, and answer from the first group on.

    Args:
        channel: the status channel; anything that arrives on it is a question.
        stacks: the pipe that stacks are written to.
    """
    # a script may close low descriptors that it did not open, and reuse their numbers
    channel, stacks = _move_to_high_number(channel), _move_to_high_number(stacks)
    records.open_channel(channel)
    if not faulthandler.is_enabled():
        faulthandler.enable(stacks)
    faulthandler.register(signal.SIGQUIT, stacks, all_threads=True)
    records.send(Ready())
    hook = functools.partial(_answer_after_first_group, channel)
    if _C10D in sys.modules:
        hook(sys.modules[_C10D])
    else:
        sys.meta_path.insert(0, AfterImport(_C10D, hook))


def _move_to_high_number(fd: int) -> int:
    """Return a duplicate of `fd` near the limit of open files, and close `fd`."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, min(limit, 65536) - _NUM_RESERVED_FDS)
    except OSError:
        return fd
    os.close(fd)
    return moved


class AfterImport:
    """Import hook that calls a function with one module after its import, and removes itself."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> Any:
        if name != self._name:
            return None
        with suppress(ValueError):  # the script may have removed it
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = spec and spec.loader
        if loader is None:
            return spec
        execute = loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            execute(module)
            self._then(module)

        loader.exec_module = execute_and_call
        return spec


def _answer_after_first_group(channel: int, c10d: ModuleType) -> None:
    """Start the answering thread when the script makes its first process group.

    Until then the script has no thread but its own; `threading` does not list this one.
    Relies on a private name of torch: `_new_process_group_helper` makes every process group.
    """
    keep_groups_apart(c10d)
    make = c10d._new_process_group_helper

    @functools.wraps(make)
    def make_and_answer(*args: Any, **kwargs: Any) -> Any:
        c10d._new_process_group_helper = make  # type: ignore[attr-defined]
        records.channel.has_joined_group = True
        _thread.start_new_thread(_answer_questions, (channel,))
        records.send(AnswersQuestions())
        return make(*args, **kwargs)

    c10d._new_process_group_helper = make_and_answer  # type: ignore[attr-defined]


def _answer_questions(channel: int) -> None:
    with suppress(OSError):
        while records.is_connected() and os.read(channel, 4096):  # b"": the launcher has ended
            records.send(
                Answer(
                    groups=read_groups(),
                    progress=records.progress(),
                    main_stack=_main_stack(),
                    shows_stacks=signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL,
                )
            )


def _main_stack() -> tuple[Frame, ...]:
    """Return the main thread's calls, the most recent one last."""
    frame = sys._current_frames().get(_MAIN_THREAD)
    calls: list[Frame] = []
    while frame is not None:
        calls.insert(0, Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(calls)


def read_groups() -> tuple[Group, ...]:
    """Return this rank's process groups, each with the last collectives that it has entered."""
    members = _members_by_group()
    entered: dict[str, list[Collective]] = {name: [] for name in members}
    for group, collective in _flight_records():
        those = entered.setdefault(group, [])
        if those and collective.number < those[-1].number:  # another group reuses the name
            those.clear()
        those.append(collective)
    return tuple(
        Group(name, members.get(name), tuple(those[-_MAX_COLLECTIVES:]))
        for name, those in entered.items()
    )


def _flight_records() -> Iterator[tuple[str, Collective]]:
    """Yield the group and the collective of each entry of torch's flight recorders, oldest first.

    Empty if they are off. Relies on private names of torch, documented for debugging; NCCL has its
    own recorder.
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
                    ),
                )


def _members_by_group() -> dict[str, tuple[int, ...]]:
    """Return the global ranks in each group that this process is a member of; private in torch."""
    c10d = sys.modules.get(_C10D)
    known = {} if c10d is None else c10d._world.pg_group_ranks
    return {
        group.group_name: tuple(sorted(ranks))
        for group, ranks in list(known.items())
        if not isinstance(group, int)  # GroupMember.NON_GROUP_MEMBER
    }
