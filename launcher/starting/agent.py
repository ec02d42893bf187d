"""Runs a plan's ranks under torch's elastic agent: monitoring and restarts are torch's; starting
and stopping the processes is done in `ranks.py`.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException

from headway.errors import ConfigError, LaunchError, WorkerFailed
from headway.launcher.clusters import rendezvous
from headway.launcher.inside.debugging import CtrlC, lent_terminal
from headway.launcher.planning.plan import LOOPBACK, LaunchPlan
from headway.launcher.planning.supervision import refuse_missing_ranks
from headway.launcher.planning.unused import unused
from headway.launcher.reporting.console import Console
from headway.launcher.reporting.failures import (
    STOPPED_AND_SAVED,
    Failure,
    RankExit,
    ServerDeath,
    describe_killed,
    find_failure,
)
from headway.launcher.reporting.hang import Hang, explain_divergence
from headway.launcher.reporting.output import UNREAD_AFTER_FAILURE_S, Output
from headway.launcher.reporting.run_socket import RunSocket
from headway.launcher.reporting.watch import Watch
from headway.launcher.starting.left_behind import describe, wait_for_left_processes
from headway.launcher.starting.ranks import NoLogs, RankProcesses
from headway.launcher.starting.restarts import MAX_DELAY_S, Restarts
from headway.launcher.starting.starter import ServerEnded, Starter
from headway.machine.cgroups import count_memory_kills
from headway.settings.profile_files import shown
from headway.settings.table import RAW, YES, Settings

# torch's agent logs a traceback for a stop signal; Headway prints one line
_torch_log = logging.getLogger("torch.distributed.elastic")
_torch_log.addHandler(logging.NullHandler())
_torch_log.propagate = False

_STOP_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")
_FORWARDED = ("SIGUSR1", "SIGUSR2", "SIGWINCH")  # the last for the rank that has the terminal
_ENDED_BY_INTERRUPT = 130
_VICTIM_GRACE_S = 5  # unless the user has set another


def supervise(
    plan: LaunchPlan, starter: Starter, run_socket: RunSocket | None, colored: bool
) -> int:
    """Run all ranks of this machine and return the launcher's exit code.

    Args:
        plan: the launch.
        starter: starts the ranks.
        run_socket: answers where the ranks are.
        colored: prefixes may be coloured on a terminal.

    Raises:
        WorkerFailed: a rank failed; the error's exit code is the rank's.
        LaunchError: the ranks could not be started, or another machine failed.
        ConfigError: `ranks` contains a rank that does not exist.
    """
    settings = plan.settings
    folder = _log_folder(plan)
    is_debugged = settings.debug_rank is not None
    is_raw = settings.output == RAW
    console = Console(
        prefixed=settings.num_processes * settings.num_machines > 1 and not is_raw,
        colored=colored,
        ranks=() if is_debugged else settings.ranks,
        is_raw=is_raw,
    )
    output = Output(console, folder=folder)
    watch = Watch(None if is_debugged else settings.hang_timeout, lambda: output.last_output_at)
    if run_socket is not None:
        run_socket.describe = lambda interrupts: watch.observe(interrupts).describe()
    handler = _rendezvous_handler(plan)
    agent = Agent(plan, starter, handler, output, watch)
    stopped_by = None
    try:
        with (
            console.takes_stderr(),
            lent_terminal() if is_debugged else nullcontext(),
            _signals(agent),
        ):
            if not agent.run().is_failed():
                agent.leave_or_await_children()
    except SignalException as stop:
        stopped_by = signal.Signals(stop.sigval)
    except ServerEnded:
        handler.announce_failure()
    except ConfigError:
        handler.announce_failure()
        raise
    finally:
        has_failed = stopped_by is not None or any(end.is_failure for end in agent.exits)
        if has_failed:
            handler.announce_failure()
        watch.close()
        if has_failed or watch.hang is not None:
            output.close(UNREAD_AFTER_FAILURE_S)
        else:
            output.close()
        handler.shutdown()
    return _exit_code(agent, stopped_by, folder)


class Agent(LocalElasticAgent):
    """torch's agent with Headway's rank processes.

    The only class that relies on these private names of torch: `_start_workers(worker_group)` is
    called after each rendezvous and returns the pids, `_restart_workers(worker_group)` before one
    that follows a failure, `_pcontext` is the context that torch polls and closes, and
    `_remaining_restarts` the number of failures that it still answers with a restart.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        starter: Starter,
        handler: rendezvous.FixedRendezvous,
        output: Output,
        watch: Watch,
    ) -> None:
        spec = WorkerSpec(
            role="headway",
            local_world_size=plan.settings.num_processes,
            rdzv_handler=handler,
            entrypoint=plan.program.name,
            max_restarts=plan.settings.max_restarts,
            monitor_interval=0.001,  # RankProcesses waits for the next end itself
        )
        super().__init__(spec, NoLogs())
        self._plan = plan
        self._starter = starter
        self._handler = handler
        self.output = output
        self.watch = watch
        self._ranks: RankProcesses | None = None
        settings = plan.settings
        self._restarts = Restarts(settings.max_restarts, settings.restart_delay)
        self._began_at = time.monotonic()  # the last attempt
        self._kills_before = count_memory_kills()
        self._ctrl_c = CtrlC()

    @property
    def exits(self) -> list[RankExit]:
        """How the ranks of the last attempt ended, in order."""
        return list(self._ranks.exits.values()) if self._ranks else []

    @property
    def num_ranks(self) -> int:
        """How many ranks run on this machine."""
        return self._plan.settings.num_processes

    @property
    def settings(self) -> Settings:
        """The settings of the launch."""
        return self._plan.settings

    @property
    def is_stopping(self) -> bool:
        """Whether the ranks have been asked to stop."""
        return self._ranks is not None and self._ranks.is_stopping

    def end_grace_period(self) -> None:
        """End the grace period of ranks that are being stopped."""
        if self._ranks:
            self._ranks.end_grace_period()

    def forwards_interrupt(self) -> bool:
        """Send a first Ctrl-C to the debugged rank; a second one ends the run at once."""
        if self._ranks is None or self._plan.settings.debug_rank is None:
            return False
        if self._ctrl_c.is_second():
            self._ranks.end_grace_period()
            return False
        return self._ranks.interrupt_debugged()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        settings = self._plan.settings
        refuse_missing_ranks(settings, worker_group.workers[0].world_size)
        attempt = self._handler.round
        if attempt > 0:
            self._starter.restart_server()
        envs = {
            worker.local_rank: _rank_environment(worker_group, worker, attempt)
            for worker in worker_group.workers
        }
        self.watch.begin_attempt()
        self._began_at = time.monotonic()
        self._ranks = self._pcontext = RankProcesses(
            self._starter,
            envs,
            self.output,
            self.watch,
            attempt,
            reports_its_end=self._plan.program.kind != "program",
            debug_rank=settings.debug_rank,
            grace_s=settings.grace_period_s,
            victim_grace_s=victim_grace_s(settings),
        )
        try:
            self._ranks.start()
        except ServerEnded:
            if not self._remaining_restarts:
                raise
            self._remaining_restarts -= 1
            self._restart_workers(worker_group)
        return self._ranks.pids()

    def forward(self, number: int) -> None:
        """Send a signal on to the ranks that are alive."""
        if self._ranks:
            self._ranks.forward(number)

    def leave_or_await_children(self) -> None:
        """After a success: let what the ranks have left end by itself, or leave it."""
        settings = self._plan.settings
        if settings.leave_children == YES:
            if left := self._starter.left_processes():
                _say(f"leaving {describe(left, self._ranks_by_pid())} (--leave-children)")
            self._starter.close(leave_children=True)
        else:
            wait_for_left_processes(self._starter, self._ranks_by_pid(), settings.grace_period_s)

    def _ranks_by_pid(self) -> dict[int, int]:
        return self._ranks.ranks_by_pid() if self._ranks else {}

    def find_failure(self) -> Failure | Hang | ServerDeath | None:
        """Return how the last attempt failed on this machine, None if it did not."""
        if self._starter.server_code is not None:
            return ServerDeath(self._starter.server_code, self._memory_kills)
        if self.watch.hang is not None:
            return self.watch.hang
        return find_failure(
            self.exits,
            ranks=[worker.global_rank for worker in self._worker_group.workers],
            world_size=self._worker_group.workers[0].world_size,
            memory_kills=self._memory_kills,
            last_lines={
                end.rank: self.watch.crash_stack(end.rank) or self.output.tail(end.rank)
                for end in self.exits
            },
            divergence=explain_divergence(self._ranks.statuses) if self._ranks else (),
        )

    @property
    def _memory_kills(self) -> int:
        return count_memory_kills() - self._kills_before

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self._stop_workers(worker_group)
        lasted_s = time.monotonic() - self._began_at
        line, delay_s = self._restarts.after(
            self.find_failure(),
            number=worker_group.spec.max_restarts - self._remaining_restarts,
            made_progress=lasted_s > MAX_DELAY_S or self.watch.has_trained(),
        )
        _say(line)
        time.sleep(delay_s)
        super()._restart_workers(worker_group)


def victim_grace_s(settings: Settings) -> float:
    """Return how long ranks may take to stop after another one has failed."""
    if settings.are_user_set("grace_period_s"):
        return settings.grace_period_s
    return min(settings.grace_period_s, _VICTIM_GRACE_S)


def _rank_environment(group: WorkerGroup, worker: Any, attempt: int) -> dict[str, str]:
    """Return the variables for one rank that torchrun sets too."""
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
        # the same on all machines, so that the ranks of one attempt use the same store keys
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(group.spec.max_restarts),
        "TORCHELASTIC_RUN_ID": group.spec.rdzv_handler.get_run_id(),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _rendezvous_handler(plan: LaunchPlan) -> rendezvous.FixedRendezvous:
    settings = plan.settings
    address, port = settings.main_address, settings.main_port
    if plan.is_one_machine:
        address, port = LOOPBACK, 0
    assert address is not None, "the plan has been checked"
    assert port is not None
    return rendezvous.FixedRendezvous(
        address=address,
        port=port,
        machine_rank=settings.machine_rank,
        num_machines=settings.num_machines,
        run_id=f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}",
    )


def _log_folder(plan: LaunchPlan) -> str | None:
    """Create a new folder in `log_dir`, so that earlier logs are not overwritten."""
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
            fix="pass a folder that you can write to",
        ) from None
    return folder


@contextmanager
def _signals(agent: Agent) -> Iterator[None]:
    r"""Handle the launcher's signals.

    The first stop signal raises torch's SignalException, a second one ends the grace period;
    SIGQUIT (Ctrl-\) prints stacks; others are forwarded to the ranks. An ignored SIGHUP (nohup)
    stays ignored.
    """
    seen: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and not seen and agent.forwards_interrupt():
            return
        seen.append(number)
        if (
            len(seen) > 1 and agent.is_stopping
        ):  # otherwise other code swallowed the first exception
            agent.end_grace_period()
        else:
            raise SignalException(f"stopped by signal {number}", signal.Signals(number))

    def forward(number: int, _: FrameType | None) -> None:
        agent.forward(number)

    def show_stacks(*_: object) -> None:
        agent.watch.ask()

    before = {}
    handlers = ((_STOP_SIGNALS, stop), (_FORWARDED, forward), (("SIGQUIT",), show_stacks))
    for names, handler in handlers:
        for name in names:
            number = getattr(signal, name, None)
            if number is None:
                continue
            # a shell script starts background jobs with SIGQUIT ignored
            if name == "SIGQUIT" or signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():  # a run that is being stopped ignores stop signals
            signal.signal(number, signal.SIG_IGN if seen else old)


def _exit_code(agent: Agent, stopped_by: signal.Signals | None, folder: str | None) -> int:
    if stopped_by == signal.SIGINT:
        _say(f"interrupted{describe_killed(agent.exits)}")
        return _ENDED_BY_INTERRUPT
    failure = agent.find_failure()
    if failure is None:
        if stopped_by is not None and len(agent.exits) < agent.num_ranks:
            _say(f"stopped by {stopped_by.name}")  # before all ranks had started
            return 128 + stopped_by
        saved = any(end.code == STOPPED_AND_SAVED for end in agent.exits)
        if stopped_by is None and not saved:
            for note in unused(agent.settings, [end.uses for end in agent.exits]):
                _say(f"note: {note}")
        return STOPPED_AND_SAVED if saved else int(agent.output.has_lost_output)
    if stopped_by is not None:
        _say(f"stopped by {stopped_by.name}{describe_killed(agent.exits)}")
        return failure.exit_code
    where = socket.gethostname()
    if isinstance(failure, Failure):
        where = f"process {failure.first.pid} on {where}"
    if folder is not None:
        where += f"; logs in {shown(folder)}"
        _write_report(failure, folder)
    raise WorkerFailed(
        failure.cause + failure.aftermath,
        where=where,
        fix=failure.fix,
        details=failure.details,
        exit_code=failure.exit_code,
    )


def _write_report(failure: Failure | Hang | ServerDeath, folder: str) -> None:
    try:
        with open(os.path.join(folder, "failure.json"), "w", encoding="utf-8") as file:
            json.dump(failure.as_json(), file, indent=2)
    except OSError as error:  # the report still comes to the terminal
        _say(f"failure.json could not be written to {shown(folder)}: {error.strerror}")


def _say(line: str) -> None:
    with suppress(OSError):  # the terminal may be gone
        print(f"headway: {line}", file=sys.stderr, flush=True)
