"""The index of the tensors is read as data: no opcode of a pickle imports, calls or sets."""

from __future__ import annotations

import os
import pathlib
import pickle
import pickletools
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.distributed.checkpoint.metadata import Metadata

from headway.checkpoint.index import read_index
from headway.checkpoint.tensors import SavedTensors, save_tensors
from headway.errors import CheckpointError

FOLLOWED = {
    *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET"),
    *("BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE"),
    *("NONE", "NEWTRUE", "NEWFALSE", "EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT"),
    *("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "APPEND", "APPENDS", "SETITEM", "SETITEMS"),
    *("STACK_GLOBAL", "NEWOBJ", "REDUCE", "BUILD"),
}
HEAD = len(pickle.PROTO) + 1


@pytest.fixture
def index(tmp_path: Path) -> Path:
    folder = tmp_path / "tensors"
    folder.mkdir()
    save_tensors({"a": torch.ones(3, 2), "b.0": torch.ones(()).bfloat16()}, folder)
    return folder / ".metadata"


def test_an_index_is_read_as_torch_reads_it(index: Path) -> None:
    theirs: Metadata = pickle.loads(index.read_bytes())
    ours = read_index(index)
    assert ours.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()
    for name, one in theirs.state_dict_metadata.items():
        found: Any = ours.state_dict_metadata[name]
        assert (found.size, found.chunks) == (one.size, one.chunks)  # type: ignore[union-attr]
        assert found.properties.dtype == one.properties.dtype  # type: ignore[union-attr]
    assert ours.storage_data == theirs.storage_data
    assert ours.planner_data == theirs.planner_data


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_it_is_read_in_the_protocols_that_torch_writes(index: Path, protocol: int) -> None:
    found = pickle.loads(index.read_bytes())
    index.write_bytes(pickle.dumps(found, protocol))
    if protocol >= 4:
        assert read_index(index).storage_data == found.storage_data
    else:
        with pytest.raises(CheckpointError):
            SavedTensors(index.parent)


@pytest.mark.parametrize("opcode", pickletools.opcodes, ids=lambda one: one.name)
def test_every_other_opcode_is_refused(index: Path, opcode: Any) -> None:
    data = index.read_bytes()
    known = read_index(index)
    for argument in (b"", b"\0", b"\1\0\0\0a", b"\1\0\0\0\0\0\0\0a", b"os\nsystem\n", b"1\n"):
        index.write_bytes(data[:HEAD] + opcode.code.encode("latin-1") + argument + data[HEAD:])
        if opcode.name in FOLLOWED:
            try:
                assert read_index(index).storage_data == known.storage_data
            except ValueError:
                continue
        else:
            with pytest.raises(CheckpointError):
                SavedTensors(index.parent)


class Command:
    def __reduce__(self) -> Any:
        return os.mkdir, ("was called",)


class Replaced:
    """Its state replaces a method of a class, as BUILD does of what it is given."""

    def __reduce__(self) -> Any:
        return pathlib.PosixPath, (), (None, {"exists": 1})


def built_on(name: bytes) -> bytes:
    """Return a pickle that sets an attribute of a class which indexes name."""
    module, _, attribute = name.rpartition(b".")
    texts = b"".join(b"\x8c" + bytes([len(one)]) + one for one in (module, attribute))
    state = b"N}\x8c\x06existsK\x01s\x86"
    return b"\x80\x04" + texts + b"\x93" + state + b"b."


@pytest.mark.parametrize(
    "attack",
    [
        *(pickle.dumps(Command(), protocol) for protocol in range(6)),
        *(pickle.dumps(Replaced(), protocol) for protocol in range(6)),
        *(pickle.dumps(one) for one in ({"a": Command()}, print, eval, torch.load)),
        built_on(b"pathlib.PosixPath"),
        built_on(b"torch.Size"),
        built_on(b"torch.distributed.checkpoint.metadata.Metadata"),
    ],
)
def test_nothing_is_called_and_nothing_is_set(index: Path, attack: bytes) -> None:
    exists = pathlib.Path.exists
    data = index.read_bytes()
    body = attack[2:] if attack[:1] == pickle.PROTO else attack
    for text in (attack, data[:HEAD] + body.rstrip(b".") + b"0" + data[HEAD:]):
        index.write_bytes(text)
        with pytest.raises(CheckpointError):
            SavedTensors(index.parent)
    assert pathlib.Path.exists is exists
    assert "exists" not in vars(pathlib.PosixPath)
    assert not hasattr(Metadata, "exists")
    assert not Path("was called").exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda one: one.storage_data.clear(),
        lambda one: vars(next(iter(one.storage_data.values()))).update(offset=-1),
        lambda one: vars(next(iter(one.storage_data.values()))).update(length=2**64),
        lambda one: vars(next(iter(one.storage_data.values()))).update(length=True),
        lambda one: one.state_dict_metadata.update(a=7),
        lambda one: one.state_dict_metadata["a"].chunks.append("chunk"),
        lambda one: vars(one.state_dict_metadata["a"]).update(size=[3, 2]),
        lambda one: one.__dict__.pop("planner_data"),
        lambda one: one.planner_data.update(a=([],)),
    ],
)
def test_what_is_no_index_is_refused(index: Path, change: Any) -> None:
    found = pickle.loads(index.read_bytes())
    change(found)
    index.write_bytes(pickle.dumps(found, 4))
    if found.storage_data:
        with pytest.raises(CheckpointError):
            SavedTensors(index.parent)
    else:
        assert read_index(index).storage_data == {}


def test_one_that_is_cut_nested_too_deep_or_missing_is_refused(index: Path) -> None:
    data = index.read_bytes()
    cut = [data[:length] for length in range(0, len(data), 7)]
    nested = b"\x80\x04" + b")" + b"\x85" * 100_000 + b"."
    for text in (*cut, nested, b"garbage", pickle.dumps({})):
        index.write_bytes(text)
        with pytest.raises(CheckpointError):
            SavedTensors(index.parent)
    index.unlink()
    with pytest.raises(CheckpointError, match="metadata is missing"):
        SavedTensors(index.parent)
