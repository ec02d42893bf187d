"""The Accelerator's methods that save when it is due, and leave when the job has to stop."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import torch

from headway.checkpointed import Checkpointed
from headway.contract.records import channel, in_phase
from headway.contract.run import LATEST
from headway.errors import CheckpointError, UsageError
from headway.meeting import meet
from headway.optimizer import PreparedOptimizer
from headway.stopping import Agreement, Request, StopSignals, say
from headway.unasked import Unasked

_KEEP = 2
"""How many of its checkpoints `checkpoint()` keeps where `total_limit` does not say."""


class _NoOptimizerYet:
    step_count = sys.maxsize


class DueCheckpoints(Checkpointed):
    """A rank that saves when it is due, and leaves with all others when the job has to stop."""

    _exit_code: int | None = None  # with which this process has been told to leave

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._signals: StopSignals | None = None
        self._request = Request.NONE  # that all ranks have agreed on
        # optimizers, and the number of steps of one of them from which `checkpoint` looks closer
        self._stepping: Any = (_NoOptimizerYet,)
        self._look_at = 0
        self._agreed_at_step = self._agree_at_step = 0
        self._saved_at_step, self._saved_at = 0, 0.0
        self._asks = self._asks_left = 0  # of `should_stop`, between two agreements
        self._has_told_of_others = False
        self._resumed_with: int | None = None  # how many objects were there in `resume`
        self._by_steps, self._by_calls = Agreement(self.device), Agreement(self.device)
        self._unasked: Unasked | None = None  # until the script asks whether it has to stop
        self._has_asked = False

    def checkpoint(
        self, every: int | str | None = None, *, allow_pickle: bool = False, wait: bool = True
    ) -> str | None:
        """Save when it is due; save and leave the script when the job has to stop.

        Call it on every rank at the end of the loop's body, in each iteration: where nothing is due
        it costs next to nothing, and between the micro-batches of a step it does nothing. A
        job has to stop after SIGTERM, SIGUSR1 or Ctrl-C to one of the ranks or to the launcher, and
        at its `--time-limit`. Then all ranks leave after the same step, by SystemExit with code 75
        ("saved, run me again"); after Ctrl-C with 130.

        A checkpoint is `checkpoints/step_00000100` in the project folder. The newest
        `total_limit` of this kind stay, or 2 if the project's configuration has no limit.

        Args:
            every: optimizer steps ("every 100th": 100), or a duration such as "10m" or "1h30m";
                None saves now, between micro-batches as well.
            allow_pickle: as in `save_state`.
            wait: False: as in `save_state`, a thread writes the checkpoint while training goes on.
                When the job has to stop, the call waits all the same.

        Returns:
            The folder, if something was saved.

        Raises:
            UsageError: there is no project folder, no optimizer has been prepared, `every` is
                neither a number of steps nor a duration, or `resume` came before `prepare`.
            CheckpointError: a rank could not save; raised on all, and older checkpoints stand. With
                `wait=False` by the next call that saves. A script that is to train on catches it.
                Or the project folder has checkpoints of an earlier run, and this one has loaded
                none.

        Examples:
            >>> accelerator = Accelerator(cpu=True, project_dir="runs/digits")
            >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
            >>> accelerator.checkpoint()
            'runs/digits/checkpoints/step_00000000'
            >>> accelerator.end_training()
        """
        if every is not None:
            look_at = self._look_at
            for optimizer in self._stepping:
                if optimizer.step_count >= look_at:
                    break
            else:
                return None
        with in_phase("checkpoint"):
            return self._look_closer(every, allow_pickle, wait)

    @property
    def should_stop(self) -> bool:
        """Whether the job has to stop; for loops in which `checkpoint(every=...)` has no place.

        Every rank must ask equally often, and gets the same answer. `checkpoint()` then saves and
        leaves.

        Examples:
            >>> accelerator = Accelerator(cpu=True, project_dir="runs/gpt")
            >>> for round in range(3):
            ...     if accelerator.should_stop:
            ...         accelerator.checkpoint()
            >>> accelerator.end_training()
        """
        if self._asks_left > 0:
            self._asks_left -= 1
            return False
        if self._request is Request.NONE and not self._accumulation.is_open:
            with in_phase("should_stop"):
                meet("should_stop")
                self._begin_to_ask()
                verdict = self._by_calls.agree(self._own_request(), False, self._asks)
            self._note(verdict.request)
            self._asks, self._asks_left = verdict.following, verdict.following - 1
        return self._request is not Request.NONE

    def end_training(self) -> None:
        """Finish the trackers and end the process group; call it last, on every rank.

        Trackers are also finished when the script ends without this call. Signals do what they did
        before `resume`.

        Examples:
            >>> accelerator.end_training()
        """
        if self._signals is not None:
            self._signals.release()
        super().end_training()

    def _arm(self) -> None:
        """Begin to note what asks this process to stop."""
        if self._signals is None:
            self._signals = StopSignals()
            self._signals.trap()
            self._saved_at = time.monotonic()
            channel.has_resumed = True
            self._note_earlier_saves()

    def _note_earlier_saves(self) -> None:
        folder = self.project_configuration.project_dir
        if folder is not None and self.is_main_process:
            from headway.checkpoint.project import saves_in

            self._known_saves |= saves_in(Path(folder).expanduser()).keys()

    def _prepare_optimizer(self, optimizer: Any, device: torch.device | None) -> None:
        super()._prepare_optimizer(optimizer, device)
        if self._agreed_settings.time_limit is not None:
            self._watch_steps()

    def _watch_steps(self) -> None:
        """Notice it if the script trains without asking whether it has to stop."""
        if self._has_asked:
            return
        if self._unasked is None:
            self._unasked = Unasked(
                self._withdraw, self._agreed_settings.deadline, self._tell_of_time_limit
            )
        for one in self._all(PreparedOptimizer):
            self._unasked.watch(one.optimizer)

    def _withdraw(self) -> None:
        """Let signals do what they did before `resume`."""
        if self._signals is not None:
            signals, self._signals = self._signals, None
            signals.withdraw()

    def _tell_of_time_limit(self) -> None:
        if self.is_main_process:
            say(
                f"note: time_limit={self._agreed_settings.time_limit} has passed, and training goes"
                " on: the script asks neither accelerator.should_stop nor accelerator.checkpoint()"
            )

    def _begin_to_ask(self) -> None:
        if self._signals is None and self._resumed_with is None:
            self._require_resumed()
        self._has_asked = True
        if self._unasked is not None:
            self._unasked.end()
            self._unasked = None
        self._arm()

    def _require_resumed(self) -> None:
        """Refuse to save beside, and in place of, checkpoints that this run does not go on from."""
        from headway.checkpoint.project import candidates
        from headway.checkpoint.saving import on_rank_0

        folder = self.project_configuration.project_dir
        if folder is None or self._has_state:
            return
        project = Path(folder).expanduser()
        found = on_rank_0(lambda: [str(one.path) for one in candidates(project)[-1:]])
        if found:
            raise CheckpointError(
                "the project folder has checkpoints of an earlier run, which this run does not go"
                " on from, and its own would take their place",
                where=found[0],
                fix="call accelerator.resume() after prepare() to go on from it, or pass another"
                " project_dir",
            )

    def _require_prepared_before(self) -> None:
        num_later = 0 if self._resumed_with is None else self._num_objects() - self._resumed_with
        if num_later > 0:
            raise UsageError(
                f"{num_later} objects were prepared or registered after resume(), which could not"
                " load what a checkpoint has of them",
                where="the script's resume()",
                fix="call accelerator.resume() after every prepare() and"
                " register_for_checkpointing()",
            )

    def _num_objects(self) -> int:
        return len(self._prepared) + len(self._registered)

    def _own_request(self) -> Request:
        """Return what this rank has been asked for."""
        assert self._signals is not None, "_arm() comes first"
        request, deadline = self._signals.request, self._agreed_settings.deadline
        if request is Request.NONE and deadline is not None and time.monotonic() >= deadline:
            return Request.TIME_LIMIT
        return request

    def _note(self, request: Request) -> None:
        self._request = request
        if request is not Request.NONE:
            self._look_at = 0

    def _look_closer(self, every: int | str | None, allow_pickle: bool, wait: bool) -> str | None:
        if self._exit_code is not None:  # the script has caught what it was to leave by
            raise SystemExit(self._exit_code)
        if every is not None and self._accumulation.is_open:
            return None
        project = self._project_folder("checkpoint")
        meet("checkpoint(...)")
        self._begin_to_ask()
        self._require_prepared_before()
        self._stepping = self._all(PreparedOptimizer)
        step = self._steps_done()
        is_due = self._is_due(every, step)
        has_to_stop = self._request is not Request.NONE
        if not (is_due or has_to_stop):
            return None
        folder = self._save_step(project, step, allow_pickle, wait or has_to_stop)
        if has_to_stop:
            self._leave(folder, step)
        return folder

    def _is_due(self, every: int | str | None, step: int) -> bool:
        """Return whether a save is due at this step, and note at which one to look again."""
        steps, seconds = self._interval(every)
        is_due = every is None or (
            steps is not None and step // steps > self._saved_at_step // steps
        )
        if self._request is Request.NONE and (is_due or step >= self._agree_at_step):
            is_due |= self._agree_at(step, seconds)
        self._look_at = self._agree_at_step
        if steps is not None:
            self._look_at = min(self._look_at, (step // steps + 1) * steps)
        return is_due

    def _agree_at(self, step: int, seconds: int | None) -> bool:
        """Agree on what this step brings; return whether rank 0's clock says that a save is due."""
        is_due = seconds is not None and time.monotonic() - self._saved_at >= seconds
        verdict = self._by_steps.agree(self._own_request(), is_due, step - self._agreed_at_step)
        self._note(verdict.request)
        self._agreed_at_step, self._agree_at_step = step, step + verdict.following
        return verdict.is_due

    def _interval(self, every: int | str | None) -> tuple[int | None, int | None]:
        """Return the steps, or the seconds, from one checkpoint to the next."""
        if every is None:
            return None, None
        where = f"the script's checkpoint(every={every!r})"
        if not self._stepping:
            raise UsageError(
                "checkpoint(every=...) acts between optimizer steps, and no optimizer is prepared",
                where=where,
                fix="prepare the optimizer, or ask accelerator.should_stop and call checkpoint()",
            )
        if type(every) is int and every > 0:
            return every, None
        try:
            from headway.settings.setting import Seconds

            if not isinstance(every, str):
                raise ValueError("which is not one of the two")
            return None, Seconds(1)(every)
        except ValueError as error:
            raise UsageError(
                f"every is {every!r}, {error}",
                where=where,
                fix="pass a number of optimizer steps (every=100), or a duration (every='10m')",
            ) from None

    def _save_step(self, project: Path, step: int, allow_pickle: bool, wait: bool) -> str:
        from headway.checkpoint.project import step_folder

        folder = step_folder(project, step)
        keep = self.project_configuration.total_limit or _KEEP
        self._wait_for_earlier()
        self._save_to(folder, allow_pickle, wait=wait, then=lambda: self._tidy_up(project, keep))
        self._saved_at_step, self._saved_at = step, time.monotonic()
        return str(folder)

    def _tidy_up(self, project: Path, keep: int) -> None:
        from headway.checkpoint.project import keep_newest_steps, saves_in

        if not self._has_told_of_others:
            saves = saves_in(project)
            for other in [saves[one] for one in saves.keys() - self._known_saves][:1]:
                self._has_told_of_others = True
                say(
                    f"note: another run saves to {project} as well ({other}), and each removes"
                    " the other's checkpoints; give each a project_dir of its own"
                )
        keep_newest_steps(project, keep)

    def _wait_for_earlier(self) -> None:
        """Wait for a checkpoint that is being written; its failure keeps no job from stopping."""
        try:
            self.wait_for_checkpoint()
        except CheckpointError as error:
            if self._request is Request.NONE:
                raise
            if self.is_main_process:
                say(str(error))

    def _leave(self, folder: str, step: int) -> NoReturn:
        """End this process, on all ranks."""
        self._exit_code = self._request.exit_code
        self._look_at = 0
        if self.is_main_process:
            say(f"stopped by {self._request} after step {step}; saved {folder}; {self._how_on()}")
        if self._signals is not None:
            signals, self._signals = self._signals, None
            signals.leave()
        self.end_training()
        raise SystemExit(self._exit_code)

    def _how_on(self) -> str:
        settings = self._agreed_settings
        if settings.resume in (None, LATEST):
            return "run the same command again to go on"
        return (
            f"to go on, run the same command again without resume={settings.resume}"
            f" ({settings.resume_from})"
        )

    def _project_folder(self, method: str) -> Path:
        folder = self.project_configuration.project_dir
        if folder is None:
            raise UsageError(
                f"{method}() needs a project folder, where its checkpoints are",
                where=f"the script's {method}()",
                fix='pass Accelerator(project_dir="runs/my_run"), another one for each training',
            )
        return Path(folder).expanduser()
