"""Checks that all ranks train the same weights on different data."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any
from zlib import crc32

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from headway.data.active_loader import open_loops
from headway.devices.table import kind_of
from headway.distributed.call_barrier import call_barrier, final_barrier, has_real_ranks
from headway.distributed.collectives import gather_same_shape
from headway.errors import Code, UsageError
from headway.ipc.stderr import log, log_once, named
from headway.strategies.compilation import uncompiled
from headway.strategies.ddp import PASSES
from headway.training.optimizer import WORDS, plain_items
from headway.training.training import Training, prepared_weights

_MAX_INTERVAL = 1024  # maximum number of steps between comparisons
_TOLERANCE = 1e-4  # the ranks' GPUs may round differently

_FIX_HYPERPARAMETER = (
    "create the optimizer with the same values on all ranks; for ReduceLROnPlateau, call"
    " loss = accelerator.reduce(loss, 'mean') before scheduler.step(loss)"
)
_FIX_ARGUMENT = "pass Accelerator() the same arguments on all ranks"
_FIX_WEIGHTS = (
    "prepare the model and its optimizer, and call the prepared model, not unwrap_model(model);"
    " call backward() once for each forward pass; change, cast or move the model before prepare(),"
    " and weights equally on all ranks, unless DistributedDataParallelKwargs(compare_weights=False)"
    " is passed; to train through another method, pass Accelerator(forward_methods=['method'])"
)
_FIX_TWICE = (
    "the model was called twice before a backward(): call backward() once, with the sum of the"
    " losses, or after each forward pass; otherwise, "
)
_FIX_UNUSED = (
    "if the loss does not use {}, pass Accelerator(kwargs_handlers=[DistributedDataParallelKwargs("
    "find_unused_parameters=True)]); after torch.autograd.grad(), add 0 * output.sum() to the loss"
)
_OF = " of prepared model "
_PREPARE = "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"


def next_comparison(step: int) -> int:
    """Return the next step after `step` at which ranks compare their weights.

    The comparisons follow steps 1, 2, 4, ..., 1024, and then every 1024th step. They take less than
    0.1 % of the time of a training run.
    """
    return step + min(max(step, 1), _MAX_INTERVAL)


def require_equal(training: Training, call: str) -> None:
    """Raise UsageError on all ranks if weights, hyperparameters or arguments differ between ranks.

    The ranks compare sums and sums of squares of weights; they do not compare sharded weights. All
    ranks must call this function. Error messages name `call`, the call in the script.
    """
    strategy = training.strategy
    models = [model for model in training.models if model not in training.evaluation_models]
    if not (strategy.compares_ranks and models and has_real_ranks()) or training.ranks_may_differ:
        return
    weights = {} if strategy.shards else dict(_weights_of(models, call))
    names = [*weights]
    arguments = {
        "gradient_accumulation_steps": training.accumulation.steps,
        "mixed_precision": training.precision.name,
    }
    own = arguments, _hyperparameters(training), [len(names), crc32(repr(names).encode())]
    if (details := call_barrier(call, json.dumps(own))) is not None:
        arguments_of, hyperparameters_of, names_of = zip(*map(json.loads, details), strict=True)
        _require_equal_items(arguments_of, call, _FIX_ARGUMENT)
        _require_equal_items(hyperparameters_of, call, _FIX_HYPERPARAMETER)
        if any(each != names_of[0] for each in names_of):
            what = "the prepared weights of the ranks differ in name or number"
            raise _differing(what, call, _FIX_WEIGHTS)
    if not weights:
        return
    device = training.world.device
    dtype = torch.float64 if kind_of(device.type).has_fp64 else torch.float32
    sums = _sums(weights.values(), device, dtype)
    everyones = gather_same_shape(sums[None])  # rank, weight, kind
    scale = everyones[0].abs()
    scale[:, 0] = scale[:, 0].maximum(scale[:, 1].sqrt())  # weights may sum to 0
    differ = ((everyones - everyones[0]).abs() > _TOLERANCE * scale).any(2)
    if not differ.any():
        return
    first = int(differ.any(0).int().argmax())
    ranks: list[int] = differ[:, first].nonzero().flatten().tolist()
    what = f"{names[first]} differs between {named(ranks)} and rank 0"
    raise _differing(what, call, _fix_of(names[first], weights, training.models))


def _hyperparameters(training: Training) -> dict[str, str]:
    return {
        f"the {WORDS.get(name, name)} of parameter group {group} of optimizer {number}": format(
            value, ".6g" if isinstance(value, float) else ""
        )
        for number, optimizer in enumerate(training.optimizers)
        for group, items in enumerate(optimizer.param_groups)
        for name, value in plain_items(items).items()
        if not isinstance(value, str)  # such as the name of this rank's device
    }


def _require_equal_items(items: Sequence[dict[str, Any]], call: str, fix: str) -> None:
    for name in dict.fromkeys(chain(*items)):
        first, *others = (each.get(name, "missing") for each in items)
        for rank, value in enumerate(others, 1):
            if value != first:
                what = f"{name} is {first} on rank 0, but {value} on rank {rank}"
                raise _differing(what, call, fix)


def _fix_of(name: str, weights: Mapping[str, torch.Tensor], models: list[torch.nn.Module]) -> str:
    """Return the fix for a weight that differs; if the cause is known, it comes first."""
    passes = (vars(uncompiled(model)).get(PASSES, ()) for model in models)
    if any(len({*each}) < len(each) for each in passes):
        return _FIX_TWICE + _FIX_WEIGHTS
    _, of, model = name.partition(_OF)  # empty with a single model
    trained = [key for key in weights if weights[key].requires_grad and key.endswith(of + model)]
    unused = [key for key in trained if weights[key].grad is None]
    if 0 < len(unused) < len(trained):
        warned = str(vars(torch.utils.checkpoint).get("__warningregistry__"))
        is_cut = "None of the inputs have requires_grad" in warned  # by a reentrant checkpoint()
        cut = "pass use_reentrant=False to torch.utils.checkpoint.checkpoint(); " * is_cut
        return f"{unused[0]} has no gradient: {cut}{_FIX_UNUSED.format('it')}. Or {_FIX_WEIGHTS}"
    return f"{_FIX_WEIGHTS}; {_FIX_UNUSED.format('a parameter')}"


def compare_at_end(training: Training, *, has_split: bool) -> None:
    """Wait for all ranks, compare their weights if none has exited, and log duplicated work.

    `has_split` means that the script itself has split work between ranks.
    """
    training.run.attribute()
    if training.accumulation.num_backward > 1:
        note_not_stepped(training)
    if final_barrier("end_training()"):
        require_equal(training, "end_training()")
        final_barrier("end_training()")  # rank 0, which hosts the store, leaves after the others
    ranks = training.world.ranks
    accumulation = training.accumulation
    accumulates = accumulation.is_open or accumulation.most_backward > 1
    if accumulation.has_gradients and accumulates and ranks.rank == 0:
        log("note: the run ends within an optimizer step: its last gradients were not used")
    if ranks.world_size > 1 and ranks.rank == 0 and not (has_split or training.has_prepared):
        log_once(
            f"note: nothing was passed to prepare(): each of the {ranks.world_size} ranks did all"
            " of the work, unless the script itself divides it"
        )


def _differing(what: str, call: str, fix: str) -> UsageError:
    what, code = f"{what}: the ranks train different models", Code.MODELS_DIFFER
    return UsageError(what, where=call, fix=fix, code=code, is_of_all_ranks=True)


def _weights_of(models: list[torch.nn.Module], call: str) -> Iterator[tuple[str, torch.Tensor]]:
    for number, prepared in enumerate(map(uncompiled, models)):
        model, ignored, known = prepared, set[str](), None
        if isinstance(prepared, DistributedDataParallel):
            model, ignored = prepared.module, {*prepared.parameters_to_ignore}
            known = {id(p) for p in prepared._module_parameters}  # undocumented in torch
        for name, parameter in model.named_parameters():
            is_sharded_or_quantized: bool = is_traceable_wrapper_subclass(parameter)
            if name in ignored or parameter.is_meta or is_sharded_or_quantized:
                continue
            if known is not None and parameter.requires_grad and id(parameter) not in known:
                raise UsageError(
                    f"{name} was added after its model was prepared, so the ranks do not average"
                    " its gradients",
                    where=call,
                    fix="add or replace layers before prepare()",
                    code=Code.CHANGED_LATE,
                )
            yield name if len(models) == 1 else f"{name}{_OF}{number}", parameter


@torch.no_grad()
def _sums(
    weights: Iterable[torch.Tensor], device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Return one row per weight: its sum, its sum of squares, and whether each of them is NaN."""
    sums, norms = [], []
    for weight in weights:  # two operators per weight: a model may have thousands
        if weight.is_complex():
            weight = torch.view_as_real(weight)
        if weight.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            weight = weight.float()
        sums.append(weight.sum(dtype=dtype).to(device))
        norms.append(torch.linalg.vector_norm(weight, dtype=dtype).to(device))
    rows = torch.stack([torch.stack(sums), torch.stack(norms).square()], 1)
    is_nan = rows.isnan()
    return torch.cat([rows.where(~is_nan, 0), is_nan.to(dtype)], 1)


def note_unused(training: Training) -> None:
    """Log once, after the first step, if accumulation or sharded data is unused."""
    accumulation, ranks = training.accumulation, training.world.ranks
    if ranks.rank:
        return
    if accumulation.steps > 1 and not accumulation.has_begun:
        training.progress.log_note(
            f"gradient_accumulation_steps is {accumulation.steps}, but an optimizer stepped"
            " outside of accelerator.accumulate(model), so nothing accumulates; fix: wrap the body"
            " of the loop in `with accelerator.accumulate(model):`",
        )
    elif accumulation.steps > 1 and training.progress.num_trained == 1:  # this step
        training.progress.log_note(
            "an optimizer stepped without accelerator.backward(loss), which divides by"
            f" gradient_accumulation_steps ({accumulation.steps}); fix: call"
            " accelerator.backward(loss) instead of loss.backward()",
        )
    if accumulation.steps > 1 and accumulation.has_begun:
        note_raw_scheduler(training)
    draws_own = training.run.has_begun or open_loops() or training.progress.has_own_seed
    if training.strategy.data_size > 1 and not draws_own:
        training.progress.log_note(
            "no prepared DataLoader yielded a batch: unless the script draws different samples on"
            f" each rank, all {ranks.world_size} ranks train on the same ones; fix: {_PREPARE}; or,"
            " if the script draws its own batches, call set_seed(1, device_specific=True)",
        )


def note_raw_optimizer(training: Training) -> None:
    """Log once, on rank 0, if gradients accumulate but no optimizer was prepared."""
    accumulation, is_main = training.accumulation, training.world.is_main
    if accumulation.steps > 1 and accumulation.has_begun and is_main and not training.optimizers:
        training.progress.log_note(
            "accumulate() was called without a prepared optimizer, so the optimizer steps after"
            " each micro-batch, unless the script checks accelerator.sync_gradients; fix: "
            + _PREPARE,
        )


def note_not_stepped(training: Training) -> None:
    """Log once, on rank 0, if gradients were computed but no prepared optimizer has stepped.

    Without a prepared optimizer, this is reported for sharded models only: an optimizer of other
    models may be the script's own.
    """
    passes = training.accumulation.num_backward
    if training.steps_done or not training.world.is_main:
        return
    if training.strategy.shards and not training.optimizers:
        training.progress.log_note(
            f"no optimizer was prepared before {passes} backward passes: one that was created"
            " before prepare(model) has other weights than the sharded model, so it trains nothing;"
            " fix: model, optimizer = accelerator.prepare(model, optimizer)",
        )
    elif training.optimizers:
        training.progress.log_note(
            f"no prepared optimizer has stepped in {passes} backward passes:"
            " checkpoints, schedulers and comparisons of the ranks' weights depend on its step();"
            " fix: call step() of the prepared optimizer, not another method, and not an optimizer"
            " in a hook of a parameter",
        )


def note_raw_scheduler(training: Training) -> None:
    """Log once, on rank 0, if an optimizer has a scheduler that is not prepared or registered.

    torch's schedulers set `initial_lr`; checkpoints contain it as well, so call this before a load.
    """
    held = [value for obj in training.registered for value in getattr(obj, "__dict__", {}).values()]
    known = (*training.schedulers, *training.registered, *held)
    scheduled = [training.find(getattr(each, "optimizer", None)) for each in known]
    raw = [each for each in training.optimizers if each not in scheduled]
    if training.world.is_main and any("initial_lr" in each.param_groups[0] for each in raw):
        training.progress.log_note(
            "an optimizer has a scheduler that was not passed to prepare(): unless the script does"
            " this, checkpoints do not contain it, and it also steps while gradients accumulate;"
            " fix: scheduler = accelerator.prepare(scheduler)",
        )


def note_unsaved(training: Training) -> None:
    """Log once, on rank 0, if a prepared optimizer trains weights that checkpoints lack."""
    held = [value for obj in training.registered for value in getattr(obj, "__dict__", {}).values()]
    modules = [m for m in (*training.registered, *held) if isinstance(m, torch.nn.Module)]
    known = prepared_weights() | {id(p) for module in modules for p in module.parameters()}
    known |= {id(value) for value in held}
    groups = [group for optimizer in training.optimizers for group in optimizer.param_groups]
    shapes = _trained_shapes(groups, known)
    if shapes and training.world.is_main:
        training.progress.log_note(
            f"checkpoints do not contain weights of shapes {shapes[:3]} that a prepared optimizer"
            " trains, because they are in no prepared model: unless the script saves them, a run"
            " that resumes starts from their initial values; fix: pass their module to prepare()"
        )


def _trained_shapes(groups: Iterable[Mapping[str, Any]], known: set[int]) -> list[list[int]]:
    """Return the shapes of weights that are trained, except those whose ids are in `known`."""
    weights = [p for group in groups for p in group["params"] if p.requires_grad]
    return [[*weight.shape] for weight in weights if id(weight) not in known]


def note_unprepared(training: Training, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Log once, on rank 0, if no model is prepared, or if `optimizer` trains other weights.

    Ranks do not exchange the gradients of these weights.
    """
    ranks, groups = training.world.ranks, [] if optimizer is None else optimizer.param_groups
    if ranks.world_size == 1 or ranks.rank:
        return
    what, fix = "the script trains a model that was not passed to prepare()", _PREPARE
    if known := prepared_weights():
        shapes = _trained_shapes(groups, known)
        if not shapes:
            return
        what = f"an optimizer has weights that are in no prepared model, of shapes {shapes[:3]}"
        fix = "pass it and its modules (also a loss module) to prepare(), after all changes to them"
    training.progress.log_note(
        f"{what}: the gradients are not averaged over the {ranks.world_size} ranks, unless the"
        f" script does this; fix: {fix}"
    )
