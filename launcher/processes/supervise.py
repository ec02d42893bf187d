"""Supervises the ranks of one machine: signals to the launcher, how the run ends, the exit code."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import TYPE_CHECKING

from torch.distributed.elastic.multiprocessing.api import SignalException

from headway.contract import signals
from headway.contract.memory_use import describe_memory_use
from headway.contract.notes import say
from headway.contract.records import STOPPED_AND_SAVED
from headway.errors import STOP_SIGNALS, HeadwayError, Stopped, WorkerFailed
from headway.history.record import LOGS, TAIL_LINES
from headway.launcher.diagnosis.failures import Failure, describe_killed
from headway.launcher.diagnosis.run_socket import RunSocket
from headway.launcher.diagnosis.watch import Watch
from headway.launcher.figures.figures import RunFigures
from headway.launcher.machines.rendezvous import Rendezvous, RunEnded
from headway.launcher.output.console import Console, StatusLine
from headway.launcher.output.pipes import UNREAD_AFTER_FAILURE_S, Output
from headway.launcher.plan.notes import unused
from headway.launcher.plan.plan import LaunchPlan
from headway.launcher.processes.agent import Agent
from headway.launcher.processes.failure_record import (
    place_of,
    record_elsewhere,
    record_here,
    write_record,
)
from headway.launcher.processes.log_folder import create_log_folder
from headway.launcher.processes.starter import ServerEnded, Starter
from headway.launcher.rank.debugging import leave_prompt, lent_terminal
from headway.settings.setting import AUTO, OFF, Seconds
from headway.settings.table import RAW

if TYPE_CHECKING:
    from headway.history.recorder import Recorder
    from headway.launcher.machines.messages import Failed

# the last for the rank that has the terminal
_FORWARDED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH)
_ENDED_BY_INTERRUPT = 130


def supervise(
    plan: LaunchPlan,
    starter: Starter,
    run_socket: RunSocket | None,
    colored: bool,
    environ: Mapping[str, str],
    recorder: Recorder | None = None,
) -> int:
    """Run all ranks of this machine and return the launcher's exit code.

    `environ` is what the launcher has inherited. Raises WorkerFailed with a rank's own exit code,
    LaunchError where the ranks could not be started or another machine failed, and Stopped where
    a signal has come while other machines wait for this one to join.
    """
    settings = plan.settings
    folder = create_log_folder(settings)
    is_debugged = settings.debug_rank is not None
    is_raw = settings.output == RAW
    console = Console(
        prefixed=settings.num_processes * settings.num_machines > 1 and not is_raw,
        colored=colored,
        ranks=() if is_debugged else settings.ranks,
        is_raw=is_raw,
        moves=environ.get("TERM", "dumb") != "dumb",
    )
    figures = RunFigures()
    status = None
    if settings.status != OFF and not is_debugged and not is_raw:
        every_s = None if settings.status == AUTO else float(Seconds(1)(settings.status))
        status = StatusLine(console, figures.line, every_s)
        figures.tell = console.warn
    output = Output(console, folder=folder, status=status)
    watch = Watch(
        None if is_debugged else settings.hang_timeout,
        lambda: output.last_output_at,
        figures.note,
    )
    if run_socket is not None:
        run_socket.figures = lambda: figures.to_json(output.last_line)
        run_socket.describe = lambda interrupts: watch.observe(interrupts).describe()
    handler = _rendezvous_handler(plan, environ)
    agent = Agent(plan, starter, handler, output, watch, figures, environ)
    if recorder is not None:
        figures.listeners.append(recorder.note)
        agent.on_restart = recorder.restart
        recorder.tails = lambda: {
            end.rank: output.tail(end.rank, TAIL_LINES) for end in agent.exits
        }
        recorder.saved_in, recorder.step = watch.saved_in, watch.step
        if folder is not None:
            recorder.keep(LOGS, folder)
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
        if handler.is_awaited:
            raise Stopped(stopped_by) from None
    except (ServerEnded, RunEnded):
        pass
    except HeadwayError as error:
        handler.give_up(error)
        error.peers_notified = True
        raise
    finally:
        has_failed = any(end.is_failure for end in agent.exits)
        has_failed |= stopped_by is not None and not _have_saved(agent)
        watch.close()
        if has_failed or watch.hang is not None:
            output.close(UNREAD_AFTER_FAILURE_S)
        else:
            output.close()
        handler.shutdown()
        if has_failed and is_debugged:
            leave_prompt()
    if recorder is not None and (failure := agent.find_failure()) is not None:
        recorder.report = failure.cause  # where no error says more
    return _exit_code(agent, stopped_by, folder)


def _rendezvous_handler(plan: LaunchPlan, environ: Mapping[str, str]) -> Rendezvous:
    run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    if plan.is_one_machine:
        return Rendezvous(run_id)
    from headway.launcher.machines.rounds import MachinesRendezvous

    return MachinesRendezvous(plan, environ, run_id)


@contextmanager
def _signals(agent: Agent) -> Iterator[None]:
    r"""Handle the launcher's signals.

    The first stop signal raises torch's SignalException. Ctrl-C after it ends the grace period, on
    all machines; a repeated SIGTERM does not, since SLURM sends each one twice. SIGQUIT (Ctrl-\)
    prints stacks; others are forwarded to the ranks. An ignored SIGHUP (nohup) stays ignored.
    """
    seen: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and not seen and agent.forwards_interrupt():
            return
        seen.append(number)
        is_repeated = len(seen) > 1 and agent.is_stopping  # else other code swallowed the first
        ends_grace = is_repeated and number == signal.SIGINT
        agent.handler.tell_stop(number, ends_grace=ends_grace)
        if ends_grace:
            agent.end_grace_period()
        elif not is_repeated:
            raise SignalException(f"stopped by signal {number}", signal.Signals(number))

    def forward(number: int, _: FrameType | None) -> None:
        agent.forward(number)

    def show_stacks(*_: object) -> None:
        agent.watch.ask()

    before = signals.trap(show_stacks, signal.SIGQUIT)  # ignored where a shell began with `&`
    for handler, numbers in ((stop, STOP_SIGNALS), (forward, _FORWARDED)):
        for number in numbers:
            if signal.getsignal(number) != signal.SIG_IGN:
                before |= signals.trap(handler, number)
    try:
        yield
    finally:  # a run that is being stopped ignores stop signals
        signals.put_back(dict.fromkeys(before, signal.SIG_IGN) if seen else before)


def _exit_code(agent: Agent, stopped_by: signal.Signals | None, folder: str | None) -> int:
    has_lost = agent.watch.will_save() and not _have_saved(agent)
    if stopped_by == signal.SIGINT:
        unsaved = ", and nothing was saved since the last checkpoint" if has_lost else ""
        failed = agent.handler.ended_by
        amid = f"; before, {failed.cause}" if failed is not None else ""
        _tell(agent, f"interrupted{unsaved}{amid}{describe_killed(agent.exits)}")
        return _ENDED_BY_INTERRUPT
    failure = agent.find_failure()
    ended_by = agent.handler.ended_by or (agent.failed_amid_stop if has_lost else None)
    if ended_by is not None and (failure is None or ended_by.machine != agent.handler.machine):
        if folder is not None:
            write_record(record_elsewhere(ended_by), folder)
        if agent.is_reported_by_machine_0:
            _tell(agent, f"the run has failed on machine {ended_by.machine}, as machine 0 reports")
            return ended_by.exit_code
        raise _failed_elsewhere(agent, ended_by)
    if failure is None:
        if stopped_by is not None and len(agent.exits) < agent.plan.settings.num_processes:
            _tell(agent, f"stopped by {stopped_by.name}")  # before all ranks had started
            return 128 + stopped_by
        saved = any(end.code == STOPPED_AND_SAVED for end in agent.exits)
        if stopped_by is None and not saved:
            _tell_of_success(agent)
        return STOPPED_AND_SAVED if saved else int(agent.output.console.has_lost_output)
    if stopped_by is not None and not has_lost:
        _tell(agent, f"stopped by {stopped_by.name}{describe_killed(agent.exits)}")
        is_consequence = isinstance(failure, Failure) and failure.doubt > 1
        return 128 + stopped_by if is_consequence else failure.exit_code
    if folder is not None:
        write_record(record_here(failure, agent.handler.machine, folder), folder)
    if ended_by is not None and agent.is_reported_by_machine_0:
        _tell(agent, "the run has failed here, as machine 0 reports")
        return failure.exit_code
    if not failure.fix:
        _tell(agent, failure.cause)
        return failure.exit_code
    agent.output.console.begin_line()
    raise WorkerFailed(
        failure.cause + failure.aftermath,
        where=place_of(failure, folder),
        fix=failure.fix,
        details=failure.details,
        exit_code=failure.exit_code,
    )


def _tell_of_success(agent: Agent) -> None:
    """Print what the ranks left unused, and how much memory they took if it was estimated."""
    for note in unused(agent.plan.settings, [end.uses for end in agent.exits]):
        _tell(agent, f"note: {note}")
    memory = {end.rank: end.memory for end in agent.exits if end.memory is not None}
    if memory and agent.plan.estimated_bytes is not None:
        _tell(agent, describe_memory_use(agent.plan.estimated_bytes, memory))


def _failed_elsewhere(agent: Agent, failed: Failed) -> WorkerFailed:
    """Return the report of a failure on another machine; machine 0 alone knows the traceback."""
    agent.output.console.begin_line()
    return WorkerFailed(
        failed.cause + describe_killed(agent.exits),
        where=f"{failed.where} (machine {failed.machine})",
        fix=failed.fix,
        details=failed.details,
        exit_code=failed.exit_code,
    )


def _tell(agent: Agent, text: str) -> None:
    """Print a line on stderr, after what the ranks have written."""
    agent.output.console.begin_line()
    say(text)


def _have_saved(agent: Agent) -> bool:
    """Return whether all ranks have ended as those do that save when they are asked to stop."""
    codes = {end.code for end in agent.exits}
    return len(agent.exits) == agent.plan.settings.num_processes and codes <= {0, STOPPED_AND_SAVED}
