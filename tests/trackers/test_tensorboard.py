"""TensorBoard's tracker where its files cannot be written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
from headway import Accelerator
from tests.trackers.full_disk import no_file_above


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
    with no_file_above(10):
        accelerator.log({"loss": 3.0}, step=5)
    accelerator.end_training()  # a writer that has failed has nothing left to write
    assert capsys.readouterr().err.count("headway: ") == 2, "that it failed, and what it missed"
    events: Any = EventAccumulator(str(tmp_path / "project"))
    events.Reload()
    assert [one.step for one in events.Scalars("loss")] == [0, 4]
