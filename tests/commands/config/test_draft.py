"""`headway config edit`: a draft in the user's editor, until it is sound."""

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


def editor(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("EDITOR", f"sed -i 's/{old}/{new}/'")


@pytest.mark.wording
def test_edit_replaces_the_profile_only_by_a_sound_one_and_keeps_the_draft(
    profile: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    editor(monkeypatch, "cpu", "cqu")
    assert main(["config", "edit"]) == 2
    err = capsys.readouterr().err
    assert "from: profile ~/.config/headway/.draft-default.yaml, line 2" in err
    assert "`headway config edit` opens your draft again" in err
    assert profile.read_text() == PROFILE
    editor(monkeypatch, "cqu", "cuda")
    assert main(["config", "edit"]) == 0
    assert "your draft of last time" in capsys.readouterr().err
    assert profile.read_text() == PROFILE.replace("cpu", "cuda")
    assert os.listdir(profile.parent) == ["default.yaml"]


@pytest.mark.parametrize("broken", ["device: [\n", "device: cpu\ndevice: mps\n", "version: 9\n"])
def test_edit_mends_a_broken_profile(
    broken: str, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile.write_text(broken)
    monkeypatch.setenv("VISUAL", "sh -c 'echo device: cpu > \"$1\"' -")
    assert main(["config", "edit"]) == 0
    assert profile.read_text() == "device: cpu\n"


def test_an_editor_that_removes_the_draft_changes_nothing(
    profile: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VISUAL", "rm -f")
    assert main(["config", "edit"]) == 2
    assert "the editor has removed the draft" in capsys.readouterr().err
    assert os.listdir(profile.parent) == ["default.yaml"]
    assert profile.read_text() == PROFILE


def test_edit_loses_neither_text_when_somebody_else_writes_meanwhile(
    profile: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VISUAL", f"sh -c 'echo max_restarts: 2 >> \"$1\"; rm {profile}; "
                       f"echo device: mps > {profile}' -")  # fmt: skip
    assert main(["config", "edit"]) == 2
    assert "somebody else" in capsys.readouterr().err
    assert profile.read_text() == "device: mps\n"
    assert "max_restarts: 2" in (profile.parent / ".draft-default.yaml").read_text()


def test_a_draft_of_a_profile_that_has_changed_since_is_kept_and_replaces_nothing(
    profile: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    editor(monkeypatch, "cpu", "cqu")
    assert main(["config", "edit"]) == 2
    assert main(["config", "set", "max_restarts=4"]) == 0
    editor(monkeypatch, "cpu", "cuda")
    assert main(["config", "edit"]) == 0
    assert "the profile has changed since your draft" in capsys.readouterr().err
    changed = PROFILE.replace("cpu", "cuda") + "max_restarts: 4\n"
    assert profile.read_text() == changed
    aside = profile.parent / ".draft-default.yaml.1"
    assert aside.read_text() == PROFILE.replace("cpu", "cqu")
    assert sorted(os.listdir(profile.parent)) == [aside.name, "default.yaml"]


@pytest.mark.parametrize(("command", "reason"), [("false", "ended with 1"), ("no-ed", "started")])
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
    assert "no editor is named, and there is no terminal" in capsys.readouterr().err
    assert os.listdir(profile.parent) == ["default.yaml"]


def test_a_draft_of_a_named_profile_is_opened_again_by_its_name(
    profile: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VISUAL", "sh -c 'echo device: cqu > \"$1\"' -")
    assert main(["config", "edit", "--profile", "gpu4"]) == 2
    note = "headway: note: `headway config edit --profile gpu4` opens your draft again"
    assert note in capsys.readouterr().err


def test_a_new_profile_that_is_left_as_it_was_proposed_is_not_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VISUAL", "true")
    assert main(["config", "edit"]) == 0
    assert capsys.readouterr().out.startswith("unchanged: there is still no ~/")
    assert not any(path.is_file() for path in Path.home().rglob("*"))
