"""The state of a whole training, part by part: what a checkpoint holds, and how it is put back.

Each part has `state_dict()`, as torch's Stateful has, a check that changes nothing, and
`load_state_dict()`, which comes after the checks of all parts.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, empty
from torch.optim.lr_scheduler import ChainedScheduler, SequentialLR

from headway.checkpoint.loading import Like, Loaded, reading_state
from headway.checkpoint.manifest import take_another
from headway.checkpoint.saving import State, agree
from headway.checkpoint.tensors import described, own_part
from headway.checkpoint.values import encode
from headway.contract.notes import say
from headway.data.loader import PreparedDataLoader
from headway.data.position import Resumption
from headway.distributed.collectives import gather_object
from headway.distributed.rng import are_generator_states, generator_states
from headway.distributed.world import is_alone, rank_and_size
from headway.errors import CheckpointError, UsageError
from headway.strategies.weights import saved_buffers
from headway.training.optimizer import PreparedOptimizer
from headway.training.training import Training

Weights = dict[str, Any]
_SAME_OBJECTS = "prepare and register the same objects as the run that saved it, in the same order"


def state_of(
    training: Training,
    weights: Sequence[Weights],
    own_buffers: Sequence[Sequence[torch.Tensor | None]] = (),
    *,
    allow_pickle: bool,
) -> State:
    """Return what a checkpoint holds; it is not copied.

    `weights` are the state dicts of those models that it holds, and `own_buffers` what
    `own_buffers_of` has returned for them.
    """
    shared = {kind.name: kind(training).state_dict() for kind in _SHARED}
    shared["objects"] = Objects(training).state_dict(allow_pickle=allow_pickle)
    shared |= {"models": list(weights), "global_batch_size": training.global_batch_size}
    own = OwnOfRank(training).state_dict(own_buffers, shared["loaders"])
    return State(shared, own)


class Checkpoint:
    """A verified checkpoint, as its parts judge it.

    `own` is what this rank has of its own; None with another number of ranks, or if only rank 0 has
    saved. `strict`: a model's weights must have the names that the checkpoint has.
    """

    def __init__(
        self, loaded: Loaded, folder: Path, *, strict: bool = True, allow_pickle: bool = False
    ) -> None:
        self.shared, self.folder = loaded.shared, folder
        self.saved_by = loaded.manifest.world_size
        is_same_size = rank_and_size()[1] == self.saved_by
        self.lacks_other_ranks = is_same_size and loaded.manifest.num_parts < self.saved_by
        self.own = loaded.own if is_same_size else None
        self.strict, self.allow_pickle = strict, allow_pickle

    @property
    def positions(self) -> Any:
        """Where the loaders of this rank stand; with another number of ranks, those of rank 0."""
        return (self.own or self.shared)["loaders"]

    def require_equal(self, what: str, saved: Any, live: Any, *, fix: str = _SAME_OBJECTS) -> None:
        """Raise CheckpointError unless a fact is the same in this run."""
        if saved != live:
            raise self.misfit(f"{what}: {saved} in the checkpoint, {live} in this run", fix)

    def require_kind(self, name: str, saved: Mapping[str, Any], live: Any) -> None:
        """Refuse what another class has saved."""
        self.require_equal(f"class of {name}", saved["kind"], kind_of(live))

    def misfit(self, what: str, fix: str = _SAME_OBJECTS) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint does not fit this run: {what}", where=str(self.folder), fix=fix
        )


class _Part:
    """A part of the state that all ranks share, by the name that a checkpoint has for it."""

    name: ClassVar[str]

    def __init__(self, training: Training) -> None:
        self._training = training

    def state_dict(self) -> Any:
        raise NotImplementedError

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise CheckpointError if a checkpoint does not fit; nothing changes."""

    def load_state_dict(self, checkpoint: Checkpoint) -> Iterator[str]:
        """Change the training; yield the name of each object before it changes."""
        yield from ()


class Optimizers(_Part):
    """What optimizers remember, and how often they have stepped."""

    name = "optimizers"

    def state_dict(self) -> list[Any]:
        names = _names_of_parameters(self._training)
        return [
            {
                "kind": kind_of(one.optimizer),
                "parameters": _parameters_of(one, names),
                "state": one.state_dict(),
                "steps": one.step_count,
                "skipped": one.step_was_skipped,
            }
            for one in self._training.optimizers
        ]

    def check(self, checkpoint: Checkpoint) -> None:
        all_saved, live = checkpoint.shared[self.name], self._training.optimizers
        checkpoint.require_equal("number of optimizers", len(all_saved), len(live))
        for number, (saved, optimizer) in enumerate(zip(all_saved, live, strict=True)):
            checkpoint.require_kind(f"optimizer {number}", saved, optimizer.optimizer)
            self._check_optimizer(checkpoint, f"optimizer {number}", saved, optimizer)

    def _check_optimizer(
        self, checkpoint: Checkpoint, name: str, saved: dict[str, Any], live: PreparedOptimizer
    ) -> None:
        """Refuse other groups of parameters, and other parameters in them."""
        groups = saved["parameters"], _parameters_of(live, _names_of_parameters(self._training))
        sizes = ([len(group) for group in each] for each in groups)
        checkpoint.require_equal(f"sizes of the parameter groups of {name}", *sizes)
        pairs = zip(*map(chain.from_iterable, groups), strict=True)
        for number, (one, other) in enumerate(pairs):
            if not checkpoint.strict or None in (one[0], other[0]):
                one, other = one[1:], other[1:]  # parameters of no model have no names
            checkpoint.require_equal(f"parameter {number} of {name}", one, other)

    def load_state_dict(self, checkpoint: Checkpoint) -> Iterator[str]:
        pairs = zip(checkpoint.shared[self.name], self._training.optimizers, strict=True)
        for number, (saved, optimizer) in enumerate(pairs):
            yield f"optimizer {number}, {kind_of(optimizer.optimizer)}"
            optimizer.load_state_dict(saved["state"])
            optimizer.step_count, optimizer.step_was_skipped = saved["steps"], saved["skipped"]


class Schedulers(_Part):
    """Where learning-rate schedules stand."""

    name = "schedulers"

    def state_dict(self) -> list[Any]:
        return [
            {
                "kind": kind_of(one.scheduler),
                "state": one.scheduler.state_dict(),
                "seen_steps": one.seen_steps,
            }
            for one in self._training.schedulers
        ]

    def check(self, checkpoint: Checkpoint) -> None:
        all_saved, live = checkpoint.shared[self.name], self._training.schedulers
        checkpoint.require_equal("number of schedulers", len(all_saved), len(live))
        for number, (saved, one) in enumerate(zip(all_saved, live, strict=True)):
            checkpoint.require_kind(f"scheduler {number}", saved, one.scheduler)

    def load_state_dict(self, checkpoint: Checkpoint) -> Iterator[str]:
        pairs = zip(checkpoint.shared[self.name], self._training.schedulers, strict=True)
        for number, (saved, scheduler) in enumerate(pairs):
            yield f"scheduler {number}, {kind_of(scheduler.scheduler)}"
            scheduler.scheduler.load_state_dict(saved["state"])
            scheduler.seen_steps = saved["seen_steps"]


class Objects(_Part):
    """What the script has registered."""

    name = "objects"

    def state_dict(self, *, allow_pickle: bool = False) -> list[Any]:
        return [
            {"kind": kind_of(one), **_state_of_object(one, allow_pickle)}
            for one in self._training.registered
        ]

    def check(self, checkpoint: Checkpoint) -> None:
        all_saved, live = checkpoint.shared[self.name], self._training.registered
        checkpoint.require_equal("number of objects", len(all_saved), len(live))
        for number, (saved, obj) in enumerate(zip(all_saved, live, strict=True)):
            checkpoint.require_kind(f"registered object {number}", saved, obj)
            if "pickle" in saved and not checkpoint.allow_pickle:
                raise CheckpointError(
                    "a registered object was pickled, and to load it can run any code in the file",
                    where=str(checkpoint.folder),
                    fix="if you trust who wrote it, load_state(..., allow_pickle=True)",
                )
        self._states = [
            pickle.loads(one["pickle"]) if "pickle" in one else one["state"] for one in all_saved
        ]

    def load_state_dict(self, checkpoint: Checkpoint) -> Iterator[str]:
        pairs = zip(self._training.registered, self._states, strict=True)
        for number, (obj, state) in enumerate(pairs):
            yield f"registered object {number}, {kind_of(obj)}"
            obj.load_state_dict(state)


class LossScale(_Part):
    """fp16's loss scale, and with which precision the run computes."""

    name = "precision"

    def state_dict(self) -> dict[str, Any]:
        precision = self._training.precision
        return {"name": precision.name, "state": precision.state_dict()}

    def check(self, checkpoint: Checkpoint) -> None:
        saved, live = checkpoint.shared[self.name], self._training.precision
        name = saved["name"]
        fix = f"pass --mixed-precision {name}, or Accelerator(mixed_precision={name!r})"
        checkpoint.require_equal("mixed_precision", name, live.name, fix=fix)
        parts = (sorted(one) for one in (saved["state"], live.state_dict()))
        checkpoint.require_equal("parts of the loss scale", *parts)

    def load_state_dict(self, checkpoint: Checkpoint) -> Iterator[str]:
        yield "the loss scale"
        self._training.precision.load_state_dict(checkpoint.shared[self.name]["state"])


class OpenStep(_Part):
    """Where in an optimizer step the training stands."""

    name = "accumulation"

    def state_dict(self) -> dict[str, Any]:
        # a rank alone lacks the gradients of the others, which belong to an open step
        return self._training.accumulation.state_dict(at_step_end=is_alone())

    def check(self, checkpoint: Checkpoint) -> None:
        """Require that this run can go on between two optimizer steps."""
        saved_step = checkpoint.shared[self.name]
        if saved_step["micro_batches"]:
            ranks = checkpoint.saved_by, rank_and_size()[1]
            self._require(checkpoint, "--num-processes", *ranks)
            steps = saved_step["steps"], self._training.accumulation.steps
            self._require(checkpoint, "gradient_accumulation_steps", *steps)

    def _require(self, checkpoint: Checkpoint, setting: str, saved: int, live: int) -> None:
        if saved != live:
            raise CheckpointError(
                f"the checkpoint was saved between two optimizer steps with {setting}={saved}, and"
                f" this run has {live}",
                where=str(checkpoint.folder),
                fix=f"load it with {setting}={saved}, or one that was saved after an optimizer"
                " step",
            )

    def load_state_dict(self, checkpoint: Checkpoint) -> Iterator[str]:
        yield "the accumulation of gradients"
        self._training.accumulation.load_state_dict(checkpoint.shared[self.name])


class Positions(_Part):
    """Where the passes over loaders stand; they go on with the generators of the rank."""

    name = "loaders"

    def state_dict(self) -> list[Any]:
        return [one.position() for one in self._training.loaders]

    def check(self, checkpoint: Checkpoint) -> None:
        saved, live = checkpoint.positions, self._training.loaders
        checkpoint.require_equal("number of loaders", len(saved), len(live))
        if self._training.skips_itself:
            return
        for loader, position in zip(live, saved, strict=True):
            loader.require_position(position, str(checkpoint.folder))
            self._check_global_batch(checkpoint, position, loader)

    def _check_global_batch(
        self, checkpoint: Checkpoint, position: dict[str, Any], loader: PreparedDataLoader
    ) -> None:
        """Require as many samples in an optimizer step, where either run says how many."""
        promised = checkpoint.shared["global_batch_size"], self._training.global_batch_size
        saved = position["total"] * checkpoint.shared["accumulation"]["steps"]
        live = loader.total_batch_size * self._training.accumulation.steps
        if promised != (None, None) and position["pass"] is not None and saved != live:
            raise CheckpointError(
                f"an optimizer step has {live} samples in this run, and {saved} in the epoch that"
                " the checkpoint is in",
                where=str(checkpoint.folder),
                fix=f"pass Accelerator(global_batch_size={saved}), or load a checkpoint from the"
                " end of an epoch",
            )


_SHARED: tuple[type[_Part], ...] = (
    Optimizers,
    Schedulers,
    Objects,
    LossScale,
    OpenStep,
    Positions,
)


class OwnOfRank:
    """What each rank has of its own: generators, tokens, buffers, gradients of an open step."""

    def __init__(self, training: Training) -> None:
        self._training = training

    def state_dict(
        self, own_buffers: Sequence[Sequence[torch.Tensor | None]], positions: Any
    ) -> dict[str, Any]:
        training = self._training
        own: dict[str, Any] = {
            "generators": generator_states(training.world.device),
            "loaders": positions,
            "tokens": None if is_alone() else training.token_mean.pending,
        }
        if own_buffers:
            spread = map(training.strategy.spreads_buffers, training.models)
            own["buffers"] = [*zip(own_buffers, spread, strict=True)]
        if training.accumulation.is_open and not is_alone():
            own["gradients"] = [
                None if one.grad is None else own_part(one.grad) for one in _parameters(training)
            ]
        return own

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise CheckpointError if a checkpoint does not fit; nothing changes."""
        models = self._training.inner_models
        self._check_generators(checkpoint)
        if checkpoint.own is not None and "gradients" in checkpoint.own:
            shapes = [_shape(own_part(one)) for one in _parameters(self._training)]
            if not _have_shapes(checkpoint.own["gradients"], shapes):
                raise checkpoint.misfit(
                    "the gradients are those of other models, or of another strategy"
                )
        for model, (buffers, _) in zip(models, self._buffers(checkpoint), strict=True):
            shapes = [_shape(getattr(*one)) for one in saved_buffers(model)]
            if buffers and not _have_shapes(buffers, shapes):
                raise checkpoint.misfit("the buffers are those of other models")

    def _check_generators(self, checkpoint: Checkpoint) -> None:
        """Refuse states that would let numpy read other memory; see `are_generator_states`."""
        passes = [one["pass"] for one in checkpoint.positions if one["pass"] is not None]
        states = [one["global"] for one in passes]
        states += [one["ahead"] for one in passes if one["ahead"] is not None]
        if checkpoint.own is not None:
            states.append(checkpoint.own["generators"])
        if not all(map(are_generator_states, states)):
            raise take_another(
                "the checkpoint is damaged: it has states of generators that are none",
                checkpoint.folder,
            )

    def load_state_dict(self, checkpoint: Checkpoint) -> Iterator[str]:
        """Change the training; yield a name before that."""
        yield "what each rank has of its own"
        training, own = self._training, checkpoint.own or {}
        training.token_mean.pending = own.get("tokens")
        parameters = _parameters(training)
        gradients = own.get("gradients", [None] * len(parameters))
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else _as_gradient(gradient, parameter)
        models = training.inner_models, training.models, self._buffers(checkpoint)
        for model, prepared, (buffers, are_spread) in zip(*models, strict=True):
            for one, saved in zip(saved_buffers(model), buffers, strict=False):
                if saved is not None:
                    getattr(*one).copy_(saved)
            training.strategy.set_spreads_buffers(prepared, are_spread)
        resumption = Resumption(own.get("generators"), training.world.device, training.progress)
        loaders, positions = training.loaders, checkpoint.positions
        if positions and not training.skips_itself:
            positions = over_where_left(loaders, positions, is_told=training.world.is_main)
        for loader, position in zip(loaders, positions, strict=False):
            loader.seek(position, resumption, only_skipped=training.skips_itself)
        resumption.generators.restore()

    def _buffers(
        self, checkpoint: Checkpoint
    ) -> Sequence[tuple[Sequence[torch.Tensor | None], bool]]:
        """Return for each model this rank's own buffers, and whether it gets rank 0's next."""
        nothing = [((), True)] * len(self._training.models)
        return (checkpoint.own or {}).get("buffers") or nothing


def over_where_left(
    loaders: Sequence[PreparedDataLoader], positions: Sequence[Any], *, is_told: bool
) -> list[Any]:
    """Return where loaders go on: in a new pass, if the script would have left this one there."""
    pairs = [*zip(loaders, positions, strict=True)]
    ended = [(one, position) for one, position in pairs if position["is_at_end"]]
    judged = [one.over_where_left(position, ended) for one, position in pairs]
    for note in (note for _, note in judged if note and is_told):
        say(note)
    return [position for position, _ in judged]


def parts_of(training: Training) -> list[Any]:
    """Return the parts of the state of a whole training, but for the weights of models."""
    return [*(kind(training) for kind in _SHARED), OwnOfRank(training)]


class Restoring:
    """A checkpoint whose parts are about to become those of a training."""

    def __init__(self, checkpoint: Checkpoint, parts: Sequence[Any]) -> None:
        self._checkpoint, self._parts = checkpoint, parts

    def check(self) -> None:
        """Raise CheckpointError unless all but the models fits the training; nothing changes."""
        with reading_state(self._checkpoint.folder):
            for part in self._parts:
                part.check(self._checkpoint)

    def check_models(self, models: Sequence[torch.nn.Module]) -> None:
        """Raise CheckpointError unless the weights fit these models, which stay as they are."""
        all_live = [one.state_dict() for one in models]
        with reading_state(self._checkpoint.folder):
            saved = self._checkpoint.shared["models"]
            self._checkpoint.require_equal("number of models", len(saved), len(models))
            for number, (weights, live) in enumerate(zip(saved, all_live, strict=True)):
                self._check_weights(f"model {number}", weights, live)

    def _check_weights(self, model: str, saved: Weights, live: Weights) -> None:
        if self._checkpoint.strict and live.keys() != saved.keys():
            name = min(live.keys() ^ saved.keys(), key=str)
            place = "the checkpoint" if name in saved else "this run"
            raise self._checkpoint.misfit(f"of {model}, only {place} has {name!r}")
        for name in live.keys() & saved.keys():
            if isinstance(live[name], torch.Tensor):
                facts = _facts(saved[name]), _facts(live[name])
                self._checkpoint.require_equal(f"{name!r} of {model}", *facts)

    def apply(self, models: Sequence[torch.nn.Module]) -> None:
        """Give the training the state of the checkpoint, and these models their weights.

        Where a `load_state_dict` fails on any rank, it is a UsageError on all.
        """
        cause: Exception | None = None

        def give() -> None:
            nonlocal cause
            part = ""
            try:
                for part in self._give(models):  # noqa: B007  its name, should it fail
                    pass
            except Exception as error:  # noqa: BLE001  a class of the script may raise anything
                cause = error
                raise CheckpointError(
                    f"{part} did not take its state: {type(error).__name__}: {error}",
                    where=f"rank {rank_and_size()[0]}, {self._checkpoint.folder}",
                    fix="repair its load_state_dict(), and start the script anew: from here on it"
                    " would train with a mixture of two states",
                ) from None

        try:
            agree(give)
        except CheckpointError as error:
            problem = error.problems[0]
            raise UsageError(
                f"load_state() has changed a part of the training only: {problem.what}",
                where=problem.where,
                fix=problem.fix,
            ) from cause

    def _give(self, models: Sequence[torch.nn.Module]) -> Iterator[str]:
        """Give each part its state; yield the name of each before that."""
        pairs = zip(models, self._checkpoint.shared["models"], strict=True)
        for number, (model, weights) in enumerate(pairs):
            yield f"model {number}"
            model.load_state_dict(weights, strict=self._checkpoint.strict)
        for part in self._parts:
            yield from part.load_state_dict(self._checkpoint)


def kind_of(obj: Any) -> str:
    """Return the name of an object's class; for SequentialLR also `(LinearLR, StepLR)`, its parts.

    ChainedScheduler also has them. The module is not part of the name: a class moves to another
    file, and the script's own module is `__main__` in one run and has a name in another.
    """
    name = type(obj).__name__
    if isinstance(obj, SequentialLR | ChainedScheduler):
        name += f"({', '.join(map(kind_of, obj._schedulers))})"
    return name


def _names_of_parameters(training: Training) -> dict[int, str]:
    """Return the names of the models' parameters, by their ids."""
    return {
        id(parameter): f"{number}.{name}"
        for number, model in enumerate(training.inner_models)
        for name, parameter in model.named_parameters()
    }


def _parameters_of(optimizer: PreparedOptimizer, names: Mapping[int, str]) -> list[Any]:
    """Return the name and the shape of each parameter, by group."""
    return [
        [[names.get(id(one)), [*one.shape]] for one in group["params"]]
        for group in optimizer.param_groups
    ]


def spread_as(training: Training) -> Like:
    """Return what says how a tensor of a checkpoint is spread over the ranks: as in this training.

    A parameter that is a DTensor, the optimizer's states of its shape, and what a registered object
    has as a DTensor are loaded in parts. So is all else that was saved as one: as parameters are.
    """
    sharded: dict[str, DTensor] = {}  # by the names that `encode` gives
    for number, model in enumerate(training.inner_models):
        for name, one in model.state_dict().items():
            if isinstance(one, DTensor):
                sharded[f"shared.models.{number}.{name}"] = one
    for number, optimizer in enumerate(training.optimizers):
        groups = (group["params"] for group in optimizer.param_groups)
        for index, parameter in enumerate(chain.from_iterable(groups)):
            if isinstance(parameter, DTensor):
                sharded[f"shared.optimizers.{number}.state.state.{index}"] = parameter
    parameter = next(iter(sharded.values()), None)
    for number, obj in enumerate(training.registered if sharded else ()):
        tensors: dict[str, torch.Tensor] = {}
        with suppress(Exception):  # it may have no state yet
            encode(obj.state_dict(), f"shared.objects.{number}.state", tensors)
        sharded |= {name: one for name, one in tensors.items() if isinstance(one, DTensor)}

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
    return [*chain.from_iterable(one.parameters() for one in training.inner_models)]


def own_buffers_of(models: Sequence[torch.nn.Module]) -> list[list[torch.Tensor | None]]:
    """Return for each model the buffers that are not rank 0's; every rank calls this.

    DDP gives all ranks rank 0's before most forward passes, in which each then changes its own.
    None stands in place of each buffer that is rank 0's; a rank that is alone has none.
    """
    if rank_and_size()[1] == 1:
        return []
    live = [[getattr(*one) for one in saved_buffers(model)] for model in models]
    facts = gather_object([[[_facts(one) for one in each] for each in live]])
    if any(one != facts[0] for one in facts):
        return []
    own = []
    for buffers in live:
        of_rank_0 = [one.detach().clone() for one in buffers]
        for work in [dist.broadcast(one, src=0, async_op=True) for one in of_rank_0]:
            work.wait()
        pairs = zip(buffers, of_rank_0, strict=True)
        own.append([None if torch.equal(one, other) else one for one, other in pairs])
    return own


def _state_of_object(obj: Any, allow_pickle: bool) -> dict[str, Any]:
    state = obj.state_dict()
    if allow_pickle:
        try:
            encode(state, "state", {})
        except CheckpointError:
            return {"pickle": _pickled(state, obj)}
    return {"state": state}


def _pickled(state: Any, obj: Any) -> bytes:
    try:
        return pickle.dumps(state)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"the state of a registered {type(obj).__name__} cannot be pickled:"
            f" {type(error).__name__}: {error}",
            where=f"{type(obj).__qualname__}.state_dict()",
            fix="let state_dict() return tensors, numbers, strings, lists, tuples and dicts",
        ) from None


def _as_gradient(saved: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a parameter from the part of it that this rank had."""
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


def _have_shapes(saved: Sequence[torch.Tensor | None], shapes: Sequence[torch.Size | None]) -> bool:
    """Return whether the tensors have these shapes, as far as there are any."""
    return len(saved) == len(shapes) and all(
        one is None or one.shape == shape for one, shape in zip(saved, shapes, strict=True)
    )


def _shape(tensor: torch.Tensor | None) -> torch.Size | None:
    return None if tensor is None else tensor.shape


def _facts(tensor: Any) -> str:
    return described(tensor) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
