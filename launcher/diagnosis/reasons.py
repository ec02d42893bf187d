"""Why a run failed: a table of reasons; the first one that matches is reported. Pure."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable
from typing import NamedTuple

from headway.errors import MORE_PROCESSES
from headway.ipc.paths import installer_of
from headway.ipc.records import Crash
from headway.ipc.stderr import shown
from headway.launcher.diagnosis.torch_messages import (
    COMMUNICATION,
    COMMUNICATION_ERRORS,
    DEBUGGER_LEFT,
    DISK_FAILED,
    DISK_FULL,
    LOADER_WORKER_ENDED,
    LOADER_WORKER_KILLED,
    NEW_SEMAPHORE,
    NO_GPU,
    NO_INPUT,
    NO_KERNELS,
    NO_NCCL,
    NO_THREAD,
    OUT_OF_CPU_MEMORY,
    OUT_OF_MEMORY,
    OUT_OF_MEMORY_ERROR,
    SHARED_MEMORY_FULL,
    WRAPPED_MODEL,
    contains,
)


class Evidence(NamedTuple):
    code: int  # of its process; negative for a signal
    crash: Crash | None = None  # the exception that nothing handled
    message: str = ""  # the text of sys.exit("text")
    memory_kills: int = 0  # by the kernel's OOM killer during the run
    lost_reader: str = ""  # the launcher's streams that lost their reader
    divergence: tuple[str, ...] = ()  # where it failed in communication: how the ranks diverged
    killed_after_s: float | None = None  # by the launcher: it had not stopped in its grace period
    exited_silently: bool = False  # reported neither an end nor an exception
    is_forwarded: bool = False  # the launcher has received the signal that ended it


class Reason(NamedTuple):
    """One reason why a run fails.

    `cause` is one sentence with fields: {rank} (as "rank 1 of 4"), {exception}, {signal}, {code},
    {message}, {memory_kills}, {lost_reader} and {divergence}; a fix may have {installer} and
    {module}, the missing one under its package's usual name. Without a `fix` the report has none.
    """

    name: str  # identifies it
    matches: Callable[[Evidence], bool]
    cause: str
    fix: str


_PACKAGES = {"PIL": "pillow", "bs4": "beautifulsoup4", "cv2": "opencv-python", "yaml": "pyyaml"}
_PACKAGES |= {"skimage": "scikit-image", "sklearn": "scikit-learn"}
_EXCEPTION = "{rank} failed with {exception}"
_OOM_KILL_FIX = (
    "usually this is the kernel's OOM killer (`dmesg` names what it killed): use fewer processes, "
    "loader workers or samples, or raise the memory limit of the job or container; otherwise "
    "another program killed it"
)


def _for_crash(name: str, matches: Callable[[Crash], bool], fix: str, more: str = "") -> Reason:
    """Return the reason for an exception that nothing handled."""
    return Reason(
        name, lambda seen: seen.crash is not None and matches(seen.crash), _EXCEPTION + more, fix
    )


REASONS = (
    Reason(
        "reader_left",
        lambda seen: bool(seen.lost_reader) and _is_broken_pipe(seen),
        "the reader of {lost_reader} went away",
        "",
    ),
    Reason(
        "ranks_diverged",
        lambda seen: bool(seen.divergence),
        "{divergence}",
        "have every rank enter the same collectives in the same order; to leave a "
        "loop: accelerator.set_trigger() on one, `if accelerator.check_trigger(): break` on all",
    ),
    _for_crash(
        "device_out_of_memory",
        lambda crash: is_out_of_memory(crash),
        "the device's memory is full: make the batch smaller (and gradient_accumulation_steps "
        "larger, so that an optimizer step sees as many samples as before)",
    ),
    _for_crash(
        "no_nccl",
        lambda crash: contains(crash.message, NO_NCCL),
        "NCCL needs NVIDIA GPUs, and a torch that is built for them: on CPUs use "
        'init_process_group("gloo")',
    ),
    _for_crash(
        "no_gpu",
        lambda crash: contains(crash.message, NO_GPU),
        "the script requests a GPU, but torch finds none here (`headway doctor` prints why): "
        'use accelerator.device, or torch.device("cpu")',
    ),
    _for_crash(
        "no_kernels",
        lambda crash: contains(crash.message, NO_KERNELS),
        "this torch is not built for this GPU: `headway doctor` names a build that is",
    ),
    _for_crash(
        "shared_memory_full",
        # the whole traceback: that of a loader worker is in it
        lambda crash: (
            contains(crash.traceback, SHARED_MEMORY_FULL)
            or (contains(crash.message, [DISK_FULL]) and contains(crash.traceback, [NEW_SEMAPHORE]))
        ),
        "/dev/shm is full, through which loader workers pass batches: start the container with "
        "`docker run --shm-size=8g`, in Kubernetes mount an emptyDir of medium Memory at /dev/shm; "
        "or use num_workers=0",
    ),
    _for_crash(
        "wrapped_model",
        lambda crash: crash.kind == "AttributeError" and contains(crash.message, WRAPPED_MODEL),
        "with several ranks the prepared model is wrapped: its own attributes are those of "
        "accelerator.unwrap_model(model)",
    ),
    _for_crash(
        "no_input",
        lambda crash: crash.kind == "EOFError" and contains(crash.message, NO_INPUT),
        "of the ranks only rank 0 has the standard input: pass the answer as an argument of the "
        "script, or ask under `if accelerator.is_main_process:`",
    ),
    _for_crash(
        "module_not_found",
        lambda crash: crash.kind == "ModuleNotFoundError",
        "a package: install it for the Python of this launch, `{installer} {module}`, "
        "or launch from the environment that has it; a file of yours: put its folder on PYTHONPATH",
    ),
    _for_crash(
        "file_not_found",
        lambda crash: crash.kind == "FileNotFoundError" and ": '/" not in crash.message,
        "a relative path begins in the folder of the launch, not in the script's: pass an absolute "
        "one, or use `pathlib.Path(__file__).parent`",
    ),
    _for_crash("no_process", lambda crash: contains(crash.message, NO_THREAD), MORE_PROCESSES),
    _for_crash(
        "out_of_memory",
        lambda crash: crash.kind == "MemoryError" or contains(crash.message, OUT_OF_CPU_MEMORY),
        "this process's memory is full, or at a limit (`ulimit -v`): use fewer processes, "
        "loader workers or samples on this machine",
    ),
    _for_crash(
        "debugger_left",
        lambda crash: crash.kind == DEBUGGER_LEFT.text,
        "pass --debug-rank RANK to attach the terminal to one rank; on the others breakpoint() and "
        "pdb.set_trace() do nothing; exit the debugger with c, not with q",
        ": its debugger was left, or found no terminal to read from",
    ),
    Reason(
        "loader_worker_killed",
        lambda seen: _has_lost_loader_worker(seen),
        _EXCEPTION + ": one of its loader workers was killed{memory_kills}",
        _OOM_KILL_FIX,
    ),
    _for_crash(
        "error_in_headway",
        lambda crash: crash.is_from_headway,
        "check the script's call that leads there; if it is right, this is an error in Headway: "
        "report it with the traceback",
        ", raised in a file of Headway",
    ),
    _for_crash("exception", lambda _: True, "fix the script at the line the traceback points to"),
    Reason(
        "left_without_exit",
        lambda seen: seen.code == 0,
        "{rank} left by os._exit(0) while the others were still running",
        "run every rank to completion, or call sys.exit()",
    ),
    Reason(
        "did_not_stop",
        lambda seen: seen.code == -signal.SIGKILL and seen.killed_after_s is not None,
        "{rank} was asked to stop, and did not",
        "look at where the ranks are with `headway stack` before you stop the run; ranks wait for "
        "ever where one calls accelerator.checkpoint() and another does not",
    ),
    Reason(
        "killed",
        lambda seen: seen.code == -signal.SIGKILL,
        "{rank} was ended by {signal}{memory_kills}",
        _OOM_KILL_FIX,
    ),
    Reason(
        "segmentation_fault",
        lambda seen: seen.code == -signal.SIGSEGV,
        "{rank} was ended by {signal}",
        "the stack above names the native code; a mismatched wheel is the usual cause",
    ),
    Reason(
        "signal_passed_on",
        lambda seen: seen.is_forwarded,
        "{rank} was ended by {signal}",
        "the launcher received {signal} and passed it on to the ranks: handle it in the script, by "
        "accelerator.checkpoint() (SIGTERM, SIGUSR1) or a handler of signal.signal",
    ),
    Reason(
        "signal",
        lambda seen: seen.code < 0,
        "{rank} was ended by {signal}",
        "check its output above; if it printed nothing, another process sent the signal",
    ),
    Reason(
        "left_by_exit",
        lambda seen: seen.exited_silently,
        "{rank} ended with exit code {code}, by os._exit() or outside of Python code",
        "raise an exception instead of calling os._exit(), which reports nothing",
    ),
    Reason(
        "exit_message",
        lambda seen: bool(seen.message),
        "{rank} ended with exit code {code}: {message}",
        "check its output above",
    ),
    Reason(
        "exit_code",
        lambda seen: True,
        "{rank} ended with exit code {code}",
        "check its output above; if it printed nothing, raise an exception instead of sys.exit()",
    ),
)


_TRANSIENT = (
    *("reader_left", "ranks_diverged", "device_out_of_memory", "out_of_memory"),
    *("shared_memory_full", "loader_worker_killed", "no_process"),
)
_CONNECTION_ERRORS = (  # exceptions of Python, requests, urllib3 and httpx, by their classes
    *("ConnectionError", "ConnectionRefusedError", "ConnectionResetError", "BrokenPipeError"),
    *("ConnectionAbortedError", "TimeoutError", "gaierror", "herror", "URLError", "HTTPError"),
    *("RemoteDisconnected", "IncompleteRead", "IncompleteReadError", "SSLError", "ProtocolError"),
    *("ConnectTimeout", "ReadTimeout", "Timeout", "MaxRetryError", "ReadTimeoutError"),
    *("ChunkedEncodingError", "ConnectError", "ReadError", "RemoteProtocolError"),
)


def is_transient(evidence: Evidence) -> bool:
    """Return whether a restart may help: memory, a disk, a connection, or no exception at all."""
    crash = evidence.crash
    if crash is None or crash.code < 0 or find_reason(evidence).name in _TRANSIENT:
        return True
    if crash.kind in _CONNECTION_ERRORS or is_communication_error(crash):
        return True
    # the text: a loader worker and another rank send it without the error's number
    return contains(f"{crash.message}\n{crash.traceback}", DISK_FAILED)


def find_reason(evidence: Evidence) -> Reason:
    """Return the first reason that matches; the last one always does."""
    return next(reason for reason in REASONS if reason.matches(evidence))


def formatted(text: str, evidence: Evidence, rank: str = "") -> str:
    missing = re.search(r"No module named '(\w+)", evidence.crash.message if evidence.crash else "")
    kills = f" (OOM kills by the kernel during the run: {evidence.memory_kills})"
    sentence = text.format(
        rank=rank,
        exception=evidence.crash and evidence.crash.name,
        signal=signal_name(-evidence.code),
        code=evidence.code,
        message=evidence.message,
        memory_kills=kills if evidence.memory_kills else "",
        lost_reader=evidence.lost_reader,
        divergence="".join(evidence.divergence[:1]),
        installer=installer_of(sys.executable),
        module=_PACKAGES.get(missing[1], missing[1]) if missing else "NAME",
    )
    return shown(sentence)


def _is_broken_pipe(seen: Evidence) -> bool:
    if seen.crash is None:
        return seen.code == -signal.SIGPIPE
    return seen.crash.kind == BrokenPipeError.__name__


def _has_lost_loader_worker(seen: Evidence) -> bool:
    texts = LOADER_WORKER_ENDED if seen.memory_kills else LOADER_WORKER_KILLED
    # the whole traceback: torch mostly raises another exception from the one that says why
    return seen.crash is not None and contains(seen.crash.traceback, texts)


def is_out_of_memory(crash: Crash) -> bool:
    """Return whether a device was full: torch's class on CUDA, its message for MPS."""
    return crash.kind == OUT_OF_MEMORY_ERROR.text or contains(crash.message, OUT_OF_MEMORY)


def is_communication_error(crash: Crash) -> bool:
    """Return whether it is an error of gloo or NCCL, which may be due to what another rank does."""
    if crash.kind in [error.text for error in COMMUNICATION_ERRORS]:
        return True
    is_torchs = crash.kind == "RuntimeError" and crash.is_from_torch
    return is_torchs and contains(crash.message, COMMUNICATION)


def signal_name(number: int) -> str:
    """Return SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
