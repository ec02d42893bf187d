"""In a rank: what it says about itself when asked, also while the script is deep in C++.

Python's faulthandler writes all stacks on SIGQUIT, and when the process crashes, without help from
the interpreter. A thread that begins with the process group tells, when asked, which collectives
this rank has entered: torch's flight recorder knows. No torch is imported here.
"""

from __future__ import annotations

import _thread
import faulthandler
import functools
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

from headway import status

_C10D = "torch.distributed.distributed_c10d"
_LAST_OPERATIONS = 16  # of each group, that are told


def stand_by(channel: int, stacks: int) -> None:
    """Be ready to say where this process is.

    Args:
        channel: the status channel; whatever comes down it is a question.
        stacks: the pipe that stacks are written to.
    """
    status.open_channel(channel)
    if not faulthandler.is_enabled():
        faulthandler.enable(stacks)
    faulthandler.register(signal.SIGQUIT, stacks, all_threads=True)
    status.tell(shows_stacks=True)
    answer = functools.partial(_answer_from_the_first_group_on, channel)
    if _C10D in sys.modules:
        answer(sys.modules[_C10D])
    else:
        sys.meta_path.insert(0, _AfterImport(_C10D, answer))


class _AfterImport:
    """Calls a function with one module, once that has been imported; then it is gone."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> Any:
        if name != self._name:
            return None
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
    make = c10d._new_process_group_helper

    @functools.wraps(make)
    def make_and_answer(*args: Any, **kwargs: Any) -> Any:
        c10d._new_process_group_helper = make  # type: ignore[attr-defined]
        _thread.start_new_thread(_answer, (channel,))
        status.tell(answers=True)
        return make(*args, **kwargs)

    c10d._new_process_group_helper = make_and_answer  # type: ignore[attr-defined]


def _answer(channel: int) -> None:
    with suppress(OSError):
        while os.read(channel, 4096):  # nothing: the launcher is gone
            status.tell(groups=collectives(), progress=status.progress())


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
            operations.setdefault(group, []).append([number, name, entry["input_sizes"], is_done])
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
