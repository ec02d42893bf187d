"""Supervises the ranks of one machine: handles signals, logs the report, returns the exit code."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import TYPE_CHECKING

from torch.distributed.elastic.multiprocessing.api import SignalException

from headway.errors import HeadwayError, WorkerFailed
from headway.history.record import TAIL_LINES
from headway.ipc import signals
from headway.ipc.records import LOGS, SAVED
from headway.ipc.run_contract import epoch_time
from headway.ipc.stderr import log
from headway.launcher.clusters.table import WITH_ONE_OUTPUT
from headway.launcher.diagnosis.failures import describe_killed
from headway.launcher.diagnosis.run_socket import RunSocket
from headway.launcher.diagnosis.watch import NO_GROUP_AFTER_S, Watch
from headway.launcher.multinode.rendezvous import Rendezvous, RunEnded
from headway.launcher.output.console import Console, StatusLine, wants_color
from headway.launcher.output.pipes import FAILURE_UNREAD_TIMEOUT_S, Output
from headway.launcher.plan.notes import final_notes
from headway.launcher.plan.plan import LaunchPlan, counted
from headway.launcher.processes.agent import Agent, failure_location
from headway.launcher.processes.log_folder import create_log_folder
from headway.launcher.processes.run_exit import RunExit, RunOutcome, run_exit_of
from headway.launcher.processes.starter import ServerExited, Starter, wait_for_leftovers
from headway.launcher.rank.debugging import borrowed_terminal
from headway.launcher.step_stats.run_stats import RunStats
from headway.settings.table import OFF, RAW

if TYPE_CHECKING:
    from headway.history.record import Recorder

# SIGWINCH is for the rank that has the terminal
_FORWARDED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH)


def supervise(
    plan: LaunchPlan,
    starter: Starter,
    run_socket: RunSocket | None,
    environ: Mapping[str, str],
    recorder: Recorder | None,
) -> int:
    """Run all ranks of this machine and return the launcher's exit code.

    `environ` is the launcher's environment. Raises WorkerFailed with the failed rank's exit code,
    and LaunchError if the ranks cannot be started or another machine failed.
    """
    settings = plan.settings
    folder = create_log_folder(settings)
    is_debugged = settings.debug_rank is not None
    is_raw = settings.output == RAW
    console = Console(
        prefixed=settings.num_processes * settings.num_machines > 1 and not is_raw,
        colored=wants_color(environ),
        ranks=() if is_debugged else settings.ranks,
        is_raw=is_raw,
        is_ansi=environ.get("TERM", "dumb") != "dumb",
    )
    stats = RunStats()
    status = None
    if settings.status != OFF and not is_debugged and not is_raw:
        status = StatusLine(console, stats.line)
        stats.report = console.warn
    output = Output(console, folder=folder, status=status)
    watch = Watch(
        None if is_debugged else settings.hang_timeout, lambda: output.last_output_at, stats.note
    )
    ranks = counted(settings.num_processes, "rank", "ranks")
    if status is not None and console.has_terminal and plan.is_one_machine and not starter.is_quiet:
        watch.on_ready = lambda: log(f"{ranks} ready in {epoch_time() - plan.began_at:.1f} s")
    if plan.is_one_machine and settings.num_processes > 1 and not is_debugged:
        watch.on_no_group = lambda: log(
            f"note: no rank has joined a process group in {NO_GROUP_AFTER_S} s: all {ranks} do the "
            f"same work{', unless the script reads RANK' * plan.program.mentions_rank}; fix: use "
            "an Accelerator, or Trainer(devices=N) in Lightning, or pass --num-processes 1"
        )
    if run_socket is not None:
        run_socket.stats = lambda: stats.to_json(output.last_line)
        run_socket.describe = watch.describe
    handler = _rendezvous_handler(plan, environ)
    agent = Agent(plan, starter, handler, output, watch, stats, environ)
    if recorder is not None:
        stats.listeners.append(recorder.note)
        recorder.tails = lambda: {
            end.rank: output.tail(end.rank, TAIL_LINES) for end in agent.exits
        }
        recorder.kept, recorder.attempts = watch.kept, lambda: agent.attempts.rows
        if folder is not None:
            recorder.keep(LOGS, folder)
    stopped_by = None
    try:
        with (
            console.capture_stderr(),
            borrowed_terminal() if is_debugged else nullcontext(),
            _signals(agent),
        ):
            if not agent.run().is_failed():
                wait_for_leftovers(starter, settings.grace_period_s)
    except SignalException as stop:
        stopped_by = signal.Signals(stop.sigval)
    except (ServerExited, RunEnded):
        pass
    except HeadwayError as error:
        handler.give_up(error)
        raise
    finally:
        outcome = RunOutcome(agent.exits, settings.num_processes, stopped_by)
        has_failed = any(end.is_failure for end in agent.exits)
        has_failed |= stopped_by is not None and not outcome.have_saved
        watch.close()
        if has_failed or watch.hang is not None:
            output.close(FAILURE_UNREAD_TIMEOUT_S)
        else:
            output.close()
        handler.shutdown()
        if has_failed and is_debugged:
            print(file=sys.stderr)  # a debugger's prompt may be on this line
    failure = agent.find_failure()
    agent.attempts.end(agent.watch.step(), epoch_time())
    outcome = outcome._replace(
        failure=failure,
        remote_failure=handler.ended_by,
        repeats=agent.repeats(failure, is_stopped=stopped_by is not None),
        restarts=f"{agent.attempts.rows[-1].num_restarts} of {settings.max_restarts} restarts used",
        lost_during_stop=agent.ranks.failure_during_stop,
        will_save=watch.will_save(),
        machine=handler.machine,
        pending_restart=agent.pending_restart,
        is_cut_short=agent.ranks.is_cut_short,
        is_reported_by_machine_0=handler.machine > 0
        and not handler.has_lost_machine_0
        and settings.cluster in WITH_ONE_OUTPUT,
    )
    run_exit = run_exit_of(outcome)
    if recorder is not None:
        # replaced if an error has more details
        recorder.report = SAVED if run_exit.is_saved else run_exit.line
    _report(agent, run_exit, folder)
    if run_exit.code == 0 and stopped_by is None and not plan.program.is_asked_for_help:
        for note in final_notes(plan, [end.feature_use for end in agent.exits]):
            log(f"note: {note}")
    if output.lost_logs:
        log(output.lost_logs)
    return run_exit.code or int(output.is_incomplete)


def _rendezvous_handler(plan: LaunchPlan, environ: Mapping[str, str]) -> Rendezvous:
    run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    if plan.is_one_machine:
        return Rendezvous(run_id, plan.settings.num_processes)
    from headway.launcher.multinode.membership import MultiNodeRendezvous

    return MultiNodeRendezvous(plan, environ, run_id)


@contextmanager
def _signals(agent: Agent) -> Iterator[None]:
    r"""Handle the launcher's signals.

    The first stop signal raises torch's SignalException, even if another machine forwarded it. A
    second Ctrl-C on this machine ends the grace period on all machines; a repeated SIGTERM does
    not, because SLURM sends each SIGTERM twice. SIGQUIT (Ctrl-\) prints stacks; other signals are
    forwarded to the ranks. An ignored SIGHUP (nohup) stays ignored.
    """
    received: list[int] = []  # on this machine, not forwarded
    is_stopped = False

    def stop(number: int, _: FrameType | None) -> None:
        nonlocal is_stopped
        agent.signals_received.add(number)
        if number == signal.SIGINT and not is_stopped and agent.forward_interrupt():
            return
        if not agent.handler.forwards_stop:
            received.append(number)
        # other code may have swallowed the first one
        is_repeated = is_stopped and agent.ranks.is_stopping
        is_stopped = True
        ends_grace = is_repeated and number == signal.SIGINT and len(received) > 1
        agent.handler.report_stop(number, ends_grace=ends_grace)
        if ends_grace:
            agent.ranks.end_grace_period()
        elif not is_repeated:
            stopped = SignalException(f"stopped by signal {number}", signal.Signals(number))
            if not agent.ranks.defer_stop(stopped):
                raise stopped

    def forward(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1 and agent.pending_restart[0]:  # no rank can save
            stop(number, frame)
        else:
            agent.signals_received.add(number)
            agent.forward(number)

    # a shell's `&` has ignored it
    before = signals.trap(lambda *_: agent.watch.ask(), signal.SIGQUIT)
    for handler, numbers in ((stop, signals.STOP_SIGNALS), (forward, _FORWARDED)):
        for number in numbers:
            if signal.getsignal(number) != signal.SIG_IGN:
                before |= signals.trap(handler, number)
    try:
        yield
    finally:  # a run that is being stopped ignores stop signals
        signals.restore_handlers(dict.fromkeys(before, signal.SIG_IGN) if is_stopped else before)


def _report(agent: Agent, run_exit: RunExit, folder: str | None) -> None:
    """Log the run's report, or raise WorkerFailed to report a failure."""
    failure, remote_failure = run_exit.failure, run_exit.remote_failure
    again, anyway = "", ""
    if run_exit.repeats:
        again, anyway = "; repeated failure", "; --restart-anyway restarts the ranks regardless"
    if run_exit.line:
        log(run_exit.line)
        return
    if failure is not None:
        where, aftermath = failure_location(failure, folder), failure.aftermath
    elif remote_failure is not None:
        where = f"{remote_failure.where} (machine {remote_failure.machine})"
        aftermath = describe_killed(agent.exits)
    if (failed := failure or remote_failure) is not None:
        raise WorkerFailed(
            failed.cause + aftermath + again,
            where=where,
            fix=failed.fix + anyway,
            # only machine 0 has the details of other machines
            details=f"{failed.details}\n{run_exit.repeats}".strip("\n"),
            exit_code=run_exit.code,
        )
