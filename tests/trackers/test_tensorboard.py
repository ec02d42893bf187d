"""TensorBoard's tracker where its files cannot be written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
from headway import Accelerator
from tests.trackers.full_disk import no_file_above


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_is_told_and_the_training_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setattr("headway.trackers.tracking._PATIENCE", 0)  # it is tried again at once
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("project")
    accelerator.log({"loss": 0.0}, step=0)
    with no_file_above(10):
        accelerator.log({"loss": 1.0}, step=1)
    accelerator.log({"loss": 2.0}, step=2)  # a writer that has failed does not write again
    accelerator.end_training()
    told = capsys.readouterr().err
    assert "'tensorboard' failed: OSError" in told
    assert "missed 2 calls" in told
    events: Any = EventAccumulator(str(tmp_path / "project"))
    events.Reload()
    assert [one.step for one in events.Scalars("loss")] == [0]
