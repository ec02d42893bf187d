"""A server that imports torch once and forks a process for each trial read from standard input.

A trial and its result are one line each. When standard input is closed, for example because the
planner was killed, the server terminates the running trial, removes its files and exits.

A trial runs the user's script until its second optimizer step. The process is patched permanently
and exits with the result.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import os
import runpy
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import ExitStack, suppress
from types import FrameType
from typing import IO, Any, NoReturn

import torch
from torch.distributed.device_mesh import init_device_mesh

from headway.estimate.child import fake_cuda, script_patches
from headway.estimate.child.confinement import Confinement
from headway.estimate.child.fake_mode import ScriptMode
from headway.estimate.child.ledger import Ledger, Models
from headway.estimate.child.patching import line_in, line_now, line_of
from headway.estimate.planner import Trial, TrialResult
from headway.ipc import signals
from headway.ipc.forking import init_child, wake_on_child_exit
from headway.ipc.stderr import log
from headway.ipc.typed import decode, encode
from headway.strategies.units import checkpoint_activations, units_of

_OUTPUT_BYTES = 2**16  # large, as a crash prints a list of all native modules last


def main() -> None:
    signals.trap(signal.SIG_IGN, signal.SIGINT)  # Ctrl-C terminates the planner
    _import_for_all()
    wake_fds = wake_on_child_exit()
    for line in sys.stdin:
        trial = decode(Trial, line)
        with (
            tempfile.TemporaryDirectory(
                prefix="headway-estimate-", ignore_cleanup_errors=True
            ) as scratch,
            tempfile.TemporaryFile() as output,
        ):
            result = _run_trial(trial, scratch, output, wake_fds)
        sys.stdout.write(encode(result).decode())
        sys.stdout.flush()


def _import_for_all() -> None:
    """Import modules that most scripts need, and exempt them from garbage collection."""
    import torch._dynamo  # imported by the first step of any optimizer
    import torch.distributed.fsdp
    import torch.distributed.nn.functional
    import torch.utils.checkpoint  # noqa: F401
    from torch.testing._internal.distributed import fake_pg  # noqa: F401

    gc.freeze()
    atexit.register(gc.unfreeze)  # nanobind would report frozen objects as leaks


def _run_trial(
    trial: Trial, scratch: str, output: IO[bytes], wake_fds: tuple[int, int]
) -> TrialResult:
    """Run a trial in a child process, whose output goes to `output`."""
    deadline = time.monotonic() + trial.time_limit_s
    server, child = os.getpid(), os.fork()
    if child == 0:
        try:
            printed = output.fileno()
            init_child(server, [os.open(os.devnull, os.O_RDONLY), os.dup(printed), os.dup(printed)])
            for fd in wake_fds:
                os.close(fd)
            signals.reset_handlers(signal.SIGINT)
            TrialRunner(trial, scratch).run_script()
        finally:
            os._exit(1)
    where = os.path.join(scratch, _PROGRESS)
    status = _wait(child, wake_fds[0], deadline, where, trial)
    output.seek(max(0, output.seek(0, os.SEEK_END) - _OUTPUT_BYTES))
    text = output.read().decode(errors="replace")
    with suppress(OSError, ValueError), open(os.path.join(scratch, RESULT), "rb") as file:
        found: TrialResult = decode(TrialResult, file.read())
        return found._replace(output=text)
    if status is None:
        line = _line_at(where)
        ended = f"no second optimizer step within {trial.time_limit_s:g} s (--time-limit)"
    else:
        line, code = line_in(text), os.waitstatus_to_exitcode(status)
        ended = f"the process exited with {f'signal {-code}' if code < 0 else f'exit code {code}'}"
    return TrialResult(failed_at=f"{line}: {ended}" if line else ended, output=text)


def _wait(child: int, woken: int, deadline: float, progress: str, trial: Trial) -> int | None:
    """Wait for the child and log its progress; return its status, or None if it times out."""
    ended = status = 0
    began = logged_at = time.monotonic()
    try:
        while not ended and (left := deadline - time.monotonic()) > 0:
            ready = select.select([woken, sys.stdin], [], [], min(left, _POLL_S))[0]
            if (now := time.monotonic()) - logged_at >= PROGRESS_S:
                logged_at, where = now, _line_at(progress) or "an unknown line"
                how = " with shards" * trial.sharded + " with recomputation" * trial.checkpointed
                log(f"after {now - began:.0f} s the script{how} is at {where}")
            if sys.stdin in ready:  # it is closed, as no trial arrives before this result
                raise SystemExit
            if woken in ready:
                os.read(woken, 2**10)
            ended, status = os.waitpid(child, os.WNOHANG)
    finally:
        if not ended:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return status if ended else None


def _line_at(progress: str) -> str:
    with suppress(OSError), open(progress) as file:
        return file.read()
    return ""


RESULT, _PROGRESS = "result", "progress"
"""Files in the scratch folder with the result and the script's current line."""
PROGRESS_S = 10.0  # between progress messages
_POLL_S = 1.0  # between updates of the current line

_STEPS = 2  # steps of each optimizer before the script is stopped
_MOST_STEPS = 12  # limit for each optimizer, if another has made fewer than two steps
_LONGEST_LINE = 300  # limit on an exception's message, in characters


class TrialRunner:
    """Runs a trial in this process and writes the result to the scratch folder."""

    def __init__(self, trial: Trial, scratch: str) -> None:
        self._trial = trial
        self._scratch = os.path.realpath(scratch)
        self._notes: dict[str, None] = {}
        self._reshaped: list[torch.nn.Module] = []
        self._mode = ScriptMode(self.note)
        self._device = fake_cuda.FAKE_GPU if trial.device != "cpu" else torch.device("cpu")
        self._ledger = Ledger(self._device, self._mode)
        self._models = Models(self._ledger, self._reshape, self._after_step)
        self._mesh: Any = None
        self._began = time.monotonic()

    def note(self, what: str) -> None:
        line = line_now()
        self._notes[f"{what} ({line})" if line else what] = None

    def run_script(self) -> NoReturn:
        trial = self._trial
        faulthandler.enable()
        script_patches.init_fake_ranks(trial.world_size, trial.local_world_size)
        if trial.sharded and trial.world_size > 1:  # before fake mode is entered
            self._mesh = init_device_mesh("cpu", (trial.world_size,))
        self.apply_patches()
        self._models.register_hooks()
        stack = ExitStack()  # never closed: the process exits first
        stack.enter_context(fake_cuda.GpuNames(self._device))
        stack.enter_context(self._mode)
        stack.enter_context(self._ledger)
        Confinement(self._scratch, self.note).begin()
        self._began = time.monotonic()
        signals.trap(self._on_alarm, signal.SIGALRM)
        signal.setitimer(signal.ITIMER_REAL, _POLL_S, _POLL_S)
        try:
            _run_program(trial)
        except BaseException as error:  # noqa: BLE001  part of the result
            self._end_early(error)
        self._end_early(None)

    def apply_patches(self) -> None:
        warnings.simplefilter("ignore")
        trial, ledger = self._trial, self._ledger
        if trial.device != "cpu":
            fake_cuda.patch_cuda(trial.device_name, trial.device_bytes, trial.local_world_size)
            fake_cuda.patch_autocast()
            fake_cuda.patch_optimizer_defaults()
        fake_cuda.patch_module_moves(ledger.observe)
        fake_cuda.patch_load_device(self._device)
        script_patches.patch_tensor_reads(self._mode)
        script_patches.patch_data_ptr()
        script_patches.patch_grad_scaler()
        script_patches.patch_safetensors(self._mode)
        script_patches.patch_resize(ledger.resized)
        script_patches.patch_loaders(self._mode, ledger.observe)
        script_patches.patch_saving(self.note)
        script_patches.patch_loading(self.note)
        script_patches.patch_compile(self.note)
        torch.backends.mha.set_fastpath_enabled(False)  # used only for inference
        script_patches.patch_strategy_choice(self.note)
        script_patches.patch_ddp(None if trial.sharded else ledger.classify)
        script_patches.patch_object_collectives(trial.world_size)

    def _reshape(self, model: torch.nn.Module) -> None:
        model = getattr(model, "module", model)  # unwrap DistributedDataParallel
        trial = self._trial
        if model in self._reshaped or not any(p.requires_grad for p in model.parameters()):
            return
        self._reshaped.append(model)
        units = units_of(model, "auto")
        if trial.checkpointed:
            checkpoint_activations(units)
        if self._mesh is not None:
            self._models.classify()
            script_patches.shard(model, units, self._models.optimizers(), self._mesh)
            gc.collect()  # full parameters may be in cycles; a launch frees them as it shards
            self._ledger.reset_peak()

    def _after_step(self) -> None:
        steps = self._models.steps()
        if min(steps) >= _STEPS or max(steps) >= _MOST_STEPS:
            self._finish_with_peak()

    def _on_alarm(self, _: int, __: FrameType | None) -> None:
        """Write the script's current line to a file, from which the server reports it."""
        with suppress(OSError), open(os.path.join(self._scratch, _PROGRESS), "w") as file:
            file.write(line_now())

    def _finish_with_peak(self) -> NoReturn:
        self._models.classify()
        self._finish(
            TrialResult(
                peak_bytes=self._ledger.peak_bytes,
                peak_at=self._ledger.peak_when,
                categories=self._ledger.peak_by_category(),
                steps=max(self._models.steps(), default=0),
                seconds=time.monotonic() - self._began,
                notes=tuple(self._notes),
            )
        )

    def _end_early(self, error: BaseException | None) -> NoReturn:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if error is not None and not isinstance(error, SystemExit):
            traceback.print_exception(error)
        elif any(self._models.steps()):
            self.note("the script ended before its second optimizer step")
            self._finish_with_peak()
        ended = "the script ended without an optimizer step"
        self._finish(TrialResult(failed_at=_error_text(error) if error else ended))

    def _finish(self, result: TrialResult) -> NoReturn:
        """Write the result and exit immediately, without the script's exit handlers."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(BaseException):  # replaced by the script, or closed
                stream.flush()
        with open(os.path.join(self._scratch, RESULT), "wb") as file:
            file.write(encode(result))
        os._exit(0)


def _run_program(trial: Trial) -> None:
    sys.argv = [trial.program, *trial.args]
    if trial.is_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(trial.program, run_name="__main__", alter_sys=True)
    else:
        if not os.path.isdir(trial.program):
            sys.path.insert(0, os.path.dirname(os.path.realpath(trial.program)))
        runpy.run_path(trial.program, run_name="__main__")


def _error_text(error: BaseException) -> str:
    line = line_of(error)
    message = str(error).strip().splitlines() or [""]
    first_line = message[0][:_LONGEST_LINE]
    text = f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
    return f"{line}: {text}" if line else text
