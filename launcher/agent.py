"""Runs a plan's ranks under torch's elastic agent: rendezvous, monitoring and restarts are torch's,
starting and stopping the processes is ours (`ranks.py`).
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch.distributed.elastic.rendezvous.registry as rendezvous_registry
from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import RendezvousParameters

from headway.errors import LaunchError, WorkerFailed
from headway.launcher import rendezvous
from headway.launcher.output import Output
from headway.launcher.plan import LOOPBACK, LaunchPlan
from headway.launcher.ranks import STOPPED_AND_SAVED, NoLogs, RankExit, RankProcesses
from headway.profile import shown

# what torch's agent logs about a stop is said here in one line of our own
_torch_log = logging.getLogger("torch.distributed.elastic")
_torch_log.addHandler(logging.NullHandler())
_torch_log.propagate = False

GRACE_PERIOD_S = 30
_STOP_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
_ENDED_BY_INTERRUPT = 130


def supervise(plan: LaunchPlan, environ: Mapping[str, str]) -> int:
    """Run all ranks of this machine to their end and return the launcher's exit code.

    Args:
        plan: the launch.
        environ: the environment of every rank, but for what differs from rank to rank.

    Raises:
        WorkerFailed: a rank failed; the error's exit code is the rank's.
        LaunchError: the ranks could not be started, or another machine failed.
    """
    folder = _log_folder(plan)
    output = Output(
        prefixed=plan.settings.num_processes * plan.settings.num_machines > 1, folder=folder
    )
    handler = _rendezvous_handler(plan)
    agent = Agent(plan, environ, handler, output)
    stopped_by = None
    try:
        with _stop_signals(agent.hurry):
            agent.run()
    except SignalException as stop:
        stopped_by = signal.Signals(stop.sigval)
    finally:
        output.close()
        if stopped_by is not None or any(end.is_failure for end in agent.exits):
            handler.announce_failure()
        handler.shutdown()
    return _exit_code(plan, agent.exits, stopped_by, folder)


class Agent(LocalElasticAgent):
    """torch's agent with our ranks. This class is all that leans on torch's private names:
    `_start_workers(worker_group)` is called after each rendezvous and returns the pids, and
    `_pcontext` is the context that torch then polls and closes.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        environ: Mapping[str, str],
        handler: rendezvous.FixedRendezvous,
        output: Output,
    ) -> None:
        spec = WorkerSpec(
            role="headway",
            local_world_size=plan.settings.num_processes,
            rdzv_handler=handler,
            entrypoint=plan.program.name,
            max_restarts=plan.settings.max_restarts,
        )
        super().__init__(spec, NoLogs(), shutdown_timeout=GRACE_PERIOD_S)
        self._plan = plan
        self._environ = environ
        self._handler = handler
        self._output = output
        self._ranks: RankProcesses | None = None

    @property
    def exits(self) -> list[RankExit]:
        """How the ranks of the last attempt ended, in that order."""
        return list(self._ranks.exits.values()) if self._ranks else []

    def hurry(self) -> None:
        """Grant the ranks that are being stopped no more grace."""
        if self._ranks:
            self._ranks.hurry()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        attempt = self._handler.round
        if attempt > 0:
            self._say_restart(attempt)
        envs = {
            worker.local_rank: {**self._environ, **_rank_environment(worker_group, worker, attempt)}
            for worker in worker_group.workers
        }
        self._ranks = self._pcontext = RankProcesses(
            self._plan.program.command(self._plan.python), envs, self._output, attempt
        )
        self._ranks.start()
        return self._ranks.pids()

    def _say_restart(self, attempt: int) -> None:
        failed = [end for end in self.exits if end.is_failure and not end.was_stopping]
        cause = describe_exit(failed[0]) if failed else "another machine lost its ranks"
        print(f"headway: {cause}; restart {attempt}", file=sys.stderr, flush=True)


def _rank_environment(group: WorkerGroup, worker: Any, attempt: int) -> dict[str, str]:
    """Return torch's variables for one rank, under the names that torchrun sets too."""
    return {
        "RANK": str(worker.global_rank),
        "LOCAL_RANK": str(worker.local_rank),
        "WORLD_SIZE": str(worker.world_size),
        "LOCAL_WORLD_SIZE": str(group.spec.local_world_size),
        "GROUP_RANK": str(group.group_rank),
        "GROUP_WORLD_SIZE": str(group.group_world_size),
        "ROLE_NAME": group.spec.role,
        "ROLE_RANK": str(worker.role_rank),
        "ROLE_WORLD_SIZE": str(worker.role_world_size),
        "MASTER_ADDR": str(group.master_addr),
        "MASTER_PORT": str(group.master_port),
        # all machines agree on the round, so the ranks of one attempt meet under the same keys
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(group.spec.max_restarts),
        "TORCHELASTIC_RUN_ID": group.spec.rdzv_handler.get_run_id(),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _rendezvous_handler(plan: LaunchPlan) -> rendezvous.FixedRendezvous:
    settings = plan.settings
    address, port = (
        (LOOPBACK, 0) if plan.is_one_machine else (settings.main_address, settings.main_port)
    )
    handler = rendezvous_registry.get_rendezvous_handler(
        RendezvousParameters(
            backend=rendezvous.BACKEND,
            endpoint=f"{address}:{port}",
            run_id=f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}",
            min_nodes=settings.num_machines,
            max_nodes=settings.num_machines,
            machine_rank=settings.machine_rank,
        )
    )
    assert isinstance(handler, rendezvous.FixedRendezvous)
    return handler


def _log_folder(plan: LaunchPlan) -> str | None:
    """Make a new folder below `log_dir`, so that no earlier run's logs are overwritten."""
    log_dir = plan.settings.log_dir
    if log_dir is None:
        return None
    folder = os.path.join(log_dir, f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    try:
        os.makedirs(folder)
    except OSError as error:
        raise LaunchError(
            f"log_dir {log_dir!r} cannot be written to: {error.strerror}",
            where=str(plan.settings.origin("log_dir")),
            fix="name a folder that you may write to",
        ) from None
    return folder


@contextmanager
def _stop_signals(hurry: Callable[[], None]) -> Iterator[None]:
    """Turn the first stop signal into torch's SignalException, a second one into `hurry`.

    A SIGHUP that is ignored already (nohup) stays ignored.
    """
    seen: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        seen.append(number)
        if len(seen) > 1:
            hurry()
        else:
            raise SignalException(f"stopped by signal {number}", signal.Signals(number))

    before = {}
    for name in _STOP_SIGNALS:
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit_code(
    plan: LaunchPlan, exits: list[RankExit], stopped_by: signal.Signals | None, folder: str | None
) -> int:
    if stopped_by == signal.SIGINT:
        print("headway: interrupted", file=sys.stderr)
        return _ENDED_BY_INTERRUPT
    failures = [end for end in exits if end.is_failure]
    if stopped_by is not None and failures:
        print(f"headway: stopped by {stopped_by.name}", file=sys.stderr)
        return _shell_code(failures[0].code)
    if failures:
        first, victims = failures[0], [end for end in failures[1:] if end.was_stopping]
        raise WorkerFailed(
            describe_exit(first) + _after(first, victims),
            where=f"{plan.program.name}, process {first.pid}",
            fix="its own output stands above"
            if folder is None
            else f"read {shown(folder)}/rank_{first.rank}_attempt_*.log",
            exit_code=_shell_code(first.code),
        )
    if any(end.code == STOPPED_AND_SAVED for end in exits):
        return STOPPED_AND_SAVED
    return 0


def describe_exit(end: RankExit) -> str:
    """Return in words how a rank failed: "rank 1 failed with exit code 3"."""
    if end.code >= 0:
        return f"rank {end.rank} failed with exit code {end.code}"
    try:
        name = signal.Signals(-end.code).name
    except ValueError:
        name = f"signal {-end.code}"
    return f"rank {end.rank} was ended by {name}"


def _after(first: RankExit, victims: list[RankExit]) -> str:
    if not victims:
        return ""
    ranks = ", ".join(str(end.rank) for end in sorted(victims))
    return f"; rank{'s' * (len(victims) > 1)} {ranks} stopped after it"


def _shell_code(code: int) -> int:
    """Return an exit code as a shell would: 128+n for signal n."""
    return code if code >= 0 else 128 - code
