"""Names of `accelerate.utils.fsdp_utils`: a sharded model or its optimizer in an own folder.

transformers' Trainer saves and loads by them. Each folder is a checkpoint like those of
`save_state`: written in parts, verified when it is loaded, for any number of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from headway.compat.forwarding import forward
from headway.distributed.meeting import meet
from headway.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from headway.checkpoint.training_state import SavedState
    from headway.training.training import Training

__getattr__, __dir__ = forward(__name__)

Folder = str | os.PathLike[str]


class LoadResult(NamedTuple):
    """The names that only a model or only a checkpoint has, as `load_state_dict` returns them."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: Any,
    output_dir: Folder,
    model_index: int = 0,
    adapter_only: bool = False,
) -> None:
    """Save the weights of a model into `output_dir/pytorch_model_fsdp_0`; every rank calls this.

    Args:
        fsdp_plugin: not looked at: there is one format.
        accelerator: the one that has prepared `model`.
        model_index: the number in the name of the folder.
        adapter_only: of a peft model, save what is trained alone.

    Raises:
        CheckpointError: a rank could not save; an earlier folder still stands.
    """
    from headway.strategies.compilation import is_peft_model

    training = _only(accelerator, model)
    [inner] = training.inner_models
    weights = training.strategy.own_state_dict(inner)
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
) -> LoadResult:
    """Load what `save_fsdp_model` saved; every rank calls this.

    Raises:
        CheckpointError: it is missing, damaged or does not fit; the model is as it was.
    """
    from headway.strategies.compilation import is_peft_model

    training = _only(accelerator, model)
    [inner] = training.inner_models
    is_part = adapter_only and is_peft_model(inner)
    folder = _named(input_dir, f"pytorch_model_fsdp_{model_index}")
    checkpoint = _load(training, folder, [inner], [], strict=not is_part)
    saved, live = checkpoint.shared["models"][0].keys(), inner.state_dict().keys()
    return LoadResult([*(live - saved)], [*(saved - live)])


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: Any,
    output_dir: Folder,
    optimizer_index: int = 0,
) -> None:
    """Save what an optimizer remembers into `output_dir/optimizer_0`; every rank calls this.

    Raises:
        CheckpointError: a rank could not save; an earlier folder still stands.
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
    """Load what `save_fsdp_optimizer` saved; every rank calls this.

    Raises:
        CheckpointError: it is missing, damaged or does not fit; the optimizer is as it was.
    """
    from headway.checkpoint.training_state import Optimizers

    training = _only(accelerator, model, optimizer)
    folder = _named(input_dir, f"optimizer_{optimizer_index}")
    _load(training, folder, [], [Optimizers(training)])


def _only(accelerator: Any, *objects: Any) -> Training:
    """Return a training of these prepared objects alone, with all else of the accelerator's."""
    training: Training = accelerator.parts.training
    prepared = [training.find(obj) for obj in objects]
    if None in prepared:
        raise UsageError(
            f"a {type(objects[prepared.index(None)]).__name__} has not been prepared",
            where="the script's call that saves or loads it",
            fix="give it to prepare() first",
        )
    other = copy(training)
    other.prepared = [pair for pair in training.prepared if any(pair[1] is p for p in prepared)]
    other.registered = []
    return other


def _save(training: Training, folder: Path, weights: Sequence[dict[str, Any]]) -> None:
    from headway.checkpoint.saving import CheckpointProgress, prepare_checkpoint, write_prepared
    from headway.checkpoint.training_state import state_of

    meet("the saving of a sharded model or optimizer")
    progress = CheckpointProgress(training.steps_done, 0, 0.0)
    state = state_of(training, weights, allow_pickle=False)
    write_prepared(prepare_checkpoint(folder, lambda _: state, progress))


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
            f"there is no {folder.name}: this was saved by a run that did not shard",
            where=str(folder.parent),
            fix="go on with the strategy that saved it, such as `--strategy ddp`, or begin anew",
        )
    meet("the loading of a sharded model or optimizer")
    loaded = load_checkpoint(folder, shard_like(training))
    checkpoint = SavedState(loaded, folder, parts, strict=strict)
    agree(checkpoint.check)
    agree(lambda: checkpoint.check_models(models))
    checkpoint.apply(models)
    return checkpoint


def _named(folder: Folder, name: str) -> Path:
    """Return the folder of this name in another one, which may be it already."""
    given = Path(folder)
    return given if given.name == name else given / name
