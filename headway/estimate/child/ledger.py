"""Which storages live on the device at any time, what each is for, and what lives at the peak."""

from __future__ import annotations

import re
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch._guards import active_fake_mode
from torch.distributed._tools.common_utils import get_untyped_storages
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary

from headway.estimate.attempt import CATEGORIES, Part

ACTIVATIONS = "activations"
MOST_PARTS = 8
OUTSIDE = "(outside of modules)"

_WAIT = torch.ops._c10d_functional.wait_tensor.default
_KEEP_THEIR_TEMPORARY = {
    torch.ops.aten.mse_loss.default,
    torch.ops.aten.smooth_l1_loss.default,
    torch.ops.aten.soft_margin_loss.default,
    torch.ops.aten.binary_cross_entropy.default,
}
"""Losses whose mean or sum lies in the storage of the losses of all elements, as torch has it."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Entry:
    """One storage: its bytes now, what they are for, and the module that made it."""

    __slots__ = ("category", "gone", "is_counted", "least_bytes", "nbytes", "number", "owner")

    def __init__(self, number: int, category: str, owner: Any) -> None:
        self.number = number
        self.nbytes = self.least_bytes = 0
        self.category = category
        self.owner = owner  # a weak reference to a module, or None
        self.is_counted = False
        self.gone: Any = None


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows all tensors that operators return, by their storages.

    Storages are counted only where `is_counted` says so of their tensor's device. What a storage is
    for is often known only later (`classify`), so the changes are kept, and the peak's parts are
    worked out at the end.

    Args:
        is_counted: whether a tensor's device is the one whose memory is asked for.
        fake_mode: the mode that is active while the script runs; None where its tensors are real.
        limit_bytes: raise MemoryError above it.
    """

    def __init__(
        self,
        is_counted: Callable[[torch.Tensor], bool],
        fake_mode: Any = None,
        limit_bytes: int | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake_mode = fake_mode
        self._is_counted = is_counted
        self._limit = limit_bytes
        self._entries: Any = WeakIdKeyDictionary()
        self._all: list[Entry] = []
        self._changes: list[tuple[int, int]] = []  # an entry's number, and bytes more
        self._current = 0
        self._peak_at = self._began_at = 0
        self.peak_bytes = 0
        self.modules: list[Any] = []  # weak references to those whose forward is being run
        self.default_category = ACTIVATIONS

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # it comes again with the tensors inside
        if func is _WAIT and self._fake_mode is not None:
            return args[0]
        result = func(*args, **(kwargs or {}))
        if func in _KEEP_THEIR_TEMPORARY and self._fake_mode is not None:
            self._keep_temporary(result, args)
        if active_fake_mode() is self._fake_mode:  # DTensor has one of its own, for shapes
            for one in tree_iter(result):
                if isinstance(one, torch.Tensor):
                    self.see(one)
        return result

    def _keep_temporary(self, loss: torch.Tensor, args: Any) -> None:
        self.see(loss)
        count = max(args[0].numel(), args[1].numel())
        for storage in _storages(loss):
            self._entries[storage].least_bytes = count * loss.element_size()

    def see(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storages, if that is new, or their bytes or device have changed."""
        counted = self._is_counted(tensor)
        for storage in _storages(tensor):
            entry = self._entries.get(storage)
            if entry is None:
                entry = self._new_entry(storage)
            self._count(entry, max(storage.nbytes(), entry.least_bytes) if counted else 0)

    def classify(self, tensor: torch.Tensor, category: str, owner: Any = None) -> None:
        """Say what the storages of a tensor are for; the first word counts."""
        self.see(tensor)
        for storage in _storages(tensor):
            entry = self._entries[storage]
            if entry.category == ACTIVATIONS:
                entry.category = category
            if entry.category == category:
                entry.owner = owner or entry.owner

    def owner_of(self, tensor: torch.Tensor) -> Any:
        """Return the module that a tensor belongs to, or that made it."""
        return next((self._entries[storage].owner for storage in _storages(tensor)), None)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Note that a known storage has another size now."""
        entry = self._entries.get(storage)
        if entry is not None and entry.is_counted:
            self._count(entry, storage.nbytes())

    def start_anew(self) -> None:
        """Forget the peak so far: what was done until now is done otherwise in a real run."""
        self.peak_bytes, self._peak_at = self._current, len(self._changes)
        self._began_at = self._peak_at

    def leave_out(self, categories: Collection[str]) -> None:
        """Count storages of these categories no more, as if they lay elsewhere from the start."""
        before = self._changes[: self._began_at]
        self._changes = [
            (number, change)
            for number, change in self._changes
            if self._all[number].category not in categories
        ]
        self._began_at = sum(self._all[number].category not in categories for number, _ in before)
        self.peak_bytes = self._peak_at = current = 0
        for at, (_, change) in enumerate(self._changes, 1):
            current += change
            if at >= self._began_at and current > self.peak_bytes:
                self.peak_bytes, self._peak_at = current, at
        self._current = current

    def live(self) -> list[Entry]:
        """Return what lives now."""
        return [entry for entry in self._all if entry.nbytes]

    def at_peak(self) -> list[Entry]:
        """Return what lives at the peak, each entry with its bytes there."""
        nbytes: dict[int, int] = defaultdict(int)
        for number, change in self._changes[: self._peak_at]:
            nbytes[number] += change
        live = [self._all[number] for number, count in nbytes.items() if count]
        for entry in live:
            entry.nbytes = nbytes[entry.number]
        return live

    def _new_entry(self, storage: torch.UntypedStorage) -> Entry:
        owner = self.modules[-1] if self.modules else None
        entry = Entry(len(self._all), self.default_category, owner)
        entry.gone = weakref.ref(storage, lambda _: self._count(entry, 0))
        self._all.append(entry)
        self._entries[storage] = entry
        return entry

    def _count(self, entry: Entry, nbytes: int) -> None:
        change = nbytes - entry.nbytes
        entry.is_counted = entry.is_counted or nbytes > 0
        if not change:
            return
        entry.nbytes = nbytes
        self._changes.append((entry.number, change))
        self._current += change
        if self._current > self.peak_bytes:
            self.peak_bytes = self._current
            self._peak_at = len(self._changes)
            if self._limit is not None and self._current > self._limit:
                raise MemoryError(f"more than {self._limit} bytes of tensors")


def totals(entries: Iterable[Entry]) -> dict[str, int]:
    """Return the bytes of each category."""
    found = dict.fromkeys(CATEGORIES, 0)
    for entry in entries:
        found[entry.category] += entry.nbytes
    return found


def largest_parts(entries: Iterable[Entry], names: dict[int, str]) -> tuple[Part, ...]:
    """Return the modules that take most; those that differ by their numbers alone are one.

    Args:
        names: of modules, by their id.
    """
    found: dict[str, dict[str, int]] = {}
    for entry in entries:
        module = entry.owner and entry.owner()
        name = OUTSIDE if module is None else names.get(id(module), type(module).__name__)
        parts = found.setdefault(_folded(name), defaultdict(int))
        parts[entry.category] += entry.nbytes
    ordered = sorted(found.items(), key=lambda one: -sum(one[1].values()))
    return tuple(Part(name, dict(nbytes)) for name, nbytes in ordered[:MOST_PARTS])


def _folded(name: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _storages(tensor: torch.Tensor) -> Iterable[torch.UntypedStorage]:
    """Return the storages of a tensor, or of those inside it (DTensor).

    `get_untyped_storages` is private to torch; its own memory tracker uses it the same way.
    """
    if type(tensor) in _PLAIN or hasattr(tensor, "fake_mode"):
        return (tensor.untyped_storage(),) if tensor.layout is torch.strided else ()
    return get_untyped_storages(tensor)
