"""Collects the state of a training run for a checkpoint, and restores it, part by part.

Like torch's Stateful, each part has `state_dict()` and `load_state_dict()`. In addition, `check()`
compares a part with the checkpoint and changes nothing. All checks run before any part is loaded.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, empty
from torch.optim.lr_scheduler import ChainedScheduler, SequentialLR
from torch.optim.swa_utils import AveragedModel

from headway.checkpoint.loading import Like, Loaded, reading_state
from headway.checkpoint.manifest import unusable
from headway.checkpoint.saving import Contents
from headway.checkpoint.tensors import local_part
from headway.checkpoint.values import encode
from headway.distributed.call_barrier import call_barrier
from headway.distributed.collectives import gather_object
from headway.distributed.nested import is_instance_of
from headway.distributed.rng import are_generator_states, generator_states, set_generator_states
from headway.distributed.world import rank_and_size
from headway.errors import CheckpointError, Code, UsageError
from headway.strategies.weights import saved_buffers
from headway.training.optimizer import (
    Groups,
    PreparedOptimizer,
    PreparedScheduler,
    optimizer_options,
    override_notes,
    scheduler_options,
    scheduler_paths,
)
from headway.training.training import Training

Weights = dict[str, Any]
_NO_RANK_STATE: dict[str, Any] = {
    "generators": None,
    "tokens": {},
    "buffers": (),
    "gradients": (),
    "positions": (),
}
_UNSAVED_GRADIENTS = (
    "note: a sharded model's gradients from no_sync() are not saved: a run that resumes between two"
    " micro-batches loses them. Use accelerator.accumulate(model), or save after the optimizer step"
)
_WRAPPED = r"\b(module|_orig_mod)\."
_SAME_WRAPPERS = (
    "compile and wrap the same modules as the run that saved the checkpoint; in both runs, register"
    " AveragedModel(accelerator.unwrap_model(model)), not AveragedModel(model)"
)
_SAME_OBJECTS = (
    "prepare and register the same objects, in the same order, as the run that saved the"
    " checkpoint; for the weights alone, `headway checkpoint export FOLDER FILE` writes them"
)
_SAME_SIZES = "create the model with the saved sizes and dtypes, or load another checkpoint"


def state_of(
    training: Training,
    weights: Sequence[Weights],
    own_buffers: Sequence[Sequence[torch.Tensor | None]] = (),
    *,
    allow_pickle: bool,
) -> Contents:
    """Return the contents of a checkpoint, without copying tensors.

    `weights` are the state dicts of the models to save, and `own_buffers` is the result of
    `diverging_buffers` for these models.
    """
    shared = {kind.name: kind(training).state_dict() for kind in _SHARED}
    shared |= {
        "models": list(weights),
        "objects": RegisteredObjects(training).states(allow_pickle),
        "global_batch_size": training.global_batch_size,
    }
    return Contents(shared, RankState(training).states(own_buffers))


class SavedState:
    """A verified checkpoint, whose state can be restored.

    With `strict`, the names of a model's weights must match those in the checkpoint.
    """

    def __init__(
        self,
        loaded: Loaded,
        folder: Path,
        parts: Sequence[Any],
        *,
        strict: bool = True,
        allow_pickle: bool = False,
    ) -> None:
        self._parts = parts
        self.shared, self.folder = loaded.shared, folder
        self.saved_by = loaded.manifest.world_size
        is_same_size = rank_and_size()[1] == self.saved_by
        # this rank's own state; empty if the saved run had a different number of ranks
        self.own: Mapping[str, Any] = (loaded.own if is_same_size else None) or _NO_RANK_STATE
        self.strict, self.allow_pickle = strict, allow_pickle

    def require_equal(self, what: str, saved: Any, live: Any, *, fix: str = _SAME_OBJECTS) -> None:
        """Raise CheckpointError unless the saved and live values are equal."""
        if saved != live:
            raise self.mismatch_error(f"{what}: {saved} in the checkpoint, {live} in this run", fix)

    def mismatch_error(self, what: str, fix: str = _SAME_OBJECTS) -> CheckpointError:
        what = f"the checkpoint does not match this run: {what}"
        return CheckpointError(what, where=str(self.folder), fix=fix, code=Code.MISMATCH)

    def check(self) -> None:
        """Raise CheckpointError unless all parts except the models match; change nothing."""
        with reading_state(self.folder):
            for part in self._parts:
                part.check(self)

    def check_models(self, models: Sequence[torch.nn.Module]) -> None:
        """Raise CheckpointError unless the weights match these models; change nothing."""
        all_live = [model.state_dict() for model in models]
        with reading_state(self.folder):
            saved = self.shared["models"]
            self.require_equal("number of models", len(saved), len(models))
            for number, (weights, live) in enumerate(zip(saved, all_live, strict=True)):
                if self.strict:
                    self.require_names(f"model {number}", weights, live)
                self._check_weights(f"model {number}", weights, live)

    def require_names(self, what: str, saved: Weights, live: Weights) -> None:
        """Raise CheckpointError unless the names of a module's weights match the saved names."""
        if live.keys() != saved.keys():
            name = min(live.keys() ^ saved.keys(), key=str)
            place = "the checkpoint" if name in saved else "this run"
            one, other = ({re.sub(_WRAPPED, "", key) for key in each} for each in (saved, live))
            fix = _SAME_OBJECTS if one != other else _SAME_WRAPPERS
            raise self.mismatch_error(f"{name!r} of {what} exists only in {place}", fix)

    def _check_weights(self, model: str, saved: Weights, live: Weights) -> None:
        for name in live.keys() & saved.keys():
            if isinstance(live[name], torch.Tensor):
                facts = _describe_value(saved[name]), _describe_value(live[name])
                self.require_equal(f"{name!r} of {model}", *facts, fix=_SAME_SIZES)

    def apply(self, models: Sequence[torch.nn.Module]) -> None:
        """Restore the state of the training run, and the weights of these models.

        If a `load_state_dict` fails on any rank, all ranks raise UsageError.
        """
        part, failed, cause = "", "", None
        try:
            for part in self._restore_parts(models):  # noqa: B007  used if it fails
                pass
        except Exception as error:  # noqa: BLE001  a class of the script may raise anything
            failed, cause = f"{part} cannot load its state: {type(error).__name__}: {error}", error
        for rank, what in enumerate(gather_object([failed])):
            if what:
                raise UsageError(
                    f"load_state() failed and left the training state only partly restored: {what}",
                    where=f"rank {rank}, {self.folder}",
                    fix="fix the load_state_dict() that failed, and restart the script, which would"
                    " otherwise train with a mixture of two states",
                    code=Code.PARTLY_RESTORED,
                ) from cause

    def _restore_parts(self, models: Sequence[torch.nn.Module]) -> Iterator[str]:
        """Restore each part, after yielding its name."""
        pairs = zip(models, self.shared["models"], strict=True)
        for number, (model, weights) in enumerate(pairs):
            yield f"model {number}"
            model.load_state_dict(weights, strict=self.strict)
        for part in self._parts:
            yield from part.load_state_dict(self)


class _Part:
    """A part of the state of a training run; `name` is its key in the shared state."""

    name: ClassVar[str]

    def __init__(self, training: Training) -> None:
        self._training = training


class _Objects(_Part):
    """A part that consists of an ordered list of objects."""

    noun: ClassVar[str]

    def live(self) -> Sequence[Any]:
        raise NotImplementedError

    def pairs(self, checkpoint: SavedState) -> Iterator[tuple[str, Any, Any]]:
        """Yield each object's name, its saved state and the live object.

        Raises CheckpointError if the number of objects or their classes differ.
        """
        all_saved, all_live = checkpoint.shared[self.name], self.live()
        checkpoint.require_equal(f"number of {self.name}", len(all_saved), len(all_live))
        for number, (saved, live) in enumerate(zip(all_saved, all_live, strict=True)):
            name, kind = f"{self.noun} {number}", kind_of(live)
            checkpoint.require_equal(f"class of {name}", saved["kind"], kind)
            yield f"{name}, {kind}", saved, live

    def check(self, checkpoint: SavedState) -> None:
        for _ in self.pairs(checkpoint):
            pass

    def setters(self, one: Any) -> Sequence[str]:
        """Return a template of code that sets a hyperparameter, for each group of them."""
        raise NotImplementedError

    def _report_replaced(self, one: Any, before: Groups, loaded: Groups) -> None:
        """Report the hyperparameters that the checkpoint replaced; later saves include `before`."""
        for line in override_notes(one.hyperparameters, before, loaded, self.setters(one)):
            self._training.run.report(line)
        one.hyperparameters = before


class Optimizers(_Objects):
    """The states and step counts of the optimizers."""

    name, noun = "optimizers", "optimizer"

    def setters(self, one: PreparedOptimizer) -> Sequence[str]:
        code = 'for group in optimizer.param_groups: group["{name}"] = {value!r}'
        return [code] * len(one.param_groups)

    def live(self) -> list[PreparedOptimizer]:
        return self._training.optimizers

    def state_dict(self) -> list[Any]:
        names = _names_of_parameters(self._training)
        for live in self.live():
            if is_instance_of(live.optimizer, "torch.distributed.optim", "ZeroRedundancyOptimizer"):
                raise UsageError(
                    "the state of a ZeroRedundancyOptimizer cannot be saved, because each rank has"
                    " another part of it",
                    where="the script's prepare(...)",
                    fix="prepare an optimizer of the class that it wraps; fsdp also divides its"
                    " state among the ranks",
                    code=Code.UNSUPPORTED,
                )
        return [
            {
                "kind": kind_of(live),
                "parameters": _parameters_of(live, names),
                "state": live.state_dict(),
                "steps": live.step_count,
                "skipped": live.step_was_skipped,
                "hyperparameters": live.hyperparameters,
            }
            for live in self.live()
        ]

    def check(self, checkpoint: SavedState) -> None:
        """Raise CheckpointError if classes, parameter groups or parameters differ."""
        names = _names_of_parameters(self._training)
        for name, saved, live in self.pairs(checkpoint):
            groups = saved["parameters"], _parameters_of(live, names)
            sizes = ([len(group) for group in each] for each in groups)
            checkpoint.require_equal(f"sizes of the parameter groups of {name}", *sizes)
            pairs = zip(*map(chain.from_iterable, groups), strict=True)
            for number, (ours, other) in enumerate(pairs):
                if not checkpoint.strict or None in (ours[0], other[0]):
                    ours, other = ours[1:], other[1:]  # parameters outside of models have no names
                what, fix = f"parameter {number} of {name}", _SAME_OBJECTS
                if ours[0] == other[0] and ours[1:]:  # the same name
                    owner, _, weight = ours[0].partition(".")
                    what, fix = f"shape of {weight!r} of model {owner}", _SAME_SIZES
                    ours, other = ours[1], other[1]
                checkpoint.require_equal(what, ours, other, fix=fix)

    def load_state_dict(self, checkpoint: SavedState) -> Iterator[str]:
        for name, saved, optimizer in self.pairs(checkpoint):
            yield name
            optimizer.load_state_dict(saved["state"])
            optimizer.step_count, optimizer.step_was_skipped = saved["steps"], saved["skipped"]
            loaded = optimizer_options(optimizer.optimizer)
            self._report_replaced(optimizer, saved["hyperparameters"], loaded)


class Schedulers(_Objects):
    """The states of the learning-rate schedulers."""

    name, noun = "schedulers", "scheduler"

    def setters(self, one: PreparedScheduler) -> Sequence[str]:
        note = "  # not for OneCycleLR or a schedule that has ended: start a new run"
        paths = scheduler_paths(one.scheduler, "scheduler.scheduler")
        return [f"{path}.{{name}} = {{value!r}}{note}" for path in paths]

    def live(self) -> list[PreparedScheduler]:
        return self._training.schedulers

    def state_dict(self) -> list[Any]:
        return [
            {
                "kind": kind_of(live),
                "state": live.scheduler.state_dict(),
                "seen_steps": live.seen_steps,
                "hyperparameters": live.hyperparameters,
            }
            for live in self.live()
        ]

    def load_state_dict(self, checkpoint: SavedState) -> Iterator[str]:
        for name, saved, scheduler in self.pairs(checkpoint):
            yield name
            scheduler.scheduler.load_state_dict(saved["state"])
            scheduler.seen_steps = saved["seen_steps"]
            loaded = scheduler_options(scheduler.scheduler)
            self._report_replaced(scheduler, saved["hyperparameters"], loaded)


class RegisteredObjects(_Objects):
    """The states of the objects that the script has registered."""

    name, noun = "objects", "registered object"

    def live(self) -> list[Any]:
        return self._training.registered

    def states(self, allow_pickle: bool) -> list[Any]:
        return [_state_of_object(live, allow_pickle) for live in self.live()]

    def check(self, checkpoint: SavedState) -> None:
        self._states: list[tuple[str, Any, Any]] = []
        for name, saved, obj in self.pairs(checkpoint):
            if "pickle" not in saved:
                state = saved["state"]
                if type(obj) is AveragedModel:
                    checkpoint.require_names(name, state, obj.state_dict())
            elif checkpoint.allow_pickle:
                state = pickle.loads(saved["pickle"])
            else:
                raise CheckpointError(
                    "a registered object was pickled, and unpickling can run arbitrary code",
                    where=str(checkpoint.folder),
                    fix="if you trust the source of the file, use load_state(...,"
                    " allow_pickle=True)",
                    code=Code.PICKLED,
                )
            self._states.append((name, obj, state))

    def load_state_dict(self, checkpoint: SavedState) -> Iterator[str]:
        for name, obj, state in self._states:
            yield name
            obj.load_state_dict(state)


class LossScale(_Part):
    """The mixed precision of the run, and the loss scale for fp16."""

    name = "precision"

    def state_dict(self) -> dict[str, Any]:
        precision = self._training.precision
        return {"name": precision.name, "state": precision.state_dict()}

    def check(self, checkpoint: SavedState) -> None:
        saved, live = checkpoint.shared[self.name], self._training.precision
        name = saved["name"]
        fix = f"pass --mixed-precision {name}, or Accelerator(mixed_precision={name!r})"
        checkpoint.require_equal("mixed_precision", name, live.name, fix=fix)
        parts = (sorted(state) for state in (saved["state"], live.state_dict()))
        fix = "pass the same GradScalerKwargs as the run that saved the checkpoint"
        checkpoint.require_equal("state of the loss scale", *parts, fix=fix)

    def load_state_dict(self, checkpoint: SavedState) -> Iterator[str]:
        yield "the loss scale"
        self._training.precision.load_state_dict(checkpoint.shared[self.name]["state"])


class AccumulationState(_Part):
    """The position within an optimizer step during gradient accumulation."""

    name = "accumulation"

    def state_dict(self) -> dict[str, Any]:
        return self._training.accumulation.state_dict()

    def check(self, checkpoint: SavedState) -> None:
        """Raise CheckpointError if this run cannot resume within an optimizer step."""
        saved = checkpoint.shared[self.name]
        if saved["micro_batches"] or saved["num_backward"]:
            ranks = checkpoint.saved_by, rank_and_size()[1]
            self._require(checkpoint, "the number of ranks", *ranks)
        if saved["micro_batches"]:
            steps = saved["steps"], self._training.accumulation.steps
            self._require(checkpoint, "gradient_accumulation_steps", *steps)

    def _require(self, checkpoint: SavedState, setting: str, saved: int, live: int) -> None:
        what = f"{setting} (the checkpoint was saved in the middle of an optimizer step)"
        fix = f"set {setting} to {saved}, or load a checkpoint saved right after an optimizer step"
        checkpoint.require_equal(what, saved, live, fix=fix)

    def load_state_dict(self, checkpoint: SavedState) -> Iterator[str]:
        yield "the accumulation of gradients"
        self._training.accumulation.load_state_dict(checkpoint.shared[self.name])


class LoaderPositions(_Part):
    """The positions of the loaders, and this rank's random number generators."""

    name = "loaders"

    def state_dict(self) -> dict[str, Any]:
        training = self._training
        return {
            "positions": [loader.state_dict() for loader in training.loaders],
            "epochs": training.run.counted_epochs([loader.epochs for loader in training.loaders]),
        }

    def check(self, checkpoint: SavedState) -> None:
        saved, live = checkpoint.shared[self.name]["positions"], self._training.loaders
        checkpoint.require_equal("number of loaders", len(saved), len(live))
        promised = checkpoint.shared["global_batch_size"], self._training.global_batch_size
        for loader, position in zip(live, self._positions(checkpoint), strict=True):
            is_within = loader.require_position(position, str(checkpoint.folder))
            if is_within and promised != (None, None):
                total = position["total"] * checkpoint.shared["accumulation"]["steps"]
                here = loader.total_batch_size * self._training.accumulation.steps
                what = "samples per optimizer step within an epoch"
                fix = f"pass Accelerator(global_batch_size={total}), or resume between two epochs"
                checkpoint.require_equal(what, total, here, fix=fix)

    def load_state_dict(self, checkpoint: SavedState) -> Iterator[str]:
        yield "the positions of loaders"
        training, saved = self._training, checkpoint.shared[self.name]
        for loader, position in zip(training.loaders, self._positions(checkpoint), strict=True):
            loader.seek(position)
        states, device = checkpoint.own["generators"], training.world.device

        def restore() -> None:
            if states is not None:
                set_generator_states(states, device)

        if training.run.resumes_within:
            training.accumulation.resumed_backward = training.accumulation.num_backward
        has_trained = training.has_trained_epochs or training.steps_done > 0
        training.run.resume(restore, saved["epochs"], has_trained=has_trained)

    def _positions(self, checkpoint: SavedState) -> list[dict[str, Any]]:
        """Return each loader's position, from this rank's own state if that contains one."""
        shared = checkpoint.shared[self.name]["positions"]
        own = checkpoint.own["positions"] or [None] * len(shared)
        return [mine or theirs for mine, theirs in zip(own, shared, strict=True)]


class OtherLoaders(_Part):
    """The states of `headway.compat`'s loaders, which do not resume by position."""

    name = "other loaders"

    @property
    def _loaders(self) -> list[Any]:
        loaders = self._training.all_loaders
        return [loader for loader in loaders if loader not in self._training.loaders]

    def state_dict(self) -> list[dict[str, Any]]:
        return [loader.position() for loader in self._loaders]

    def check(self, checkpoint: SavedState) -> None:
        saved, live = checkpoint.shared[self.name], self._loaders
        what, fix = "number of loaders of headway.compat", "use the same Accelerator and loaders"
        checkpoint.require_equal(what, len(saved), len(live), fix=fix)
        if any(loader["state"] for loader in saved):
            ranks = checkpoint.saved_by, rank_and_size()[1]
            fix = f"use {checkpoint.saved_by} ranks"
            checkpoint.require_equal("ranks, with use_stateful_dataloader", *ranks, fix=fix)

    def load_state_dict(self, checkpoint: SavedState) -> Iterator[str]:
        yield "the state of loaders"
        for loader, position in zip(self._loaders, checkpoint.shared[self.name], strict=True):
            loader.seek(position)


_SHARED: Sequence[Any] = (
    *(Optimizers, Schedulers, LossScale, AccumulationState, OtherLoaders, LoaderPositions),
)


class RankState(_Part):
    """The state of one rank: generators, tokens, buffers, and gradients of an incomplete step."""

    def states(self, own_buffers: Sequence[Sequence[torch.Tensor | None]]) -> dict[str, Any]:
        training, has_gradients = self._training, self._training.accumulation.has_gradients
        broadcasts = map(training.strategy.broadcasts_buffers, training.models)
        parameters = _parameters(training) if has_gradients else []
        if training.strategy.shards and parameters and all(p.grad is None for p in parameters):
            training.run.report(_UNSAVED_GRADIENTS)
        return {
            "generators": generator_states(training.world.device),
            "tokens": training.accumulation.tokens,
            "buffers": [*zip(own_buffers, broadcasts, strict=True)] if own_buffers else [],
            "gradients": [None if p.grad is None else local_part(p.grad) for p in parameters],
            "positions": [
                loader.state_dict() if loader.data_shards else None for loader in training.loaders
            ],
        }

    def check(self, checkpoint: SavedState) -> None:
        own, models = checkpoint.own, self._training.inner_models
        if own["generators"] is not None and not are_generator_states(own["generators"]):
            why = "it contains invalid generator states"
            raise unusable(f"the checkpoint is damaged: {why}", checkpoint.folder)
        if own["gradients"]:
            parameters = [local_part(p) for p in _parameters(self._training)]
            _require_shapes(checkpoint, "gradients", own["gradients"], parameters)
        for model, (buffers, _) in zip(models, self._buffers(checkpoint), strict=True):
            if buffers:
                live = [getattr(*buffer) for buffer in saved_buffers(model)]
                _require_shapes(checkpoint, "buffers", buffers, live)

    def load_state_dict(self, checkpoint: SavedState) -> Iterator[str]:
        yield "the state of the rank"
        training, own = self._training, checkpoint.own
        training.accumulation.tokens = own["tokens"]
        parameters = _parameters(training)
        gradients = own["gradients"] or [None] * len(parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else _as_gradient(gradient, parameter)
        models = training.inner_models, training.models, self._buffers(checkpoint)
        for model, prepared, (buffers, broadcasts_next) in zip(*models, strict=True):
            for buffer, saved in zip(saved_buffers(model), buffers, strict=False):
                if saved is not None:
                    getattr(*buffer).copy_(saved)
            training.strategy.set_broadcast_buffers(prepared, broadcasts_next)

    def _buffers(self, checkpoint: SavedState) -> Sequence[tuple[Sequence[Any], bool]]:
        """Return each model's buffers, and whether its next forward pass sets them to rank 0's."""
        return checkpoint.own["buffers"] or [((), True)] * len(self._training.models)


def _require_shapes(
    checkpoint: SavedState,
    what: str,
    saved: Sequence[torch.Tensor | None],
    live: Sequence[torch.Tensor],
) -> None:
    pairs = zip(saved, live, strict=False)
    have_shapes = all(ours is None or ours.shape == other.shape for ours, other in pairs)
    if len(saved) != len(live) or not have_shapes:
        raise checkpoint.mismatch_error(f"the {what} belong to other models or another strategy")


def parts_of(training: Training) -> list[Any]:
    """Return all parts of the state except the model weights."""
    kinds: list[Any] = [Optimizers, Schedulers, RegisteredObjects, LossScale, AccumulationState]
    kinds += [RankState, OtherLoaders, LoaderPositions]  # generators are restored last
    return [kind(training) for kind in kinds]


def kind_of(obj: Any) -> str:
    """Return an object's class name, such as `SequentialLR(LinearLR, StepLR)`.

    The name does not include the module, because a class may move to another file, and the script
    may be `__main__` in one run but not in another.
    """
    if isinstance(obj, PreparedOptimizer | PreparedScheduler):
        return kind_of(obj.optimizer if isinstance(obj, PreparedOptimizer) else obj.scheduler)
    name = type(obj).__name__
    if isinstance(obj, SequentialLR | ChainedScheduler):
        parts = vars(obj)["_schedulers"]  # a key of their state_dict()
        name += f"({', '.join(map(kind_of, parts))})"
    return name


def _names_of_parameters(training: Training) -> dict[int, str]:
    return {
        id(parameter): f"{number}.{name}"
        for number, model in enumerate(training.inner_models)
        for name, parameter in model.named_parameters()
    }


def _parameters_of(optimizer: PreparedOptimizer, names: Mapping[int, str]) -> list[Any]:
    """Return the name and shape of each parameter, as one list per parameter group."""
    return [
        [[names.get(id(p)), [*p.shape]] for p in group["params"]]
        for group in optimizer.param_groups
    ]


def shard_like(training: Training) -> Like:
    """Return a function for `load_checkpoint` that shards tensors as this run shards them.

    DTensor parameters, optimizer states of the same shapes, and DTensors of registered objects get
    the placements that they have in this run. Other tensors that were saved as DTensors are placed
    like the parameters.
    """
    sharded: dict[str, DTensor] = {}  # by the names that `encode` generates
    for number, model in enumerate(training.inner_models):
        for name, value in model.state_dict().items():
            if isinstance(value, DTensor):
                sharded[f"shared.models.{number}.{name}"] = value
    for number, optimizer in enumerate(training.optimizers):
        groups = (group["params"] for group in optimizer.param_groups)
        for index, parameter in enumerate(chain.from_iterable(groups)):
            if isinstance(parameter, DTensor):
                sharded[f"shared.optimizers.{number}.state.state.{index}"] = parameter
    parameter = next(iter(sharded.values()), None)
    for number, obj in enumerate(training.registered if sharded else ()):
        tensors: dict[str, torch.Tensor] = {}
        with suppress(Exception):  # the object may not have state yet
            encode(obj.state_dict(), f"shared.objects.{number}.state", tensors)
        sharded |= {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}

    def like(name: str, saved: torch.Tensor, was_sharded: bool) -> torch.Tensor:
        live = sharded.get(name, sharded.get(name.rpartition(".")[0]))
        if live is not None and live.shape == saved.shape:
            return live if live.dtype == saved.dtype else torch.empty_like(live, dtype=saved.dtype)
        if parameter is None or not was_sharded:
            return saved
        placements = (
            parameter.placements if saved.ndim else [Replicate()] * parameter.device_mesh.ndim
        )
        return empty(
            saved.shape, dtype=saved.dtype, device_mesh=parameter.device_mesh, placements=placements
        )

    return like


def _parameters(training: Training) -> list[torch.nn.Parameter]:
    return [*chain.from_iterable(model.parameters() for model in training.inner_models)]


def diverging_buffers(models: Sequence[torch.nn.Module]) -> list[list[torch.Tensor | None]]:
    """Return each model's buffers that differ from rank 0's; every rank must call this.

    DDP broadcasts rank 0's buffers before most forward passes, and each forward pass may change
    them. Buffers that equal rank 0's are returned as None; with one rank, the result is empty.
    """
    if rank_and_size()[1] == 1:
        return []
    live = [[getattr(*buffer) for buffer in saved_buffers(model)] for model in models]
    facts = repr([[_describe_value(tensor) for tensor in each] for each in live])
    if call_barrier("a checkpoint", f"buffers {crc32(facts.encode())}") is not None:
        return []
    own = []
    for buffers in live:
        of_rank_0 = [buffer.detach().clone() for buffer in buffers]
        for work in [dist.broadcast(tensor, src=0, async_op=True) for tensor in of_rank_0]:
            work.wait()
        pairs = zip(buffers, of_rank_0, strict=True)
        own.append([None if torch.equal(ours, other) else ours for ours, other in pairs])
    return own


def _state_of_object(obj: Any, allow_pickle: bool) -> dict[str, Any]:
    state = obj.state_dict()
    saved = {"kind": kind_of(obj), "state": state}
    if not allow_pickle:
        return saved
    try:
        encode(state, "state", {})
        return saved
    except CheckpointError:
        pass
    try:
        return {"kind": kind_of(obj), "pickle": pickle.dumps(state)}
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"the state of a registered {type(obj).__name__} cannot be pickled:"
            f" {type(error).__name__}: {error}",
            where=f"{type(obj).__qualname__}.state_dict()",
            fix="return only tensors, numbers, strings, lists, tuples and dicts from state_dict()",
            code=Code.UNSAVABLE,
        ) from None


def _as_gradient(saved: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a parameter's gradient, created from this rank's saved shard."""
    if not isinstance(parameter, DTensor):
        return saved.to(parameter.device)
    return DTensor.from_local(
        saved.to(parameter.to_local().device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _describe_value(tensor: Any) -> str:
    if not isinstance(tensor, torch.Tensor):
        return type(tensor).__name__
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
