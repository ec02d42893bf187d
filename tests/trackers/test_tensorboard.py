"""TensorBoard's tracker where its files cannot be written."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch")
from headway import Accelerator
from headway.trackers.adapters import TensorBoardTracker
from tests.trackers.full_disk import no_file_above


class Writer:
    """Writes as torch's does: one that could not write once never does again."""

    def __init__(self, folder: str) -> None:
        self._path, self._has_failed = Path(folder) / "events", False
        self._path.parent.mkdir(parents=True, exist_ok=True)

    def add_scalar(self, name: str, value: float, global_step: int) -> None:
        if self._has_failed:
            raise OSError("the thread that writes has ended")
        try:
            with self._path.open("ab", buffering=0) as file:
                file.write(f"{global_step}\n".encode())
        except OSError:
            self._has_failed = True
            raise

    def flush(self) -> None: ...

    def close(self) -> None:
        if self._has_failed:
            raise OSError("the thread that writes has ended")


def test_a_writer_that_has_failed_on_a_full_disk_is_replaced_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, module.__name__, module)
    Accelerator(cpu=True)  # a tracker asks which process it is in
    tracker = TensorBoardTracker("project", tmp_path)
    tracker.start()
    tracker.log({"loss": 0.0}, step=0)
    with no_file_above(2):
        for step in (1, 2):
            with pytest.raises(OSError, match=r"File too large|No space"):
                tracker.log({"loss": 1.0}, step=step)
    tracker.log({"loss": 2.0}, step=3)
    with no_file_above(4), pytest.raises(OSError, match=r"File too large|No space"):
        tracker.log({"loss": 2.0}, step=4)
    tracker.finish()  # there is nothing left to write for one that has failed
    assert (tmp_path / "project" / "events").read_text() == "0\n3\n"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_is_told_once_and_what_is_logged_after_it_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setattr("headway.trackers.tracking._PATIENCE", 0)  # it is tried again at once
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("project")
    accelerator.log({"loss": 0.0}, step=0)
    with no_file_above(10):
        for step in (1, 2, 3):
            accelerator.log({"loss": 1.0}, step=step)
    accelerator.log({"loss": 2.0}, step=4)
    accelerator.end_training()
    assert capsys.readouterr().err.count("headway: ") == 2, "that it failed, and what it missed"
    events: Any = EventAccumulator(str(tmp_path / "project"))
    events.Reload()
    assert [one.step for one in events.Scalars("loss")] == [0, 4]
