"""Runs the user's script as `__main__` in a rank's process, and reports its exit.

The script must not notice a difference from `python script.py`. The same code runs in a process
forked from the fork server and in a fresh interpreter.
"""

from __future__ import annotations

import atexit
import builtins
import io
import os
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable, Collection, Sequence
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from importlib.util import MAGIC_NUMBER
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from headway.errors import Code, ConfigError, HeadwayError
from headway.ipc import process_groups, signals
from headway.ipc.progress import process_progress
from headway.ipc.records import Crash, Frame, ScriptEnd
from headway.ipc.run_contract import epoch_time, read_ranks, read_run
from headway.launcher.diagnosis.reasons import is_communication_error, may_pass
from headway.launcher.diagnosis.stacks import BEFORE_SCRIPT, PACKAGE, is_in_library
from headway.launcher.plan.program import RUNTIMES, finder_in, interpreter
from headway.launcher.rank import import_hooks, rank_monitor

STOP_SIGNALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
"""Signals blocked while a rank starts, so that none is lost or reaches an inherited handler."""

USER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that are forwarded to the ranks; a cluster may send them to all processes of a job."""

T = TypeVar("T")

_IMPORT_ERRORS = ("AttributeError", "ImportError", "ModuleNotFoundError")
_GLOO_WAIT_S = 0.02  # for gloo's threads to release their last works; see distributed/world.py

_BOOTSTRAP = """\
import sys
if sys.path[:1] == [""]: del sys.path[0]
from headway.launcher.{} import main
main()
"""


def bootstrap_code(module: str) -> str:
    """Return Python code that calls `main` of a launcher module, for `python -c`.

    The code removes the working directory, which Python puts first on sys.path with -c, because a
    user's file there could shadow any module.
    """
    return _BOOTSTRAP.format(module)


def main() -> None:
    """Run the program from the command line in this new interpreter.

    The status channel is empty if this process has replaced the launcher.
    """
    channel, kind, name, *args = sys.argv[1:]
    atexit.register(finish_process)
    if not channel:
        run_alone(kind, name, args)
        return
    os.set_inheritable(int(channel), False)
    rank_monitor.start(int(channel))
    run_program(kind, name, args, blocked=STOP_SIGNALS)


def run_alone(kind: str, name: str, args: Sequence[str]) -> None:
    """Run the program without a launcher, and record its exit."""
    try:
        run_program(kind, name, args)
    finally:
        _attempt(_record_end, None)


def _record_end() -> None:
    from headway.history import process_record

    if (end := _end_record) is not None:
        report = end.traceback if isinstance(end, Crash) else end.message
        process_record.record_exit(end.code, report, process_progress())


def run_program(
    kind: str, name: str, args: Sequence[str], *, blocked: Collection[signal.Signals] = ()
) -> None:
    """Run the user's program as `__main__`; the interpreter then exits as usual.

    The signals in `blocked` are unblocked just before the program starts. Raises the script's
    SystemExit or, after printing an unhandled exception, a SystemExit with its exit code.
    """
    run = read_run()
    if run is not None and run.debug_rank is not None:
        from headway.launcher.rank.debugging import skip_prompts, suspend_timeouts

        suspend_timeouts()
        ranks = read_ranks()
        if ranks is not None and ranks.rank != run.debug_rank:
            skip_prompts()
    if run is not None and run.replace_accelerate:
        from headway.compat.forwarding import replace_accelerate

        replace_accelerate()
    if process_progress().is_connected:
        import_hooks.watch_steps()
    if run is not None and run.library_hooks:
        import_hooks.hook_libraries()
    sys.argv = [name, *args]
    # a script may start itself again with this command
    sys.orig_argv = [*interpreter(), *["-m"] * (kind == "module"), *sys.argv]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    vars(main).update(__builtins__=builtins, __annotations__={})
    stop = crash = None
    hooks: Any = None, None
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
        if kind == "module":
            _run_as_main(name, None if is_path_safe() else os.getcwd(), alter_argv=True)
        elif finder_in(file := os.path.join(os.getcwd(), name)) is not None:  # has `__main__`
            _run_as_main("__main__", file, alter_argv=False)
        else:
            _run_file(file, main)
    except SystemExit as error:
        stop = error
    except BaseException as error:  # noqa: BLE001  printed and reported below
        crash = error, sys.exc_info()[2]  # error.__traceback__ may be the script's own property
    try:  # the script's trace function must not run in the report: it may raise
        hooks = sys.gettrace(), sys.getprofile()
        if callable(hooks[1]):  # Python cannot restore another one, such as cProfile's
            sys.setprofile(None)
    except BaseException:  # noqa: BLE001  Python has removed the function that raised
        pass
    sys.settrace(None)
    try:  # outside the handler: an exception in sys.excepthook has no context
        if crash is None:
            _report_end(stop)
        else:
            _report_crash(*crash)
    finally:
        sys.settrace(hooks[0])
        if callable(hooks[1]):
            sys.setprofile(hooks[1])
    if stop is not None:
        raise stop


def _run_file(file: str, main: types.ModuleType) -> None:
    if not is_path_safe():
        _add_to_path(os.path.dirname(os.path.realpath(file)))
    main.__file__ = file
    main.__cached__ = None  # type: ignore[attr-defined]
    loader: SourcelessFileLoader | SourceFileLoader = SourceFileLoader("__main__", file)
    code: Any
    try:
        with io.open_code(file) as source:
            text = source.read()
        if file.endswith(".pyc") or text[:2] == MAGIC_NUMBER[:2]:  # as python does
            loader = SourcelessFileLoader("__main__", file)
            code = loader.get_code("__main__")
        else:
            code = compile(text, file, "exec", dont_inherit=True)
        main.__loader__ = loader
    except OSError as error:
        raise ConfigError(
            f"script {file!r} can no longer be read: {error.strerror}",
            where="the start of this rank",
            fix="keep the script in place during the run; every restart reads it again",
            code=Code.NO_PROGRAM,
        ) from None
    exec(code, main.__dict__)  # noqa: S102  the user's script


def _run_as_main(module: str, folder: str | None, *, alter_argv: bool) -> None:
    """Run a module as `python -m` does, with `folder` first on sys.path.

    Relies on a private function of runpy: the public ones replace `__main__` only temporarily.
    """
    import runpy

    if folder is not None:
        _add_to_path(folder)
    runpy._run_module_as_main(module, alter_argv)  # type: ignore[attr-defined]


def _add_to_path(folder: str) -> None:
    sys.path.insert(0, folder)
    import_hooks.prefer_modules_in(folder)


def is_path_safe() -> bool:
    """Return whether Python omits the program's folder from sys.path (-P, -I)."""
    return bool(getattr(sys.flags, "safe_path", False))


def _attempt(do: Callable[[], T], otherwise: T) -> T:
    """Return `do()`, or `otherwise` if an object of the script raises an exception."""
    try:
        return do()
    except BaseException:  # noqa: BLE001  also a SystemExit from `__str__`, as in Python
        return otherwise


def _report_end(stop: SystemExit | None) -> None:
    """Report that the program exited by itself, unless it called os._exit."""
    readers = tuple(name for name in RUNTIMES if name in sys.modules)
    end = ScriptEnd(
        time=epoch_time(),
        code=0,
        groups=_attempt(rank_monitor.read_groups, ()),
        feature_use=process_progress().feature_use._replace(readers=readers),
    )
    if stop is not None:
        end = _attempt(lambda: _with_exit(end, stop), end._replace(code=1))
    _send_end(end)


def _send_end(record: ScriptEnd | Crash) -> None:
    """Send the program's exit record, and store it for `run_alone`."""
    global _end_record
    _end_record = record
    progress = process_progress()
    if progress.step:  # the last heartbeat may be a second old
        _attempt(progress.finish, None)
        progress.send(progress.snapshot())
    progress.send(record)


_end_record: ScriptEnd | Crash | None = None


def _with_exit(end: ScriptEnd, stop: SystemExit) -> ScriptEnd:
    frame = traceback.extract_tb(stop.__traceback__)[-1]
    return end._replace(
        code=stop.code & 255 if isinstance(stop.code, int) else int(stop.code is not None),
        message=stop.code[:2000] if isinstance(stop.code, str) else "",
        exited_at=Frame(frame.filename, frame.lineno or 0, frame.name),
    )


def _report_crash(error: BaseException, trace: TracebackType | None) -> NoReturn:
    """Report an unhandled exception to the launcher, print it as Python would, and exit.

    A HeadwayError is a user error: it is printed without Headway's frames, and its exit code is
    used. A KeyboardInterrupt is not printed.
    """
    shown = _without_our_frames(trace)
    BaseException.with_traceback(error, shown)
    kind = type.__dict__["__name__"].__get__(type(error))  # a metaclass may override `__name__`
    message = _attempt(lambda: str(error)[:2000], "<exception str() failed>")  # as in Python
    ours = issubclass(type(error), HeadwayError)
    frames = "Traceback (most recent call last):\n" + "".join(traceback.format_tb(shown))
    text = _attempt(
        lambda: "".join(_format_briefly(error)) if ours else _as_python_prints(error, shown),
        f"{frames}{kind}: {message}\n",
    )
    code = error.exit_code if isinstance(error, HeadwayError) else 1
    progress, use = process_progress(), process_progress().feature_use
    is_of_training = use.accelerator or use.stopping  # otherwise, `step` counts this process only
    crash = Crash(
        time=epoch_time(),
        kind=kind,
        message=message,
        traceback=text[-20000:],
        is_from_torch=_attempt(lambda: _is_from_torch(shown), False),
        code=-signal.SIGINT if isinstance(error, KeyboardInterrupt) else code,
        groups=_attempt(rank_monitor.read_groups, ()),
        is_from_headway=_attempt(lambda: _is_from_headway(error, trace), False),
        step=progress.step if is_of_training else 0,
        may_pass=_attempt(lambda: may_pass(error), False),
    )
    crash = crash._replace(fix=_attempt(lambda: _fix_for_shadowing(crash), ""))
    if isinstance(error, HeadwayError):
        crash = _attempt(lambda: _with_fix(crash, error), crash)
    _send_end(crash)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, shown
    if isinstance(error, KeyboardInterrupt):
        global _exits_by_sigint
        _exits_by_sigint = True  # in `finish_process`, as Python does after KeyboardInterrupt
    elif ours:
        _write_error(_attempt(lambda: _without_repetition(error, text), text))
    elif not _attempt(lambda: _is_for_the_launcher(error, crash), False):
        _show(error, shown)
    sys.exit(code)


def _as_python_prints(error: BaseException, trace: TracebackType | None) -> str:
    """Return the text that Python prints; before 3.12, `traceback` omits "Did you mean" hints."""
    from contextlib import redirect_stderr

    with redirect_stderr(io.StringIO()) as printed:
        sys.__excepthook__(type(error), error, trace)
    return printed.getvalue()


def _with_fix(crash: Crash, error: HeadwayError) -> Crash:
    """Move the origin and the fix from the traceback to fields, which the launcher prints."""
    problems = "\n".join(problem.statement for problem in error.problems)
    return crash._replace(
        traceback="".join(_format_briefly(error, problems))[-20000:],
        fix="; ".join(problem.fix for problem in error.problems),
        where="; ".join(problem.where for problem in error.problems),
    )


def _fix_for_shadowing(crash: Crash) -> str:
    """Return the fix if a file shadows the module of the standard library that has failed."""
    for name in sorted(sys.stdlib_module_names & sys.modules.keys()):
        file = getattr(sys.modules[name], "__file__", None) or ""
        is_named = crash.kind in _IMPORT_ERRORS and f"'{name}'" in crash.message
        if file and not is_in_library(file) and (is_named or crash.is_from_headway):
            return f"rename {file}: it is imported instead of Python's module {name}"
    return ""


def _without_repetition(error: BaseException, text: str) -> str:
    """Return one line if rank 0 prints the same error, otherwise `text`."""
    ranks = read_ranks()
    if isinstance(error, HeadwayError) and error.is_of_all_ranks and ranks and ranks.rank:
        return f"{type(error).__name__}: {error.problems[0].title}, as on rank 0\n"
    return text


def _show(error: BaseException, trace: TracebackType | None) -> None:
    """Print an exception with sys.excepthook; if the hook fails, print both exceptions."""
    try:
        sys.excepthook(type(error), error, trace)
        return
    except SystemExit:
        raise
    except BaseException as raised:  # noqa: BLE001  printed below
        own = _without_our_frames(sys.exc_info()[2])
        second = BaseException.with_traceback(raised, own)
    _write_error("Error in sys.excepthook:\n")
    sys.__excepthook__(type(second), second, own)
    _write_error("\nOriginal exception was:\n")
    sys.__excepthook__(type(error), error, trace)


def _write_error(text: str) -> None:
    _attempt(lambda: sys.stderr.write(text), 0)


def _is_from_torch(trace: TracebackType | None) -> bool:
    frames = [frame for frame, _ in traceback.walk_tb(trace)]
    return bool(frames) and str(frames[-1].f_globals.get("__name__")).startswith("torch.")


def _is_from_headway(error: BaseException, trace: TracebackType | None) -> bool:
    """Return whether Headway's own code failed; a SyntaxError is always the script's."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(trace)]
    is_on_purpose = isinstance(error, (HeadwayError, SyntaxError, KeyboardInterrupt))
    if is_on_purpose or not codes or codes[-1].co_name == "__getattr__":  # no such attribute
        return False
    return codes[-1].co_filename.startswith(PACKAGE)


def _is_for_the_launcher(error: BaseException, crash: Crash) -> bool:
    is_known = is_communication_error(crash) or (
        isinstance(error, BrokenPipeError) and _has_lost_reader()
    )
    return is_known and process_progress().is_connected and _has_default_excepthook()


def _has_lost_reader() -> bool:
    """Return whether this process's stdout or stderr is a pipe without a reader."""
    import select

    poll = select.poll()
    for fd in (1, 2):
        poll.register(fd, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _has_default_excepthook() -> bool:
    """Return whether sys.excepthook is Python's hook, or torch's hook, which adds the rank."""
    module = sys.excepthook.__module__ or ""
    return module == "sys" or module.startswith("torch.")


def _format_briefly(error: BaseException, text: str | None = None) -> list[str]:
    """Format the script's frames, followed by `text` or the error's message."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(PACKAGE)]
    message = str(error) if text is None else text
    return [*traceback.format_list(theirs), f"{type(error).__name__}: {message}\n"]


def _without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    """Remove Headway's frames: those before the script, and wrappers of torch functions."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(BEFORE_SCRIPT):
        trace = trace.tb_next
    kept, wrappers = trace, (rank_monitor.__file__, process_groups.__file__)
    while kept is not None:
        while kept.tb_next and kept.tb_next.tb_frame.f_code.co_filename in wrappers:
            kept.tb_next = kept.tb_next.tb_next
        kept = kept.tb_next
    return trace


_exits_by_sigint = False


def finish_process() -> None:
    """Finish the process; atexit calls this function last, because it is registered first."""
    if "torch.distributed" in sys.modules:
        time.sleep(_GLOO_WAIT_S)
    if _exits_by_sigint:
        sys.stdout.flush()
        sys.stderr.flush()
        signals.restore_handlers({signal.SIGINT: signal.SIG_DFL})
        os.kill(os.getpid(), signal.SIGINT)
