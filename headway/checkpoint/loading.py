"""Loads a checkpoint on all ranks, after verifying all of its files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from headway.checkpoint.files import original_names
from headway.checkpoint.folders import recover
from headway.checkpoint.manifest import NAME, Manifest, read_json, read_manifest, unusable, verify
from headway.checkpoint.saving import TENSORS, agree, on_rank_0, values_name
from headway.checkpoint.tensors import SavedTensors
from headway.checkpoint.values import decode, tensor_names
from headway.distributed.world import rank_and_size
from headway.errors import CheckpointError, Code
from headway.ipc.paths import is_absent


class Loaded(NamedTuple):
    """Values and tensors of a verified checkpoint, before they are loaded into objects."""

    manifest: Manifest
    shared: dict[str, Any]  # shared by all ranks
    own: dict[str, Any] | None  # of this rank; None if it did not save any


Like = Callable[[str, torch.Tensor, bool], torch.Tensor]


def load_checkpoint(
    folder: Path, like: Like = lambda _, saved, __: saved, *, launched_at: float = 0.0
) -> Loaded:
    """Verify and read a checkpoint; a collective call, which raises on all ranks or on none.

    `like` takes a saved tensor's name, its meta tensor, and whether it was a DTensor. It returns a
    tensor with the shape, dtype and placements to load. Plain tensors are loaded on the CPU. For
    `launched_at`, see `verify`.
    """
    rank, _ = rank_and_size()

    def recovered() -> Manifest:
        recover(folder)
        return verify(folder, launched_at=launched_at)

    manifest = on_rank_0(recovered)

    def require_unchanged() -> None:
        exists = not is_absent(folder / NAME)
        if not exists or read_manifest(folder) != manifest:
            raise CheckpointError(
                "the checkpoint was replaced while it was being loaded, or this rank sees a"
                " different folder"
                if exists
                else "the checkpoint was removed while it was being loaded, or this rank cannot see"
                " it",
                where=f"rank {rank}, {folder}",
                fix="load the same folder on all ranks, from a disk shared by all machines, while"
                " no other run saves or prunes checkpoints there",
                code=Code.NOT_SHARED,
            )

    def read() -> tuple[Any, Any, SavedTensors, dict[str, torch.Tensor]]:
        require_unchanged()
        shared = read_json(folder / values_name())
        has_own = rank < manifest.world_size
        own = read_json(folder / values_name(rank)) if has_own else None
        saved = SavedTensors(folder / TENSORS)
        names = {*tensor_names(shared), *(tensor_names(own) if has_own else ())}
        if missing := sorted(names - saved.meta_tensors.keys()):
            raise _unreadable(folder, f"{missing[0]} is missing")
        sharded = tensor_names(shared, ["sharded"])
        wanted = {name: like(name, saved.meta_tensors[name], name in sharded) for name in names}
        return shared, own, saved, wanted

    try:
        shared, own, saved, wanted = agree(read)
        tensors = saved.load(wanted)
    except CheckpointError:
        agree(require_unchanged)  # a checkpoint removed by another process is not damaged
        raise

    def decoded() -> Loaded:
        require_unchanged()
        mine = None if own is None else _decode(own, tensors, folder)
        return Loaded(manifest, _decode(shared, tensors, folder), mine)

    return agree(decoded)


@contextmanager
def reading_state(folder: Path) -> Iterator[None]:
    """Convert errors caused by malformed state inside the block to CheckpointError."""
    try:
        yield
    except CheckpointError:  # a subclass of ValueError
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        why = f"its state cannot be read ({type(error).__name__}: {error})"
        raise unusable(f"the checkpoint is damaged: {why}", folder) from None


def weights_in(
    folder: Path, number: int | None = None
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Verify a checkpoint, and return the state dict of one of its models.

    Models are numbered in the order in which they were prepared; None selects the only model. The
    result consists of the tensors by name, and of the names of all other entries.
    """
    loaded = load_checkpoint(folder)
    with reading_state(folder):
        models = loaded.shared["models"]
        if (number is None and len(models) != 1) or (number or 0) >= len(models):
            raise CheckpointError(
                f"the checkpoint has {len(models)} models",
                where=str(folder),
                fix=f"select a model with --model, from 0 to {len(models) - 1}"
                if models
                else "export a checkpoint that includes model weights",
                code=Code.COMMAND_LINE,
            )
        weights = original_names(models[number or 0])
        tensors = {name: t for name, t in weights.items() if isinstance(t, torch.Tensor)}
        return tensors, sorted(weights.keys() - tensors.keys())


def _decode(value: Any, tensors: Mapping[str, torch.Tensor], folder: Path) -> dict[str, Any]:
    try:
        decoded = decode(value, tensors)
        if type(decoded) is not dict:
            raise ValueError("the state is not a dict")
    except (ValueError, RecursionError) as error:
        raise _unreadable(folder, str(error)) from None
    return decoded


def _unreadable(where: Path, why: str) -> CheckpointError:
    return unusable(f"the checkpoint cannot be read: {why}", where)
