"""Calls of ordinary scripts that cannot work without memory, and what they do instead.

Loaders read their data for real, in this process; compiled functions are the functions themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only
from torch.utils.data import dataloader
from torch.utils.weak import WeakIdKeyDictionary

from headway.estimate.child.fake_mode import ScriptMode
from headway.estimate.child.replacing import replace

Note = Callable[[str], None]

_PAGE_BYTES = 4096


def replace_loaders(mode: ScriptMode | None, see: Callable[[torch.Tensor], None]) -> None:
    """Let data loaders read for real, without workers, and give batches of fake tensors.

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
            if mode is not None:
                data = tree_map_only(torch.Tensor, mode.faked, data)
            tree_map_only(torch.Tensor, see, data)
            return data

    def get_iterator(self: Any) -> Any:
        vars(self).update(num_workers=0, prefetch_factor=None, persistent_workers=False, timeout=0)
        vars(self).update(pin_memory=False)
        return Iterator(self)

    def not_shared(self: torch.Tensor) -> torch.Tensor:
        return self  # there is no process to share it with

    replace(torch.utils.data.DataLoader, "_get_iterator", get_iterator)
    replace(torch.Tensor, "share_memory_", not_shared)


def replace_reading(mode: ScriptMode) -> None:
    """Let what looks at all of a tensor's values see known ones, or ones."""
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


def replace_padding(mode: ScriptMode) -> None:
    """Let `pad_packed_sequence` use torch's operators; its own code, in C++, reads addresses."""

    def pad(
        data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, value: float, total: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with _disable_current_modes():
            batch, longest = int(batch_sizes[0]), max(total, len(batch_sizes))
            is_there = batch_sizes.unsqueeze(1) > torch.arange(batch)  # [longest, batch]
            rows, lengths = is_there.flatten().nonzero().squeeze(1), is_there.sum(0)
        padded = data.new_full((longest * batch, *data.shape[1:]), value)
        places = mode.faked(rows).to(data.device)
        padded = padded.index_copy(0, places, data).view(longest, batch, *data.shape[1:])
        return padded.transpose(0, 1) if batch_first else padded, mode.faked(lengths)

    replace(torch._VF, "_pad_packed_sequence", pad)


def replace_compilation(note: Note) -> None:
    """Let torch.compile return what it is given."""

    def compile(model: Any = None, *_: Any, **__: Any) -> Any:
        note("torch.compile is skipped: what compiled code saves or needs is not counted")
        return (lambda function: function) if model is None else model

    def compile_module(self: torch.nn.Module, *_: Any, **__: Any) -> None:
        compile(self)

    replace(torch, "compile", compile)
    replace(torch.nn.Module, "compile", compile_module)


def replace_skipped_steps() -> None:
    """Let the gradient scaler step always. Relies on `GradScaler._maybe_opt_step`."""

    def step(self: Any, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)

    replace(torch.amp.GradScaler, "_maybe_opt_step", step)


def replace_fast_paths() -> None:
    """Let torch's transformer layers use the operators that they train with."""
    torch.backends.mha.set_fastpath_enabled(False)


def replace_addresses() -> None:
    """Give each storage without memory an address of its own: by them scripts find tied weights."""
    address_of = torch.UntypedStorage.data_ptr
    addresses: Any = WeakIdKeyDictionary()
    unused = itertools.count(_PAGE_BYTES, _PAGE_BYTES)

    def of_storage(self: torch.UntypedStorage) -> int:
        if self.device.type != "meta":
            return address_of(self)
        if self not in addresses:
            addresses[self] = next(unused)
        found: int = addresses[self]
        return found

    def of_tensor(self: FakeTensor) -> int:
        offset = int(self.storage_offset()) * self.element_size()
        return of_storage(self.untyped_storage()) + offset

    replace(torch.UntypedStorage, "data_ptr", of_storage)
    replace(FakeTensor, "data_ptr", of_tensor)


def replace_resizing(resized: Callable[[torch.UntypedStorage], None]) -> None:
    """Say which storages are resized, which is no operator; FSDP does it."""
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> None:
        resize(storage, size)
        resized(storage)

    replace(torch.UntypedStorage, "resize_", resize_)
