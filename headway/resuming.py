"""The Accelerator's method for going on after an interruption, and where training stands then."""

from __future__ import annotations

import atexit
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from headway.contract.records import channel, in_phase, is_connected
from headway.data.loader import PreparedDataLoader
from headway.due_checkpoints import DueCheckpoints
from headway.errors import CheckpointError
from headway.meeting import meet
from headway.stopping import say
from headway.trackers.tracked import Tracked


@dataclass(frozen=True)
class ResumedRun:
    """Where training goes on; all are 0 for a fresh start.

    Args:
        epoch: the number of the epoch that goes on, or begins.
        step: optimizer steps that have been completed.
        samples: how many samples all ranks together have trained on, those of earlier epochs
            included. Batches whose sizes nobody knows in advance count as none.
        checkpoint: the folder that was loaded; None for a fresh start.
    """

    epoch: int = 0
    step: int = 0
    samples: int = 0
    checkpoint: str | None = None


class Resuming(DueCheckpoints, Tracked):
    """A rank whose training goes on where it was interrupted, and stops without losing anything."""

    _has_told_of_evaluation = False

    def resume(self, *, fall_back: bool = False, allow_pickle: bool = False) -> ResumedRun:
        """Go on from the newest checkpoint of the project folder, or start afresh; rank 0 says so.

        Call it on every rank after `prepare` and `register_for_checkpointing`. The checkpoints that
        count are those of `checkpoint` and `save_state` in `project_dir` and in `checkpoints`
        below. From here on a signal to stop is acted on by `checkpoint` and `should_stop`.

        Args:
            fall_back: where the newest is damaged, go on from the newest that is whole.
            allow_pickle: as in `load_state`.

        Raises:
            UsageError: there is no project folder.
            CheckpointError: the newest is damaged, or does not fit; or the one that
                `Accelerator(resume_from=...)` or `headway launch --resume` asks for is none.

        Examples:
            >>> accelerator = Accelerator(cpu=True, project_dir="runs/digits")
            >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
            >>> run = accelerator.resume()
            >>> run.epoch, run.step, run.samples
            (0, 0, 0)
            >>> accelerator.end_training()
        """
        from headway.checkpoint.project import remove_abandoned
        from headway.checkpoint.saving import on_rank_0
        from headway.resume_choice import choose

        project = self._project_folder("resume")
        meet("resume()")
        self._resumed_with = self._num_objects()
        channel.has_resumed = True
        self._skips_itself = False  # a script for Accelerate that calls this has its loaders go on
        self._arm()
        self._watch_steps()
        with in_phase("resume"):
            path, lines = on_rank_0(lambda: choose(self._agreed_settings, project, fall_back))
        if path is not None:
            self._load(Path(path), project, allow_pickle)
        loader, step = self._training_loader(), self._steps_done()
        self._saved_at_step = self._agreed_at_step = step
        run = ResumedRun(step=step, checkpoint=path)
        if path is not None and loader is not None:
            run = ResumedRun(loader.epoch, step, loader.samples, path)
        if self.is_main_process:
            for line in (*lines, _start_of(run, project)):
                say(line)
            remove_abandoned(project)
        return run

    def _state_to_save(self, folder: Path, own_buffers: list[Any], allow_pickle: bool) -> Any:
        from headway.checkpoint.manifest import write_json
        from headway.resume_choice import TRACKERS

        if self.is_main_process:
            write_json(folder / TRACKERS, self._run_ids())
            self._tell_of_evaluation()
        return super()._state_to_save(folder, own_buffers, allow_pickle)

    def _tell_of_evaluation(self) -> None:
        loaders = self._all(PreparedDataLoader)
        is_inside = any(one.has_trained for one in loaders) and any(
            one.is_evaluated for one in loaders
        )
        if is_inside and not self._has_told_of_evaluation:
            self._has_told_of_evaluation = True
            say(
                "note: saved in the middle of an evaluation; a run that goes on from there will"
                " give that loader's next pass the remaining batches only. Save outside of it"
            )

    def _load(self, path: Path, project: Path, allow_pickle: bool) -> None:
        from headway.checkpoint.saving import on_rank_0
        from headway.resume_choice import explain_damage, tracked_runs

        try:
            runs = on_rank_0(lambda: tracked_runs(path))
            self.load_state(path, allow_pickle=allow_pickle)
        except CheckpointError as error:
            explain_damage(error, path, project)
            raise
        self._go_on_in(runs)


@cache
def tell_if_unused(asked: str) -> None:
    """Say at the end of a successful script that it has not looked at what was asked for, once.

    Under a launcher, that itself says so.
    """
    atexit.register(_tell_if_unused, asked)


def _tell_if_unused(asked: str) -> None:
    has_failed = getattr(sys, "last_type", None) is not None
    if not channel.has_resumed and not has_failed and not is_connected():
        say(
            f"note: {asked} had no effect: the script called neither accelerator.resume() nor"
            " accelerator.checkpoint()"
        )


def _start_of(run: ResumedRun, project: Path) -> str:
    if run.checkpoint is None:
        return f"starting from the beginning: no checkpoint in {project}"
    return f"going on from {run.checkpoint}: epoch {run.epoch}, {run.step} optimizer steps done"
