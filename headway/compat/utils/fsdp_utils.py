"""Functions of `accelerate.utils.fsdp_utils` that save and load sharded models and optimizers.

transformers' Trainer calls these functions. Each folder is a checkpoint like those of
`save_state`: it is written in parts, is verified when loaded, and can be loaded on any number of
ranks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.nn.modules.module import _IncompatibleKeys

from headway.compat.forwarding import forward
from headway.distributed.call_barrier import call_barrier
from headway.errors import CheckpointError, Code, UsageError
from headway.strategies.compilation import is_peft_model

if TYPE_CHECKING:
    from headway.checkpoint.training_state import SavedState
    from headway.training.training import Training

__getattr__, __dir__ = forward(__name__)

Folder = str | os.PathLike[str]


def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: Any,
    output_dir: Folder,
    model_index: int = 0,
    adapter_only: bool = False,
) -> None:
    """Save a model's weights to `output_dir/pytorch_model_fsdp_0`; must be called on every rank.

    Args:
        fsdp_plugin: Has no effect, because there is only one format.
        accelerator: The Accelerator that prepared `model`.
        model_index: Number in the name of the folder.
        adapter_only: Save only the trainable weights of a peft model.

    Raises:
        CheckpointError: A rank failed to save; an existing folder is unchanged.
    """
    training = _only(accelerator, model)
    [inner] = training.inner_models
    weights = inner.state_dict()
    if adapter_only and is_peft_model(inner):
        trained = {name for name, p in inner.named_parameters() if p.requires_grad}
        weights = {name: weight for name, weight in weights.items() if name in trained}
    _save(training, Path(output_dir, f"pytorch_model_fsdp_{model_index}"), [weights])


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: Any,
    input_dir: Folder,
    model_index: int = 0,
    adapter_only: bool = False,
) -> _IncompatibleKeys:
    """Load weights saved by `save_fsdp_model`; must be called on every rank.

    Returns the missing and unexpected keys, as `torch.nn.Module.load_state_dict` does.

    Raises:
        CheckpointError: The checkpoint is missing, damaged or incompatible; the model is unchanged.
    """
    training = _only(accelerator, model)
    [inner] = training.inner_models
    is_part = adapter_only and is_peft_model(inner)
    folder = _named(input_dir, f"pytorch_model_fsdp_{model_index}")
    checkpoint = _load(training, folder, [inner], [], strict=not is_part)
    saved, live = checkpoint.shared["models"][0].keys(), inner.state_dict().keys()
    return _IncompatibleKeys([*(live - saved)], [*(saved - live)])


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: Any,
    output_dir: Folder,
    optimizer_index: int = 0,
) -> None:
    """Save an optimizer's state to `output_dir/optimizer_0`; must be called on every rank.

    Raises:
        CheckpointError: A rank failed to save; an existing folder is unchanged.
    """
    training = _only(accelerator, model, optimizer)
    _save(training, Path(output_dir, f"optimizer_{optimizer_index}"), [])


def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: Any,
    input_dir: Folder,
    optimizer_index: int = 0,
    adapter_only: bool = False,
) -> None:
    """Load state saved by `save_fsdp_optimizer`; must be called on every rank.

    Raises:
        CheckpointError: The checkpoint is missing, damaged or incompatible; the optimizer is
            unchanged.
    """
    from headway.checkpoint.training_state import Optimizers

    training = _only(accelerator, model, optimizer)
    _load(training, _named(input_dir, f"optimizer_{optimizer_index}"), [], [Optimizers(training)])


def _only(accelerator: Any, *objects: Any) -> Training:
    """Return a copy of the accelerator's Training that has only these prepared objects."""
    training: Training = accelerator.parts.training
    prepared = [training.find(obj) for obj in objects]
    if None in prepared:
        raise UsageError(
            f"a {type(objects[prepared.index(None)]).__name__} has not been prepared",
            where="the script's call that saves or loads it",
            fix="pass it to prepare() first",
            code=Code.NOT_PREPARED,
        )
    other = copy(training)
    other.prepared = [pair for pair in training.prepared if any(pair[1] is p for p in prepared)]
    other.registered = []
    return other


def _save(training: Training, folder: Path, weights: Sequence[dict[str, Any]]) -> None:
    from headway.checkpoint.folders import SaveTimes
    from headway.checkpoint.saving import CheckpointProgress, prepare_checkpoint, write_prepared
    from headway.checkpoint.training_state import state_of

    call_barrier("the saving of a sharded model or optimizer")
    progress = CheckpointProgress(training.steps_done, 0, 0.0)
    state = state_of(training, weights, allow_pickle=False)
    write_prepared(prepare_checkpoint(folder, lambda _: state, progress, SaveTimes()))


def _load(
    training: Training,
    folder: Path,
    models: Sequence[Any],
    parts: Sequence[Any],
    *,
    strict: bool = True,
) -> SavedState:
    from headway.checkpoint.loading import load_checkpoint
    from headway.checkpoint.saving import agree
    from headway.checkpoint.training_state import SavedState, shard_like

    if not folder.exists():
        raise CheckpointError(
            f"{folder.name} does not exist",
            where=str(folder.parent),
            fix="pass a folder to which a sharded model was saved; if the checkpoint is from a run"
            " without sharding, resume with the strategy of that run, such as `--strategy ddp`",
            code=Code.MISMATCH,
        )
    call_barrier("the loading of a sharded model or optimizer")
    loaded = load_checkpoint(folder, shard_like(training))
    checkpoint = SavedState(loaded, folder, parts, strict=strict)
    agree(checkpoint.check)
    agree(lambda: checkpoint.check_models(models))
    checkpoint.apply(models)
    return checkpoint


def _named(folder: Folder, name: str) -> Path:
    """Return the folder `name` inside `folder`, or `folder` itself if that is its name."""
    given = Path(folder)
    return given if given.name == name else given / name
