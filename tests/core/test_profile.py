"""Profiles are read strictly, with the line in every message, and written whole or not at all."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from headway import profile
from headway.errors import ConfigError
from headway.machine import Machine
from headway.profile import (
    find_project_profile,
    read_profile,
    user_profile_path,
    write_profile,
)
from headway.resolve import resolve
from headway.settings import Settings


def read(text: str | bytes) -> Settings:
    path = Path("profile.yaml")
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return resolve([read_profile(str(path.absolute()), "user profile")], Machine(), {})


def test_unquoted_no_and_integers_for_texts_are_understood() -> None:
    settings = read("mixed_precision: no\nmain_address: 10\nenv: {DEBUG: 1, COLOR: no, B: 0o7}\n")
    assert settings.mixed_precision == "no"
    assert settings.main_address == "10"
    assert settings.env == {"DEBUG": "1", "COLOR": "no", "B": "0o7"}


def test_lists_comments_quotes_and_a_byte_order_mark_are_understood() -> None:
    settings = read("\ufeff# a comment\nversion: 1\ndevices: [1, 3]\nnum_processes: '2'  # two\n")
    assert str(settings.devices) == "1,3"
    assert settings.num_processes == 2


BROKEN: dict[str, tuple[str | bytes, str, int | None]] = {
    "empty": ("", "empty", None),
    "only a comment": ("# nothing\n", "empty", None),
    "a list": ("- device\n- cpu\n", "is a list", 1),
    "a lone value": ("cpu", "is a lone value", 1),
    "half a file": ("device: cpu\nenv: {A: 1,", "not YAML", 3),
    "bad indentation": ("device: cpu\n  devices: 1\n", "not YAML", 2),
    "an open quote": ("device: 'cpu", "not YAML", 1),
    "an unknown key": ("device: cpu\ndevcies: 2\n", "did you mean 'devices'", 2),
    "a wrong type": ("num_processes: four\n", "whole number", 1),
    "a list for a number": ("num_processes: [1, 2]\n", "list", 1),
    "a map for a text": ("device:\n  cpu: yes\n", "map", 1),
    "out of range": ("device: cpu\nmain_port: 70000\n", "from 1 to 65535", 2),
    "a duplicate key": ("device: cpu\n\ndevice: mps\n", "stands twice; first in line 1", 3),
    "a duplicate variable": ("env:\n  A: 1\n  A: 2\n", "env.A stands twice", 3),
    "an unknown nested key": ("env:\n  A:\n    B: 1\n", "too deep", 3),
    "no value": ("device:\nnum_processes: 2\n", "no value", 1),
    "a null": ("device: ~\n", "no value", 1),
    "a hostile tag": ("device: !!python/object/apply:os.system [touch owned]\n", "tags", 1),
    "a local tag": ("device: !cpu cpu\n", "tags", 1),
    "an anchor": ("device: &a cpu\n", "anchors", 1),
    "an alias": ("device: *a\n", "anchors", 1),
    "a merge key": ("<<: {device: cpu}\n", "no setting", 1),
    "two documents": ("device: cpu\n---\ndevice: cpu\n", "second document", 2),
    "a control character": ("device: cpu\nlog_dir: a\0b\n", "not YAML", 2),
    "no UTF-8": (b"device: cpu\nlog_dir: \xff\n", "not UTF-8", 2),
    "a newer version": ("version: 99\n", "version is '99'", 1),
    "a deep bomb": ("env: " + "[" * 100_000, "too deep", 1),
    "too large": ("#" * (profile.MAX_BYTES + 1), "larger than 1 MiB", None),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_profile_is_one_error_with_file_line_and_fix(kind: str) -> None:
    text, reason, line = BROKEN[kind]
    with pytest.raises(ConfigError, match=reason) as caught:
        read(text)
    (problem,) = caught.value.problems
    assert "profile.yaml" in problem.where
    assert problem.fix
    if line is not None:
        assert f"line {line}" in problem.where
    assert not Path("owned").exists()


def test_a_billion_laughs_are_refused_without_a_laugh() -> None:
    bomb = "a: &a [x, x]\n" + "".join(
        f"{key}: &{key} [*{last}, *{last}]\n" for last, key in pairwise("abcdefghijkl")
    )
    started = time.process_time()
    with pytest.raises(ConfigError, match="anchors"):
        read(bomb)
    assert time.process_time() - started < 1


def test_an_unreadable_profile_is_an_error_with_its_path() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_profile(str(Path.cwd()), "user profile")


def test_a_profile_that_is_a_fifo_is_refused_at_once() -> None:
    os.mkfifo("fifo.yaml")
    with pytest.raises(ConfigError, match="is no file"):
        read_profile("fifo.yaml", "user profile")


def test_a_relative_xdg_folder_is_ignored_and_an_empty_home_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    home = os.environ["HOME"]
    assert user_profile_path({"XDG_CONFIG_HOME": "x"}) == f"{home}/.config/headway/default.yaml"
    monkeypatch.setenv("HOME", "")
    assert os.path.isabs(user_profile_path({}))
    assert user_profile_path({}) != "/.config/headway/default.yaml"


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="needs root to chown")
def test_a_project_profile_of_another_user_is_refused() -> None:
    Path("headway.yaml").write_text("env: {LD_PRELOAD: /tmp/theirs.so}\n")
    os.chown("headway.yaml", 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        find_project_profile(os.getcwd())


def test_what_is_written_is_read_again() -> None:
    path = Path("new/folder/default.yaml").absolute()
    write_profile(str(path), {"device": "cpu", "mixed_precision": "no", "num_processes": 2}, "Why.")
    assert path.read_text().startswith("# Why.\nversion: 1\n")
    settings = resolve([read_profile(str(path), "user profile")], Machine(), {})
    assert (settings.device, settings.mixed_precision, settings.num_processes) == ("cpu", "no", 2)
    assert os.listdir(path.parent) == ["default.yaml"]


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

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        write_profile("default.yaml", {"device": "mps"})
    assert "device: cpu" in Path("default.yaml").read_text()
    assert os.listdir() == ["default.yaml"]


WRITER = """
import sys
from headway.profile import write_profile
while True:
    write_profile(sys.argv[1], {"device": "cpu", "env": {"FILL": sys.argv[2] * int(sys.argv[3])}})
"""


def test_readers_see_a_whole_profile_while_writers_are_killed() -> None:
    path = str(Path("default.yaml").absolute())
    write_profile(path, {"device": "cpu"})

    def start(letter: str, length: int) -> subprocess.Popen[bytes]:
        arguments = [sys.executable, "-c", WRITER, path, letter, str(length)]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.Popen(arguments, env=environ)

    lengths = {"a": 10, "b": 60_000}
    writers = {letter: start(letter, length) for letter, length in lengths.items()}
    seen = set()
    try:
        for kill in range(6):
            until = time.monotonic() + 0.4
            while time.monotonic() < until:
                entries = read_profile(path, "user profile")
                fill = entries["env"].raw["FILL"] if "env" in entries else ""  # type: ignore[call-overload]
                assert fill == fill[:1] * lengths.get(fill[:1], 0)
                seen.add(fill[:1])
            letter = "ab"[kill % 2]
            writers[letter].send_signal(signal.SIGKILL)
            writers[letter].wait()
            writers[letter] = start(letter, lengths[letter])
    finally:
        for writer in writers.values():
            writer.kill()
            writer.wait()
    assert {"a", "b"} <= seen
    write_profile(path, {"device": "cpu"})  # the lock of a killed writer is gone with it
