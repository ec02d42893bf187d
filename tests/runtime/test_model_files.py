"""save_model: files that Accelerate's and transformers' loaders read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headway import Accelerator
from headway.checkpoint import files as saving
from headway.errors import UsageError
from headway.utils import convert_file_size_to_int


class Tied(torch.nn.Module):
    """A model whose first and last layers share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Embedding(10, 4)
        self.hidden = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(6))
        self.last = torch.nn.Linear(4, 10, bias=False)
        self.last.weight = self.first.weight


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("size", ["10GB", 200])
def test_accelerates_loader_reads_what_was_saved(
    size: int | str, safe: bool, tmp_path: Path
) -> None:
    modeling = pytest.importorskip("accelerate.utils.modeling")
    accelerator = Accelerator(cpu=True)
    model, other = accelerator.prepare(Tied(), Tied())
    accelerator.save_model(model, tmp_path / "new", size, safe)
    modeling.load_checkpoint_in_model(other, str(tmp_path / "new"))
    assert other.last.weight is other.first.weight
    for name, tensor in model.state_dict().items():
        assert tensor.equal(other.state_dict()[name]), name


@pytest.mark.slow
def test_transformers_reads_shards_and_tied_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a thread of tqdm's own
    monkeypatch.setattr(pytest.importorskip("tqdm").tqdm, "monitor_interval", 0)
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    Accelerator(cpu=True).save_model(model, tmp_path, "1KB")
    config.save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    read = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    for name, tensor in model.state_dict().items():
        assert tensor.equal(read.state_dict()[name]), name


def test_an_index_names_the_file_of_each_weight_and_the_next_save_removes_old_files(
    tmp_path: Path,
) -> None:
    accelerator = Accelerator(cpu=True)
    folder = tmp_path / "new"
    folder.mkdir()
    (folder / "model-notes.txt").touch()
    accelerator.save_model(Tied(), folder, "0.3KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * (40 + 6 * 20)
    files = {path.name for path in folder.glob("*.safetensors")}
    assert {*index["weight_map"].values()} == files
    accelerator.save_model(Tied(), folder)
    assert {path.name for path in folder.iterdir()} == {"model.safetensors", "model-notes.txt"}


@pytest.mark.parametrize("interrupted", ["write", "replace"])
def test_a_save_that_is_cut_off_leaves_no_mixture_of_two_models(
    interrupted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator, folder = Accelerator(cpu=True), tmp_path / "model"
    accelerator.save_model(Tied(), folder, "0.3KB")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    owner, name = {"write": (saving, "write_synced"), "replace": (Path, "replace")}[interrupted]
    function, calls = getattr(owner, name), []

    def third_call_fails(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, third_call_fails)
    with pytest.raises(OSError, match="No space"):
        accelerator.save_model(Tied(), folder, "0.3KB")
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert after == before if interrupted == "write" else not list(folder.glob("*.index.json"))
    assert not list(folder.glob(".*"))


def test_sizes_are_those_of_accelerate_and_others_are_refused() -> None:
    modeling = pytest.importorskip("accelerate.utils.modeling")
    for size in (7, "1KB", "5MB", "2.5GB", "3KiB", "1MiB", "1GIB"):
        assert convert_file_size_to_int(size) == modeling.convert_file_size_to_int(size)
    for size in (-1, "5", "MB", "5 bananas"):
        with pytest.raises(UsageError):
            convert_file_size_to_int(size)


def test_a_file_in_place_of_the_folder_and_weights_without_data_are_refused(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    accelerator = Accelerator(cpu=True)
    with pytest.raises(UsageError):
        accelerator.save_model(Tied(), tmp_path / "file")
    with pytest.raises(UsageError):
        accelerator.save_model(Tied().to("meta"), tmp_path / "new")


class Counting(torch.nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def test_an_extra_state_is_saved_by_torch_and_refused_for_safetensors(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Counting(2, 1))
    with pytest.raises(UsageError, match="_extra_state is a dict"):
        accelerator.save_model(model, tmp_path)
    accelerator.save_model(model, tmp_path, safe_serialization=False)
    again = Counting(2, 1)
    again.load_state_dict(torch.load(tmp_path / "pytorch_model.bin"))
    assert again.calls == 3
