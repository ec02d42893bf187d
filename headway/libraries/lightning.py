"""Joins Lightning's Trainer, under both of its package names, by a callback and `Trainer.fit`.

Lightning by itself restarts an epoch that was interrupted with the epoch's first batches, and saves
no random numbers: the callback saves what it takes to resume at the next batch.
"""

from __future__ import annotations

import importlib
import inspect
import io
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from headway.checkpoint.values import decode, encode
from headway.contract import signals
from headway.contract.notes import say
from headway.contract.run import Ranks, RunContract, read_ranks, read_run
from headway.data.workers import with_lasting_workers
from headway.distributed.rng import generator_states, set_generator_states
from headway.distributed.world import rank_and_size
from headway.libraries.folders import LIGHTNING
from headway.libraries.resuming import (
    Start,
    Stopping,
    list_saved,
    require_same,
    select_start,
    tell_start,
)

_OWN = "headway-step="  # the beginning of the names of our checkpoints
_LOSS_EVERY_S = 1.0  # reading it waits for the GPU


def join(module: ModuleType) -> None:
    """Make the trainings of `module.Trainer` stop, save and resume as the launcher asks."""
    trainer_class: Any = module.Trainer
    fit, signature = trainer_class.fit, inspect.signature(trainer_class.fit)
    package = module.__name__.removesuffix(".trainer.trainer")
    # Lightning calls callbacks of this class last
    last: Any = importlib.import_module(f"{package}.callbacks").Checkpoint
    seed_workers = importlib.import_module(
        f"{package}.trainer.connectors.data_connector"
    )._auto_add_worker_init_fn
    callback_class = type("HeadwayCheckpoint", (_Fit, last), {})

    @wraps(fit)
    def joined_fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        run, ranks = read_run(), read_ranks() or Ranks()
        # ranks that Lightning starts by itself are not joined
        is_joined = run is not None and self.world_size == ranks.world_size
        if run is None or not is_joined or self.fast_dev_run or "://" in self.default_root_dir:
            return fit(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        given = bound.arguments.get("ckpt_path")
        with (
            _joined(self, run, callback_class, given) as checkpoint,
            _lasting_workers(self, seed_workers),
        ):
            bound.arguments["ckpt_path"] = checkpoint
            return fit(*bound.args, **bound.kwargs)

    trainer_class.fit = joined_fit


@contextmanager
def _joined(trainer: Any, run: RunContract, callback_class: Any, given: Any) -> Iterator[Any]:
    """Join a training, and return what it resumes from, as `Trainer.fit` takes it."""
    start = select_start(run, Path(trainer.default_root_dir), given, Path.exists)
    callback = callback_class(trainer, start, Stopping(run, trainer.strategy.root_device))
    trainer.callbacks.append(callback)
    trainer.save_checkpoint = callback.listing(trainer.save_checkpoint)
    try:
        yield given or start.path
    finally:
        del trainer.save_checkpoint  # the instance's
        if callback in trainer.callbacks:
            trainer.callbacks.remove(callback)
        callback.stopping.release()


@contextmanager
def _lasting_workers(trainer: Any, seed_workers: Callable[[Any, int], None]) -> Iterator[None]:
    """Let the workers of loaders serve until a rank that stops has saved.

    `seed_workers` is what Lightning does afterwards, unless a loader has a `worker_init_fn`.
    """
    strategy, process = trainer.strategy, trainer.strategy.process_dataloader

    def process_dataloader(loader: Any) -> Any:
        loader = process(loader)
        seed_workers(loader, trainer.global_rank)
        return with_lasting_workers(loader)

    strategy.process_dataloader = process_dataloader
    try:
        yield
    finally:
        del strategy.process_dataloader  # the instance's


class _Fit:
    """One training of Lightning's, and the hooks of its callback."""

    def __init__(self, trainer: Any, start: Start, stopping: Stopping) -> None:
        self.stopping = stopping
        self._trainer, self._start = trainer, start
        self._folder = Path(trainer.default_root_dir)
        self._handler = signal.getsignal(signal.SIGTERM)  # before Lightning's own
        self._step = 0
        self._loss: float | None = None
        self._loss_read_at = 0.0
        self._kept_at = -1  # the step that was saved before or amid its validation
        self._pass: Any = None  # the generators before the first batch of the epoch
        self._loaded: Any = None  # what the checkpoint has of this

    def listing(self, save: Callable[..., None]) -> Callable[..., None]:
        """Return `Trainer.save_checkpoint`, which lists what a training can resume from."""

        @wraps(save)
        def save_checkpoint(filepath: Any, weights_only: Any = None, *args: Any) -> None:
            save(filepath, weights_only, *args)  # returns once all ranks have written
            if self._trainer.is_global_zero and not weights_only:
                self._folder.mkdir(parents=True, exist_ok=True)
                list_saved(self._folder, self._start.training, str(filepath))

        return save_checkpoint

    # ------------------------------------------------------------------ hooks of the callback

    def on_fit_start(self, *_: Any) -> None:
        self._note_pass()

    def on_train_start(self, *_: Any) -> None:
        trainer, chosen = self._trainer, [self._start.path]
        if rank_and_size()[1] > 1:
            dist.broadcast_object_list(chosen, src=0)
        require_same(self._start.path == chosen[0], self._folder)  # each rank has looked itself
        tell_start("Lightning's Trainer", self._start)
        if self._loaded is not None:
            self._go_on_in_data()
        self._step = self._kept_at = trainer.global_step
        signals.put_back({signal.SIGTERM: self._handler})  # Lightning's ends a rank by itself
        self.stopping.begin()
        self.stopping.progress.follow(self._step, self._total(), None)

    def on_train_epoch_start(self, *_: Any) -> None:
        loops = self._trainer.fit_loop
        is_going_on = loops.restarting or getattr(loops, "is_resuming", False)
        if self._trainer.current_epoch > 0 and not is_going_on:  # else the pass has begun before
            self._note_pass()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self._read_loss(outputs)
        self.stopping.progress.follow(trainer.global_step, self._total(), self._loss)
        has_stepped, self._step = trainer.global_step != self._step, trainer.global_step
        if self.stopping.is_asked() and has_stepped and not self._is_over():
            if self._is_validation_due():
                self._keep()
            elif not trainer.is_last_batch:
                self._leave()

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        if self._is_amid_training() and self.stopping.is_asked():
            self._keep()

    def on_validation_end(self, *_: Any) -> None:
        is_asked = self._is_amid_training() and bool(self.stopping.request)
        if is_asked and not (self._trainer.is_last_batch or self._is_over()):
            self._leave()

    def on_train_epoch_end(self, *_: Any) -> None:
        if self.stopping.request and not self._is_over():
            self._leave()

    def state_dict(self) -> Any:
        """Return where each rank is in its data, and its random numbers; every rank calls this."""
        loops = self._trainer.fit_loop
        epoch = loops.epoch_progress.current
        is_epoch_over = epoch.ready == epoch.processed
        batches = 0 if is_epoch_over else loops.epoch_loop.batch_progress.current.processed
        tensors: dict[str, torch.Tensor] = {}
        own = {"now": self._generators(), "pass": self._pass, "batches": batches}
        written = io.BytesIO()  # torch's messages cannot carry tensors of every type
        torch.save({"values": encode(own, "rank", tensors), "tensors": tensors}, written)
        mine = written.getvalue()
        states = [mine] * rank_and_size()[1]
        if len(states) > 1:
            dist.all_gather_object(states, mine)
        return {"ranks": states}

    def load_state_dict(self, state: Any) -> None:
        rank, states = rank_and_size()[0], state["ranks"]
        if len(states) == rank_and_size()[1]:  # else the ranks share the data otherwise
            own = torch.load(io.BytesIO(states[rank]), weights_only=True)
            self._loaded = decode(own["values"], own["tensors"])

    # ------------------------------------------------------------------ parts of these

    def _generators(self) -> dict[str, Any]:
        return generator_states(self._trainer.strategy.root_device)

    def _note_pass(self) -> None:
        self._pass = self._generators()

    def _go_on_in_data(self) -> None:
        """Leave out the batches of the epoch that the checkpoint was saved after.

        Loaders that tell their own state are set by Lightning.
        """
        state, loops = self._loaded, self._trainer.fit_loop
        device = self._trainer.strategy.root_device
        fetcher, loaders = loops._data_fetcher, loops._combined_loader.flattened
        if not all(hasattr(loader, "load_state_dict") for loader in loaders):
            for loader in loaders:
                samplers: tuple[Any, ...] = getattr(loader, "sampler", None), _inner_sampler(loader)
                for sampler in samplers:
                    if hasattr(sampler, "set_epoch"):
                        sampler.set_epoch(loops.epoch_progress.current.processed)
            self._pass = state["pass" if state["batches"] else "now"]
            set_generator_states(self._pass, device)
            iter(fetcher)
            for _ in range(state["batches"]):
                next(fetcher)
            fetcher.fetched -= state["batches"]  # which Lightning adds
            if not state["batches"]:
                return
        set_generator_states(state["now"], device)

    def _read_loss(self, outputs: Any) -> None:
        if time.monotonic() - self._loss_read_at < _LOSS_EVERY_S:
            return
        self._loss_read_at = time.monotonic()
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._loss = float(loss)

    def _total(self) -> int:
        total = self._trainer.estimated_stepping_batches
        return int(total) if 0 < total < float("inf") else 0

    def _is_amid_training(self) -> bool:
        return self._trainer.state.fn == "fit" and not self._trainer.sanity_checking

    def _is_validation_due(self) -> bool:
        loop = self._trainer.fit_loop
        return bool(loop.epoch_loop._should_check_val_fx(loop._data_fetcher))

    def _is_over(self) -> bool:
        """Return whether the training ends by itself after this batch or epoch."""
        trainer = self._trainer
        if trainer.should_stop and trainer.fit_loop._can_stop_early:
            return True
        if 0 < trainer.max_steps <= trainer.global_step:
            return True
        is_last_epoch = 0 < (trainer.max_epochs or -1) <= trainer.current_epoch + 1
        return bool(is_last_epoch and trainer.is_last_batch)

    def _keep(self) -> None:
        """Save once before or amid a validation, which may take longer than there is time."""
        if self._kept_at == self._trainer.global_step:
            return
        self._kept_at = self._trainer.global_step
        path = self._save()
        if self._trainer.is_global_zero:
            say(f"saved {path}; leaving after the validation")

    def _save(self) -> Path:
        callback = self._trainer.checkpoint_callback
        folder = getattr(callback, "dirpath", None) or self._folder / "checkpoints"
        path = Path(folder) / f"{_OWN}{self._trainer.global_step}{LIGHTNING}"
        self._trainer.save_checkpoint(path)
        if self._trainer.is_global_zero:
            for old in {*path.parent.glob(f"{_OWN}*{LIGHTNING}")} - {path}:
                old.unlink()
        return path

    def _leave(self) -> NoReturn:
        path = self._save()
        self.stopping.leave(self._trainer.global_step, str(path))


def _inner_sampler(loader: Any) -> Any:
    return getattr(getattr(loader, "batch_sampler", None), "sampler", None)
