"""The state of a whole training: what a checkpoint of it holds, and how it is put back."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from headway.accumulation import Accumulation
from headway.checkpoint.generators import generator_states, set_generator_states
from headway.checkpoint.loading import Loaded
from headway.checkpoint.saving import State, prefix_of
from headway.checkpoint.values import encode
from headway.collectives import (
    broadcast_object_list,
)
from headway.data.loader import PreparedDataLoader
from headway.errors import CheckpointError
from headway.optimizer import PreparedOptimizer, PreparedScheduler
from headway.precision.precision import Precision
from headway.token_mean import TokenMean
from headway.world import rank_and_size

Weights = dict[str, Any]


class Training(NamedTuple):
    """What changes in training, on this rank.

    Args:
        models: as they were before `prepare`.
        objects: those that the script has registered.
        skips_itself: the script leaves out what its loaders have read; see `go_on_at`.
        sharded_as: returns a value of a state as this rank holds it for a parameter.
    """

    models: Sequence[torch.nn.Module]
    optimizers: Sequence[PreparedOptimizer]
    schedulers: Sequence[PreparedScheduler]
    loaders: Sequence[PreparedDataLoader]
    objects: Sequence[Any]
    precision: Precision
    accumulation: Accumulation
    token_mean: TokenMean
    device: torch.device
    skips_itself: bool = False
    sharded_as: Callable[[torch.Tensor, Any], Any] = lambda parameter, value: value

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for model in self.models for parameter in model.parameters()]


def state_of(training: Training, weights: Sequence[Weights], *, allow_pickle: bool) -> State:
    """Return what a checkpoint holds; it is not copied.

    Args:
        weights: the state dicts of those models that it holds.
        allow_pickle: pickle the state of registered objects that has no other form.
    """
    loaders = [one.position() for one in training.loaders]
    shared: dict[str, Any] = {
        "models": list(weights),
        "optimizers": [
            {"state": one.state_dict(), "steps": one.step_count, "skipped": one.step_was_skipped}
            for one in training.optimizers
        ],
        "schedulers": [
            {"state": one.scheduler.state_dict(), "seen_steps": one.seen_steps}
            for one in training.schedulers
        ],
        "objects": [_state_of_object(one, allow_pickle) for one in training.objects],
        "loaders": loaders,
        "precision": {"name": training.precision.name, "state": training.precision.state_dict()},
        "accumulation": training.accumulation.state_dict(),
    }
    own: dict[str, Any] = {
        "generators": generator_states(training.device),
        "loaders": loaders,
        "tokens": training.token_mean.pending,
    }
    if training.accumulation.is_open:
        gradients = [parameter.grad for parameter in training.parameters]
        if any(map(is_sharded, training.parameters)):
            shared["gradients"] = gradients  # no rank has them in full
        else:
            own["gradients"] = gradients
    return State(shared, own)


class Live(Mapping[str, torch.Tensor]):
    """The sharded parameters of a training, by the names of what a checkpoint has for them.

    `get(name, saved)` returns one of the shape and placements to load with, for weights and
    gradients and for states of an optimizer, which may be in the checkpoint alone.
    """

    def __init__(self, training: Training, models: Sequence[torch.nn.Module]) -> None:
        self._exact: dict[str, torch.Tensor] = {}
        self._below: dict[str, torch.Tensor] = {}
        shared = prefix_of()
        for number, model in enumerate(models):
            for name, one in model.state_dict().items():
                self._exact[f"{shared}.models.{number}.{name}"] = one
        for number, one in enumerate(training.parameters):
            self._exact[f"{shared}.gradients.{number}"] = one
        for number, optimizer in enumerate(training.optimizers):
            for index, one in enumerate(_parameters_of(optimizer)):
                self._below[f"{shared}.optimizers.{number}.state.state.{index}"] = one

    def get(self, name: str, default: Any = None) -> Any:
        live = self._exact.get(name)
        if live is None:
            live = self._below.get(name.rpartition(".")[0])
        if live is None or not is_sharded(live):
            return default
        return live if (live.shape, live.dtype) == (default.shape, default.dtype) else default

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._exact[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._exact)

    def __len__(self) -> int:
        return len(self._exact)


def is_sharded(tensor: Any) -> bool:
    """Return whether this is a DTensor, of which a rank holds a part."""
    return hasattr(tensor, "full_tensor")


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]


def _state_of_object(obj: Any, allow_pickle: bool) -> dict[str, Any]:
    state = obj.state_dict()
    if allow_pickle:
        try:
            encode(state, "state", {})
        except CheckpointError:
            return {"pickle": pickle.dumps(state)}
    return {"state": state}


def chosen_by_rank_0(weights: list[Weights], before: list[Weights]) -> list[Weights]:
    """Return the weights that hooks of the script have left on rank 0, where some run only.

    Args:
        weights: what they have left on this rank.
        before: what they were given.
    """
    places = [next((i for i, one in enumerate(before) if one is left), None) for left in weights]
    places = broadcast_object_list([places])[0]
    if rank_and_size()[0] == 0:
        return weights
    # what a hook has put in place of a model's weights is saved by rank 0
    return [{} if place is None else before[place] for place in places]


class Restoring:
    """A verified checkpoint that is about to become the state of a training.

    Args:
        folder: where it was read, for messages.
        strict: a model's weights must have the names that the checkpoint has.
        allow_pickle: unpickle registered objects, which can run any code that is in the file.
    """

    def __init__(
        self,
        loaded: Loaded,
        training: Training,
        folder: Path,
        *,
        strict: bool = True,
        allow_pickle: bool = False,
    ) -> None:
        self._shared, self._training, self._folder = loaded.shared, training, folder
        self._saved_by = loaded.manifest.world_size
        is_same_size = rank_and_size()[1] == self._saved_by
        self._own = loaded.own if is_same_size else None
        self._strict, self._allow_pickle = strict, allow_pickle

    def check(self) -> None:
        """Compare all but the models with the training, which stays as it is.

        Raises:
            CheckpointError: they do not fit.
        """
        training, shared = self._training, self._shared
        for kind in ("optimizers", "schedulers", "objects", "loaders"):
            self._require_equal(
                f"number of {kind}", len(shared[kind]), len(getattr(training, kind))
            )
        for number, (one, saved) in enumerate(
            zip(training.optimizers, shared["optimizers"], strict=True)
        ):
            sizes = [len(group["params"]) for group in saved["state"].get("param_groups", ())]
            live = [len(group["params"]) for group in one.state_dict().get("param_groups", ())]
            self._require_equal(f"sizes of the parameter groups of optimizer {number}", sizes, live)
        self._require_equal("mixed_precision", shared["precision"]["name"], training.precision.name)
        if shared["accumulation"]["micro_batches"] and self._own is None:
            raise CheckpointError(
                f"the checkpoint was saved by {self._saved_by} ranks between two optimizer steps,"
                f" and this run has {rank_and_size()[1]}",
                where=str(self._folder),
                fix=f"load it with --num-processes {self._saved_by}, or one that was saved after an"
                " optimizer step",
            )
        gradients = self._gradients()
        if gradients is not None:
            shapes = [_shape(one) for one in gradients]
            live_shapes = [_shape(one) for one in training.parameters]
            if len(shapes) != len(live_shapes) or any(
                shape not in (None, live) for shape, live in zip(shapes, live_shapes, strict=True)
            ):
                raise self._misfit("the gradients are those of other models")
            if ("gradients" in shared) != any(map(is_sharded, training.parameters)):
                raise self._misfit("saved between two optimizer steps, with another strategy")
        for loader, state in zip(training.loaders, self._loaders(), strict=True):
            if training.skips_itself:
                break
            loader.require_position(state, str(self._folder))
        self._objects = [self._state_of_object(saved) for saved in shared["objects"]]

    def check_models(self, models: Sequence[torch.nn.Module]) -> None:
        """Compare the weights in the checkpoint with those of these models, which stay as they are.

        Raises:
            CheckpointError: they do not fit.
        """
        saved = self._shared["models"]
        self._require_equal("number of models", len(saved), len(models))
        for number, (model, weights) in enumerate(zip(models, saved, strict=True)):
            live = model.state_dict()
            if self._strict and live.keys() != weights.keys():
                name = sorted(live.keys() ^ weights.keys())[0]
                place = "the checkpoint" if name in weights else "this run"
                raise self._misfit(f"of model {number}, only {place} has {name!r}")
            for name in live.keys() & weights.keys():
                one, other = weights[name], live[name]
                if isinstance(other, torch.Tensor):
                    facts = (_facts(one), _facts(other))
                    self._require_equal(f"{name!r} of model {number}", *facts)

    def apply(self, models: Sequence[torch.nn.Module]) -> None:
        """Give the training the state of the checkpoint, and these models their weights."""
        training, shared = self._training, self._shared
        for model, weights in zip(models, shared["models"], strict=True):
            live = model.state_dict()
            fitted = {
                name: training.sharded_as(live[name], one) if name in live else one
                for name, one in weights.items()
            }
            model.load_state_dict(fitted, strict=self._strict)
        for optimizer, saved in zip(training.optimizers, shared["optimizers"], strict=True):
            optimizer.load_state_dict(self._fitted(optimizer, saved["state"]))
            optimizer.step_count, optimizer.step_was_skipped = saved["steps"], saved["skipped"]
        for scheduler, saved in zip(training.schedulers, shared["schedulers"], strict=True):
            scheduler.scheduler.load_state_dict(saved["state"])
            scheduler.seen_steps = saved["seen_steps"]
        for obj, state in zip(training.objects, self._objects, strict=True):
            obj.load_state_dict(state)
        training.precision.load_state_dict(shared["precision"]["state"])
        training.accumulation.load_state_dict(shared["accumulation"])
        self._apply_own()

    def _fitted(self, optimizer: PreparedOptimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state with its tensors sharded as the parameters are."""
        parameters = _parameters_of(optimizer)
        states = state.get("state")
        if not any(map(is_sharded, parameters)) or not isinstance(states, dict):
            return state
        fitted = {
            index: {
                name: self._training.sharded_as(parameters[index], value)
                for name, value in values.items()
            }
            for index, values in states.items()
        }
        return {**state, "state": fitted}

    def _gradients(self) -> list[Any] | None:
        """Return the gradients in the checkpoint, in the order of the parameters."""
        held = self._shared if "gradients" in self._shared else self._own or {}
        return held.get("gradients")

    def _apply_own(self) -> None:
        training, own = self._training, self._own or {}
        training.token_mean.pending = own.get("tokens")
        parameters = training.parameters
        gradients = self._gradients() or [None] * len(parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = (
                None
                if gradient is None
                else training.sharded_as(parameter, gradient.to(parameter.device))
            )
        generators = own.get("generators")

        def restore_generators() -> None:
            if generators is not None:
                set_generator_states(generators, training.device)

        for loader, state in zip(training.loaders, self._loaders(), strict=True):
            loader.go_on_at(state, restore_generators, only_skipped=training.skips_itself)
        restore_generators()

    def _loaders(self) -> Iterable[Any]:
        """Return the states of this rank's loaders; with another number of ranks, of rank 0's."""
        return (self._own or self._shared)["loaders"]  # type: ignore[no-any-return]

    def _state_of_object(self, saved: dict[str, Any]) -> Any:
        if "pickle" not in saved:
            return saved["state"]
        if not self._allow_pickle:
            raise CheckpointError(
                "a registered object was pickled, and to load it can run any code in the file",
                where=str(self._folder),
                fix="if you trust who wrote it, load_state(..., allow_pickle=True)",
            )
        return pickle.loads(saved["pickle"])

    def _require_equal(self, what: str, saved: Any, live: Any) -> None:
        if saved != live:
            raise self._misfit(f"{what}: {saved} in the checkpoint, {live} in this run")

    def _misfit(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint does not fit this run: {what}",
            where=str(self._folder),
            fix="prepare and register the same objects as the run that saved it, in the same order",
        )


def _shape(tensor: torch.Tensor | None) -> torch.Size | None:
    return None if tensor is None else tensor.shape


def _facts(tensor: Any) -> str:
    if not isinstance(tensor, torch.Tensor):
        return type(tensor).__name__
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
