"""The table of reasons for failures; the first matching reason is reported."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from headway.errors import MORE_PROCESSES, SOCKET_FIX, Code, HeadwayError
from headway.ipc.paths import installer_of
from headway.ipc.records import Crash
from headway.ipc.stderr import shown
from headway.launcher.diagnosis import torch_messages as texts
from headway.launcher.diagnosis.stacks import parse_traceback, user_frame
from headway.launcher.diagnosis.torch_messages import contains


class Evidence(NamedTuple):
    code: int  # exit code of the process; negative for a signal
    crash: Crash | None = None  # the unhandled exception
    message: str = ""  # the text of sys.exit("text")
    memory_kills: int | None = None  # by the kernel's OOM killer during the run; None: unknown
    lost_reader: str = ""  # the launcher's streams whose reader disconnected
    divergence: tuple[str, ...] = ()  # the ranks' positions, after a communication error
    killed_after_s: float | None = None  # time until the launcher killed the rank
    exited_silently: bool = False  # by os._exit or a signal, without a report
    is_forwarded: bool = False  # the launcher received the signal first
    last_lines: tuple[str, ...] = ()  # of the process's output


class Reason(NamedTuple):
    """A reason for a failure.

    `cause` is a sentence that may contain the fields {rank} ("rank 1 of 4"), {exception}, {signal},
    {code}, {message}, {memory_kills}, {lost_reader} and {divergence}. `fix` may be empty. It may
    also contain {installer} and {module}, which is the name of the missing module's package.
    """

    name: str  # a unique identifier
    matches: Callable[[Evidence], bool]
    cause: str
    fix: str


_PACKAGES = {"PIL": "pillow", "bs4": "beautifulsoup4", "cv2": "opencv-python", "yaml": "pyyaml"}
_PACKAGES |= {"skimage": "scikit-image", "sklearn": "scikit-learn"}
_EXCEPTION = "{rank} failed with {exception}"
_OOM_KILL_FIX = (
    "usually, this was the kernel's OOM killer (`dmesg` lists its kills): use fewer processes, "
    "loader workers or samples, or raise the memory limit of the job or container; otherwise, "
    "another program killed the process"
)
_NO_OOM_KILL_FIX = (
    "another program, a user or a scheduler sent the signal (systemd-oomd and earlyoom do so to "
    "free memory): the kernel counted no OOM kill in this control group during the run"
)
_COLLECTIVES_FIX = (
    "call the same collectives in the same order on all ranks; to leave a loop together, call "
    "accelerator.set_trigger() on one rank, and run `if accelerator.check_trigger(): break` on "
    "all ranks"
)


def _for_crash(name: str, matches: Callable[[Crash], bool], fix: str, more: str = "") -> Reason:
    """Return a reason that matches unhandled exceptions."""
    return Reason(
        name, lambda seen: seen.crash is not None and matches(seen.crash), _EXCEPTION + more, fix
    )


def _for_text(name: str, known: Sequence[str], fix: str) -> Reason:
    """Return a reason that matches unhandled exceptions by their message."""
    return _for_crash(name, lambda crash: contains(crash.message, known), fix)


REASONS = (
    Reason(
        "reader_left",
        lambda seen: bool(seen.lost_reader) and _is_broken_pipe(seen),
        "the reader of {lost_reader} disconnected",
        "",
    ),
    _for_text(
        *("no_interface", texts.NO_INTERFACE),
        f"no network interface of this machine has that name: {SOCKET_FIX}",
    ),
    Reason("ranks_diverged", lambda seen: bool(seen.divergence), "{divergence}", _COLLECTIVES_FIX),
    _for_crash(
        "device_out_of_memory",
        lambda crash: is_out_of_memory(crash),
        "the device is out of memory: reduce the batch size, and raise gradient_accumulation_steps "
        "to keep the effective batch size",
    ),
    _for_text(
        *("no_nccl", texts.NO_NCCL),
        "NCCL requires NVIDIA GPUs and a CUDA build of torch: on CPUs, pass backend='gloo' to "
        "init_process_group(); some scripts have an argument for the backend",
    ),
    _for_text(
        *("no_gpu", texts.NO_GPU),
        "the script requests a GPU, but torch finds none here (`headway doctor` prints why): "
        "on a machine without a GPU, do not call torch.cuda, and use the device cpu, or "
        "accelerator.device if the script has an Accelerator",
    ),
    _for_text(
        *("unused_parameters", texts.UNUSED_PARAMETERS),
        "the loss does not use all parameters of the model: freeze the others before prepare(), or "
        "pass Accelerator(kwargs_handlers=[DistributedDataParallelKwargs("
        "find_unused_parameters=True)])",
    ),
    _for_text(
        *("second_backward", texts.SECOND_BACKWARD),
        "the strategy ddp allows one backward pass for each forward pass: add the losses and call "
        "accelerator.backward() once, or run the forward pass again",
    ),
    _for_text(
        *("one_sample", texts.ONE_SAMPLE),
        "this rank's batch has one sample, as the last global batch is divided among the ranks: "
        "pass drop_last=True to the DataLoader, or another batch size",
    ),
    _for_text(
        *("device_ids_on_cpu", texts.DEVICE_IDS_ON_CPU),
        "the model is on the CPU: omit device_ids and output_device, or call model.to(device)",
    ),
    _for_text(
        *("sharded_parameter", texts.MIXED_TENSORS),
        "the parameters of a sharded model are DTensors: use parameter.full_tensor() in the loss, "
        "on all ranks, or the strategy ddp",
    ),
    _for_text(
        *("empty_shard", texts.EMPTY_SHARD),
        "some ranks have no part of a parameter with fewer rows than ranks, and torch computes no "
        "infinity norm of it: pass norm_type=2 to clip_grad_norm_(), or use the strategy ddp",
    ),
    _for_text(
        *("dtype_of_gloo", texts.NO_DTYPE),
        "gloo, which connects ranks on CPUs, does not support the dtype of a buffer or of a result "
        "to gather, such as int16: convert it, for example to int32",
    ),
    _for_text(
        *("mismatched_packages", texts.MISMATCHED_PACKAGES),
        "torchvision or torchaudio was built for another version of torch: install the version "
        "that belongs to this torch, with `{installer}`",
    ),
    _for_text(
        *("no_kernels", texts.NO_KERNELS),
        "this torch build does not support this GPU: `headway doctor` names a build that does",
    ),
    _for_crash(
        "no_shared_memory",
        # the whole traceback includes the traceback of a loader worker
        lambda crash: (
            contains(crash.traceback, texts.SHARED_MEMORY_FULL)
            or (
                contains(crash.message, texts.UNUSABLE_FOLDER)
                and contains(crash.traceback, texts.NEW_SHARED_OBJECT)
            )
        ),
        "/dev/shm, which loader workers use to pass batches, is full, missing or read-only: start "
        "the container with `docker run --shm-size=8g`; in Kubernetes, mount an emptyDir with "
        "`medium: Memory` at /dev/shm; or set num_workers=0",
    ),
    _for_crash(
        "disk_full",
        lambda crash: crash.kind == "OSError" and contains(crash.message, [texts.DISK_FULL]),
        "the disk is full: free space, or write to another disk",
    ),
    _for_crash(
        "wrapped_model",
        lambda crash: (
            crash.kind == "AttributeError" and contains(crash.message, texts.WRAPPED_MODEL)
        ),
        "with several ranks, the prepared model is wrapped: access its attributes with "
        "accelerator.unwrap_model(model); to train through a method other than forward, also pass "
        "Accelerator(forward_methods=['method'])",
    ),
    _for_crash(
        "no_input",
        lambda crash: crash.kind == "EOFError" and contains(crash.message, texts.NO_INPUT),
        "standard input is at its end, or this is not rank 0, which alone can read it: pass the "
        "value as an argument, or call input() under `if accelerator.is_main_process:`",
    ),
    _for_crash(
        "module_not_found",
        lambda crash: crash.kind == "ModuleNotFoundError",
        "if it is a package, install it for this launch's Python, with `{installer} {module}`, or "
        "launch from the environment that contains it; if it is your own, add the folder that "
        "contains the file or package to PYTHONPATH",
    ),
    _for_text(
        *("no_temporary_folder", texts.NO_TEMPORARY_FOLDER),
        "set TMPDIR to a writable folder on a disk with free space, and check `ulimit -f`",
    ),
    _for_crash(
        "file_not_found",
        lambda crash: crash.kind == "FileNotFoundError" and ": '/" not in crash.message,
        "relative paths are resolved from the working directory, not from the script's folder: "
        "pass an absolute path, or use `pathlib.Path(__file__).parent`",
    ),
    _for_text("no_process", texts.NO_THREAD, MORE_PROCESSES),
    _for_crash(
        "out_of_memory",
        lambda crash: (
            crash.kind == "MemoryError" or contains(crash.message, texts.OUT_OF_CPU_MEMORY)
        ),
        "the machine is out of memory, or a limit (`ulimit -v`) is reached: use fewer processes, "
        "loader workers or samples on this machine",
    ),
    _for_crash(
        "debugger_left",
        lambda crash: crash.kind == texts.DEBUGGER_LEFT,
        "pass --debug-rank RANK to attach the terminal to one rank, and num_workers=0 to debug a "
        "loader worker; on other ranks, breakpoint() and pdb.set_trace() do nothing; exit the "
        "debugger with c, not with q",
        ": its debugger was quit, or has no terminal to read from",
    ),
    Reason(
        "loader_worker_killed",
        lambda seen: _has_lost_loader_worker(seen),
        _EXCEPTION + ": one of its loader workers was killed{memory_kills}",
        "{kill_fix}",
    ),
    _for_crash(
        "error_in_headway",
        lambda crash: crash.is_from_headway,
        "check the script's call in the traceback; if it is correct, this is a bug in Headway: "
        "report it with the traceback",
        ", raised inside Headway",
    ),
    _for_crash("exception", lambda _: True, "fix the script at {line}"),
    Reason(
        "left_without_exit",
        lambda seen: seen.code == 0,
        "{rank} exited with code 0, by os._exit() or os.exec*(), while other ranks were running",
        "run every rank to completion, or call sys.exit(); start other programs with subprocess",
    ),
    Reason(
        "did_not_stop",
        lambda seen: seen.code == -signal.SIGKILL and seen.killed_after_s is not None,
        "{rank} did not stop when requested",
        "before you stop a run, print the ranks' stacks with `headway stack`; ranks hang if only "
        "some of them call accelerator.checkpoint()",
    ),
    Reason(
        "killed",
        lambda seen: seen.code == -signal.SIGKILL,
        "{rank} was killed by {signal}{memory_kills}",
        "{kill_fix}",
    ),
    Reason(
        "segmentation_fault",
        lambda seen: seen.code == -signal.SIGSEGV,
        "{rank} was killed by {signal}",
        "the stack above shows the call into native code; the usual cause is a mismatched wheel",
    ),
    Reason(
        "signal_passed_on",
        lambda seen: seen.is_forwarded,
        "{rank} was killed by {signal}",
        "the launcher received {signal} and forwarded it to the ranks: between the first call of "
        "accelerator.checkpoint() and end_training(), SIGTERM, SIGINT, SIGHUP, SIGXCPU and SIGUSR1 "
        "save and stop; otherwise, and for SIGUSR2, set a handler with signal.signal",
    ),
    Reason(
        "other_collective",
        lambda seen: contains("\n".join(seen.last_lines), texts.OTHER_COLLECTIVE),
        "{rank} was killed by {signal}, because the ranks called different collectives",
        "skip a sharded model's forward or backward pass on all ranks or none; " + _COLLECTIVES_FIX,
    ),
    Reason(
        "cpu_time",
        lambda seen: seen.code == -signal.SIGXCPU,
        "{rank} was killed by {signal}",
        "it has used the CPU time that the shell or job allows: raise that limit (`ulimit -t`)",
    ),
    Reason(
        "signal",
        lambda seen: seen.code < 0,
        "{rank} was killed by {signal}",
        "check its output above; if it printed nothing, another process sent the signal",
    ),
    Reason(
        "left_by_exit",
        lambda seen: seen.exited_silently,
        "{rank} exited with code {code}, by os._exit(), by os.exec*() or in native code",
        "raise an exception instead of calling os._exit(), which reports nothing, and start other "
        "programs with subprocess.run() instead of os.exec*()",
    ),
    Reason(
        "exit_message",
        lambda seen: bool(seen.message),
        "{rank} exited with code {code}: {message}",
        "check its output above",
    ),
    Reason(
        "exit_code",
        lambda seen: True,
        "{rank} exited with code {code}",
        "check its output above; if it printed nothing, raise an exception instead of sys.exit()",
    ),
)

_PATH = FileNotFoundError, FileExistsError, PermissionError, NotADirectoryError, IsADirectoryError
_MAY_PASS = (
    *(
        *texts.OUT_OF_MEMORY,
        *texts.OUT_OF_CPU_MEMORY,
        *texts.SHARED_MEMORY_FULL,
        *texts.LOADER_WORKER_ENDED,
        *texts.NO_THREAD,
    ),
    *(*texts.UNWRITTEN, *texts.COMMUNICATION),
)


def may_pass(error: BaseException | None) -> bool:
    """Return whether a restart may help: memory, a disk, a connection or another process failed.

    This is decided by the classes of the exception and of its causes. torch and Python raise some
    of these failures as a RuntimeError, which is recognized by its message.
    """
    if error is None:
        return False
    torch = sys.modules.get("torch")
    of_torch = () if torch is None else (torch.OutOfMemoryError, torch.distributed.DistError)
    if isinstance(error, (OSError, MemoryError, *of_torch)):
        return not isinstance(error, _PATH)
    if isinstance(error, HeadwayError) and error.problems[0].code == Code.UNWRITABLE:
        return True
    is_known = type(error) is RuntimeError and contains(str(error), _MAY_PASS)
    context = None if error.__suppress_context__ else error.__context__
    return is_known or may_pass(error.__cause__ or context)


def find_reason(evidence: Evidence) -> Reason:
    """Return the first matching reason; the last reason always matches."""
    return next(reason for reason in REASONS if reason.matches(evidence))


def formatted(text: str, evidence: Evidence, rank: str = "") -> str:
    missing = re.search(r"No module named '(\w+)", evidence.crash.message if evidence.crash else "")
    frames = parse_traceback(evidence.crash.traceback) if evidence.crash else ()
    user = user_frame(frames)
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
        kill_fix=_NO_OOM_KILL_FIX if evidence.memory_kills == 0 else _OOM_KILL_FIX,
        line="the line the traceback points to"
        if user is None or user == frames[-1]
        else f"{user.file}:{user.line}, which calls the library that raised the exception",
        installer=installer_of(sys.executable),
        module=_PACKAGES.get(missing[1], missing[1]) if missing else "NAME",
    )
    return shown(sentence)


def _is_broken_pipe(seen: Evidence) -> bool:
    if seen.crash is None:
        return seen.code == -signal.SIGPIPE
    return seen.crash.kind == BrokenPipeError.__name__


def _has_lost_loader_worker(seen: Evidence) -> bool:
    known = texts.LOADER_WORKER_ENDED if seen.memory_kills else texts.LOADER_WORKER_KILLED
    # the whole traceback: torch usually raises another exception from the relevant one
    return seen.crash is not None and contains(seen.crash.traceback, known)


def is_out_of_memory(crash: Crash) -> bool:
    """Return whether a device ran out of memory; MPS errors are recognized by their message."""
    return crash.kind == texts.OUT_OF_MEMORY_ERROR or contains(crash.message, texts.OUT_OF_MEMORY)


def is_communication_error(crash: Crash) -> bool:
    """Return whether gloo or NCCL failed, possibly because of another rank."""
    if crash.kind in texts.COMMUNICATION_ERRORS:
        return True
    is_torchs = crash.kind == "RuntimeError" and crash.is_from_torch
    return is_torchs and contains(crash.message, texts.COMMUNICATION)


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
