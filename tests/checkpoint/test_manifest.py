"""A checkpoint is verified against its manifest; what is damaged is refused."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.checkpoint.folders import resolve_checkpoint
from headway.checkpoint.manifest import FORMAT, NAME, read_manifest, unlisted_files, verify
from headway.errors import CheckpointError
from headway.ipc.stderr import shown
from tests.checkpoint.saved import TEXTS, rewrite, save


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(tmp_path / "saved")
    return tmp_path / "saved"


def test_a_checkpoint_that_was_saved_is_whole(saved: Path) -> None:
    found = verify(saved)
    assert [file.path for file in found.files] == sorted(TEXTS)
    assert found.step == 1
    assert unlisted_files(saved, found) == []


def test_files_that_were_added_are_told_and_not_refused(saved: Path) -> None:
    (saved / "notes.txt").write_text("good one")
    (saved / "link").symlink_to("/")
    assert unlisted_files(saved, verify(saved)) == ["link", "notes.txt"]


def link(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("damage", [link, pipe])
@pytest.mark.parametrize("name", ["tensors/a.bin", NAME])
def test_what_is_not_a_file_is_refused_and_named_and_not_waited_for(
    name: str, damage: Callable[[Path], object], saved: Path
) -> None:
    damage(saved / name)
    with pytest.raises(CheckpointError) as caught:
        verify(saved)
    assert str(saved / name) in caught.value.problems[0].where


@pytest.mark.parametrize("seed", range(30))
def test_a_damaged_manifest_is_refused_or_means_the_same(seed: int, saved: Path) -> None:
    draw, path, before = random.Random(seed), saved / NAME, verify(saved)
    data = bytearray(path.read_bytes())
    start = draw.randrange(len(data))
    change = draw.choice(["flip", "cut", "zero", "double"])
    if change == "flip":
        data[start] ^= 1 << draw.randrange(8)
    elif change == "cut":
        del data[start:]
    elif change == "zero":
        data[start : start + 20] = bytes(len(data[start : start + 20]))
    else:
        data[start:start] = data[start : start + 20]
    path.write_bytes(data)
    try:
        after = verify(saved)
    except CheckpointError:
        return
    assert after == before


UNFIT: list[Callable[[Any], object]] = [
    lambda fields: fields["files"][0].update(size=True),
    lambda fields: fields["files"][0].update(crc32="0"),
    lambda fields: fields["files"][0].update(more=1),
    lambda fields: fields.update(files={}),
    lambda fields: fields.update(step="1"),
    lambda fields: fields.update(launched_at=None),
    lambda fields: fields.update(format=None),
    lambda fields: fields.pop("world_size"),
]


@pytest.mark.parametrize("change", UNFIT, ids=range(len(UNFIT)))
def test_a_manifest_with_other_fields_is_refused(
    change: Callable[[Any], object], saved: Path
) -> None:
    rewrite(saved, change)
    with pytest.raises(CheckpointError) as caught:
        read_manifest(saved)
    assert str(saved / NAME) in caught.value.problems[0].where


@pytest.mark.parametrize("text", ["", "[]", "null", "[" * 100_000, '{"format": 1e400}', "\0"])
def test_what_is_no_manifest_is_refused(text: str, saved: Path) -> None:
    (saved / NAME).write_text(text)
    with pytest.raises(CheckpointError):
        read_manifest(saved)


@pytest.mark.parametrize("version", [FORMAT - 1, FORMAT + 1])
def test_another_format_is_refused_with_the_version_that_wrote_it(
    version: int, saved: Path
) -> None:
    rewrite(saved, lambda fields: fields.update(format=version, headway="9.9", anything="else"))
    with pytest.raises(CheckpointError, match=rf"^the checkpoint has format {version}, .* '9\.9'"):
        read_manifest(saved)


ODD = ["missing", "a\0b", "\ud800", "a" * 5000, "pipe", "file", "loop", "a\nb", "loop/below"]


@pytest.mark.parametrize("name", ["", *ODD], ids=repr)
def test_a_path_that_is_no_checkpoint_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(CheckpointError) as caught:
        verify(resolve_checkpoint(tmp_path / name))
    (problem,) = caught.value.problems
    assert shown(str(tmp_path / name)) in problem.where
    assert problem.where.isprintable()
    assert caught.value.__cause__ is None
