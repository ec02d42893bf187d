"""Hooks into transformers' Trainer and its subclasses, through a callback and `Trainer.train`.

Each rank's Trainer writes its files directly to the checkpoint's folder, and rank 0 then writes
`trainer_state.json`, which is removed before a folder is overwritten. A checkpoint is complete if
it contains that file and is listed. It is listed after the files of all ranks have been flushed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

from transformers.trainer_callback import TrainerCallback

from headway.data.workers import with_shielded_workers
from headway.distributed.world import rank_and_size
from headway.errors import Code, UsageError
from headway.integrations.resuming import (
    TrainerPreemption,
    TrainingStart,
    add_to_list,
    log_start,
    replaced,
    select_start,
)
from headway.ipc.run_contract import RunContract, read_run

_STATE = "trainer_state.json"


def install(module: ModuleType) -> None:
    """Hook into `module.Trainer`, so that it stops, saves and resumes as the launcher requests.

    Raises AttributeError if the version of transformers is unsupported.
    """
    trainer_class: Any = module.Trainer
    train, _ = trainer_class.train, (trainer_class._save_checkpoint, trainer_class._save_rng_state)

    @wraps(train)
    def hooked_train(
        self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        run, trial = read_run(), kwargs.get("trial", args[0] if args else None)
        stops_itself = getattr(self.args, "enable_jit_checkpoint", False)
        is_own = trial is not None or stops_itself or self.args.world_size != rank_and_size()[1]
        if run is not None and stops_itself and run.resume is not None:
            raise UsageError(
                "enable_jit_checkpoint cannot be used with --resume, because Trainer then"
                " chooses the checkpoint itself",
                where=f"TrainingArguments; {run.origins.get('resume', 'resume')}",
                fix="remove enable_jit_checkpoint or --resume",
                code=Code.CONTRADICTS_RUN,
            )
        if run is None or is_own:
            return train(self, resume_from_checkpoint, *args, **kwargs)
        folder = Path(self.args.output_dir)
        start = select_start(run, folder, resume_from_checkpoint, _STATE)
        log_start("transformers' Trainer", start, folder)
        callback = _Callback(self, run, start)
        self.add_callback(callback)
        try:
            with replaced(self, **callback.wrappers()):
                return train(self, resume_from_checkpoint or start.path, *args, **kwargs)
        finally:
            self.remove_callback(callback)
            callback.stopping.release()

    trainer_class.train = hooked_train


class _Callback(TrainerCallback):  # type: ignore[misc]
    """Reports progress, and saves and stops training on preemption.

    The callback runs after all other callbacks, so that it sees their decisions. If an evaluation
    is due, Trainer evaluates before it saves the checkpoint, as usual.
    """

    def __init__(self, trainer: Any, run: RunContract, start: TrainingStart) -> None:
        self.stopping = TrainerPreemption(run, trainer.args.device)
        self._trainer, self._training = trainer, start.training
        self._folder = Path(trainer.args.output_dir)
        self._loss: float | None = None
        self._is_stopping = False

    def wrappers(self) -> dict[str, Callable[..., Any]]:
        """Return wrappers for Trainer methods that have no callback event."""
        wrappers: dict[str, Callable[..., Any]] = {
            "_save_checkpoint": self.save_full,
            "_save_rng_state": self.complete,
            "_run_epoch": self.run_epoch,
            "get_train_dataloader": _shield_workers,
            "get_eval_dataloader": _shield_workers,
        }
        return {name: wrapper for name, wrapper in wrappers.items() if hasattr(self._trainer, name)}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        handler = self._trainer.callback_handler
        handler.callbacks = [*(cb for cb in handler.callbacks if cb is not self), self]
        self.stopping.begin(state.global_step, state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.stopping.progress.follow(state.global_step, state.max_steps, self._loss)
        if self.stopping.should_stop() and state.epoch != int(state.epoch):  # not its last step
            self._save_and_stop(args, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.stopping.request:
            self._save_and_stop(args, control)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._loss = kwargs.get("logs", {}).get("loss", self._loss)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._is_stopping or control.should_training_stop:
            return
        for callback in self._trainer.callback_handler.callbacks:
            if (writer := getattr(callback, "tb_writer", None)) is not None:
                writer.flush()  # the exit kills the writer's thread
        self.stopping.exit(state.global_step, str(self._checkpoint()))

    def _save_and_stop(self, args: Any, control: Any) -> None:
        if not control.should_training_stop:  # otherwise, training stops anyway
            self._is_stopping = control.should_save = True
            args.save_only_model = False  # training cannot resume from weights alone

    def _checkpoint(self) -> Path:
        return self._folder / f"checkpoint-{self._trainer.state.global_step}"

    def save_full(self, save: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Save after rank 0 has removed an earlier state file from the folder."""
        if self._trainer.args.should_save:
            (self._checkpoint() / _STATE).unlink(missing_ok=True)
        self.stopping.barrier()
        save(*args, **kwargs)

    def complete(self, save: Callable[[str], None], output_dir: str) -> None:
        """Save, wait for the files of all ranks, and flush and list the checkpoint on rank 0."""
        save(output_dir)
        self.stopping.barrier()
        if self._trainer.args.should_save:
            for file in filter(Path.is_file, Path(output_dir).rglob("*")):
                with open(file, "rb") as opened:
                    os.fsync(opened.fileno())
            add_to_list(self._folder, self._training._replace(path=output_dir))

    def run_epoch(self, run_epoch: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Skip the epoch if `max_steps` is reached, because Trainer would take another step."""
        state = self._trainer.state
        if 0 < state.max_steps <= state.global_step:
            self._trainer.control.should_training_stop = True
        else:
            run_epoch(*args, **kwargs)


def _shield_workers(get: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return with_shielded_workers(get(*args, **kwargs))
