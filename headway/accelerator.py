"""The object that training scripts use; it delegates to strategy, precision, loaders and so on."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, NoReturn

import torch

from headway.accumulation import Accumulation
from headway.arguments import (
    EffectiveSettings,
    check_seed,
    merge_accumulation,
    merge_arguments,
    merge_compilation,
    merge_sharing,
    reject_unsupported,
)
from headway.contract.records import channel
from headway.contract.run import read_ranks, read_run
from headway.contract.strategies import SHARDED
from headway.data.configuration import DataLoaderConfiguration, merged_configuration
from headway.data.global_batch import micro_batch_of
from headway.device_memory import tell_memory_at_exit
from headway.generators import RNGType
from headway.in_effect import InEffect
from headway.meeting import meet
from headway.micro_batches import MicroBatches
from headway.model_files import save_weights
from headway.placement import Devices, gpu_named_by
from headway.plugins.accumulation import GradientAccumulationPlugin
from headway.plugins.compilation import DynamoBackend, TorchDynamoPlugin
from headway.plugins.handler import Handlers, KwargsHandler
from headway.plugins.handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
)
from headway.plugins.profiling import ProfileKwargs
from headway.plugins.project import Folder, ProjectConfiguration, merged_project
from headway.plugins.sharding import FullyShardedDataParallelPlugin
from headway.precision.choice import precision_for
from headway.precision.precision import PrecisionSettings
from headway.profiling import profiled
from headway.resuming import Resuming, tell_if_unused
from headway.saving import save
from headway.seeding import set_seed
from headway.state import GradientState, share, shared_precision, shared_world
from headway.strategies.choice import strategy_for
from headway.strategies.strategy import StrategySettings
from headway.trackers.tracked import LogWith
from headway.world import GroupSettings, World, join_world

HANDLERS = (
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    AutocastKwargs,
    ProfileKwargs,
)


class Accelerator(InEffect, Resuming):
    """Prepare a training script for one process or many; names and meanings are Accelerate's.

    Under `headway launch` the launcher's settings apply; an argument given here overrides a profile
    or variable (one line on stderr says so) and may not contradict a flag. Under plain python or
    torchrun the device is the best one there, the precision `no`, the accumulation 1.

    Args:
        device_placement: move models and batches to `device`.
        split_batches: the loaders' batch_size is that of all ranks together, not of each.
        mixed_precision: `no`, `fp16` or `bf16`.
        gradient_accumulation_steps: micro-batches in one optimizer step.
        cpu: use the CPU, even where there is a GPU.
        device: `auto`, `cpu`, `cuda`, `gpu` (cuda, or mps on a Mac) or `mps`.
        devices: which GPU, written as for `headway launch --devices`: `[1]`, `"1,"`, `"idle:1"`.
            Several need the launcher; under it they must agree with what it started.
        dataloader_config: how prepared loaders share their data out.
        log_with: trackers, each a name (`jsonl`, `tensorboard`, `wandb`, `mlflow`, `comet_ml`,
            `trackio`), a LoggerType or an instance of a GeneralTracker; `all` is all installed.
        project_dir: the folder of the trackers' files and of checkpoints.
        project_config: a ProjectConfiguration, which names checkpoints and says how many stay.
        resume_from: the checkpoint that `resume()` goes on from: "latest", or the path of one,
            or of the folder of a project, whose newest it is.
        seed: from 0 to 2**32 - 1, for a run that can be repeated: `set_seed(seed)` is called here,
            prepared loaders shuffle by it and the epoch (or by `data_seed`), and the random
            augmentation of a sample follows from it, the epoch and the sample's index alone,
            whatever rank, worker or restart loads it; see the page on checkpoints.
        global_batch_size: samples in an optimizer step. Prepared loaders get the batch size that
            this means for the ranks and `gradient_accumulation_steps` of the run.
        auto_micro_batch: let `micro_batches` split batches that do not fit into memory.
        step_scheduler_with_optimizer: a scheduler's `step()` counts only after an optimizer step.
        gradient_accumulation_plugin: in place of `gradient_accumulation_steps`.
        rng_types: which random generators all ranks get from rank 0 at the beginning of each pass
            over a prepared loader: `torch`, `cuda`, `generator` (those of samplers, which all
            ranks get in any case). None: `generator` alone.
        kwargs_handlers: settings for parts of torch, at most one of each kind:
            DistributedDataParallelKwargs, GradScalerKwargs, InitProcessGroupKwargs, AutocastKwargs,
            ProfileKwargs. One for a part that this run does not use has nothing to do.
        dynamo_backend: compile models with this backend of torch.compile, such as "inductor".
        dynamo_plugin: in place of `dynamo_backend`.
        strategy: how several ranks share a model: `ddp`, a copy each; `fsdp`, a part of each
            parameter; `hsdp`, parts on `shard_size` ranks, and copies of those; `auto` is ddp.
        shard_size: ranks that hold the parts of one copy, with `hsdp`.
        wrap: the units that are gathered at a time: `auto` for the blocks that the model repeats,
            class names, or the smallest number of parameters.
        activation_checkpointing: compute activations of each unit again in the backward pass.
        cpu_offload: keep the parts of parameters, gradients and optimizer states on the CPU.
        forward_methods: names of methods that use weights of a sharded model and do not call its
            `forward()` alone; `generate` needs no mention.
        fsdp_plugin: a FullyShardedDataParallelPlugin, in place of the five before.
        unsupported: Accelerate's other arguments are refused, unless they are None.

    Raises:
        UsageError: an argument is impossible, unknown, or contradicts a flag.
        MachineError: this machine does not have the device or precision.
        LaunchError: the ranks cannot form a group.

    Examples:
        >>> import torch
        >>> from headway import Accelerator
        >>> accelerator = Accelerator(cpu=True)
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = accelerator.prepare(model, optimizer)
        >>> accelerator.backward(model(torch.ones(4, 2)).mean())
        >>> optimizer.step()

        Examples of the methods go on from `import torch` and `accelerator = Accelerator(cpu=True)`,
        with one rank.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = False,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool = False,
        *,
        device: str | None = None,
        devices: Devices | None = None,
        dataloader_config: DataLoaderConfiguration | None = None,
        log_with: LogWith = None,
        project_dir: Folder = None,
        project_config: ProjectConfiguration | None = None,
        step_scheduler_with_optimizer: bool = True,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        kwargs_handlers: Sequence[KwargsHandler] | None = None,
        dynamo_backend: DynamoBackend | str | Callable[..., Any] | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        rng_types: Sequence[str | RNGType] | None = None,
        auto_micro_batch: bool = False,
        resume_from: Folder = None,
        seed: int | None = None,
        global_batch_size: int | None = None,
        strategy: str | None = None,
        shard_size: int | None = None,
        wrap: str | Sequence[str] | int | None = None,
        activation_checkpointing: bool | None = None,
        cpu_offload: bool | None = None,
        forward_methods: Sequence[str] | str | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        **unsupported: NoReturn,
    ) -> None:
        reject_unsupported(unsupported)
        check_seed(seed)
        self._handlers = handlers = Handlers(kwargs_handlers, HANDLERS)
        dynamo = merge_compilation(dynamo_backend, dynamo_plugin)
        accumulation = merge_accumulation(gradient_accumulation_steps, gradient_accumulation_plugin)
        agreed = merge_arguments(
            read_run(),
            mixed_precision=mixed_precision,
            gradient_accumulation_steps=accumulation.num_steps,
            cpu=cpu,
            device=device,
            resume=None if resume_from is None else os.fspath(resume_from),
            sharing=merge_sharing(
                strategy, shard_size, wrap, activation_checkpointing, cpu_offload, fsdp_plugin
            ),
        )
        is_device_named = cpu or device is not None or devices is not None
        group = _group_settings(handlers.or_default(InitProcessGroupKwargs))
        world = _join_world(None if is_device_named else shared_world(), agreed, devices, group)
        precision = precision_for(
            (None if mixed_precision else shared_precision()) or agreed.mixed_precision,
            world.device,
            PrecisionSettings(
                handlers.or_default(AutocastKwargs), handlers.or_default(GradScalerKwargs)
            ),
            where=agreed.precision_from,
        )
        super().__init__(
            world,
            precision,
            strategy_for(
                world,
                StrategySettings(
                    ddp=handlers.or_default(DistributedDataParallelKwargs),
                    dynamo=dynamo,
                    forward_methods=_names(forward_methods),
                    **agreed.sharing._asdict(),
                ),
            ),
            Accumulation(agreed.gradient_accumulation_steps, accumulation),
            device_placement=device_placement,
            data=merged_configuration(dataloader_config, split_batches, global_batch_size),
            step_scheduler_with_optimizer=step_scheduler_with_optimizer,
            rng_types=rng_types,
            seed=seed,
            global_batch_size=global_batch_size,
        )
        if global_batch_size is not None:
            micro_batch_of(global_batch_size, self._strategy.data_size, self._accumulation.steps)
        if seed is not None:
            set_seed(seed)
        if auto_micro_batch:
            self._strategy.require_whole_models("auto_micro_batch=True")
            self._micro_batches = MicroBatches(
                self._accumulation, self._strategy, self._token_mean, self._trained_parameters
            )
        self._agreed_settings = agreed
        if self.is_main_process and agreed.asks_to_go_on:
            tell_if_unused(agreed.asks_to_go_on)
        if self.is_main_process and agreed.estimated_bytes is not None:
            tell_memory_at_exit(agreed.estimated_bytes)
        self._track_with(log_with, merged_project(project_config, project_dir))
        self.state = share(world, precision.name, dynamo)
        self.gradient_state = GradientState._of(self._accumulation)
        channel.has_made_accelerator = True
        notes = agreed.notes
        if strategy in SHARDED and not self.use_distributed:
            notes = (*notes, f"headway: strategy {strategy!r} has no effect with one process")
        if self.is_main_process and notes:
            print(*notes, sep="\n", file=sys.stderr, flush=True)

    deepspeed_plugin = None  # what scripts written for Accelerate look at

    deepspeed_plugins = torch_tp_plugin = parallelism_config = torch_device_mesh = fp8_backend = (
        None
    )
    fp8_enabled = has_lomo_optimizer = is_composable_parallelism_enabled = False

    # ------------------------------------------------------------------ profile

    @contextmanager
    def profile(
        self, profile_handler: ProfileKwargs | None = None
    ) -> Iterator[torch.profiler.profile]:
        """Profile the block; with `output_trace_dir`, all ranks' traces are there at its end.

        Args:
            profile_handler: in place of the one in `kwargs_handlers`.

        Returns:
            The context, which gives a `torch.profiler.profile`; call its `step()` after each step
            where there is a schedule.

        Examples:
            >>> from headway import ProfileKwargs
            >>> with accelerator.profile(ProfileKwargs(activities=["cpu"])) as profiler:
            ...     product = torch.ones(2, 3) @ torch.ones(3, 4)
            >>> "aten::mm" in {one.key for one in profiler.key_averages()}
            True
        """
        handler = profile_handler or self._handlers.or_default(ProfileKwargs)
        with profiled(handler, self.process_index) as profiler:
            yield profiler
        if handler.output_trace_dir is not None:
            self.wait_for_everyone()

    # ------------------------------------------------------------------ save

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the full state of a model. Call it on every rank: each may hold a part of it.

        Args:
            model: a prepared model, or any other.
            unwrap: use the names of the weights in the model itself, without those of wrappers.

        Examples:
            >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
            >>> list(accelerator.get_state_dict(model))
            ['weight', 'bias']
        """
        if unwrap:
            model = self.unwrap_model(model, keep_torch_compile=False)
        if self._strategy.shards:
            meet("get_state_dict(...)")
        return self._strategy.state_dict(model)

    def save(
        self, obj: Any, f: str | os.PathLike[str] | IO[bytes], safe_serialization: bool = False
    ) -> None:
        """Write `obj` on rank 0, atomically: a file is replaced in full or not at all.

        Args:
            f: a path, or an open binary file.
            safe_serialization: write a state dict with safetensors instead of torch.save.

        Examples:
            >>> accelerator.save({"weight": torch.ones(2)}, "model.pt")
            >>> torch.load("model.pt")
            {'weight': tensor([1., 1.])}
        """
        save(obj, f, safe_serialization=safe_serialization)

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the weights of `model` on rank 0; every rank has to call this.

        The files are those of Hugging Face libraries. Those of an earlier save into the same folder
        are removed.

        Args:
            model: a prepared model, or any other.
            save_directory: a folder, which is created.
            max_shard_size: the size of a file's tensors, in bytes or such as "5MB" (10**6 bytes) or
                "5MiB" (2**20 bytes). A larger tensor gets a file of its own.
            safe_serialization: write `model.safetensors`, instead of `pytorch_model.bin` by
                torch.save.

        Raises:
            WrongValue: `max_shard_size` is no size.
            UsageError: `save_directory` is a file, or a weight has no data (on the meta device).

        Examples:
            >>> from pathlib import Path
            >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
            >>> accelerator.save_model(model, "weights")
            >>> [path.name for path in Path("weights").iterdir()]
            ['model.safetensors']
        """
        model = self.unwrap_model(model, keep_torch_compile=False)
        if self._strategy.shards:
            meet("save_model(...)")
        save_weights(
            self._strategy.weights_to_save(model),
            save_directory,
            max_shard_size,
            safe_serialization,
            read_whole=self._strategy.read_whole,
            writes=self.is_main_process,
        )

    if not TYPE_CHECKING:  # a type checker knows every member that there is

        def __getattr__(self, name: str) -> Any:
            from headway.migration.missing import refuse_member  # only for what is missing

            refuse_member(name, self)
            return object.__getattribute__(self, name)  # raises what it raised before


def _names(methods: Sequence[str] | str | None) -> tuple[str, ...]:
    return (methods,) if isinstance(methods, str) else tuple(methods or ())


def _group_settings(handler: InitProcessGroupKwargs) -> GroupSettings:
    """Return the settings; the handler's default backend stands for the one of the device."""
    is_default = handler.backend == InitProcessGroupKwargs.backend
    return GroupSettings(
        None if is_default else handler.backend, handler.init_method, handler.timeout
    )


def _join_world(
    shared: World | None, agreed: EffectiveSettings, devices: Devices | None, group: GroupSettings
) -> World:
    """Join with the device of the shared world if there is one, else with what was agreed."""
    if shared is not None:
        return join_world(shared.device.type, shared.device.index, group)
    gpu = None if devices is None else gpu_named_by(devices, agreed.device, read_ranks())
    return join_world(agreed.device if gpu is None else "cuda", gpu, group)
