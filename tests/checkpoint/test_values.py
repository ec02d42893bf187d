"""Values and tensors of a checkpoint come back as they were; what has no form is refused."""

from __future__ import annotations

import json
import math
import os
import zlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402
from torch.distributed.checkpoint.filesystem import FileSystemReader  # noqa: E402
from torch.distributed.checkpoint.state_dict_loader import load  # noqa: E402

from headway.checkpoint.tensors import (  # noqa: E402
    INDEX,
    SavedTensors,
    _Checksummed,
    save_tensors,
)
from headway.checkpoint.values import decode, encode, tensor_names  # noqa: E402
from headway.errors import CheckpointError  # noqa: E402

keys = st.one_of(st.integers(), st.text(), st.booleans(), st.tuples(st.integers(), st.text()))
plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(),
    st.complex_numbers(),
)
values = st.recursive(
    plain,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(keys, inner),
        st.sets(keys, max_size=1),  # a larger one has no order to compare
    ),
    max_leaves=20,
)


def round_trip(value: Any) -> Any:
    tensors: dict[str, Any] = {}
    text = json.dumps(encode(value, "it", tensors), allow_nan=True)
    assert tensor_names(json.loads(text)) == tensors.keys()
    return decode(json.loads(text), tensors)


@given(values)
def test_any_value_comes_back_as_it_was(value: Any) -> None:
    assert repr(round_trip(value)) == repr(value)


def test_tensors_whose_paths_read_alike_are_kept_apart() -> None:
    back = round_trip({"a": {"b": torch.tensor(1)}, "a.b": torch.tensor(2)})
    assert back == {"a": {"b": torch.tensor(1)}, "a.b": torch.tensor(2)}


def test_values_of_numpy_come_back() -> None:
    numpy = pytest.importorskip("numpy")
    assert round_trip(numpy.float64(0.5)) == 0.5
    assert math.isnan(round_trip(numpy.float32("nan")))
    for array in (numpy.arange(6).reshape(2, 3)[:, ::2], numpy.array(1.5), numpy.zeros((0, 2))):
        back = round_trip(array)
        assert back.dtype == array.dtype
        assert back.shape == array.shape
        assert (back == array).all()


class Named(torch.Tensor):  # type: ignore[name-defined,misc]
    """A tensor that knows more than torch does."""


@pytest.mark.parametrize(
    ("make", "called"),
    [
        (lambda: torch.eye(2).to_sparse(), "sparse_coo"),
        (lambda: torch.eye(2).to_mkldnn(), "_mkldnn"),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "nested"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantized"),
        (lambda: torch.ones(2, device="meta"), "without data"),
        (lambda: torch.ones(2).as_subclass(Named), "Named"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_tensor_that_could_not_be_loaded_is_refused_by_name(
    make: Callable[[], Any], called: str
) -> None:
    with pytest.raises(CheckpointError, match=rf"it\.scale is .*{called}"):
        encode({"scale": make()}, "it", {})


def test_a_parameter_and_its_buffer_are_saved_as_plain_tensors() -> None:
    module = torch.nn.BatchNorm1d(2)
    after = round_trip(module.state_dict() | {"live": module.weight})
    assert {type(t) for t in after.values()} == {torch.Tensor}


def test_other_kinds_of_dicts_become_dicts() -> None:
    assert round_trip(OrderedDict(a=1)) == {"a": 1}


def test_the_step_of_an_optimizer_is_a_number_and_a_weight_is_a_tensor() -> None:
    number = torch.tensor([0.1])[0]
    assert decode(json.loads(json.dumps(encode(number, "all.optimizers.0", {}))), {}) == number
    assert encode(number, "all.models.optimizers.0", {}) == {"tensor": "all.models.optimizers.0"}


@pytest.mark.parametrize("value", [object(), print, {"a": [object()]}, {1: lambda: None}])
def test_an_object_is_refused_by_name(value: Any) -> None:
    with pytest.raises(CheckpointError, match="it"):
        encode(value, "it", {})


def nested(depth: int, kind: str) -> Any:
    value: Any = 1.5
    for _ in range(depth):
        value = {"list": [value], "tuple": (value,), "dict": {"k": value}}[kind]
    return value


@pytest.mark.parametrize("kind", ["list", "tuple", "dict"])
def test_what_is_nested_too_deep_is_refused_by_name_and_anything_else_is_read(kind: str) -> None:
    value = nested(100, kind)
    read = json.loads(json.dumps(encode(value, "objects.0", {})))
    assert decode(read, {}) == value
    for depth in (102, 5000):
        with pytest.raises(CheckpointError, match=r"objects\.0\.") as caught:
            encode(nested(depth, kind), "objects.0", {})
        assert len(str(caught.value)) < 500
    itself: dict[str, Any] = {"inner": []}
    itself["inner"].append(itself)
    with pytest.raises(CheckpointError, match=r"objects\.0\.inner\.0"):
        encode(itself, "objects.0", {})


@pytest.mark.parametrize(
    "text",
    [
        *("{}", '{"tensor": "away"}', '{"a": 1}', '{"tuple": 1}', '{"dict": [1]}'),
        *('{"bytes": "?"}', '{"dict": [[[], 1]]}', '{"tensor": []}', '{"number": 1}'),
        *('{"tuple": [], "set": []}', '{"scalar": []}'),
    ],
)
def test_what_is_no_value_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="invalid encoded value"):
        decode(json.loads(text), {})


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
    assert {name: fact.shape for name, fact in SavedTensors(saved).meta_tensors.items()} == {
        name: tensor.shape for name, tensor in TENSORS.items()
    }


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_itself_reads_the_folder(saved: Path) -> None:
    loaded = {name: torch.ones_like(tensor) for name, tensor in TENSORS.items()}
    load(loaded, storage_reader=FileSystemReader(saved), no_dist=True)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())


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
    with pytest.raises(CheckpointException, match="already exists"):
        save_tensors(TENSORS, saved)


def test_the_checksums_of_what_was_written_are_those_of_the_files(tmp_path: Path) -> None:
    checksums = save_tensors({"large": torch.rand(2**19), **TENSORS}, tmp_path / "tensors")
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
