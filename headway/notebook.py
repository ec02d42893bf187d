"""Starts ranks from a notebook, or for debugging: forked from this process, on this machine.

The ranks are forked, and not started anew, so that functions defined in a notebook work.
"""

from __future__ import annotations

import atexit
import codecs
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from headway.contract import signals
from headway.contract.precisions import PRECISIONS
from headway.contract.run import VARIABLE, RunContract, encode, read_ranks
from headway.devices.table import KINDS
from headway.distributed.environment import patch_environment
from headway.distributed.world import leave_world
from headway.errors import UsageError, WorkerFailed
from headway.state import AcceleratorState

GRACE_S = 5.0
"""How long a rank has to end, once another has failed or the launch was interrupted."""
_SEEN_WITHIN_S = 1.0
"""How long the end of a rank may take to be seen after an error that it caused in another."""
_ADDRESS, _ANY_PORT = "127.0.0.1", "29500"
_REFUSED = {  # arguments of Accelerate's, with the values that mean nothing else than here
    "master_addr": _ADDRESS,
    "node_rank": 0,
    "num_nodes": 1,
    "rdzv_backend": "static",
    "rdzv_endpoint": "",
    "rdzv_conf": None,
    "rdzv_id": "none",
    "max_restarts": 0,
    "monitor_interval": 0.1,
    "log_line_prefix_template": None,
}


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: int | str = _ANY_PORT,
    **unsupported: Any,
) -> None:
    """Call `function(*args)` on several ranks, forked from this process, and wait for them.

    What rank 0 prints is shown in the cell. Make the `Accelerator` in `function`, and use no GPU
    before this call. One process is no rank: `function` is called in this process.

    Args:
        num_processes: how many ranks; without it one for each GPU, or a single process.
        mixed_precision: the precision of each `Accelerator()` that chooses none itself.
        use_port: where the ranks meet; Accelerate's default is any port that is free.
        unsupported: Accelerate's arguments for several machines and restarts; only their defaults.

    Raises:
        UsageError: an argument is impossible, a GPU is in use by this process already, or this
            process is a rank itself.
        WorkerFailed: a rank failed; with its traceback. All others have been stopped.

    Examples:
        >>> from headway import Accelerator, notebook_launcher
        >>> def train(name):
        ...     accelerator = Accelerator(cpu=True)
        ...     accelerator.print(f"{name}: {accelerator.mixed_precision}")
        >>> notebook_launcher(train, ("small",), num_processes=1, mixed_precision="bf16")
        small: bf16
    """
    _check(unsupported, mixed_precision)
    if num_processes is None:
        gpus = [kind.count() for kind in KINDS.values() if kind.is_numbered]
        num_processes = max(1, *gpus)
    run = RunContract("auto", mixed_precision, 1, origins={})
    if num_processes == 1:
        with patch_environment(**{VARIABLE: encode(run)}):
            function(*args)
        return
    _check_process(num_processes)
    _run_ranks(function, args, num_processes, run, 0 if use_port == _ANY_PORT else int(use_port))


def debug_launcher(
    function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2
) -> None:
    """Call `function(*args)` on several ranks on the CPU; see `notebook_launcher`.

    Args:
        args: for `function`.
        num_processes: how many ranks, at least 1.

    Raises:
        UsageError: `num_processes` is below 1, or this process is a rank itself or uses a GPU.
        WorkerFailed: a rank failed; with its traceback. All others have been stopped.

    Examples:
        >>> import torch
        >>> from headway import Accelerator, debug_launcher
        >>> def check():
        ...     rank = torch.tensor([Accelerator().process_index])
        ...     assert Accelerator().gather(rank).tolist() == [0, 1]
        >>> debug_launcher(check, num_processes=2)
    """
    _check_process(num_processes)
    run = RunContract("cpu", "no", 1, origins={})
    _run_ranks(function, args, num_processes, run, 0)


def _check(unsupported: Mapping[str, Any], mixed_precision: str) -> None:
    where = "the call of notebook_launcher(...)"
    for name, value in unsupported.items():
        if name not in _REFUSED or value != _REFUSED[name]:
            raise UsageError(
                f"notebook_launcher() cannot obey {name}={value!r}",
                where=where,
                fix="leave it out; for several machines or restarts put the function into a script,"
                " and run it with `headway launch`",
            )
    if mixed_precision not in PRECISIONS:
        raise UsageError(
            f"mixed_precision is {mixed_precision!r}, not one of {', '.join(PRECISIONS)}",
            where=where,
            fix="pass mixed_precision='bf16', or another of them",
        )


def _check_process(num_processes: int) -> None:
    where = "this process, which calls the launcher"
    if num_processes < 1:
        raise UsageError(
            f"num_processes is {num_processes}", where=where, fix="pass a number of at least 1"
        )
    if read_ranks() is not None or dist.is_initialized():
        raise UsageError(
            "this process is a rank already, or has a process group",
            where=where,
            fix="run the notebook or script without `headway launch`, and restart the kernel",
        )
    for label in [kind.label for kind in KINDS.values() if kind.is_in_use()]:  # pragma: needs a GPU
        raise UsageError(
            f"this process uses {label}, which forked ranks could not use any more",
            where=where,
            fix=f"restart the kernel, and use {label} only in the function that is launched",
        )


def _run_ranks(
    function: Callable[..., Any], args: Sequence[Any], count: int, run: RunContract, port: int
) -> None:
    store = dist.TCPStore(_ADDRESS, port, is_master=True, wait_for_workers=False)
    common = {
        VARIABLE: encode(run),
        "MASTER_ADDR": _ADDRESS,
        "MASTER_PORT": store.port,
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # `store`, of this process
        "TORCHELASTIC_RESTART_COUNT": 0,
    }
    sys.stdout.flush()
    sys.stderr.flush()
    context = multiprocessing.get_context("fork")
    pipes = [_Pipe(sys.stdout), _Pipe(sys.stderr)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for pipe in pipes:
            stack.callback(pipe.close)
        ranks = [
            context.Process(
                target=_be_rank,
                args=(function, args, common | {"RANK": rank, "LOCAL_RANK": rank}),
                kwargs={
                    "streams": () if rank else [pipe.writer for pipe in pipes],
                    "report": folder / str(rank),
                },
            )
            for rank in range(count)
        ]
        running: dict[int, BaseProcess] = {}  # by sentinel
        try:
            for process in ranks:
                process.start()
                running[process.sentinel] = process
            for pipe in pipes:
                pipe.close_writer()
            _wait_for(running, pipes)
            victims = [*running.values()]
        finally:
            _stop(running)
            for pipe in pipes:
                pipe.show()
        codes = [None if process in victims else process.exitcode for process in ranks]
        _raise_failure(ranks, codes, folder)


class _Pipe:
    """What rank 0 writes into one of its streams, on its way to one of this process."""

    def __init__(self, stream: Any) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def show(self) -> bool:
        """Pass on what has been written; return whether there may be more."""
        is_open = False
        with suppress(BlockingIOError):
            while chunk := os.read(self.reader, 1 << 16):
                self._stream.write(self._decoder.decode(chunk))
                self._stream.flush()
                is_open = True
        return is_open

    def close_writer(self) -> None:
        """Close this process's copy of the writing end, once the ranks have theirs."""
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def close(self) -> None:
        """Close both ends."""
        self.close_writer()
        os.close(self.reader)


def _be_rank(
    function: Callable[..., Any],
    args: Sequence[Any],
    variables: Mapping[str, Any],
    streams: Sequence[int],
    report: Path,
) -> None:
    """Run in a forked process: call `function`, and write a traceback to `report`."""
    atexit._clear()  # the notebook's own functions
    os.setsid()  # `_stop` ends what this rank has started, too
    signals.put_back(  # the notebook has handlers of its own
        dict.fromkeys((signal.SIGINT, signal.SIGTERM), signal.SIG_DFL)
    )
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number, stream in enumerate((nowhere, *(streams or (nowhere, nowhere)))):
        os.dup2(stream, number)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(one), "w", buffering=1) for one in (1, 2))
    # OpenMP's threads are not forked, and a parallel region would wait for them
    torch.set_num_threads(1)
    AcceleratorState._reset_state(reset_partial_state=True)  # that of the launching process
    with patch_environment(**variables):
        try:
            function(*args)
            leave_world()
        except (Exception, SystemExit) as error:
            if isinstance(error, SystemExit) and not isinstance(error.code, str):
                raise
            # the launching process raises it
            report.write_text(json.dumps([time.time(), traceback.format_exc()]), encoding="utf-8")
            sys.last_type = type(error)  # exit functions look at it, as at the end of a script
        finally:
            atexit._run_exitfuncs()  # multiprocessing does not
    if report.exists():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _wait_for(running: dict[int, BaseProcess], pipes: Sequence[_Pipe]) -> None:
    """Show what rank 0 prints until all ranks have ended, or one has failed.

    Args:
        running: the ranks by their sentinels; those that have ended are removed.
    """
    unread = {pipe.reader: pipe for pipe in pipes}
    while running:
        for ready in wait([*running, *unread]):
            pipe = unread.get(cast(int, ready))
            if pipe is not None:
                if not pipe.show():
                    del unread[pipe.reader]
                continue
            process = _join(running, ready)
            if process.exitcode:
                # its error may come from the end of another, which is seen a little later
                for other in wait([*running], timeout=_SEEN_WITHIN_S):
                    _join(running, other)
                return


def _stop(running: dict[int, BaseProcess]) -> None:
    """End these ranks, and the processes that they have left."""
    for process in running.values():
        process.terminate()
    deadline = time.monotonic() + GRACE_S
    while running:
        left_s = max(0.0, deadline - time.monotonic())
        for ready in wait([*running], timeout=left_s) or [*running]:
            _join(running, ready)


def _join(running: dict[int, BaseProcess], sentinel: Any) -> BaseProcess:
    """End what a rank has left, itself included, and forget it.

    Only a process that nobody has waited for yet has its number for certain.
    """
    process = running.pop(sentinel)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
    process.join()
    return process


def _raise_failure(ranks: Sequence[BaseProcess], codes: Sequence[int | None], folder: Path) -> None:
    """Raise the error of the rank that failed first, if any did.

    Args:
        codes: how those ranks ended that had ended before the others were stopped; None for these.
    """
    reports = {rank: folder / str(rank) for rank in range(len(ranks))}
    failures = [
        (*json.loads(report.read_text(encoding="utf-8")), rank)
        for rank, report in reports.items()
        if report.exists()
    ]
    silent = [rank for rank, code in enumerate(codes) if code and not reports[rank].exists()]
    if not failures and not silent:
        return
    # a rank that a signal has ended reports nothing, and the others' errors come from that
    trace, rank = ("", silent[0]) if silent else min(failures)[1:]
    code = codes[rank] or 1
    how = trace.strip().splitlines()[-1] if trace else f"ended with exit code {code}"
    raise WorkerFailed(
        f"rank {rank} of {len(ranks)} failed: {how}",
        where=f"process {ranks[rank].pid}, which was forked from this one",
        fix="correct the function that is launched, and call the launcher again",
        details=trace,
        exit_code=code if code > 0 else 128 - code,
    )
