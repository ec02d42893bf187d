"""Extends torch's elastic agent to monitor and restart the rank processes in `ranks.py`."""

from __future__ import annotations

import logging
import signal
import socket
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import SignalException

from headway.errors import ConfigError
from headway.history.attempts import Attempts
from headway.ipc import signals
from headway.ipc.records import PROJECT, StepStats
from headway.ipc.run_contract import CPUS_VARIABLE, Ranks, epoch_time, rank_variables
from headway.ipc.stderr import log
from headway.launcher.diagnosis.failures import (
    Failure,
    RankExit,
    ServerDeath,
    describe_killed,
    find_failure,
)
from headway.launcher.diagnosis.hang import Hang, explain_divergence
from headway.launcher.diagnosis.reasons import Evidence
from headway.launcher.diagnosis.watch import Watch
from headway.launcher.multinode.coordinator import RankCallbacks
from headway.launcher.multinode.messages import MAX_DETAILS, Failed
from headway.launcher.multinode.rendezvous import Rendezvous, RunEnded
from headway.launcher.output.pipes import Output
from headway.launcher.plan.plan import LaunchPlan
from headway.launcher.processes.ranks import RankProcesses
from headway.launcher.processes.repeats import RepeatDetector
from headway.launcher.processes.shutdown import grace_of
from headway.launcher.processes.starter import ServerExited, Starter
from headway.launcher.rank.debugging import DOUBLE_PRESS_S, breakpoint_variables
from headway.launcher.step_stats.run_stats import RunStats
from headway.machine.source import count_oom_kills
from headway.settings.problems import missing_ranks
from headway.settings.profile import shown
from headway.settings.table import YES

# torch's agent logs a traceback for a stop signal; Headway prints one line
_torch_log = logging.getLogger("torch.distributed.elastic")
_torch_log.addHandler(logging.NullHandler())
_torch_log.propagate = False

_MAX_DELAY_S = 60  # a longer delay would leave recovered machines idle


def failure_location(failure: Failure | Hang | ServerDeath, folder: str | None) -> str:
    """Return the host, process and log folder of a failure on this machine."""
    place = socket.gethostname()
    if isinstance(failure, Failure):
        place = f"process {failure.first.pid} on {place}"
        if failure.first.crash is not None and failure.first.crash.where:
            place = f"{failure.first.crash.where}; {place}"
    return place if folder is None else f"{place}; logs in {shown(folder)}"


class RestartBackoff:
    """Computes the delay before a restart, which doubles after each attempt without progress.

    An attempt makes progress if it reaches a later step than all earlier attempts. If no steps are
    reported, it makes progress if it lasts more than 60 s. With several machines, the delay after
    progress is `delay_s` instead of 0, so that other machines can join.
    """

    def __init__(self, delay_s: float, *, is_one_machine: bool = True) -> None:
        self._furthest = 0  # the furthest step in all attempts
        self._after_progress_s = 0.0 if is_one_machine else delay_s
        self._first_delay_s = delay_s
        self._delay_s = delay_s

    def next_restart(self, what: str, step: int, lasted_s: float) -> tuple[str, float]:
        """Return `what` with the delay appended, and the delay in seconds."""
        if step > self._furthest or (not step and lasted_s > _MAX_DELAY_S):
            delay_s, self._delay_s = self._after_progress_s, self._first_delay_s
        else:
            delay_s = min(self._delay_s, _MAX_DELAY_S)
            self._delay_s = delay_s * 2
        self._furthest = max(self._furthest, step)
        return what + (f" in {delay_s:.0f} s" if delay_s else ""), delay_s


class Agent(SimpleElasticAgent):
    """Runs Headway's rank processes under torch's agent.

    Only this class relies on the following private names of torch. `_start_workers(worker_group)`
    is called after each rendezvous; `_restart_workers(worker_group)` is called before a rendezvous
    that follows a failure, and calls `_stop_workers`. `_assign_worker_ranks(...)` is called between
    the two and returns the ranks of this machine. `_remaining_restarts` is the number of
    remaining restarts; it is 0 on several machines, where machine 0 decides.
    `_monitor_workers(worker_group)` returns the state of the ranks, `_shutdown` stops the ranks
    when the run ends, and `_exit_barrier()` waits for the other machines.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        starter: Starter,
        handler: Rendezvous,
        output: Output,
        watch: Watch,
        stats: RunStats,
        environ: Mapping[str, str],
    ) -> None:
        spec = WorkerSpec(
            role="headway",
            local_world_size=plan.settings.num_processes,
            rdzv_handler=handler,
            entrypoint=plan.program.name,
            max_restarts=plan.settings.max_restarts if plan.is_one_machine else 0,
            monitor_interval=0.001,  # RankProcesses itself waits for the next exit
        )
        super().__init__(spec)
        self.plan = plan
        self._starter = starter
        self._environ = environ
        self.handler = handler
        stats.listeners += [handler.report_steps, self._note_cost]
        self.attempts = Attempts(plan.began_at)
        handler.end_grace_period = lambda: self.ranks.end_grace_period()
        self.output = output
        self.watch = watch
        self._stats = stats
        self.ranks = self._processes({})  # of the last attempt; empty before the first attempt
        settings = plan.settings
        self._restarts = RestartBackoff(settings.restart_delay, is_one_machine=plan.is_one_machine)
        self._repeats = RepeatDetector(self._project, settings.restart_anyway == YES)
        handler.callbacks = RankCallbacks(stats.note, stats.drop_machine, self._repeats.check)
        self._repeated = ""  # why the final failure counts as a repeat of an earlier one
        self._began_at = time.monotonic()  # start of the last attempt
        self._kills_before = count_oom_kills()
        self._interrupted_at = float("-inf")  # the last Ctrl-C for a debugged rank
        self.pending_restart = "", ""  # the restart, and its cause if machine 0 sent one
        self.signals_received: set[int] = set()  # by the launcher

    @property
    def exits(self) -> list[RankExit]:
        """The exits of the last attempt's ranks, in the order in which they exited."""
        return list(self.ranks.exits.values())

    def forward_interrupt(self) -> bool:
        """Forward Ctrl-C to the debugged rank; return False if it should stop the run instead.

        A second Ctrl-C within 1 s stops the run, without a grace period.
        """
        if self.plan.settings.debug_rank is None:
            return False
        before, self._interrupted_at = self._interrupted_at, time.monotonic()
        if self._interrupted_at - before < DOUBLE_PRESS_S:
            self.ranks.end_grace_period()
            return False
        return self.ranks.interrupt_debugged()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = self.ranks.poll()
        if result.state == WorkerState.SUCCEEDED:
            describe = partial(self._describe_failure, silent_fails=True)
            should_continue = not self.handler.are_all_done(describe)
        elif result.is_failed() and not self._remaining_restarts:
            should_continue = self.handler.restarts_after(self._describe_failure)
        else:
            return result
        return RunResult(state=WorkerState.HEALTHY) if should_continue else result

    def _exit_barrier(self) -> None:
        """Do not wait: `_monitor_workers` reports success only when all machines have succeeded."""

    def _stop_workers(self, worker_group: WorkerGroup, *_: Any, **__: Any) -> None:
        self._shutdown()

    # torch up to 2.11 passes no timeout
    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *_: Any, **__: Any) -> None:
        are_victims = bool(self.handler.ended_by or self.handler.restart)
        try:
            self.ranks.close(death_sig, are_victims=are_victims)
        except SignalException:  # interrupted: the ranks must still be stopped
            self.ranks.close(death_sig, are_victims=are_victims)
            raise

    def _describe_failure(self, *, silent_fails: bool = False) -> Failed | None:
        self.ranks.collect()
        failure = self.find_failure(silent_fails=silent_fails)
        if failure is None:
            return None
        of_rank = failure if isinstance(failure, Failure) else None
        return Failed(
            machine=self.handler.machine,
            host=socket.gethostname(),
            cause=failure.cause,
            where=failure_location(failure, self.output.folder),
            details=failure.details[-MAX_DETAILS:],
            fix=failure.fix,
            exit_code=failure.exit_code,
            suspicion=of_rank.suspicion if of_rank else 0,
            is_final=of_rank is not None and of_rank.is_final,
            ago_s=max(epoch_time() - of_rank.first.time, 0.0) if of_rank else 0.0,
            site=failure.site,
        )

    def _assign_worker_ranks(self, *_: Any, **__: Any) -> list[Worker]:
        """Use the ranks that machine 0 has assigned; torch would exchange them in the store."""
        first, world_size = self.handler.first_rank, self.handler.world_size
        ranks = range(first, first + self.plan.settings.num_processes)
        return [Worker(rank - first, rank, rank, world_size, world_size) for rank in ranks]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        settings = self.plan.settings
        if found := missing_ranks(settings, worker_group.workers[0].world_size):
            raise ConfigError.of(found)  # with several machines, the world size is known only now
        attempt = self.handler.round
        if attempt > 0:
            self._starter.restart_server()
        shared = self.handler.rank_variables({**self._environ, **settings.env})
        cpus = self.plan.cpus
        envs = {
            worker.global_rank: {
                **shared,
                **_rank_environment(worker_group, worker, attempt, settings.max_restarts),
                **breakpoint_variables(worker.global_rank, settings.debug_rank),
                **({CPUS_VARIABLE: cpus[worker.local_rank]} if cpus else {}),
            }
            for worker in worker_group.workers
        }
        self.watch.begin_attempt(len(envs))
        self._stats.begin_attempt(worker_group.workers[0].world_size, self.handler.machine)
        self._began_at = time.monotonic()
        self.ranks = self._processes(envs)
        self.pending_restart = "", ""
        try:
            self.ranks.start()
        except ServerExited:
            if self._remaining_restarts:
                self._remaining_restarts -= 1
            elif not self.handler.restarts_after(self._describe_failure):
                raise
            self._restart_workers(worker_group)
        return {}  # torch would only log the ids

    def _processes(self, envs: Mapping[int, dict[str, str]]) -> RankProcesses:
        settings = self.plan.settings
        return RankProcesses(
            self._starter,
            envs,
            self.output,
            self.watch,
            self.handler.round,
            reports_exit=self.plan.program.is_python,
            debug_rank=settings.debug_rank,
            grace=grace_of(settings, self._environ),
            remote_failure=self.handler.remote_failure,
        )

    def forward(self, number: int) -> None:
        """Forward a signal to the running ranks, or log that a user signal arrived too early."""
        if self.ranks.envs:
            self.ranks.forward(number)
        elif number != signal.SIGWINCH:
            signals.log_early_stop(number)

    def find_failure(self, *, silent_fails: bool = False) -> Failure | Hang | ServerDeath | None:
        """Return the last attempt's failure on this machine; see `failures.find_failure`."""
        kills, before = count_oom_kills(), self._kills_before
        memory_kills = None if kills is None or before is None else kills - before
        if self._starter.server_exit_code is not None:
            return ServerDeath(Evidence(self._starter.server_exit_code, memory_kills=memory_kills))
        workers = self._worker_group.workers
        if (hang := self.watch.hang) is not None:
            aftermath = describe_killed(self.exits)
            return hang._replace(aftermath=aftermath, world_size=workers[0].world_size)
        return find_failure(
            self.exits,
            ranks=[worker.global_rank for worker in workers],
            world_size=workers[0].world_size,
            memory_kills=memory_kills,
            last_lines={end.rank: self.output.tail(end.rank) for end in self.exits},
            lost_reader=self.output.console.lost_reader,
            divergence=explain_divergence(self.ranks.statuses),
            signals_received=self.signals_received,
            silent_fails=silent_fails,
        )

    def repeats(self, failure: Failure | Hang | ServerDeath | None, *, is_stopped: bool) -> str:
        """Return why the final failure counts as a repeat of an earlier one, or an empty string."""
        if (remote_failure := self.handler.ended_by) is not None:
            return remote_failure.repeats
        if failure is not None and not is_stopped:
            return self._repeated or self._repeats.check(failure.site)
        if self.handler.machine == 0:
            self._repeats.note_success(self.watch.step(), is_success=not is_stopped)
        return ""

    def _note_cost(self, rank: int, stats: StepStats) -> None:
        if cost := self.attempts.note(rank, stats, epoch_time()):
            log(cost)

    def _project(self) -> str:
        return next((kept.path for kept in self.watch.kept() if kept.what == PROJECT), "")

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        ordered = self.handler.restart
        number = worker_group.spec.max_restarts - self._remaining_restarts
        number = number if ordered is None else ordered.number
        restart = f"restart {number} of {self.plan.settings.max_restarts}"
        restart = restart if number else "restart with the available machines"
        self.pending_restart = restart, ordered.cause if ordered is not None else ""
        self._stop_workers(worker_group)
        lasted_s = time.monotonic() - self._began_at
        step = self.watch.step()
        if ordered is not None:
            cause, where = ordered.cause, " on all machines" * bool(number)
            failed_at = epoch_time()
        else:
            failure = self.find_failure()
            assert failure is not None, "no other process restarts ranks"
            self._repeated = self._repeats.check(failure.site)
            if self._repeated or (isinstance(failure, Failure) and failure.is_final):
                raise RunEnded
            cause, where = failure.cause, ""
            failed_at = failure.first.time if isinstance(failure, Failure) else epoch_time()
        line, delay_s = self._restarts.next_restart(f"{cause}; {restart}{where}", step, lasted_s)
        log(line)
        self.attempts.end(step, failed_at)
        used = number or self.attempts.rows[-1].num_restarts
        self.attempts.begin(restart, failed_at, cause, step, used)
        self.handler.pause(delay_s)
        super()._restart_workers(worker_group)


def _rank_environment(group: Any, worker: Any, attempt: int, max_restarts: int) -> dict[str, str]:
    """Return the environment variables that torchrun would also set for a rank."""
    num_local = group.spec.local_world_size
    ranks = Ranks(worker.global_rank, worker.local_rank, worker.world_size, num_local)
    return {
        **rank_variables(ranks, group.group_rank, group.group_world_size),
        "MASTER_ADDR": str(group.master_addr),
        "MASTER_PORT": str(group.master_port),
        # the same on all machines, so that the ranks of one attempt use the same store keys
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_RUN_ID": group.spec.rdzv_handler.get_run_id(),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
