"""What a launcher learns of a training in this process, and what a script cannot break of it."""

from __future__ import annotations

import copy
import os
import pickle

import pytest

from headway.ipc import step_clock
from headway.ipc.progress import Channel, Progress, process_progress
from headway.ipc.records import ProgressSnapshot, RecordReader, StepStats, WillSave
from headway.ipc.step_clock import BACKWARD, DATA, SAVE, SCRIPT


def sent(reading: int) -> list[object]:
    return [*RecordReader().read(os.read(reading, 2**16))]


def test_progress_is_reported_at_most_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(step_clock, "_now", lambda: now[0])
    reading, writing = os.pipe()
    progress = Progress()
    progress.connect(Channel(writing))
    for seconds in (0.0, 0.6, 0.6):
        now[0] += seconds
        progress.begin_forward(8)
        progress.clock.enter(BACKWARD)
        progress.end_backward()
    assert sent(reading) == 2 * [ProgressSnapshot()]
    os.close(reading)
    os.close(writing)


def test_without_a_reader_no_step_is_timed_and_how_far_a_library_is_is_known() -> None:
    progress = Progress()
    progress.follow(1, 9, 0.5)
    assert (progress.clock.tally.num_steps, sum(progress.clock.tally.spent)) == (0, 0)
    assert progress.snapshot() == ProgressSnapshot(1, "script", 9, 0.5)


def test_a_descriptor_that_the_script_closed_and_reused_gets_nothing() -> None:
    (ours, writing), (reading, theirs) = os.pipe(), os.pipe()
    channel = Channel(writing)
    channel.send(WillSave())
    assert sent(ours) == [WillSave()]
    os.dup2(theirs, writing)
    assert not channel.is_open
    channel.send(WillSave())
    os.write(theirs, b"end")
    assert os.read(reading, 100) == b"end"
    for fd in (ours, writing, reading, theirs):
        os.close(fd)


def test_a_call_that_all_ranks_make_is_the_phase_and_saving_counts_as_such() -> None:
    progress = Progress()
    progress.clock.enter(DATA)
    with progress.calling("save_state"):
        assert progress.snapshot().phase == "save_state"
        assert progress.clock.phase == SAVE
    assert progress.snapshot().phase == "data"


def test_at_the_end_the_last_steps_and_saves_after_them_are_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, told, progress = [100.0], list[StepStats](), Progress()
    monkeypatch.setattr(step_clock, "_now", lambda: now[0])
    progress.report_to(told.append)

    def save(seconds: float) -> None:
        with progress.calling("save_state"):
            now[0] += seconds

    progress.clock.enter(SCRIPT)
    for step in range(1, 4):  # the second is reported at once
        now[0] += 0.25
        progress.end_step(step)
        save(0.25)
    now[0] += 8  # an evaluation
    progress.clock.enter(SCRIPT)
    save(2.0)
    progress.finish()
    progress.finish()
    of_steps = [(row.step, row.num_steps, row.seconds, row.save_s) for row in told]
    assert of_steps == [(2, 1, 0.5, 0.25), (3, 1, 0.5, 0.25), (3, 0, 0.0, 2.25)]


def test_what_the_program_uses_adds_up() -> None:
    progress = Progress()
    progress.note_use(group=True)
    progress.note_use(stopping=True)
    assert progress.feature_use == type(progress.feature_use)(group=True, stopping=True)


def test_an_object_that_reports_can_be_copied_and_pickled() -> None:
    progress = process_progress()
    assert copy.deepcopy(progress) is progress
    assert pickle.loads(pickle.dumps(progress)) is progress
