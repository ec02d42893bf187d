"""Joins transformers' Trainer, and all that derives from it, by a callback and `Trainer.train`.

Trainer writes the files of a checkpoint into their place, each rank its own. So the
`trainer_state.json` of an older save is removed first, and is written anew once the files of all
ranks are on their disk: a folder that has it is complete.
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

from headway.checkpoint.saving import agree, on_rank_0
from headway.contract.notes import say
from headway.contract.records import report
from headway.contract.run import RunContract, read_run
from headway.data.workers import with_lasting_workers
from headway.distributed.world import rank_and_size
from headway.errors import CheckpointError
from headway.libraries.folders import STATE, trainer_checkpoints, trainer_fault
from headway.libraries.resuming import (
    Checkpoints,
    Start,
    Stopping,
    Training,
    note_stop,
    select_start,
    tell_start,
    write_record,
)

_CHECKPOINTS = Checkpoints(trainer_checkpoints, trainer_fault)


def join(module: ModuleType) -> None:
    """Let the trainings of `module.Trainer` stop, save and go on as the launcher says.

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
    """Join a training, and return what it goes on from, as `Trainer.train` takes it."""
    folder = Path(trainer.args.output_dir)
    start: Start = on_rank_0(lambda: select_start(run, folder, given, _CHECKPOINTS))
    tell_start("transformers' Trainer", start)
    if start.path is not None and start.path != str(given):
        agree(partial(_require_seen, Path(start.path)))
    callback = _Callback(trainer, start.training, Stopping(run, trainer.args.device))
    trainer.add_callback(callback)
    try:
        with callback.joined():
            yield True if given is True and start.path is None else start.path
    finally:
        trainer.remove_callback(callback)
        callback.stopping.release()


def _require_seen(checkpoint: Path) -> None:
    if not (checkpoint / STATE).exists():
        raise CheckpointError(
            f"rank {rank_and_size()[0]} does not see the checkpoint that rank 0 goes on from",
            where=str(checkpoint),
            fix="let the output be on a disk that all machines share, or pass save_on_each_node",
        )


def _is_last_of_epoch(state: Any) -> bool:
    return bool(state.epoch == int(state.epoch))


def _sync_to_disk(folder: Path) -> None:
    for file in filter(Path.is_file, folder.rglob("*")):
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())


class _Callback(TrainerCallback):  # type: ignore[misc]
    """Tells how far a training is, completes what it saves, and ends it when the job has to stop.

    It comes after all other callbacks, whose decisions it sees. Where an evaluation is due, which
    may take longer than there is time, it saves at once, and leaves after a step more.
    """

    def __init__(self, trainer: Any, training: Training, stopping: Stopping) -> None:
        self.stopping = stopping
        self._trainer, self._training = trainer, training
        self._folder = Path(trainer.args.output_dir)
        self._loss: float | None = None
        self._kept_at = -1  # the step that was saved before or amid its evaluation
        self._is_stopping = False  # this callback has told the trainer to stop
        self._is_epoch_over = False

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Let methods of the trainer do more than its callbacks are told of."""
        own, trainer = vars(self._trainer), self._trainer
        instead = {
            "_save_checkpoint": partial(self._save_whole, trainer._save_checkpoint),
            "_save_rng_state": partial(self._end_rank, trainer._save_rng_state),
            "get_train_dataloader": partial(self._loader, trainer.get_train_dataloader),
            "get_eval_dataloader": partial(self._loader, trainer.get_eval_dataloader),
        }
        if (run_epoch := getattr(trainer, "_run_epoch", None)) is not None:
            instead["_run_epoch"] = partial(self._run_epoch, run_epoch)
        before = {name: own[name] for name in instead if name in own}
        own.update(instead)
        try:
            yield
        finally:
            for name in instead:
                del own[name]
            own.update(before)

    # ------------------------------------------------------------------ as Trainer calls it

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        handler = self._trainer.callback_handler
        handler.callbacks = [*(one for one in handler.callbacks if one is not self), self]
        self._replace_jit_checkpoint(args, state, control)
        if args.should_save:
            self._training = write_record(self._folder, self._training)
        self._kept_at = state.global_step  # nothing is lost up to here
        self.stopping.begin()
        report(state.global_step, state.max_steps, None)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        report(state.global_step, state.max_steps, self._loss)
        self._is_epoch_over = False
        is_asked = self.stopping.is_asked()
        if is_asked and not self._is_over(control) and not _is_last_of_epoch(state):
            self._keep_or_stop(args, state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._is_epoch_over = True
        if self.stopping.request and not self._is_over(control):
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
        if is_asked and not (has_more or self._is_over(control) or args.save_only_model):
            self._leave(state.global_step)

    # ------------------------------------------------------------------ parts of these

    def _is_over(self, control: Any) -> bool:
        """Return whether the training ends by itself."""
        return control.should_training_stop and not self._is_stopping

    def _keep_or_stop(self, args: Any, state: Any, control: Any) -> None:
        if control.should_evaluate:
            self._keep(state.global_step)
        else:
            self._is_stopping = control.should_training_stop = control.should_save = True
            args.save_only_model = False  # training cannot go on from weights alone

    def _keep(self, step: int) -> None:
        """Save once before or amid an evaluation."""
        if self._kept_at == step:
            return
        self._kept_at = step
        self._trainer.args.save_only_model = False
        self._trainer._save_checkpoint(self._trainer.model_wrapped, trial=None)
        if rank_and_size()[0] == 0:
            say(f"saved {self._checkpoint(step)}; leaving after the evaluation and a step more")

    def _leave(self, step: int) -> None:
        is_writer, request = self._trainer.args.should_save, self.stopping.request
        is_noted = is_writer and note_stop(self._folder, self._training, request)
        for callback in self._trainer.callback_handler.callbacks:
            if (writer := getattr(callback, "tb_writer", None)) is not None:
                writer.flush()  # its thread ends with this process
        self.stopping.meet()  # until all is written
        self.stopping.leave(step, str(self._checkpoint(step)), is_noted=is_noted)

    def _checkpoint(self, step: int) -> Path:
        return self._folder / f"checkpoint-{step}"

    def _replace_jit_checkpoint(self, args: Any, state: Any, control: Any) -> None:
        """Take over from Trainer's own saving on SIGTERM, on which ranks do not agree."""
        if not getattr(args, "enable_jit_checkpoint", False):
            return
        from transformers.trainer_jit_checkpoint import JITCheckpointCallback

        if (own := self._trainer.pop_callback(JITCheckpointCallback)) is not None:
            own.on_train_end(args, state, control)  # puts back the handler of SIGTERM

    # ------------------------------------------------------------------ instead of its methods

    def _save_whole(self, save: Any, *args: Any, **kwargs: Any) -> None:
        if self._trainer.args.should_save:
            state = self._checkpoint(self._trainer.state.global_step) / STATE
            state.unlink(missing_ok=True)
        self.stopping.meet()  # before any rank writes
        save(*args, **kwargs)

    def _end_rank(self, save: Any, output_dir: str) -> None:
        """Save what is the last file of each rank, before rank 0 writes the state."""
        save(output_dir)
        self.stopping.meet()
        if self._trainer.args.should_save:
            _sync_to_disk(Path(output_dir))

    def _run_epoch(self, run_epoch: Any, *args: Any, **kwargs: Any) -> None:
        """Train no step more where a checkpoint has all of them, as Trainer would."""
        state = self._trainer.state
        if 0 < state.max_steps <= state.global_step:
            self._trainer.control.should_training_stop = True
        else:
            run_epoch(*args, **kwargs)

    def _loader(self, get: Any, *args: Any, **kwargs: Any) -> Any:
        return with_lasting_workers(get(*args, **kwargs))
