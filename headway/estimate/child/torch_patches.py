"""Calls of ordinary scripts that cannot work without memory, and what they do instead.

Loaders read their data for real, in this process; compiled functions are the functions themselves.
Files that are saved are empty, and tensors that are loaded are fake. What a checkpoint holds has
the shapes of what is there already, so that those of Headway and of torch.distributed are not read;
a script that goes on from one is followed as from its beginning.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only
from torch.utils.data import dataloader

from headway.checkpoint import loading, training_state
from headway.checkpoint.checkpointer import Checkpointer
from headway.checkpoint.manifest import read_manifest
from headway.estimate.child.fake_mode import ScriptMode
from headway.estimate.child.patching import nothing, replace, replace_wherever_imported

Note = Callable[[str], None]

_NOT_MAPPED = 2**62  # an address at which no process has memory
_LOADED = "loading is skipped: the script goes on as from its beginning"


def replace_loaders(mode: ScriptMode, see: Callable[[torch.Tensor], None]) -> None:
    """Make data loaders read for real, without workers, and yield batches of fake tensors.

    Relies on `_SingleProcessDataLoaderIter` and `DataLoader._get_iterator`, which are private.
    """
    single: Any = dataloader._SingleProcessDataLoaderIter

    class Iterator(single):  # type: ignore[misc]
        def __init__(self, loader: Any) -> None:
            with _disable_current_modes():
                super().__init__(loader)

        def _next_data(self) -> Any:
            with _disable_current_modes():
                data = super()._next_data()
            data = tree_map_only(torch.Tensor, mode.faked, data)
            tree_map_only(torch.Tensor, see, data)
            return data

    def get_iterator(self: Any) -> Any:
        vars(self).update(num_workers=0, prefetch_factor=None, persistent_workers=False)
        vars(self).update(timeout=0, pin_memory=False)
        return Iterator(self)

    replace(torch.utils.data.DataLoader, "_get_iterator", get_iterator)
    replace(torch.Tensor, "share_memory_", lambda self: self)  # with no process


def replace_reading(mode: ScriptMode) -> None:
    """Make calls that read all of a tensor's values return known ones, or ones."""
    random_permutation = torch.randperm

    def randperm(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device", None)
        with _disable_current_modes():
            permutation = random_permutation(*args, **kwargs)
        return mode.faked(permutation)

    def as_format(self: FakeTensor, format_spec: str) -> str:
        return format(self.item() if self.dim() == 0 else str(self), format_spec)

    def as_array(self: FakeTensor, dtype: Any = None, copy: Any = None) -> Any:
        array = mode.array(self)
        return array if dtype is None else array.astype(dtype)

    def deepcopy(self: FakeTensor, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copied: Any = self.detach().clone().requires_grad_(self.requires_grad)
            is_parameter = isinstance(self, torch.nn.Parameter)
            memo[id(self)] = (
                torch.nn.Parameter(copied, self.requires_grad) if is_parameter else copied
            )
        return memo[id(self)]

    replace(torch, "randperm", randperm)
    replace(FakeTensor, "__deepcopy__", deepcopy)
    replace(FakeTensor, "numpy", lambda self, **_: mode.array(self))
    replace(FakeTensor, "__array__", as_array)
    replace(FakeTensor, "tolist", lambda self: mode.array(self).tolist())
    replace(FakeTensor, "__format__", as_format)


def replace_compilation(note: Note) -> None:
    def compile(model: Any = None, *_: Any, **__: Any) -> Any:
        note("torch.compile is skipped: what compiled code saves or needs is not counted")
        return (lambda function: function) if model is None else model

    for owner in (torch, torch.nn.Module):
        replace(owner, "compile", compile)


def replace_skipped_steps() -> None:
    """Make the gradient scaler always step. Relies on `GradScaler._maybe_opt_step`."""

    def step(_: Any, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)

    replace(torch.amp.GradScaler, "_maybe_opt_step", step)


def replace_addresses() -> None:
    """Give each storage without memory an address of its own: by them scripts find tied weights."""
    address_of = torch.UntypedStorage.data_ptr

    def of_storage(self: torch.UntypedStorage) -> int:
        return _NOT_MAPPED + self._cdata if self.device.type == "meta" else address_of(self)

    def of_tensor(self: FakeTensor) -> int:
        offset = int(self.storage_offset()) * self.element_size()
        return of_storage(self.untyped_storage()) + offset

    replace(torch.UntypedStorage, "data_ptr", of_storage)
    replace(FakeTensor, "data_ptr", of_tensor)


def replace_resizing(resized: Callable[[torch.UntypedStorage], None]) -> None:
    """Report which storages are resized, which is not an operator; FSDP does it."""
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> None:
        resize(storage, size)
        resized(storage)

    replace(torch.UntypedStorage, "resize_", resize_)


def replace_saving(note: Note) -> None:
    """Make torch, safetensors and Headway write no tensors, and leave their files empty."""

    def skip(*_: Any, **__: Any) -> None:
        note("saving is skipped")

    def save(*args: Any, **kwargs: Any) -> None:
        skip()
        file = kwargs.get("f") or kwargs.get("filename") or args[1]
        if isinstance(file, (str, os.PathLike)):
            open(file, "wb").close()

    def save_as_bytes(*_: Any, **__: Any) -> bytes:
        skip()
        return b""

    def skip_in_thread(*_: Any, **__: Any) -> Future[None]:
        skip()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    replace(torch, "save", save)
    for name in ("save_file", "save_model"):
        replace(safetensors.torch, name, save)
    replace(safetensors.torch, "save", save_as_bytes)
    for name in ("save", "save_state_dict"):
        replace(dcp, name, skip)
    replace(dcp, "async_save", skip_in_thread)
    replace(Checkpointer, "save_to", skip)


def replace_loading(note: Note) -> None:
    """Make loading a checkpoint change nothing; the checkpoint must exist nevertheless."""

    def skip(*_: Any, **__: Any) -> None:
        note(_LOADED)

    def load_checkpoint(folder: Path, like: Any = None) -> None:
        read_manifest(folder)
        note(_LOADED)

    for name in ("load", "load_state_dict"):
        replace(dcp, name, skip)
    replace(loading, "load_checkpoint", load_checkpoint)
    replace(training_state, "Checkpoint", _NothingToRestore)


class _NothingToRestore:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.check = self.check_models = self.apply = nothing


def replace_files_of_tensors(mode: ScriptMode) -> None:
    """Make safetensors, whose code is native, map files for real and return fake tensors."""
    opened = safetensors.safe_open

    def open_file(
        filename: Any, framework: str, device: Any = "cpu", *args: Any, **kwargs: Any
    ) -> _Reading:
        def faked(tensor: torch.Tensor) -> torch.Tensor:
            return mode.faked(tensor).to(device)

        return _Reading(opened(filename, framework, "cpu", *args, **kwargs), faked)

    replace_wherever_imported("safe_open", open_file)


class _Reading:
    def __init__(self, real: Any, faked: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._real, self._faked = real, faked

    def __enter__(self) -> Any:
        self._real.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._real.__exit__(*error)

    def get_slice(self, name: str) -> _Reading:
        return _Reading(self._real.get_slice(name), self._faked)

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._real, name)
        return lambda *args, **kwargs: self._read(call, *args, **kwargs)

    def __getitem__(self, part: Any) -> Any:
        return self._read(self._real.__getitem__, part)

    def _read(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            found = call(*args, **kwargs)
        return tree_map_only(torch.Tensor, self._faked, found)
