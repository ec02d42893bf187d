"""`headway config edit`: a copy of the profile in the user's editor, checked first."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headway.commands.main import main
from headway.contract.origin import Layer
from headway.settings.profile import parse_profile
from headway.settings.profile_files import choose_profile
from headway.settings.table import TABLE
from tests.commands.conftest import PROFILE
from tests.terminal import Terminal

pytestmark = pytest.mark.processes


def editor(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("EDITOR", f"sed -i 's/{old}/{new}/'")


def left_over(folder: Path) -> list[Path]:
    """Return the copies of a profile that lie beside it."""
    return [path for path in folder.iterdir() if path.name.startswith(".edit-")]


def test_edit_replaces_the_profile_by_a_valid_one(
    profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    editor(monkeypatch, "cpu", "cuda")
    assert main(["config", "edit"]) == 0
    assert profile.read_text() == PROFILE.replace("cpu", "cuda")
    assert os.listdir(profile.parent) == ["default.yaml"]


def test_without_a_terminal_an_invalid_profile_is_refused_and_the_text_is_kept(
    profile: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    editor(monkeypatch, "cpu", "cqu")
    assert main(["config", "edit"]) == 2
    (copy,) = left_over(profile.parent)
    err = capsys.readouterr().err
    assert f"profile ~/.config/headway/{copy.name}, line 2" in err
    assert err.count(f"~/.config/headway/{copy.name}") == 2  # where the error is; the note
    assert profile.read_text() == PROFILE
    assert copy.read_text() == PROFILE.replace("cpu", "cqu")
    assert copy.stat().st_mode & 0o777 == 0o600  # it may hold secrets


@pytest.mark.parametrize(
    ("reply", "code", "after"),
    [
        ("\r", 0, PROFILE.replace("cpu", "cuda")),  # the second change is valid
        ("n\r", 2, PROFILE),
        ("ctrl-c", 130, PROFILE),
    ],
)
def test_on_a_terminal_an_invalid_profile_can_be_edited_again_or_given_up(
    reply: str, code: int, after: str, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("EDITOR", "sed -i 's/cqu/cuda/; s/cpu/cqu/'")
    with Terminal("laptop_cpu", "config", "edit") as terminal:
        terminal.wait_for("Edit again? [Y/n]")
        assert "device is 'cqu'" in terminal.text
        terminal.press(reply)
        assert terminal.exit_code() == code
        assert ("your changes are in" in terminal.text) == (reply == "ctrl-c")
    assert profile.read_text() == after
    assert len(left_over(profile.parent)) == (1 if reply == "ctrl-c" else 0)


@pytest.mark.parametrize("broken", ["device: [\n", "device: cpu\ndevice: mps\n", "version: 9\n"])
def test_edit_can_fix_a_broken_profile(
    broken: str, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile.write_text(broken)
    monkeypatch.setenv("VISUAL", "sh -c 'echo device: cpu > \"$1\"' -")
    assert main(["config", "edit"]) == 0
    assert profile.read_text() == "device: cpu\n"


def test_an_editor_that_removes_its_file_changes_nothing(
    profile: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VISUAL", "rm -f")
    assert main(["config", "edit"]) == 2
    assert "the editor has removed the file" in capsys.readouterr().err
    assert os.listdir(profile.parent) == ["default.yaml"]
    assert profile.read_text() == PROFILE


def test_edit_loses_neither_text_when_somebody_else_writes_meanwhile(
    profile: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VISUAL", f"sh -c 'echo max_restarts: 2 >> \"$1\"; rm {profile}; "
                       f"echo device: mps > {profile}' -")  # fmt: skip
    assert main(["config", "edit"]) == 2
    assert profile.read_text() == "device: mps\n"
    (copy,) = left_over(profile.parent)
    assert "max_restarts: 2" in copy.read_text()
    err = capsys.readouterr().err
    assert "the profile has changed since the editor was opened" in err
    assert f"copy your changes from ~/.config/headway/{copy.name}" in err


@pytest.mark.parametrize(
    ("command", "reason"), [("false", "exited with code 1"), ("no-ed", "started")]
)
def test_an_editor_that_fails_changes_nothing(
    command: str,
    reason: str,
    profile: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VISUAL", command)
    assert main(["config", "edit"]) == 2
    assert reason in capsys.readouterr().err
    assert profile.read_text() == PROFILE
    assert os.listdir(profile.parent) == ["default.yaml"]


def test_edit_offers_every_setting_in_a_new_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    editor(monkeypatch, "# max_restarts: 0 ", "max_restarts: 3 ")
    assert main(["config", "edit", "--profile", "new"]) == 0
    text = Path(choose_profile("new").path).read_text()
    assert parse_profile(text, "", Layer.PROFILE)["max_restarts"].raw == "3"
    assert all(f"{name}: " in text for name in TABLE if name != "env")


@pytest.mark.parametrize("editor_named", ["", " "])
def test_without_an_editor_and_a_terminal_nothing_is_opened(
    editor_named: str,
    profile: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VISUAL", editor_named)
    monkeypatch.delenv("EDITOR", raising=False)
    assert main(["config", "edit"]) == 2
    assert "no editor is set, and there is no terminal" in capsys.readouterr().err
    assert os.listdir(profile.parent) == ["default.yaml"]


def test_a_new_profile_that_is_left_as_it_was_proposed_is_not_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VISUAL", "true")
    assert main(["config", "edit"]) == 0
    assert capsys.readouterr().out.startswith("unchanged: there is still no ~/")
    assert not any(path.is_file() for path in Path.home().rglob("*"))
