"""Runs a plan: a single process replaces the launcher or runs in it; several run under an agent."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from typing import TYPE_CHECKING, NoReturn

from headway.errors import HeadwayError
from headway.ipc import signals
from headway.ipc.run_contract import RECORD_VARIABLE
from headway.ipc.signals import STOP_SIGNALS
from headway.ipc.stderr import flush_streams, log, waiting_for
from headway.launcher.plan.plan import LaunchPlan
from headway.launcher.plan.variables import LOOPBACK

if TYPE_CHECKING:
    from headway.history.record import Recorder
    from headway.history.store import Launch
    from headway.launcher.diagnosis.run_socket import RunSocket
    from headway.launcher.processes.starter import Starter

_DIFF_WITHIN_S = 0.5  # time limit on `git diff` before a single process starts


def run(
    plan: LaunchPlan,
    environ: Mapping[str, str],
    *,
    is_quiet: bool = False,
    start: Callable[[], Launch] | None = None,
) -> int:
    """Run the plan and return the exit code.

    This function does not return if the script replaces this process. `start` returns the launch's
    entry in the run record; if `start` is None, no record is written.

    Raises LaunchError or WorkerFailed.
    """
    environment = launch_environment(plan, environ)
    environment.pop(RECORD_VARIABLE, None)  # inherited from an outer run
    if plan.is_single_rank:
        import socket

        with socket.create_server((LOOPBACK, 0)) as server:  # a free port
            address = server.getsockname()
        environment |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(address[1])}
    if plan.supervised is None:
        if start is not None:
            environment |= _begin_record(environ, start)
        if not plan.in_process:
            _replace_with_script(plan, environment)
        _run_in_process(plan, environment)
        return 0
    from headway.launcher.processes.starter import Starter, require_resources

    require_resources(plan.settings.num_processes)
    # the fork server imports torch in parallel
    starter = Starter(plan, environment, is_quiet=is_quiet)
    try:
        signals.trap(lambda *_: log("no rank has started yet"), signal.SIGQUIT)

        with _serve_run_socket(plan) as run_socket, _record_run(plan, environ, start) as recorder:
            import_of_torch = waiting_for("the import of torch", is_quiet=is_quiet)
            with exit_on_stop_signals(starter, recorder), import_of_torch:
                from headway.launcher.processes.supervise import supervise

            code = supervise(plan, starter, run_socket, environ, recorder)
            if recorder is not None:
                recorder.exit_code = code
            return code
    finally:
        starter.close()


@contextmanager
def exit_on_stop_signals(starter: Starter, recorder: Recorder | None = None) -> Iterator[None]:
    """Exit on stop signals without raising an exception, which an import of torch could swallow."""

    def end(number: int, _: object) -> None:
        signals.trap(signal.SIG_IGN, *STOP_SIGNALS)
        starter.close()
        stop = signal.Signals(number)
        line = "interrupted" if stop == signal.SIGINT else f"stopped by {stop.name}"
        log(line)
        if recorder is not None:
            recorder.exit_code, recorder.report = 128 + number, line
            recorder.close()
        os._exit(128 + number)

    usual = [sig for sig in STOP_SIGNALS if signals.is_default_handler(signal.getsignal(sig))]
    with signals.trapped(end, *usual):
        yield


def _serve_run_socket(plan: LaunchPlan) -> AbstractContextManager[RunSocket | None]:
    """Answer requests from `headway top` and `headway stack` if a socket can be created."""
    from headway.launcher.diagnosis.run_socket import ActiveRun, RunSocket

    settings = plan.settings
    run = ActiveRun(
        pid=os.getpid(),
        program=plan.program.name,
        num_processes=settings.num_processes,
        machine_rank=settings.machine_rank or 0,
        num_machines=settings.num_machines,
        began_at=time.time(),
    )
    try:
        return closing(RunSocket(run))
    except OSError as error:
        log(f"note: `headway top` and `headway stack` cannot reach this launch: {error.strerror}")
        return nullcontext()


def _begin_record(environ: Mapping[str, str], start: Callable[[], Launch]) -> dict[str, str]:
    """Write the run record of a process without a launcher; return the variable for its path."""
    from headway.history.store import begin, failure_message, new_path

    path = new_path(environ)
    try:
        begin(path, start(), _DIFF_WITHIN_S)
    except OSError as error:
        log(failure_message(error))
        return {}
    return {RECORD_VARIABLE: f"{os.getpid()}:{path}"}


@contextmanager
def _record_run(
    plan: LaunchPlan, environ: Mapping[str, str], start: Callable[[], Launch] | None
) -> Iterator[Recorder | None]:
    """Record the run in the `with` block, including an exception that terminates the run."""
    recorder: Recorder | None = None
    try:
        if start is not None:
            from headway.history.record import Recorder
            from headway.history.store import new_path
            from headway.ipc.secrets import secrets_among

            secrets = secrets_among(launch_environment(plan, environ), plan.program.args)
            recorder = Recorder(new_path(environ), start, secrets)
        yield recorder
    except BaseException as raised:
        error = _as_launch_error(raised)
        if recorder is not None:
            recorder.exit_code, recorder.report = _exit_of(error)
        if error is raised:
            raise
        raise error from None
    finally:
        if recorder is not None:
            recorder.close()


def _as_launch_error(error: BaseException) -> BaseException:
    """Return a LaunchError if a system resource is exhausted, otherwise the error itself."""
    from headway.launcher.diagnosis.torch_messages import NO_MAPPING, NO_THREAD, contains
    from headway.launcher.processes.starter import cannot_start

    scarce = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)
    if isinstance(error, OSError) and error.errno in scarce:
        return cannot_start(error)
    is_ours = isinstance(error, HeadwayError)
    if isinstance(error, RuntimeError) and not is_ours and contains(str(error), NO_THREAD):
        return cannot_start(OSError(errno.EAGAIN, str(error)))
    is_unmapped = isinstance(error, ImportError) and contains(str(error), NO_MAPPING)
    if isinstance(error, MemoryError) or is_unmapped:
        return cannot_start(OSError(errno.ENOMEM, str(error) or os.strerror(errno.ENOMEM)))
    return error


def _exit_of(error: BaseException) -> tuple[int, str]:
    """Return the exit code and the report of a launch that raised an exception."""
    if isinstance(error, SystemExit):  # from a stop signal
        return int(error.code or 0), "stopped before the ranks had started"
    code = 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 1)
    return code, str(error) or type(error).__name__


def launch_environment(plan: LaunchPlan, environ: Mapping[str, str]) -> dict[str, str]:
    changes = {name: change.value for name, change in plan.environment.items()}
    return {name: value for name, value in {**environ, **changes}.items() if value is not None}


def _replace_with_script(plan: LaunchPlan, environment: Mapping[str, str]) -> NoReturn:
    """Replace this process with the script's Python, which keeps the pid, terminal and stdin."""
    flush_streams()
    # Python ignores these signals, and exec would keep them ignored
    signals.restore_handlers(dict.fromkeys((signal.SIGPIPE, signal.SIGXFSZ), signal.SIG_DFL))
    program = plan.program
    command = program.command(plan.python)
    if plan.not_hooked is None:
        from headway.launcher.rank.worker import bootstrap_code

        code = bootstrap_code("rank.worker")
        command = [*plan.python, "-c", code, "", program.kind, program.name, *program.args]
    try:
        os.execve(command[0], command, environment)
    except OSError as error:
        from headway.launcher.processes.starter import cannot_start

        raise cannot_start(error) from None


def _run_in_process(plan: LaunchPlan, environment: Mapping[str, str]) -> None:
    """Run the script in this interpreter, so that an IDE's debugger can debug it."""
    import atexit

    from headway.launcher.rank import worker

    os.environ.clear()
    os.environ.update(environment)
    if not worker.is_path_safe():
        del sys.path[0]  # the folder of the `headway` command; the script's folder replaces it
    ours = [sig for sig in STOP_SIGNALS if signal.getsignal(sig) is signals.exit_on_signal]
    signals.reset_handlers(*ours)
    atexit.register(worker.finish_process)
    program = plan.program
    worker.run_alone(program.kind, program.name, program.args)
