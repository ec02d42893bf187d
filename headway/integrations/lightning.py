"""Hooks into the Trainer of both Lightning packages, through a callback and `Trainer.fit`."""

from __future__ import annotations

import importlib
import inspect
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from headway.data.workers import with_shielded_workers
from headway.integrations.resuming import (
    TrainerPreemption,
    TrainingStart,
    add_to_list,
    log_start,
    replaced,
    select_start,
)
from headway.ipc import signals
from headway.ipc.run_contract import Ranks, RunContract, read_ranks, read_run
from headway.ipc.stderr import log_once

_OWN = "headway-step="  # prefix of our checkpoints' names
_LOSS_EVERY_S = 1.0  # reading it waits for the GPU


def install(module: ModuleType) -> None:
    """Hook into `module.Trainer`, so that it stops, saves and resumes as the launcher requests."""
    trainer_class: Any = module.Trainer
    fit, signature = trainer_class.fit, inspect.signature(trainer_class.fit)
    package = module.__name__.removesuffix(".trainer.trainer")
    # Lightning calls callbacks of this class last
    last: Any = importlib.import_module(f"{package}.callbacks").Checkpoint
    connector = importlib.import_module(f"{package}.trainer.connectors.data_connector")
    seed_workers = connector._auto_add_worker_init_fn
    callback_class = type("HeadwayCheckpoint", (_Fit, last), {})

    @wraps(fit)
    def hooked_fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        run, ranks = read_run(), read_ranks() or Ranks()
        is_hooked = self.world_size == ranks.world_size  # not ranks that Lightning starts itself
        if run is not None and self.world_size < ranks.world_size and ranks.rank == 0:
            log_once(
                f"note: this Trainer has devices={self.num_devices}, so each of the"
                f" {ranks.world_size} ranks trains the whole model, and none saves when the job is"
                f" stopped; fix: Trainer(devices={ranks.local_world_size})"
            )
        if run is None or not is_hooked or self.fast_dev_run or "://" in self.default_root_dir:
            return fit(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        start = select_start(run, Path(self.default_root_dir), bound.arguments.get("ckpt_path"))
        bound.arguments["ckpt_path"] = start.path

        def process_dataloader(process: Callable[[Any], Any], loader: Any) -> Any:
            loader = process(loader)
            seed_workers(loader, self.global_rank)  # if it has no `worker_init_fn`
            return with_shielded_workers(loader)

        callback = callback_class(self, run, start)
        self.callbacks.append(callback)
        try:
            with (
                replaced(self, save_checkpoint=callback.save_and_list),
                replaced(self.strategy, process_dataloader=process_dataloader),
            ):
                return fit(*bound.args, **bound.kwargs)
        finally:
            if callback in self.callbacks:
                self.callbacks.remove(callback)
            callback.stopping.release()

    trainer_class.fit = hooked_fit


class _Fit:
    def __init__(self, trainer: Any, run: RunContract, start: TrainingStart) -> None:
        self.trainer = trainer
        self.stopping = TrainerPreemption(run, trainer.strategy.root_device)
        self._start = start
        self._folder = Path(trainer.default_root_dir)
        self._handler = signal.getsignal(signal.SIGTERM)  # before Lightning replaces it
        self._step = 0
        self._loss: float | None = None
        self._loss_read_at = 0.0

    def save_and_list(
        self, save: Callable[..., None], filepath: Any, weights_only: Any = None, *args: Any
    ) -> None:
        """Call `Trainer.save_checkpoint`; list the checkpoint unless it contains only weights."""
        save(filepath, weights_only, *args)  # returns once all ranks have written
        if self.trainer.is_global_zero and not weights_only:
            self._folder.mkdir(parents=True, exist_ok=True)
            add_to_list(self._folder, self._start.training._replace(path=str(filepath)))

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        log_start("Lightning's Trainer", self._start, self._folder)
        self._step = trainer.global_step
        # Lightning's handler would stop only this rank
        signals.restore_handlers({signal.SIGTERM: self._handler})
        self.stopping.begin(self._step, self._total())

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self._read_loss(outputs)
        self.stopping.progress.follow(trainer.global_step, self._total(), self._loss)
        has_stepped, self._step = trainer.global_step != self._step, trainer.global_step
        is_due = self.stopping.should_stop() and has_stepped
        if is_due and not (trainer.is_last_batch or self._is_validation_due() or self._is_over()):
            self._save_and_exit()

    def on_train_epoch_end(self, *_: Any) -> None:
        if self.stopping.request and not self._is_over():
            self._save_and_exit()

    def _read_loss(self, outputs: Any) -> None:
        if time.monotonic() - self._loss_read_at < _LOSS_EVERY_S:
            return
        self._loss_read_at = time.monotonic()
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._loss = float(loss)

    def _total(self) -> int:
        total = self.trainer.estimated_stepping_batches
        return int(total) if 0 < total < float("inf") else 0

    def _is_validation_due(self) -> bool:
        loop = self.trainer.fit_loop
        return bool(loop.epoch_loop._should_check_val_fx(loop._data_fetcher))

    def _is_over(self) -> bool:
        trainer = self.trainer
        if trainer.should_stop and trainer.fit_loop._can_stop_early:
            return True
        if 0 < trainer.max_steps <= trainer.global_step:
            return True
        is_last_epoch = 0 < (trainer.max_epochs or -1) <= trainer.current_epoch + 1
        return bool(is_last_epoch and trainer.is_last_batch)

    def _save_and_exit(self) -> None:
        trainer = self.trainer
        folder = getattr(trainer.checkpoint_callback, "dirpath", None)
        path = Path(folder or self._folder / "checkpoints", f"{_OWN}{trainer.global_step}.ckpt")
        trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            for old in {*path.parent.glob(f"{_OWN}*.ckpt")} - {path}:
                if old.stem.removeprefix(_OWN).isdecimal():
                    with suppress(OSError):  # the job stops anyway
                        old.unlink()
        self.stopping.exit(trainer.global_step, str(path))
