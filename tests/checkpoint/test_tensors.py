"""Tensors come back as they were saved."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.distributed.checkpoint.filesystem import FileSystemReader  # noqa: E402
from torch.distributed.checkpoint.state_dict_loader import load  # noqa: E402

from headway.checkpoint.tensors import (  # noqa: E402
    INDEX,
    SavedTensors,
    _Checksummed,
    save_tensors,
)
from headway.errors import CheckpointError  # noqa: E402

TENSORS = {
    "model.weight": torch.arange(12.0).reshape(3, 4).t(),
    "model.empty": torch.zeros(0, 2, dtype=torch.bfloat16),
    "step": torch.tensor(7, dtype=torch.int64),
    "flags": torch.tensor([True, False]),
    "complex": torch.tensor([1 + 2j]),
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_tensors(TENSORS, tmp_path / "tensors")
    return tmp_path / "tensors"


def test_tensors_come_back_with_their_bits_and_the_live_ones_are_not_changed(saved: Path) -> None:
    live = {name: torch.ones_like(tensor) for name, tensor in TENSORS.items()}
    loaded = SavedTensors(saved).load(live)
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
        assert torch.equal(live[name], torch.ones_like(tensor))
    assert {name: fact.shape for name, fact in SavedTensors(saved).facts.items()} == {
        name: tensor.shape for name, tensor in TENSORS.items()
    }


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_itself_reads_the_folder(saved: Path) -> None:
    loaded = {name: torch.ones_like(tensor) for name, tensor in TENSORS.items()}
    load(loaded, storage_reader=FileSystemReader(saved), no_dist=True)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("model.weight", torch.zeros(3, 4)),
        ("model.weight", torch.zeros(4, 3, dtype=torch.float16)),
        ("other", torch.zeros(1)),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_by_name(name: str, wanted: Any, saved: Path) -> None:
    with pytest.raises(CheckpointError, match=name):
        SavedTensors(saved).load({name: wanted})


@pytest.mark.parametrize("text", ["", "[", "[" * 100_000, "{}", "[7]", "[{}, {}]", "\0", None])
def test_what_is_not_an_index_is_refused(text: str | None, saved: Path) -> None:
    (saved / INDEX).unlink()
    if text is not None:
        (saved / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match="cannot be read") as caught:
        SavedTensors(saved)
    assert str(saved / INDEX) in caught.value.problems[0].where


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"float32", [4, 3]', '"float32", [1000000, 1000000]'),
        ('"float32", [4, 3]', '"float32", [-4, -3]'),
        ('"float32", [4, 3]', f'"float32", [0, 1{30 * "0"}]'),
        ("[4, 3]", "[400, 300]"),  # of the tensor and of its part
        ("[0, 0], [4, 3]", "[0, 1], [4, 3]"),
        ("__0_0.distcp", "/etc/passwd"),
        ("__0_0.distcp", "pipe"),
        ('"float32"', '"load"'),
    ],
)
def test_an_index_that_its_files_do_not_back_is_refused(old: str, new: str, saved: Path) -> None:
    os.mkfifo(saved / "pipe")
    text = (saved / INDEX).read_text()
    assert old in text
    (saved / INDEX).write_text(text.replace(old, new))
    with pytest.raises(CheckpointError, match="cannot be read"):
        SavedTensors(saved)


def test_a_folder_that_is_there_is_not_written_over(saved: Path) -> None:
    with pytest.raises(CheckpointError, match="exist"):
        save_tensors(TENSORS, saved)


def test_the_checksums_of_what_was_written_are_those_of_the_files(tmp_path: Path) -> None:
    tensors = {"large": torch.rand(2**19), **TENSORS}
    checksums = save_tensors(tensors, tmp_path / "tensors")
    assert checksums == {
        path.name: zlib.crc32(path.read_bytes()) for path in (tmp_path / "tensors").iterdir()
    }


def test_small_tensors_are_written_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(_Checksummed, "_check", lambda _, data: sizes.append(len(data)))
    save_tensors({str(index): torch.zeros(9) for index in range(300)}, tmp_path / "tensors")
    assert sum(sizes) > 300 * 36
    assert len(sizes) < 10
