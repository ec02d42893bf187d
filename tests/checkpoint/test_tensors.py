"""Tensors come back as they were saved; nothing in a checkpoint is run."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from headway.checkpoint.tensors import SavedTensors, save_tensors  # noqa: E402
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


def rewrite_index(folder: Path, change: Callable[[Any], object]) -> None:
    index = folder / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    change(metadata)
    index.write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", "..", ""])
def test_an_index_that_leads_out_of_the_folder_is_refused(path: str, saved: Path) -> None:
    (data,) = saved.glob("*.distcp")
    (saved.parent / "outside").write_bytes(data.read_bytes())

    def lead_out(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = path

    rewrite_index(saved, lead_out)
    with pytest.raises(CheckpointError):
        SavedTensors(saved).load(TENSORS)


def huge(entry: Any) -> None:
    entry.size = torch.Size([2**40])
    entry.chunks[0].sizes = torch.Size([2**40])


def chunked(*boxes: tuple[tuple[int, int], tuple[int, int]]) -> Callable[[Any], object]:
    """Return what gives an entry of 4 times 3 elements these chunks: their offsets and sizes."""

    def change(entry: Any) -> None:
        kind = type(entry.chunks[0])
        entry.chunks = [kind(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]

    return change


HOSTILE_ENTRIES: list[Callable[[Any], object]] = [
    huge,
    lambda entry: setattr(entry, "size", torch.Size([2**40])),
    lambda entry: setattr(entry, "size", [-1]),
    lambda entry: setattr(entry, "size", ["a"]),
    lambda entry: setattr(entry, "size", 7),
    lambda entry: entry.chunks.clear(),
    lambda entry: setattr(entry.properties, "dtype", "float32"),
    lambda entry: setattr(entry, "chunks", None),
    chunked(((-1, 0), (4, 3))),
    chunked(((0, 0), (2, 3)), ((1, 0), (2, 3))),
    chunked(((0, 0), (4, 2)), ((0, 1), (2, 2))),
    chunked(((0, 0), (6, 2))),
    chunked(((0, 0), (-4, -3))),
    lambda entry: setattr(entry.chunks[0], "offsets", torch.Size([0])),
]


@pytest.mark.parametrize("change", HOSTILE_ENTRIES, ids=range(len(HOSTILE_ENTRIES)))
def test_an_index_of_tensors_that_the_files_do_not_hold_is_refused(
    change: Callable[[Any], object], saved: Path
) -> None:
    rewrite_index(saved, lambda metadata: change(metadata.state_dict_metadata["model.weight"]))
    with pytest.raises(CheckpointError):
        SavedTensors(saved)


def test_an_index_of_chunks_as_dtensors_have_them_is_read(saved: Path) -> None:
    halves = [((row, column), (2, size)) for row in (2, 0) for column, size in ((0, 2), (2, 1))]
    change = chunked(*halves, ((4, 0), (0, 3)))
    rewrite_index(saved, lambda metadata: change(metadata.state_dict_metadata["model.weight"]))
    assert SavedTensors(saved).facts["model.weight"].shape == (4, 3)


def test_a_folder_that_is_there_is_not_written_over(saved: Path) -> None:
    with pytest.raises(CheckpointError, match="exist"):
        save_tensors(TENSORS, saved)


def test_the_checksums_of_what_was_written_are_those_of_the_files(tmp_path: Path) -> None:
    tensors = {"large": torch.rand(2**19), **TENSORS}
    checksums = save_tensors(tensors, tmp_path / "tensors")
    assert checksums == {
        path.name: zlib.crc32(path.read_bytes()) for path in (tmp_path / "tensors").iterdir()
    }
