"""The schedule on which `checkpoint(every=...)` saves."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

from headway.errors import Code, UsageError
from headway.ipc.run_contract import is_requeued, is_restart

RECORD_FILE = "record.json"
"""The file name of a `TrainingRecord` in a checkpoint."""

_FAILURE_EVERY_S = 6 * 3600.0  # assumed before the first failure
_NUM_SAVES = 3
_EARLY_SHARE, _EARLY_COSTS = 1 / 10, 20  # of the training time so far, and of the cost of a save


class TrainingRecord(NamedTuple):
    """The number of failures of a training run and the cost of its saves, for `every="auto"`.

    Each checkpoint contains this record. If the ranks were restarted or the job was requeued,
    resuming from a checkpoint counts as a failure, unless a stop request caused the save.
    """

    trained_s: float  # duration of all runs until this checkpoint
    num_failures: int
    saves_s: tuple[float, ...]  # how long each of the last saves paused training
    is_stop: bool  # whether a stop request caused the save

    @property
    def interval_s(self) -> float:
        """Young's interval. It is 0 before the first save, when the cost of a save is unknown.

        A new run has no record of failures, and many runs fail early. It therefore saves more often
        until a tenth of its duration exceeds Young's interval, but without spending more than 5 %
        of the time on saves.

        The cost is a median, because the first save of a process also imports modules.
        Source: J. W. Young, A first order approximation to the optimum checkpoint interval, 1974.
        """
        if not self.saves_s:
            return 0.0
        failure_every_s = self.trained_s / self.num_failures if self.num_failures else None
        # the median; importing `statistics` would take 10 ms
        save_s = sorted(self.saves_s)[(len(self.saves_s) - 1) // 2]
        youngs_s = math.sqrt(2 * save_s * (failure_every_s or _FAILURE_EVERY_S))
        return min(youngs_s, max(_EARLY_SHARE * self.trained_s, _EARLY_COSTS * save_s))


class Interval(NamedTuple):
    """The interval between checkpoints; if it is empty, a checkpoint is always due."""

    steps: int | None = None
    seconds: int | None = None
    is_auto: bool = False  # computed from the `TrainingRecord`


class Schedule:
    """The schedule of periodic saves on this rank; it does not communicate with other ranks.

    Attributes:
        check_at: the step before which no save can be due.
    """

    def __init__(self) -> None:
        self.check_at = 0
        self._saved_at_step, self._saved_at = 0, 0.0
        self._record, self._resumed_at = TrainingRecord(0.0, 0, (), False), time.monotonic()

    def is_due(self, every: Interval, step: int) -> bool:
        if every.steps is None:
            return every.seconds is None and not every.is_auto
        return step // every.steps > self._saved_at_step // every.steps

    def due_in_s(self, every: Interval) -> float:
        """Return the seconds until a save is due by time; infinite without such an interval."""
        seconds = self.record().interval_s if every.is_auto else every.seconds
        return math.inf if seconds is None else self._saved_at + seconds - time.monotonic()

    def schedule_check(self, every: Interval, step: int, agree_at: int) -> None:
        """Set the next step at which a save may be due, which is `agree_at` or an earlier step."""
        self.check_at = agree_at
        if every.steps is not None:
            self.check_at = min(self.check_at, (step // every.steps + 1) * every.steps)

    def saved(self, step: int) -> None:
        """Restart the interval from `step` and the current time."""
        self._saved_at_step, self._saved_at = step, time.monotonic()

    def record(self) -> TrainingRecord:
        run_s = time.monotonic() - self._resumed_at
        return self._record._replace(trained_s=self._record.trained_s + run_s)

    def resume(self, record: TrainingRecord) -> None:
        """Continue the record of the run that saved the checkpoint."""
        has_failed = not record.is_stop and (is_restart() or is_requeued())
        failures = record.num_failures + has_failed
        self._record = record._replace(num_failures=failures, is_stop=False)
        self._resumed_at = time.monotonic()

    def note_cost(self, save_s: float) -> None:
        self._record = self._record._replace(saves_s=(*self._record.saves_s, save_s)[-_NUM_SAVES:])

    def note_stop(self) -> None:
        self._record = self._record._replace(is_stop=True)


def interval_of(every: int | str | None) -> Interval:
    if every is None:
        return Interval()
    if type(every) is int and every > 0:
        return Interval(steps=every)
    if every == "auto":
        return Interval(is_auto=True)
    try:
        from headway.settings.setting import Seconds

        if not isinstance(every, str):
            raise ValueError("it is not a number of steps, a duration or 'auto'")
        if every.isdecimal():
            raise ValueError("the unit is missing")
        return Interval(seconds=Seconds(1)(every))
    except ValueError as error:
        raise UsageError(
            f"invalid value {every!r} for every: {error}",
            where=f"the script's checkpoint(every={every!r})",
            fix="pass a number of optimizer steps (every=100), a duration (every='10m'), or"
            " every='auto'",
            code=Code.BAD_ARGUMENT,
        ) from None
