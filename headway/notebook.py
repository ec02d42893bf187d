"""Launchers for notebooks and debugging, which fork ranks from this process.

Ranks are forked rather than spawned so that functions defined in a notebook work.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from inspect import signature
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import (
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from headway.devices.table import KINDS
from headway.distributed.handler import check_range, checked
from headway.distributed.process import patch_environment
from headway.distributed.world import leave_world
from headway.errors import Code, UsageError, WorkerFailed
from headway.ipc import signals
from headway.ipc.run_contract import VARIABLE, RunContract, encode, read_ranks
from headway.ipc.stderr import flush_streams, log
from headway.state import AcceleratorState, PartialState
from headway.training.arguments import check_precision, reject_unsupported

GRACE_S = 5
"""Grace period for ranks to exit after another rank has failed, in seconds."""
_ADDRESS, _ANY_PORT = "127.0.0.1", "29500"
CALL = "the call to notebook_launcher(...)"


@checked
def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: int | str = _ANY_PORT,
    rdzv_backend: str = "static",
    monitor_interval: float = 0.1,
    **unsupported: NoReturn,
) -> None:
    """Fork several ranks from this process, call `function(*args)` on each, and wait for them.

    The output of rank 0 is shown in the cell. Create the `Accelerator` inside `function`, and do
    not use a GPU before this call. With one process, `function` is called in this process.

    Args:
        num_processes: number of ranks on this machine; defaults to one per GPU, or to one rank
            without a GPU.
        mixed_precision: the default precision of each `Accelerator()`.
        use_port: the port of the rendezvous; the default, the same as Accelerate's, selects a free
            port.
        rdzv_backend: has no effect.
        monitor_interval: has no effect; failures are detected immediately.
        unsupported: Accelerate's arguments for multi-node runs, restarts and labels, which raise
            UsageError.

    Raises:
        UsageError: an argument is invalid, or this process is a rank or already uses a GPU.
        WorkerFailed: a rank failed; the error contains its traceback. All other ranks are stopped.

    Examples:
        >>> from headway import Accelerator, notebook_launcher
        >>> def train(name):
        ...     accelerator = Accelerator(cpu=True)
        ...     accelerator.print(f"{name}: {accelerator.mixed_precision}")
        >>> notebook_launcher(train, ("small",), num_processes=1, mixed_precision="bf16")
        small: bf16
    """
    check_precision(mixed_precision, "notebook_launcher")
    reject_unsupported(unsupported, signature(notebook_launcher).parameters, CALL)
    if num_processes is None:
        gpus = [kind.count() for kind in KINDS.values() if kind.is_numbered]
        num_processes = max(1, *gpus)
    run = RunContract("auto", mixed_precision, 1, origins={})
    if num_processes == 1:
        with patch_environment(**{VARIABLE: encode(run)}):
            function(*args)
        return
    port = 0 if str(use_port) == _ANY_PORT else int(use_port)
    _run_ranks(function, args, run, num_processes, port)


@checked
def debug_launcher(
    function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2
) -> None:
    """Call `function(*args)` on several ranks on the CPU; see `notebook_launcher`.

    Args:
        args: positional arguments for `function`.
        num_processes: number of ranks, at least 1.

    Raises:
        UsageError: `num_processes` is below 1, or this process is a rank or uses a GPU.
        WorkerFailed: a rank failed; the error contains its traceback. All other ranks are stopped.

    Examples:
        >>> import torch
        >>> from headway import Accelerator, debug_launcher
        >>> def check():
        ...     rank = torch.tensor([Accelerator().process_index])
        ...     assert Accelerator().gather(rank).tolist() == [0, 1]
        >>> debug_launcher(check, num_processes=2)
    """
    _run_ranks(function, args, RunContract("cpu", "no", 1, origins={}), num_processes)


def _check_process(num_processes: int) -> None:
    where = "this process, which calls the launcher"
    check_range("launcher", 1, num_processes=num_processes)
    if read_ranks() is not None or dist.is_initialized():
        raise UsageError(
            "this process is already a rank, or has a process group",
            where=where,
            fix="run the notebook or script without `headway launch`, and restart the kernel",
            code=Code.NOTEBOOK,
        )
    for label in [kind.label for kind in KINDS.values() if kind.is_in_use()]:  # pragma: needs a GPU
        raise UsageError(
            f"this process has initialized {label}, which forked ranks cannot use",
            where=where,
            fix=f"restart the kernel, and use {label} only in the launched function",
            code=Code.NOTEBOOK,
        )


def _run_ranks(
    function: Callable[..., Any], args: Sequence[Any], run: RunContract, count: int, port: int = 0
) -> None:
    from torch.distributed.elastic.multiprocessing.tail_log import TailLog  # slow to import

    _check_process(count)
    flush_streams()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for number, stream in ((1, sys.stdout), (2, sys.stderr)):
            tail = TailLog("rank", {0: str(folder / f"0.{number}")}, stream, {0: ""}).start()
            stack.callback(stream.flush)
            stack.callback(tail.stop)
        store = dist.TCPStore(_ADDRESS, port, is_master=True, wait_for_workers=False)
        variables = {
            VARIABLE: encode(run),
            "WORLD_SIZE": count,
            "LOCAL_WORLD_SIZE": count,
            "MASTER_ADDR": _ADDRESS,
            "MASTER_PORT": store.port,
            "TORCHELASTIC_USE_AGENT_STORE": True,  # this process hosts the store, not rank 0
            "TORCHELASTIC_RESTART_COUNT": 0,
        }
        stack.enter_context(patch_environment(**variables))
        group = stack.enter_context(_process_group())
        given = (function, args, folder, group)
        ranks: Any = start_processes(_run_rank, given, count, join=False, start_method="fork")  # type: ignore[no-untyped-call]
        try:
            while not ranks.join(grace_period=GRACE_S):
                pass
        except (ProcessExitedException, ProcessRaisedException) as failure:
            raise _failure(ranks, failure, count) from None


def _run_rank(
    rank: int, function: Callable[..., Any], args: Sequence[Any], folder: Path, group: int
) -> None:
    """Set up a forked process as a rank, and call `function`.

    `group` is the process group of all ranks and their child processes. Descriptors 1 and 2 are
    redirected to the files `RANK.1` and `RANK.2` in `folder`.
    """
    atexit._clear()  # unregister the notebook's functions
    os.setpgid(0, group)
    # the notebook sets its own handlers
    signals.restore_handlers(dict.fromkeys((*signals.STOP_SIGNALS, signal.SIGQUIT), signal.SIG_DFL))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number in (1, 2):
        path = folder / f"{rank}.{number}"
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(fd), "w", buffering=1) for fd in (1, 2))
    # OpenMP's threads do not survive a fork, and a parallel region would wait for them
    torch.set_num_threads(1)
    is_inherited = bool(PartialState._shared_state)
    AcceleratorState._reset_state(reset_partial_state=True)  # inherited by the fork
    Finalize(None, atexit._run_exitfuncs, exitpriority=0)  # multiprocessing does not call them
    with patch_environment(RANK=rank, LOCAL_RANK=rank):
        try:
            function(*args)
            if is_inherited and rank == 0 and not PartialState._shared_state:
                log(
                    "note: no rank joined a process group: the function used an Accelerator from"
                    " outside, so each rank trained on its own; fix: create it in the function"
                )
            leave_world()
        except BaseException as error:
            sys.last_type = type(error)  # read by exit functions, as at the end of a script
            is_code = isinstance(error, SystemExit) and not isinstance(error.code, str)
            if isinstance(error, Exception) or is_code:
                raise
            what = f"{type(error).__name__}: {error}"  # torch would ignore a KeyboardInterrupt
            raise RuntimeError(what.rstrip(": ")).with_traceback(error.__traceback__) from None


@contextmanager
def _process_group() -> Iterator[int]:
    """Yield the ID of a new process group, and kill all its processes after the block.

    The group's leader is reaped last, so that its pid cannot be reused.
    """
    leader = subprocess.Popen(  # exits once the write end of its stdin is closed
        ["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, preexec_fn=os.setpgrp
    )
    try:
        yield leader.pid
    finally:
        with suppress(ProcessLookupError):
            os.killpg(leader.pid, signal.SIGKILL)
        leader.communicate()


def _failure(ranks: Any, failure: Any, size: int) -> WorkerFailed:
    """Return the error of the rank that failed first, read from torch's traceback files.

    A rank that is killed by a signal writes no traceback file, and causes errors on other ranks.
    """
    rank, code, trace = failure.error_index, getattr(failure, "exit_code", 1), ""
    found = sorted(filter(os.path.exists, ranks.error_files), key=os.path.getmtime)
    if found and code > 0:
        rank, trace = ranks.error_files.index(found[0]), pickle.loads(Path(found[0]).read_bytes())
    for file in found:
        os.unlink(file)
    error = trace.strip().splitlines()[-1] if trace else f"exited with code {code}"
    return WorkerFailed(
        f"rank {rank} of {size} failed: {error}",
        where=f"process {ranks.processes[rank].pid}, forked from this process",
        fix="correct the launched function, and call the launcher again",
        details=trace,
        exit_code=code if code > 0 else 128 - code,
    )
