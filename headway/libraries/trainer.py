"""Joins transformers' Trainer, and all that derives from it, by a callback and `Trainer.train`.

Trainer writes the files of a checkpoint into their place, each rank its own, and then
`trainer_state.json`. A checkpoint is complete if it is listed, which it is once the files of all
ranks are on their disk, and has that file, which is removed before a folder is written again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

from transformers.trainer_callback import TrainerCallback

from headway.checkpoint.saving import on_rank_0
from headway.contract.notes import say
from headway.contract.run import RunContract, read_run
from headway.data.workers import with_lasting_workers
from headway.distributed.world import rank_and_size
from headway.libraries.folders import STATE, Listed
from headway.libraries.resuming import (
    Stopping,
    list_saved,
    require_same,
    select_start,
    tell_start,
)


def join(module: ModuleType) -> None:
    """Make the trainings of `module.Trainer` stop, save and resume as the launcher asks.

    An AttributeError: it has other methods than the versions that are known.
    """
    trainer_class: Any = module.Trainer
    train, _ = trainer_class.train, (trainer_class._save_checkpoint, trainer_class._save_rng_state)

    @wraps(train)
    def joined_train(
        self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        run, trial = read_run(), kwargs.get("trial", args[0] if args else None)
        if run is None or trial is not None or self.args.world_size != rank_and_size()[1]:
            return train(self, resume_from_checkpoint, *args, **kwargs)
        with _joined(self, run, resume_from_checkpoint) as checkpoint:
            return train(self, checkpoint, *args, **kwargs)

    trainer_class.train = joined_train


@contextmanager
def _joined(trainer: Any, run: RunContract, given: Any) -> Iterator[Any]:
    """Join a training, and return what it resumes from, as `Trainer.train` takes it."""
    folder = Path(trainer.args.output_dir)
    start = on_rank_0(
        lambda: select_start(run, folder, given, lambda path: (path / STATE).exists())
    )
    tell_start("transformers' Trainer", start)
    require_same(start.path is None or bool(given) or os.path.exists(start.path), folder)
    callback = _Callback(trainer, start.training, Stopping(run, trainer.args.device))
    trainer.add_callback(callback)
    try:
        with callback.joined():
            yield given or start.path
    finally:
        trainer.remove_callback(callback)
        callback.stopping.release()


class _Callback(TrainerCallback):  # type: ignore[misc]
    """Reports the progress of a training, and saves and ends it when the job has to stop.

    It is called after all other callbacks, whose decisions it sees. Where an evaluation is due,
    which may take longer than there is time, it saves at once, and exits after one more step.
    """

    def __init__(self, trainer: Any, training: Listed, stopping: Stopping) -> None:
        self.stopping = stopping
        self._trainer, self._training = trainer, training
        self._folder = Path(trainer.args.output_dir)
        self._loss: float | None = None
        self._kept_at = -1  # the step that was saved before or amid its evaluation
        self._is_stopping = False  # this callback has told the trainer to stop
        self._is_epoch_over = False

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Wrap methods of the trainer for which it has no callback."""
        own, trainer = vars(self._trainer), self._trainer
        wrapped: dict[str, Any] = {
            "_save_checkpoint": self._save_whole,
            "_save_rng_state": self._complete,
            "_run_epoch": self._run_epoch,
            "get_train_dataloader": self._loader,
            "get_eval_dataloader": self._loader,
        }
        wrapped = {name: wrap for name, wrap in wrapped.items() if hasattr(trainer, name)}
        before = {name: own[name] for name in wrapped if name in own}
        own.update({name: partial(wrap, getattr(trainer, name)) for name, wrap in wrapped.items()})
        try:
            yield
        finally:
            for name in wrapped:
                del own[name]
            own.update(before)

    # ------------------------------------------------------------------ as Trainer calls it

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        handler = self._trainer.callback_handler
        handler.callbacks = [*(one for one in handler.callbacks if one is not self), self]
        if getattr(args, "enable_jit_checkpoint", False):  # whose ranks do not agree on the step
            from transformers.trainer_jit_checkpoint import JITCheckpointCallback

            if (own := self._trainer.pop_callback(JITCheckpointCallback)) is not None:
                own.on_train_end(args, state, control)  # restores the handler of SIGTERM
        self._kept_at = state.global_step  # nothing is lost up to here
        self.stopping.begin()
        self.stopping.progress.follow(state.global_step, state.max_steps, None)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.stopping.progress.follow(state.global_step, state.max_steps, self._loss)
        self._is_epoch_over = False
        if self.stopping.is_asked() and not _is_last_of_epoch(state):
            self._keep_or_stop(args, state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._is_epoch_over = True
        if self.stopping.request:
            self._keep_or_stop(args, state, control)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._trainer.is_in_train and self.stopping.is_asked():
            self._keep(state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._kept_at == state.global_step:
            control.should_save = False  # not again over what is complete

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._loss = kwargs.get("logs", {}).get("loss", self._loss)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        is_asked = self.stopping.meet()
        has_more = _is_last_of_epoch(state) and not self._is_epoch_over
        if not is_asked or has_more or self._is_over(control) or args.save_only_model:
            return
        for callback in self._trainer.callback_handler.callbacks:
            if (writer := getattr(callback, "tb_writer", None)) is not None:
                writer.flush()  # its thread ends with this process
        self.stopping.leave(state.global_step, str(self._checkpoint(state.global_step)))

    # ------------------------------------------------------------------ parts of these

    def _is_over(self, control: Any) -> bool:
        """Return whether the training ends by itself."""
        return control.should_training_stop and not self._is_stopping

    def _keep_or_stop(self, args: Any, state: Any, control: Any) -> None:
        if self._is_over(control):
            return
        if control.should_evaluate:
            self._keep(state.global_step)
        else:
            self._is_stopping = control.should_training_stop = control.should_save = True
            args.save_only_model = False  # training cannot resume from weights alone

    def _keep(self, step: int) -> None:
        """Save once before or amid an evaluation."""
        if self._kept_at == step:
            return
        self._kept_at = step
        self._trainer.args.save_only_model = False
        self._trainer._save_checkpoint(self._trainer.model_wrapped, trial=None)
        if rank_and_size()[0] == 0:
            say(f"saved {self._checkpoint(step)}; exiting after the evaluation and one more step")

    def _checkpoint(self, step: int) -> Path:
        return self._folder / f"checkpoint-{step}"

    # ------------------------------------------------------------------ around its methods

    def _save_whole(self, save: Any, *args: Any, **kwargs: Any) -> None:
        if self._trainer.args.should_save:
            state = self._checkpoint(self._trainer.state.global_step) / STATE
            state.unlink(missing_ok=True)
        self.stopping.meet()  # before any rank writes
        save(*args, **kwargs)

    def _complete(self, save: Any, output_dir: str) -> None:
        """Save what is the last file of each rank, before rank 0 writes the state."""
        save(output_dir)
        self.stopping.meet()
        if self._trainer.args.should_save:
            for file in filter(Path.is_file, Path(output_dir).rglob("*")):
                with open(file, "rb") as opened:
                    os.fsync(opened.fileno())
            list_saved(self._folder, self._training, output_dir)

    def _run_epoch(self, run_epoch: Any, *args: Any, **kwargs: Any) -> None:
        """Train no further step where a checkpoint has all of them, as Trainer would."""
        state = self._trainer.state
        if 0 < state.max_steps <= state.global_step:
            self._trainer.control.should_training_stop = True
        else:
            run_epoch(*args, **kwargs)

    def _loader(self, get: Any, *args: Any, **kwargs: Any) -> Any:
        return with_lasting_workers(get(*args, **kwargs))


def _is_last_of_epoch(state: Any) -> bool:
    return bool(state.epoch == int(state.epoch))
