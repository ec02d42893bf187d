"""The run's key: from the environment, or a file that only its owner reads; never shown."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headway.commands.main import main
from headway.errors import ConfigError
from headway.launcher.machines.run_key import (
    describe_run_key,
    run_key_of_machine_0,
    run_key_of_other,
)

STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder that a job was submitted from."""
    made = tmp_path / "submitted"
    made.mkdir()
    return made


def no_line(_: str) -> None:
    raise AssertionError("nothing is to be said")


def in_step(folder: Path) -> dict[str, str]:
    return {**STEP, "SLURM_SUBMIT_DIR": str(folder)}


def test_without_a_key_and_a_scheduler_there_is_none_and_the_way_to_one_is_said() -> None:
    assert run_key_of_machine_0({}, no_line).key == b""
    other = run_key_of_other({})
    assert other is not None
    assert other.key == b""
    assert "openssl rand" in describe_run_key({})


def test_the_environment_is_taken_first_and_a_short_key_is_refused(folder: Path) -> None:
    environ = {**in_step(folder), "HEADWAY_RUN_KEY": "0123456789abcdef"}
    assert run_key_of_machine_0(environ, no_line).key == b"0123456789abcdef"
    assert not list(folder.iterdir())
    for short in ("", "secret"):
        with pytest.raises(ConfigError) as error:
            run_key_of_other({"HEADWAY_RUN_KEY": short})
        assert not short or short not in str(error.value)


def test_in_a_slurm_step_machine_0_writes_a_key_for_its_owner_alone(folder: Path) -> None:
    environ = in_step(folder)
    assert run_key_of_other(environ) is None  # not yet
    ours = run_key_of_machine_0(environ, no_line)
    theirs = run_key_of_other(environ)
    assert theirs is not None
    assert (theirs.key, len(theirs.key)) == (ours.key, 64)
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    again = run_key_of_machine_0(environ, no_line)  # after a launcher that was killed
    assert again.key != ours.key
    again.forget()
    assert not list(folder.iterdir())


def test_a_key_file_that_others_can_read_is_refused(folder: Path) -> None:
    run_key_of_machine_0(in_step(folder), no_line)
    (file,) = folder.iterdir()
    file.chmod(0o644)
    with pytest.raises(ConfigError):
        run_key_of_other(in_step(folder))


@pytest.mark.parametrize("kind", ["a link", "a folder", "a pipe"])
def test_what_is_no_file_in_the_place_of_the_key_is_refused_and_holds_nobody_up(
    kind: str, folder: Path
) -> None:
    run_key_of_machine_0(in_step(folder), no_line)
    (file,) = folder.iterdir()
    real = file.rename(folder / "real")
    make = {"a link": lambda: file.symlink_to(real), "a folder": file.mkdir}
    make.get(kind, lambda: os.mkfifo(file, 0o600))()
    with pytest.raises(ConfigError) as caught:
        run_key_of_other(in_step(folder))
    assert "remove" not in caught.value.problems[0].fix


def test_where_the_key_cannot_be_written_machine_0_says_so(folder: Path) -> None:
    lines: list[str] = []
    key = run_key_of_machine_0(in_step(folder / "missing"), lines.append)
    assert (key.key, len(lines)) == (b"", 1)


def test_a_plan_hides_the_key_from_the_script_and_from_the_reader(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("train.py").touch()
    monkeypatch.setenv("HEADWAY_RUN_KEY", "not to be shown to anybody")
    place = ["--num-machines", "2", "--machine-rank", "1", "--main-address", "n1"]
    assert main(["launch", "--dry-run", "--cpu", *place, "train.py"]) == 0
    out = capsys.readouterr().out
    assert "- HEADWAY_RUN_KEY" in out
    assert "not to be shown" not in out
    assert "machines know each other by HEADWAY_RUN_KEY" in out
    assert os.environ["HEADWAY_RUN_KEY"]
