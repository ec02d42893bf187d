"""Profiles are read strictly, with the line in every message, and written whole or not at all."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest

from headway.errors import ConfigError
from headway.ipc.origin import Layer
from headway.ipc.paths import user_folder
from headway.machine.facts import Machine
from headway.settings.profile import MAX_BYTES, choose_profile, read_profile
from headway.settings.resolve import profile_layers, resolve
from headway.settings.table import Settings
from tests.commands.running import run


def read(text: str | bytes) -> Settings:
    path = Path("profile.yaml")
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return resolve([read_profile(str(path.absolute()), Layer.USER_PROFILE)], Machine(), {})


def test_unquoted_no_and_integers_for_texts_are_understood() -> None:
    settings = read("mixed_precision: no\nmain_address: 10\nenv: {DEBUG: 1, COLOR: no, B: 0o7}\n")
    assert settings.mixed_precision == "no"
    assert settings.main_address == "10"
    assert settings.env == {"DEBUG": "1", "COLOR": "no", "B": "0o7"}


def test_lists_comments_quotes_and_a_byte_order_mark_are_understood() -> None:
    settings = read("\ufeff# a comment\nversion: 1\ndevices: [1, 3]\nnum_processes: '2'  # two\n")
    assert str(settings.devices) == "1,3"
    assert settings.num_processes == 2


BOMB = "a: &a [x, x]\n" + "".join(
    f"{key}: &{key} [*{last}, *{last}]\n" for last, key in pairwise("abcdefghijkl")
)
BROKEN: dict[str, tuple[str | bytes, str, int | None]] = {
    "empty": ("", "empty", None),
    "only a comment": ("# nothing\n", "empty", None),
    "a list": ("- device\n- cpu\n", "is a list", 1),
    "a lone value": ("cpu", "is a single value", 1),
    "half a file": ("device: cpu\nenv: {A: 1,", "not valid YAML", 3),
    "bad indentation": ("device: cpu\n  devices: 1\n", "not valid YAML", 2),
    "an open quote": ("device: 'cpu", "not valid YAML", 1),
    "an unknown key": ("device: cpu\ndevcies: 2\n", "did you mean 'devices'", 2),
    "of accelerate": ("distributed_type: NO\n", "headway config import .*profile.yaml", 1),
    "a wrong type": ("num_processes: four\n", "whole number", 1),
    "a list for a number": ("num_processes: [1, 2]\n", "list", 1),
    "a map for a text": ("device:\n  cpu: yes\n", "map", 1),
    "out of range": ("device: cpu\nmain_port: 70000\n", "from 1 to 65535", 2),
    "a duplicate key": (
        "device: cpu\n\ndevice: mps\n",
        "duplicate key 'device'; first defined in line 1",
        3,
    ),
    "a duplicate variable": ("env:\n  A: 1\n  A: 2\n", "duplicate key 'env.A'", 3),
    "an unknown nested key": ("env:\n  A:\n    B: 1\n", "too deep", 3),
    "no value": ("device:\nnum_processes: 2\n", "no value", 1),
    "a null": ("device: ~\n", "no value", 1),
    "a hostile tag": ("device: !!python/object/apply:os.system [touch owned]\n", "tags", 1),
    "a local tag": ("device: !cpu cpu\n", "tags", 1),
    "an anchor": ("device: &a cpu\n", "anchors", 1),
    "an alias": ("device: *a\n", "anchors", 1),
    "a merge key": ("<<: {device: cpu}\n", "unknown setting", 1),
    "two documents": ("device: cpu\n---\ndevice: cpu\n", "a single document", 2),
    "a control character": ("device: cpu\nlog_dir: a\0b\n", "not valid YAML", 2),
    "no UTF-8": (b"device: cpu\nlog_dir: \xff\n", "not UTF-8", 2),
    "another version": (
        "version: 99\nworkers: {a: {b: c}}\n",
        "version is '99'.*pip install -U",
        1,
    ),
    "no version that there ever was": ("version: 0\n", "write `version: 1`", 1),
    "a billion laughs": (BOMB, "anchors", 1),
    "an indenting tab": ("env:\n\tA: 1\n", "indented with spaces", 2),
    "too large": ("#" * (MAX_BYTES + 1), "exceeds the limit of 1 MiB", None),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_profile_is_one_error_with_file_line_and_fix(kind: str) -> None:
    text, reason, line = BROKEN[kind]
    with pytest.raises(ConfigError, match=f"(?s){reason}") as caught:
        read(text)
    (problem,) = caught.value.problems
    assert "profile.yaml" in problem.where
    assert problem.fix
    if line is not None:
        assert f"line {line}" in problem.where
    assert not Path("owned").exists()


def test_all_duplicates_and_missing_values_are_named_at_once_with_their_lines() -> None:
    with pytest.raises(ConfigError) as caught:
        read("device: cpu\ndevices:\nenv: {A: 1, A: 2}\ndevice: mps\nranks: x\n")
    places = [problem.where.rpartition("yaml, ")[2] for problem in caught.value.problems]
    assert sorted(places) == ["line 2", "line 3", "line 4", "line 5"]


@pytest.mark.usefixtures("ordinary_user")
def test_profiles_that_nobody_may_look_for_are_no_missing_ones() -> None:
    folder = Path(user_folder("config"))
    folder.mkdir(parents=True)
    (folder / "default.yaml").write_text("max_restarts: 3\n")
    folder.chmod(0o000)
    for command in ("config show", "config list", "config --yes", "launch --dry-run -m this"):
        code, error = run(*command.split())
        assert (code, "Permission denied" in error) == (2, True), command
        assert "fix:  fix the permissions of ~/.config/headway" in error
    folder.chmod(0o700)


@pytest.mark.parametrize("kind", ["a folder", "nothing"])
def test_what_is_no_file_is_refused_at_once_with_its_path(kind: str) -> None:
    path = Path("profile.yaml")
    if kind == "a folder":
        path.mkdir()
    with pytest.raises(ConfigError, match="No such" if kind == "nothing" else "Is a directory"):
        read_profile(str(path), Layer.USER_PROFILE)


def test_a_relative_xdg_folder_is_ignored_and_an_empty_home_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    home = os.environ["HOME"]
    assert (
        choose_profile(None, {"XDG_CONFIG_HOME": "x"}).path
        == f"{home}/.config/headway/default.yaml"
    )
    monkeypatch.setenv("HOME", "")
    assert os.path.isabs(choose_profile(None, {}).path)
    assert choose_profile(None, {}).path != "/.config/headway/default.yaml"


def test_the_flag_beats_the_variable() -> None:
    assert choose_profile(None, {}).name == "default"
    assert choose_profile(None, {"HEADWAY_PROFILE": "gpu4"}).chosen_by.endswith("HEADWAY_PROFILE")
    chosen = choose_profile("gpu8", {"HEADWAY_PROFILE": "gpu4"})
    assert chosen.path == os.path.join(user_folder("config"), "gpu8.yaml")


@pytest.mark.parametrize("path", ["./a/b.yaml", "b.yaml", "~/b.yml", "/etc/b"])
def test_a_path_names_a_profile_too(path: str) -> None:
    assert choose_profile(path).path == os.path.abspath(os.path.expanduser(path))


@pytest.mark.parametrize("name", ["", " ", ".hidden", "a b", "-x", "*"])
def test_what_cannot_be_a_name_is_refused_with_its_origin(name: str) -> None:
    with pytest.raises(ConfigError, match="environment HEADWAY_PROFILE"):
        choose_profile(None, {"HEADWAY_PROFILE": name})


def test_a_profile_that_was_named_must_exist() -> None:
    Path(user_folder("config")).mkdir(parents=True)
    (Path(user_folder("config")) / "gpu8.yaml").write_text("device: cuda\n")
    with pytest.raises(ConfigError, match=r"profile 'gpu4' does not exist; did you mean 'gpu8'\?"):
        profile_layers({}, profile="gpu4")
    with pytest.raises(ConfigError, match=r"profile '\./gpu4.yaml'"):
        profile_layers({}, profile="./gpu4.yaml")
    assert profile_layers({}) == []  # nobody named the default


def test_a_project_profile_that_is_named_is_read_once() -> None:
    Path("headway.yaml").write_text("env: {A: 1}\n")
    (layer,) = profile_layers({}, profile="headway.yaml")
    assert layer["env"].origin.layer is Layer.PROJECT_PROFILE


def test_two_profiles_that_are_broken_are_both_reported() -> None:
    for name in ("one.yaml", "headway.yaml"):
        Path(name).write_text("device: !tag cpu\n")
    with pytest.raises(ConfigError) as raised:
        profile_layers({}, profile="./one.yaml")
    places = [problem.where for problem in raised.value.problems]
    assert ["one.yaml" in places[0], "headway.yaml" in places[1]] == [True, True]


@pytest.mark.parametrize("home", ["", "/", None])
def test_a_user_whom_the_system_does_not_know_has_no_profile(
    home: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(_: int) -> None:
        raise KeyError("uid not found")

    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.delenv("HOME") if home is None else monkeypatch.setenv("HOME", home)
    assert choose_profile().path == "/.config/headway/default.yaml"
    assert profile_layers({}) == []
