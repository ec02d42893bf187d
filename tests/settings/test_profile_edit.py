"""Profiles are changed at one place and written whole: nothing that somebody wrote is lost."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from headway.contract.origin import Layer
from headway.errors import ConfigError
from headway.settings.profile import parse_profile
from headway.settings.profile_edit import BLANK, change_profile, set_value, unset_value
from headway.settings.setting import Raw

TEXT = """\
# for the big machine
version: 1
device: cuda   # eight of them
devices:
  - 1
  - 3
env:
  A: 1  # first

  B: 'two words'

log_dir: |
  logs
# the end
"""


def values_of(text: str) -> dict[str, Raw]:
    return {key: entry.raw for key, entry in parse_profile(text, "p", Layer.PROFILE).items()}


@pytest.mark.parametrize(
    ("key", "raw", "old", "new"),
    [
        ("device", "cpu", "device: cuda   #", "device: cpu   #"),
        ("devices", "0,2", "devices:\n  - 1\n  - 3\n", 'devices: "0,2"\n'),
        ("env.A", "x y", "A: 1  # first", 'A: "x y"  # first'),
        ("env.B", "no", "'two words'", '"no"'),
        ("env.C", "3", "words'\n", "words'\n  C: 3\n"),
        ("log_dir", "/tmp/é", "|\n  logs\n", '"/tmp/é"\n'),
        ("max_restarts", "3", "logs\n", "logs\nmax_restarts: 3\n"),
        ("env", {"Z": "1"}, "env:\n  A: 1  # first\n\n  B: 'two words'", "# first\nenv: {Z: 1}"),
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


@pytest.mark.parametrize(
    ("key", "old", "new"),
    [
        ("device", "device: cuda   # eight of them\n", ""),
        ("devices", "devices:\n  - 1\n  - 3\n", ""),
        ("env.A", "  A: 1  # first\n", ""),
        ("log_dir", "log_dir: |\n  logs\n", ""),
    ],
)
def test_unsetting_a_key_removes_its_lines_and_nothing_else(key: str, old: str, new: str) -> None:
    assert unset_value(TEXT, key) == TEXT.replace(old, new)


@pytest.mark.parametrize(
    ("text", "key", "edited"),
    [
        ("device: cpu", "max_restarts", "device: cpu\nmax_restarts: 1\n"),
        ("env: {}\n", "env.A", "env: {A: 1}\n"),
        ("env: {A: 0, B: 2}\n", "env.A", "env: {A: 1, B: 2}\n"),
        ("env: {A: 0}\n", "env.B", "env: {A: 0, B: 1}\n"),
        ("env: A=0\n", "env.B", "env: {A: 0, B: 1}\n"),
        ("'device': cpu\n", "device", "'device': 1\n"),
        ("  device: cpu\n", "max_restarts", "  device: cpu\n  max_restarts: 1\n"),
        (BLANK, "env.A", BLANK + "env: {A: 1}\n"),
    ],
)
def test_flow_style_and_other_spellings_can_be_changed_too(
    text: str, key: str, edited: str
) -> None:
    assert set_value(text, key, "1") == edited


def test_the_last_key_leaves_the_version_and_the_last_variable_takes_env_along() -> None:
    assert unset_value("device: cpu\n", "device") == BLANK
    assert unset_value("device: cpu\nenv: {A: 1}\n", "env.A") == "device: cpu\n"
    assert unset_value("env: {A: 1, B: 2}\n", "env.A") == "env: {B: 2}\n"
    assert unset_value("env: A=1 B=2\n", "env.A") == "env: {B: 2}\n"
    for key in ("max_restarts", "env.C", "env.C.D"):
        with pytest.raises(KeyError):
            unset_value("env: {A: 1}\n", key)


@pytest.mark.parametrize("text", ["? device\n: cpu\n", "{device: cpu}\n", "device: a\ndevice: b\n"])
def test_a_text_that_cannot_be_changed_at_one_place_is_refused(text: str) -> None:
    key = "device" if text.count("device") > 1 else "max_restarts"
    with pytest.raises(ConfigError, match="headway config path"):
        set_value(text, key, "1")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "devices:\n  - 0  # the A100\n  # - 1 broken fan\n  - 2  # last\nranks: 0\n",
            '# the A100\n# - 1 broken fan\ndevices: "0,2"  # last\nranks: 0\n',
        ),
        (
            "ranks: 0\ndevices:  # head\n- 0\n# in\n- 2\n",
            'ranks: 0\n# head\n# in\ndevices: "0,2"\n',
        ),
        ("devices: [0, # x\n  2] # y\n", '# x\ndevices: "0,2" # y\n'),
        ("device:\tcuda\ndevices:\n- 0\n", 'device:\tcuda\ndevices: "0,2"\n'),
        ('devices: "0 # no\n  comment"\n', 'devices: "0,2"\n'),
        ("devices:\r\n- 0 # x\r\n- 1\r\n", '# x\r\ndevices: "0,2"\r\n'),
    ],
)
def test_the_comments_within_a_value_of_several_lines_stay(old: str, new: str) -> None:
    assert set_value(old, "devices", "0,2") == new


TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Cn"]), max_size=20)


@given(TEXTS.filter(lambda text: text.strip()), st.sampled_from(["log_dir", "env.A", "env.N"]))
def test_whatever_is_set_is_read_back_and_everything_else_stays(raw: str, key: str) -> None:
    edited = values_of(set_value(TEXT, key, raw))
    before = values_of(TEXT)
    name, _, item = key.partition(".")
    assert edited.pop(name) == ({**before[name], item: raw} if item else raw)  # type: ignore[dict-item]
    before.pop(name)
    assert edited == before


def write_profile(path: str, values: Mapping[str, Raw]) -> None:
    text = BLANK
    for key, raw in values.items():
        text = set_value(text, key, raw)
    change_profile(path, lambda _: text)


def test_writing_follows_a_link_and_keeps_the_permissions() -> None:
    target = Path("real.yaml")
    target.write_text("device: cpu\n")
    target.chmod(0o600)
    Path("link.yaml").symlink_to(target.absolute())
    write_profile("link.yaml", {"device": "mps"})
    assert Path("link.yaml").is_symlink()
    assert "device: mps" in target.read_text()
    assert stat.S_IMODE(target.stat().st_mode) == 0o600


def test_a_failing_write_leaves_the_old_profile_and_no_litter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_profile("default.yaml", {"device": "cpu"})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        write_profile("default.yaml", {"device": "mps"})
    assert "device: cpu" in Path("default.yaml").read_text()
    assert os.listdir() == ["default.yaml"]


@pytest.mark.usefixtures("ordinary_user")
def test_a_folder_that_cannot_be_written_to_is_a_clear_error() -> None:
    Path("locked").mkdir(mode=0o500)
    Path("file").touch()
    for folder in ("locked", "file"):
        with pytest.raises(ConfigError, match="cannot be written: "):
            write_profile(f"{folder}/default.yaml", {"device": "cpu"})


@pytest.mark.usefixtures("ordinary_user")
def test_a_read_only_profile_is_not_replaced() -> None:
    write_profile("default.yaml", {"device": "cpu"})
    Path("default.yaml").chmod(0o444)
    with pytest.raises(ConfigError, match="cannot be written: Permission denied") as caught:
        change_profile("default.yaml", lambda text: set_value(text, "device", "mps"))
    assert "permissions" in caught.value.problems[0].fix
    assert "device: cpu" in Path("default.yaml").read_text()


@pytest.mark.parametrize(
    "text",
    ["31", "0x1F", "010", "0o17", "1_000", "1e3", "1.50", "0.5", ".inf", "2026-11-21", "./a", "no"],
)
def test_every_reader_of_yaml_finds_the_same_text(text: str) -> None:
    assert str(yaml.safe_load(set_value(BLANK, "env.A", text))["env"]["A"]) == text
