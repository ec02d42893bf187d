"""Profiles are changed at one place and written whole: nothing that somebody wrote is lost."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import ConfigError
from headway.ipc.origin import Layer
from headway.settings.profile import parse_profile
from headway.settings.profile_edit import BLANK, set_value, unset_value, write_profile
from headway.settings.setting import Raw

TEXT = """\
# for the big machine
version: 1
device: cuda   # eight of them
devices: [1, 3]

env: {A: 1, B: 'two words'}  # first
log_dir: logs
# the end
"""


def values_of(text: str) -> dict[str, Raw]:
    return {key: entry.raw for key, entry in parse_profile(text, "p", Layer.PROFILE).items()}


@pytest.mark.parametrize(
    ("key", "raw", "old", "new"),
    [
        ("device", "cpu", "device: cuda   #", "device: cpu   #"),
        ("devices", "0,2", "[1, 3]", '"0,2"'),
        ("env.A", "x y", "A: 1, B: 'two words'", 'A: "x y", B: "two words"'),
        ("env.C", "no", "A: 1, B: 'two words'", 'A: 1, B: "two words", C: "no"'),
        ("log_dir", "/tmp/é", "log_dir: logs", 'log_dir: "/tmp/é"'),
        ("max_restarts", "3", "# the end\n", "# the end\nmax_restarts: 3\n"),
        ("env", {"Z": "1"}, "{A: 1, B: 'two words'}", "{Z: 1}"),
    ],
)
def test_setting_a_key_changes_that_value_and_nothing_else(
    key: str, raw: Raw, old: str, new: str
) -> None:
    assert set_value(TEXT, key, raw) == TEXT.replace(old, new)
    dos = TEXT.replace("\n", "\r\n")
    assert set_value(dos, key, raw) == dos.replace(
        old.replace("\n", "\r\n"), new.replace("\n", "\r\n")
    )


def test_unsetting_a_key_removes_its_line_and_nothing_else() -> None:
    assert unset_value(TEXT, "device") == TEXT.replace("device: cuda   # eight of them\n", "")
    assert unset_value(TEXT, "env.A") == TEXT.replace("A: 1, B: 'two words'", 'B: "two words"')
    assert unset_value("device: cpu\n", "device") == BLANK  # a profile does not become empty
    assert unset_value("device: cpu\nenv: {A: 1}\n", "env.A") == "device: cpu\n"
    assert unset_value("env: A=1 B=2\n", "env.A") == "env: {B: 2}\n"
    for key in ("max_restarts", "env.C", "env.C.D"):
        with pytest.raises(KeyError):
            unset_value("env: {A: 1}\n", key)


@pytest.mark.parametrize(
    "text",
    [
        "max_restarts: 1\ndevice: a\ndevice: b\n",  # the first one is the value
        "? device\n: cpu\nmax_restarts: 1\n",
        "{device: cpu}\n",
        "  device: cpu\n",
        "device:\n- 0\nmax_restarts: 1\n",
        "device: |\n  a\nmax_restarts: 1\n",
        "device: 'a\n  b'\nmax_restarts: 1\n",
        "device: [0, # x\n  2] # y\nmax_restarts: 1\n",
        "device: cpu\n...\n",
    ],
)
def test_a_value_that_is_not_on_one_line_of_its_own_is_refused(text: str) -> None:
    key = "device" if "max_restarts" in text else "max_restarts"
    with pytest.raises(ConfigError, match="headway config path"):
        set_value(text, key, "1")


TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Cn"]), max_size=20)


@given(TEXTS.filter(lambda text: text.strip()), st.sampled_from(["log_dir", "env.A", "env.N"]))
def test_whatever_is_set_is_read_back_and_everything_else_stays(raw: str, key: str) -> None:
    edited = values_of(set_value(TEXT, key, raw))
    before = values_of(TEXT)
    name, _, item = key.partition(".")
    assert edited.pop(name) == ({**before[name], item: raw} if item else raw)  # type: ignore[dict-item]
    before.pop(name)
    assert edited == before


def test_writing_follows_a_link_and_keeps_the_permissions() -> None:
    target = Path("real.yaml")
    target.write_text("device: cpu\n")
    target.chmod(0o600)
    Path("link.yaml").symlink_to(target.absolute())
    write_profile("link.yaml", "device: mps\n")
    assert Path("link.yaml").is_symlink()
    assert "device: mps" in target.read_text()
    assert stat.S_IMODE(target.stat().st_mode) == 0o600


def test_a_failing_write_leaves_the_old_profile_and_no_litter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_profile("default.yaml", "device: cpu\n")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        write_profile("default.yaml", "device: mps\n")
    assert "device: cpu" in Path("default.yaml").read_text()
    assert os.listdir() == ["default.yaml"]


@pytest.mark.usefixtures("ordinary_user")
def test_a_folder_that_cannot_be_written_to_is_a_clear_error() -> None:
    Path("locked").mkdir(mode=0o500)
    Path("file").touch()
    for folder in ("locked", "file"):
        with pytest.raises(ConfigError, match="cannot write the profile: "):
            write_profile(f"{folder}/default.yaml", "device: cpu\n")


@pytest.mark.usefixtures("ordinary_user")
def test_a_read_only_profile_is_not_replaced() -> None:
    write_profile("default.yaml", "device: cpu\n")
    Path("default.yaml").chmod(0o444)
    with pytest.raises(ConfigError, match="cannot write the profile: Permission denied") as caught:
        write_profile("default.yaml", "device: mps\n")
    assert "writable" in caught.value.problems[0].fix
    assert "device: cpu" in Path("default.yaml").read_text()


@pytest.mark.parametrize(
    "text",
    ["31", "0x1F", "010", "0o17", "1_000", "1e3", "1.50", "0.5", ".inf", "2026-11-21", "./a", "no"],
)
def test_every_reader_of_yaml_finds_the_same_text(text: str) -> None:
    assert str(yaml.safe_load(set_value(BLANK, "env.A", text))["env"]["A"]) == text
