"""Weights for other programs, and checkpoints from folders that Accelerate's `save_state` wrote.

No pickle is executed: torch reads Accelerate's files with `weights_only=True`.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch

from headway.checkpoint.folders import begin, require_space
from headway.checkpoint.layout import SHARED, require_layout
from headway.checkpoint.loading import load_checkpoint
from headway.checkpoint.manifest import describe_files, files_below, write_json
from headway.checkpoint.saving import (
    TENSORS,
    Progress,
    commit_files,
    prefix_of,
    removed_on_failure,
    values_name,
)
from headway.checkpoint.tensors import save_tensors
from headway.checkpoint.values import encode
from headway.devices.table import KINDS
from headway.errors import CheckpointError


class Weights(NamedTuple):
    """The weights of a model in a checkpoint: tensors by their names, and the names of the rest."""

    tensors: dict[str, torch.Tensor]
    others: list[str]


def weights_in(folder: Path, number: int | None = None) -> Weights:
    """Verify a checkpoint, and return the weights of one model.

    Models are numbered in the order in which they were prepared; None: there is one only.
    """
    shared = load_checkpoint(folder).shared
    require_layout(shared, SHARED, folder)
    models = shared["models"]
    if (number is None and len(models) != 1) or (number or 0) >= len(models):
        raise CheckpointError(
            f"the checkpoint has {len(models)} models",
            where=str(folder),
            fix=f"choose one with --model, from 0 to {len(models) - 1}"
            if models
            else "export one that was saved with its weights",
        )
    weights = models[number or 0]
    tensors = {name: one for name, one in weights.items() if isinstance(one, torch.Tensor)}
    return Weights(tensors, sorted(weights.keys() - tensors.keys()))


class Imported(NamedTuple):
    """What has become of a folder of Accelerate: the files taken, and what cannot be promised."""

    taken: list[str]
    notes: list[str]


def import_accelerate(source: Path, target: Path) -> Imported:
    """Make a checkpoint from a folder of Accelerate's `save_state`; no pickle is executed."""
    reading = _Reading(source)
    shared = reading.shared()
    ranks = [{"generators": one, "loaders": None, "tokens": None} for one in reading.generators()]
    reading.note_what_is_left()
    tensors: dict[str, torch.Tensor] = {}
    values = {values_name(): encode(shared, prefix_of(), tensors)}
    for rank, own in enumerate(ranks):
        values[values_name(rank)] = encode(own, prefix_of(rank), tensors)
    pending = begin(target)
    with removed_on_failure(target, pending):
        require_space(pending, sum(tensor.nbytes for tensor in tensors.values()))
        save_tensors(tensors, pending / TENSORS)
        for name, value in values.items():
            write_json(pending / name, value)
        files = describe_files(pending, sorted(files_below(pending)))
        steps = max((one["steps"] for one in shared["optimizers"]), default=0)
        commit_files(pending, target, Progress(steps, 0), files, len(ranks))
    return Imported(reading.taken, reading.notes)


class _Reading:
    """A folder of Accelerate that is being read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.taken: list[str] = []
        self.notes: list[str] = []

    def shared(self) -> dict[str, Any]:
        """Return what all ranks share, as `headway.checkpoint.training_state` lays it out."""
        weights = list(self._numbered("model", "safetensors", take=_state_dict))
        weights = weights or list(self._numbered("pytorch_model", "bin", take=_state_dict))
        if not weights:
            raise CheckpointError(
                "there is neither model.safetensors nor pytorch_model.bin",
                where=str(self._folder),
                fix="pass a folder that Accelerate's save_state() wrote, without FSDP or DeepSpeed",
            )
        optimizers = list(self._numbered("optimizer", "bin", take=_optimizer))
        steps = max((one["steps"] for one in optimizers), default=0)
        scaler = self._read("scaler.pt")
        return {
            "models": weights,
            "optimizers": optimizers,
            "schedulers": [
                {"state": state, "seen_steps": steps}
                for state in self._numbered("scheduler", "bin")
            ],
            "objects": [
                {"state": state} for state in self._numbered("custom_checkpoint", "pkl", "_0")
            ],
            "loaders": None,
            "precision": {"name": None if scaler is None else "fp16", "state": scaler},
            "accumulation": {"micro_batches": 0, "sync_gradients": True},
        }

    def generators(self) -> list[dict[str, Any] | None]:
        """Return the states of each rank's random number generators; [None] if there are none."""
        ranks = list(self._numbered("random_states", "pkl", "_0", take=_generators))
        if not ranks:
            self.notes.append("there are no states of random number generators")
            return [None]
        if len(ranks) > 1 and (self._folder / "scheduler.bin").exists():
            self.notes.append(
                f"schedules have counted the steps of {len(ranks)} ranks, unless split_batches was"
                " set; Headway counts optimizer steps"
            )
        return ranks

    def note_what_is_left(self) -> None:
        """Note what Accelerate has not saved, and the files that are not read."""
        self.notes.append("positions in data loaders are not there: their epochs begin anew")
        left = {*files_below(self._folder)} - {*self.taken}
        self.notes += [f"{name} is not read" for name in sorted(left)]

    def _numbered(
        self,
        stem: str,
        suffix: str,
        first: str = "",
        *,
        take: Callable[[Any, int], Any] = lambda content, _: content,
    ) -> Iterator[Any]:
        """Yield what `take` makes of the contents of STEM.SUFFIX, STEM_1.SUFFIX and so on.

        `first` stands in place of the number in the first name; `take` raises on what Accelerate
        does not write.
        """
        number = 0
        while True:
            name = f"{stem}{f'_{number}' if number else first}.{suffix}"
            content = self._read(name)
            if content is None:
                return
            try:
                taken = take(content, number)
            except Exception as error:  # noqa: BLE001  the contents may be anything
                why = f"{type(error).__name__}: {error}"
                raise CheckpointError(
                    f"the file does not hold what Accelerate writes ({why})",
                    where=str(self._folder / name),
                    fix="move the file away, and go on without what it holds",
                ) from None
            yield taken
            number += 1

    def _read(self, name: str) -> Any:
        """Return what a file holds; None if it is not there."""
        path = self._folder / name
        if not os.path.lexists(path):
            return None
        if not path.is_file():
            raise CheckpointError(
                "this is not a file", where=str(path), fix="pass a folder as Accelerate writes it"
            )
        try:
            with torch.serialization.safe_globals(_numpy_globals()):
                content = (
                    safetensors.torch.load_file(path)
                    if path.suffix == ".safetensors"
                    else torch.load(path, map_location="cpu", weights_only=True)
                )
        except Exception as error:  # noqa: BLE001  whatever a damaged pickle does
            why = str(error).splitlines() or [type(error).__name__]
            raise self._unreadable(path, why[0]) from None
        self.taken.append(name)
        return content

    def _unreadable(self, path: Path, why: str) -> CheckpointError:
        return CheckpointError(
            f"the file cannot be read without running code in it: {why}",
            where=str(path),
            fix="move the file away, and go on without what it holds",
        )


def _numpy_globals() -> list[Any]:
    """Return what makes an array of numpy from bytes, and nothing else; for its generator."""
    import numpy

    rebuild = numpy.random.get_state()[1].__reduce__()[0]  # type: ignore[index]
    return [rebuild, numpy.ndarray, numpy.dtype, type(numpy.dtype(numpy.uint32)), codecs.encode]


def _state_dict(content: Any, _: int) -> dict[Any, Any]:
    """Return the contents of a file; TypeError if they are no state dict."""
    if not isinstance(content, dict):
        raise TypeError(f"{type(content).__name__} is no dict")
    return content


def _optimizer(content: Any, _: int) -> dict[str, Any]:
    """Return the state of an optimizer, with the steps that it has made, if it counts them."""
    state = _state_dict(content, _)
    counts = [int(one["step"]) for one in state.get("state", {}).values() if "step" in one]
    if min(counts, default=0) < 0:
        raise ValueError(f"it has made {min(counts)} steps")
    return {"state": state, "steps": max(counts, default=0), "skipped": False}


def _generators(states: dict[str, Any], rank: int) -> dict[str, Any]:
    """Return the states of `headway.distributed.rng` from those of Accelerate."""
    found = {
        "python": states["random_state"],
        "numpy": states["numpy_random_seed"],
        "torch": states["torch_manual_seed"],
    }
    for name in KINDS:
        gpus = states.get(f"torch_{name}_manual_seed")
        if gpus:
            found[name] = gpus[rank % len(gpus)]
    return found
