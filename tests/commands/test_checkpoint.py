"""`headway checkpoint`: lists, verifies and removes checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headway.commands.main import main
from headway.errors import CheckpointError, ConfigError
from tests.checkpoint.saved import save

FOLDER = Path("runs/checkpoints")


@pytest.fixture(autouse=True)
def saved(own_surroundings: None) -> None:
    for step in (9, 10, 11):
        save(FOLDER / f"checkpoint_{step}", step=step)


def test_checkpoints_are_listed_from_the_oldest_to_the_newest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["checkpoint", "ls", str(FOLDER)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        [f"checkpoint_{step}", str(step)] for step in (9, 10, 11)
    ]
    assert main(["checkpoint", "ls", str(FOLDER), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [one["step"] for one in listed] == [9, 10, 11]


def test_a_folder_without_checkpoints_is_said_to_have_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["checkpoint", "ls"]) == 0
    streams = capsys.readouterr()
    assert (streams.out, "no checkpoint" in streams.err) == ("", True)


def test_a_damaged_checkpoint_is_named_and_the_others_are_verified(
    capsys: pytest.CaptureFixture[str],
) -> None:
    damaged = FOLDER / "checkpoint_10" / "values.json"
    damaged.write_text("[]!")
    (FOLDER / "checkpoint_11" / "notes.txt").write_text("mine")
    folders = [str(FOLDER / f"checkpoint_{step}") for step in (10, 11)]
    assert main(["checkpoint", "verify", *folders]) == CheckpointError.exit_code
    streams = capsys.readouterr()
    assert str(damaged) in streams.err
    assert f"{folders[1]}: ok" in streams.out
    assert "notes.txt" in streams.out
    assert main(["checkpoint", "verify", folders[1]]) == 0


def test_prune_keeps_the_newest_and_leftovers_go_only_when_asked() -> None:
    left = FOLDER / ".tmp-checkpoint_12-00000000"
    left.mkdir()
    assert main(["checkpoint", "prune", str(FOLDER), "--keep", "1"]) == 0
    assert sorted(path.name for path in FOLDER.iterdir()) == [left.name, "checkpoint_11"]
    assert main(["checkpoint", "prune", str(FOLDER), "--keep", "1", "--leftovers"]) == 0
    assert [path.name for path in FOLDER.iterdir()] == ["checkpoint_11"]


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["list"],
        ["prune", "."],
        ["prune", "--keep", "1"],
        ["prune", ".", "--keep", "0"],
        ["prune", ".", "--keep", "many"],
        ["ls", "a", "b"],
        ["verify", ".", "--keep", "1"],
    ],
)
def test_words_that_make_no_command_are_refused(words: list[str]) -> None:
    assert main(["checkpoint", *words]) == ConfigError.exit_code
    assert len(list(FOLDER.iterdir())) == 3
