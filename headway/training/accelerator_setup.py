"""Sets up an Accelerator from its arguments and the launcher's settings."""

from __future__ import annotations

import atexit
import os
import sys
from typing import Any, NamedTuple

from headway.data.configuration import DataLoaderConfiguration, merged_configuration, micro_batch_of
from headway.distributed.handler import KwargsHandler, check_range, handlers_by_kind
from headway.distributed.rng import set_seed
from headway.distributed.world import InitProcessGroupKwargs, World, join_world
from headway.history import process_record
from headway.ipc.choices import SHARDED, SHARDING_SETTINGS
from headway.ipc.progress import Progress
from headway.ipc.records import PROJECT
from headway.ipc.run_contract import RunContract, has_unread_variables, read_run
from headway.ipc.stderr import log, log_once
from headway.precision.precision import (
    AutocastKwargs,
    GradScalerKwargs,
    PrecisionSettings,
    precision_for,
)
from headway.state import shared_precision, shared_world
from headway.strategies.compilation import TorchDynamoPlugin
from headway.strategies.ddp import DDP
from headway.strategies.ddp_settings import DistributedDataParallelKwargs
from headway.strategies.sharding import FullyShardedDataParallelPlugin, effective_plugin
from headway.strategies.strategy import Strategy, StrategySettings
from headway.trackers.project import ProjectConfiguration, merged_project
from headway.training.accumulation import Accumulation
from headway.training.arguments import (
    CALL,
    Arguments,
    merge_accumulation,
    merge_arguments,
    merge_compilation,
    merge_sharing,
)
from headway.training.profiling import ProfileKwargs
from headway.training.training import Training

HANDLERS = (
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    AutocastKwargs,
    ProfileKwargs,
)

_RESUME = "accelerator.resume() nor accelerator.checkpoint()"
_STOP = "accelerator.should_stop nor accelerator.checkpoint()"


class AcceleratorSetup(NamedTuple):
    """The result of `set_up_accelerator`."""

    training: Training
    data: DataLoaderConfiguration
    project: ProjectConfiguration
    handlers: dict[type[KwargsHandler], Any]
    dynamo: TorchDynamoPlugin
    fsdp_plugin: FullyShardedDataParallelPlugin | None  # if models are sharded
    run: RunContract  # the settings of the launcher, overridden by the arguments
    notes: list[str]  # on overridden settings


def set_up_accelerator(given: Arguments) -> AcceleratorSetup:
    """Join the process group, and create the objects that the arguments and settings request."""
    check_range("Accelerator", 0, 2**32 - 1, seed=given.seed)
    _note_unread_variables()
    handlers = handlers_by_kind(given.kwargs_handlers, HANDLERS)
    dynamo = merge_compilation(given.dynamo_backend, given.dynamo_plugin)
    accumulation = merge_accumulation(
        given.gradient_accumulation_steps, given.gradient_accumulation_plugin
    )
    run, notes = merge_arguments(
        read_run(),
        cpu=given.cpu,
        device=given.device,
        mixed_precision=given.mixed_precision,
        gradient_accumulation_steps=accumulation.num_steps,
        resume=None if given.resume_from is None else os.fspath(given.resume_from),
        **merge_sharing(given),
    )
    shared = None if given.cpu or given.device is not None else shared_world()
    device = run.device if shared is None else shared.device
    world = join_world(device, handlers[InitProcessGroupKwargs])
    precision = precision_for(
        given.mixed_precision or shared_precision() or run.mixed_precision,
        world.device,
        PrecisionSettings(handlers[AutocastKwargs], handlers[GradScalerKwargs]),
        where=str(run.origins.get("mixed_precision", CALL)),
    )
    methods = given.forward_methods
    strategy = strategy_for(
        world,
        given.strategy or run.strategy,
        StrategySettings(
            ddp=handlers[DistributedDataParallelKwargs],
            dynamo=dynamo,
            forward_methods=(methods,) if isinstance(methods, str) else tuple(methods or ()),
            **{name: getattr(run, name) for name in SHARDING_SETTINGS if name != "strategy"},
        ),
    )
    data = merged_configuration(
        given.dataloader_config, given.split_batches, given.global_batch_size
    )
    steps = Accumulation(run.gradient_accumulation_steps, accumulation)
    if given.global_batch_size is not None:
        micro_batch_of(given.global_batch_size, strategy.data_size, steps.steps)
    training = Training(world, strategy, precision, steps, given.global_batch_size)
    if given.seed is not None:
        set_seed(given.seed)
    project = merged_project(given.project_config, given.project_dir)
    shown = effective_plugin(given.fsdp_plugin, run) if strategy.shards else None
    return AcceleratorSetup(training, data, project, handlers, dynamo, shown, run, notes)


def _note_unread_variables() -> None:
    if has_unread_variables():
        from headway.settings.resolve import launch_variables

        if names := launch_variables():
            log_once(
                f"note: only `headway launch` reads {', '.join(names)}: start the script with it,"
                " or pass arguments to Accelerator()"
            )


def strategy_for(world: World, chosen: str | Strategy, settings: StrategySettings) -> Strategy:
    """Set up a named or custom strategy; named ones have no effect with one rank."""
    if isinstance(chosen, Strategy):
        strategy = chosen
    elif world.ranks.world_size == 1:
        strategy = Strategy()
    elif chosen in ("auto", "ddp"):
        strategy = DDP()
    else:
        from headway.strategies.fsdp import FSDP, HSDP  # imports a slow part of torch

        strategy = HSDP() if chosen == "hsdp" else FSDP()
    strategy.set_up(world, settings)
    return strategy


def log_overrides(setup: AcceleratorSetup, strategy: str | Strategy | None) -> None:
    """Log overridden settings on rank 0; at the end of the script, log unused settings."""
    run, world, progress = setup.run, setup.training.world, setup.training.progress
    progress.note_use(accelerator=True)
    if (folder := setup.project.project_dir) is not None:
        progress.note_output_path(PROJECT, os.fspath(folder))
    process_record.start(progress)
    progress.clock.watch_device(world.device)
    if not world.is_main:
        return
    atexit.register(_log_if_unused, run.resume, run.time_limit, progress)
    if strategy in SHARDED and world.ranks.world_size == 1:
        setup.notes.append(f"strategy {strategy!r} has no effect with one process")
    for note in setup.notes:
        log(note)


def _log_if_unused(resume: str | None, time_limit: int | None, progress: Progress) -> None:
    """Log unused settings at the end of a successful script, unless the launcher does so."""
    if getattr(sys, "last_type", None) is not None or progress.is_connected:
        return
    if resume is not None and not progress.feature_use.resuming:
        log_once(f"note: resume={resume} had no effect: the script called neither {_RESUME}")
    if time_limit is not None and not progress.feature_use.stopping:
        log_once(f"note: time_limit={time_limit} had no effect: the script used neither {_STOP}")
