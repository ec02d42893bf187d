"""Saving and loading in a run without memory: files are empty, or their tensors are fake.

What a checkpoint holds has the shapes of what is there already, so that those of Headway and of
torch.distributed are not read; a script that goes on from one is followed as from its beginning.
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
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from headway.checkpoint import loading, training_state
from headway.checkpoint.checkpointer import Checkpointer
from headway.checkpoint.manifest import read_manifest
from headway.estimate.child.fake_mode import ScriptMode
from headway.estimate.child.replacing import replace, replace_wherever_imported

Note = Callable[[str], None]

_LOADED = "loading is skipped: the script goes on as from its beginning"


def replace_saving(note: Note) -> None:
    """Let torch, safetensors and Headway write no tensors; files that they write are empty."""

    def skip(*_: Any, **__: Any) -> None:
        note("saving is skipped")

    def save(obj: Any, f: Any, *_: Any, **__: Any) -> None:
        skip()
        if isinstance(f, (str, os.PathLike)):
            open(f, "wb").close()

    def save_file(tensors: Any, filename: Any, *_: Any, **__: Any) -> None:
        save(tensors, filename)

    def save_model(model: Any, filename: Any, *_: Any, **__: Any) -> None:
        save(model, filename)

    def save_as_bytes(*_: Any, **__: Any) -> bytes:
        skip()
        return b""

    def skip_in_thread(*_: Any, **__: Any) -> Future[None]:
        skip()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    replace(torch, "save", save)
    replace(safetensors.torch, "save_file", save_file)
    replace(safetensors.torch, "save_model", save_model)
    replace(safetensors.torch, "save", save_as_bytes)
    for name in ("save", "save_state_dict"):
        replace(dcp, name, skip)
    replace(dcp, "async_save", skip_in_thread)
    replace(Checkpointer, "save_to", skip)


def replace_loading(note: Note) -> None:
    """Let Headway's checkpoints and torch's change nothing; they have to be there all the same."""

    def skip(*_: Any, **__: Any) -> None:
        note(_LOADED)

    def load_checkpoint(folder: Path, like: Any = None) -> None:
        read_manifest(folder)
        note(_LOADED)

    for name in ("load", "load_state_dict"):
        replace(dcp, name, skip)
    replace(loading, "load_checkpoint", load_checkpoint)
    replace(training_state, "Checkpoint", _NothingToRestore)
    replace(training_state, "Restoring", _NothingToRestore)


class _NothingToRestore:
    """Stands for a checkpoint of which nothing was read."""

    lacks_other_ranks = False

    def __init__(self, *_: Any, **__: Any) -> None:
        self.check = self.check_models = self.apply = _nothing


def _nothing(*_: Any) -> None:
    """Do nothing."""


def replace_files_of_tensors(mode: ScriptMode) -> None:
    """Let safetensors, whose own code is native, map files for real and return fake tensors."""
    opened = safetensors.safe_open

    class File(_Reading):
        def __init__(
            self,
            filename: str | os.PathLike[str],
            framework: str,
            device: Any = "cpu",
            *args: Any,
            **kwargs: Any,
        ) -> None:
            self._device = device
            super().__init__(opened(filename, framework, "cpu", *args, **kwargs), self._faked)

        def _faked(self, tensor: torch.Tensor) -> torch.Tensor:
            return mode.faked(tensor).to(self._device)

        def get_slice(self, name: str) -> _Reading:
            return _Reading(self._real.get_slice(name), self._faked)

    replace_wherever_imported("safe_open", File)


class _Reading:
    """An opened file, or a tensor in it, of which parts can be read."""

    def __init__(self, real: Any, faked: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._real, self._faked = real, faked

    def __enter__(self) -> Any:
        self._real.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._real.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._real, name)
        return lambda *args, **kwargs: self._read(call, *args, **kwargs)

    def __getitem__(self, part: Any) -> Any:
        return self._read(self._real.__getitem__, part)

    def _read(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            found = call(*args, **kwargs)
        return tree_map_only(torch.Tensor, self._faked, found)
