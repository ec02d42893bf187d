"""failure.json is for programs: what they find is whole."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from headway.launcher.processes.failure_record import write_record


def test_a_disk_that_is_full_leaves_the_failure_json_before_it_and_no_part_of_a_new_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    write_record('{"rank": 1}', str(logs))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        write_record("x" * 2000, str(logs))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [one.name for one in logs.iterdir()] == ["failure.json"]
    assert (logs / "failure.json").read_text() == '{"rank": 1}'
    assert "failure.json could not be written" in capfd.readouterr().err
