"""Starts ranks from a notebook, or for debugging: forked from this process, by torch's agent.

The ranks are forked, and not started anew, so that functions defined in a notebook work.
"""

from __future__ import annotations

import atexit
import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from string import Template
from typing import Any

import torch
import torch.distributed as dist

from headway.contract import signals
from headway.contract.run import VARIABLE, Ranks, RunContract, encode, read_ranks
from headway.devices.table import KINDS
from headway.distributed.environment import patch_environment
from headway.distributed.world import leave_world
from headway.errors import UsageError, WorkerFailed
from headway.state import AcceleratorState
from headway.training.arguments import check_precision

GRACE_S = 5
"""How long a rank has to end, once another has failed or the launch was interrupted."""
_ADDRESS, _ANY_PORT = "127.0.0.1", "29500"
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # those of torch's agent
CALL = "the call of notebook_launcher(...)"


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: int | str = _ANY_PORT,
    master_addr: str = _ADDRESS,
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> None:
    """Call `function(*args)` on several ranks, forked from this process, and wait for them.

    What rank 0 prints is shown in the cell. Make the `Accelerator` in `function`, and use no GPU
    before this call. One process is no rank: `function` is called in this process.

    Args:
        num_processes: how many ranks on this machine; without it one for each GPU, or a single
            process.
        mixed_precision: the precision of each `Accelerator()` that chooses none itself.
        use_port: where the ranks meet; Accelerate's default is any port that is free, unless there
            are several machines.
        master_addr: the address of machine 0.
        node_rank: the number of this machine, from 0.
        num_nodes: how many machines make this call, each with its own `node_rank`.
        rdzv_backend: how they meet, as for torchrun, like the next three: `static`, `c10d`, ...
        max_restarts: how often all ranks are started again after a failure.
        monitor_interval: seconds between two looks at the ranks.
        log_line_prefix_template: shows the lines of all ranks of this machine, each after this
            text, in which `${role_name}`, `${rank}` and `${local_rank}` are replaced.

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
    check_precision(mixed_precision, where=CALL)
    if not 0 <= node_rank < num_nodes:
        raise UsageError(
            f"node_rank is {node_rank}, but num_nodes is {num_nodes}",
            where=CALL,
            fix="number the machines from 0 to num_nodes - 1",
        )
    if max_restarts and num_nodes > 1 and rdzv_backend == "static":
        raise UsageError(
            "max_restarts needs a rendezvous that can be repeated, and rdzv_backend is 'static'",
            where=CALL,
            fix="pass rdzv_backend='c10d' and rdzv_endpoint='HOST:PORT' on every machine",
        )
    if num_processes is None:
        gpus = [kind.count() for kind in KINDS.values() if kind.is_numbered]
        num_processes = max(1, *gpus)
    run = RunContract("auto", mixed_precision, 1, origins={})
    if num_processes == num_nodes == 1:
        with patch_environment(**{VARIABLE: encode(run)}):
            function(*args)
        return
    _check_process(num_processes)
    config = {
        "nproc_per_node": num_processes,
        "min_nodes": num_nodes,
        "max_nodes": num_nodes,
        "max_restarts": max_restarts,
        "monitor_interval": monitor_interval,
        "rdzv_configs": {"rank": node_rank, **(rdzv_conf or {})},
        "run_id": rdzv_id,
    }
    is_static = rdzv_backend == "static"
    if is_static and num_nodes == 1 and not rdzv_endpoint:
        config |= _here(0 if str(use_port) == _ANY_PORT else use_port)
    else:
        config["rdzv_backend"] = rdzv_backend
        config["rdzv_endpoint"] = rdzv_endpoint or (
            f"{master_addr}:{use_port}" if is_static else ""
        )
    _run_ranks(function, args, run, config, node_rank, log_line_prefix_template)


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
    config = {
        "nproc_per_node": num_processes,
        "min_nodes": 1,
        "max_nodes": 1,
        "max_restarts": 0,
        "run_id": "none",
        **_here(0),
    }
    _run_ranks(function, args, run, config)


def _here(port: int | str) -> dict[str, str]:
    """Return how ranks of this machine meet; 0 is any port that is free."""
    return {"rdzv_backend": "c10d", "rdzv_endpoint": f"{_ADDRESS}:{port}"}


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
    function: Callable[..., Any],
    args: Sequence[Any],
    run: RunContract,
    config: Mapping[str, Any],
    node_rank: int = 0,
    prefix: str | None = None,
) -> None:
    # its part of torch takes time to import
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.multiprocessing.tail_log import TailLog
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    count, patience_s = config["nproc_per_node"], 2 * config.get("monitor_interval", 0.1)
    prefixes = {0: ""} if prefix is None else _prefixes(prefix, node_rank * count, count)
    sys.stdout.flush()
    sys.stderr.flush()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for number, stream in ((1, sys.stdout), (2, sys.stderr)):
            files = {one: str(_output(folder, one, number)) for one in prefixes}
            tail = TailLog("rank", files, stream, prefixes).start()
            stack.callback(stream.flush)
            stack.callback(tail.stop)
        if threading.current_thread() is threading.main_thread():  # torch's agent traps signals
            stack.callback(signals.put_back, {one: signal.getsignal(one) for one in _STOPS})
        variables = {
            VARIABLE: encode(run),
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": GRACE_S,
            "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(one.name for one in _STOPS),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1,  # it would have addresses of ranks before
        }
        stack.enter_context(patch_environment(**variables))
        group = stack.enter_context(_process_group())
        logs = DefaultLogsSpecs(str(folder / "torch"))

        def rank(*args: Any) -> None:
            _be_rank(function, args, folder, group, patience_s)

        torch_log = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
        stack.callback(setattr, torch_log, "disabled", torch_log.disabled)
        torch_log.disabled = True  # it tells of a failure by its own traceback
        try:
            launch = LaunchConfig(**config, start_method="fork", logs_specs=logs)
            elastic_launch(launch, rank)(*args)
        except ChildFailedError as error:
            size = count * config["max_nodes"]
            raise _failure(folder, *error.get_first_failure(), size) from None
        except SignalException as stop:
            raise KeyboardInterrupt from stop


def _prefixes(template: str, first_rank: int, count: int) -> dict[int, str]:
    """Return what each rank's lines begin with, by its number on this machine."""
    names = ({"rank": first_rank + one, "local_rank": one} for one in range(count))
    text = Template(template)
    return {
        one: text.safe_substitute(named, role_name="default_role")
        for one, named in enumerate(names)
    }


def _output(folder: Path, local_rank: int, number: int) -> Path:
    """Return the file of what a rank writes to its descriptor of this number."""
    return folder / f"{local_rank}.{number}"


def _be_rank(
    function: Callable[..., Any], args: Sequence[Any], folder: Path, group: int, patience_s: float
) -> None:
    """Run in a forked process: call `function`, and write a traceback into `folder`.

    `group` is the process group of all ranks, and of all that they start. `patience_s` is how long
    the end of another rank may take to be seen, after an error here that it has caused.
    """
    ranks = read_ranks() or Ranks()
    report = folder / f"{ranks.local_rank}.json"
    report.unlink(missing_ok=True)  # of an earlier attempt
    atexit._clear()  # the notebook's own functions
    os.setpgid(0, group)
    signals.put_back(dict.fromkeys(_STOPS, signal.SIG_DFL))  # the notebook has handlers of its own
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number in (1, 2):
        path = _output(folder, ranks.local_rank, number)
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(one), "w", buffering=1) for one in (1, 2))
    # OpenMP's threads are not forked, and a parallel region would wait for them
    torch.set_num_threads(1)
    AcceleratorState._reset_state(reset_partial_state=True)  # that of the launching process
    try:
        function(*args)
        leave_world()
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and not isinstance(error.code, str):
            raise
        # the launching process raises it
        told = [time.time(), ranks.rank, os.getpid(), traceback.format_exc()]
        report.write_text(json.dumps(told), "utf-8")
        sys.last_type = type(error)  # exit functions look at it, as at the end of a script
    finally:
        atexit._run_exitfuncs()  # multiprocessing does not
        sys.stdout.flush()
        sys.stderr.flush()
    if report.exists():
        time.sleep(patience_s)
        os._exit(1)  # torch would leave a file of it


@contextmanager
def _process_group() -> Iterator[int]:
    """Yield a process group, and kill all its processes after the block.

    Its leader is not waited for before, so that no other process can have its number.
    """
    reader, writer = os.pipe()
    leader = multiprocessing.get_context("fork").Process(target=_lead, args=(reader, writer))
    leader.start()
    group = leader.pid or 0
    with suppress(ProcessLookupError, PermissionError):  # it may have done so itself
        os.setpgid(group, group)
    try:
        yield group
    finally:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        leader.join()
        os.close(reader)
        os.close(writer)


def _lead(reader: int, writer: int) -> None:
    """Lead a process group until nobody is left who has launched it, or belongs to it."""
    signals.put_back(dict.fromkeys(_STOPS, signal.SIG_DFL))
    os.setpgid(0, 0)
    os.close(writer)
    os.read(reader, 1)


def _failure(folder: Path, rank: int, failure: Any, size: int) -> WorkerFailed:
    """Return the error of the rank that failed first, as it has reported, or as torch tells it.

    A rank that a signal has ended reports nothing, and the others' errors come from that.
    """
    reports = [json.loads(one.read_text("utf-8")) for one in folder.glob("*.json")]
    code, pid, trace = failure.exitcode, failure.pid, ""
    if reports and code >= 0:
        _, rank, pid, trace = min(reports)
    how = trace.strip().splitlines()[-1] if trace else f"ended with exit code {code}"
    return WorkerFailed(
        f"rank {rank} of {size} failed: {how}",
        where=f"process {pid}, which was forked from this one",
        fix="correct the function that is launched, and call the launcher again",
        details=trace,
        exit_code=code if code > 0 else 128 - code,
    )
