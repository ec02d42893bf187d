"""The object that training scripts use: every method names the part that does the work."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, TypeVar, cast

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from headway.checkpoint.checkpointer import Checkpointer, refuse_keywords
from headway.checkpoint.files import save
from headway.checkpoint.preemption import Preemption, ResumedRun
from headway.data.active_loader import gather_for_metrics
from headway.data.configuration import DataLoaderConfiguration
from headway.data.loader import skip_first_batches
from headway.distributed import collectives
from headway.distributed.handler import Handlers, KwargsHandler
from headway.distributed.meeting import meet_to_end
from headway.distributed.process import Function, Process
from headway.distributed.rng import RNGType
from headway.distributed.world import DistributedType, InitProcessGroupKwargs, leave_world
from headway.errors import UsageError
from headway.history import own
from headway.precision.precision import AutocastKwargs, GradScalerKwargs
from headway.state import share, share_accumulation
from headway.strategies.compilation import DynamoBackend, TorchDynamoPlugin
from headway.strategies.ddp_settings import DistributedDataParallelKwargs
from headway.strategies.sharding import FullyShardedDataParallelPlugin
from headway.trackers.choice import Chosen
from headway.trackers.project import Folder, ProjectConfiguration
from headway.trackers.tracker import GeneralTracker
from headway.trackers.tracking import RUNS_FILE, LogWith, Tracking
from headway.training.accumulation import GradientAccumulationPlugin
from headway.training.arguments import Devices, reject_unsupported
from headway.training.connector import connect, tell
from headway.training.preparer import Preparer, is_spread_by_device_map
from headway.training.profiling import ProfileKwargs, profiled
from headway.training.steps import Steps, Tensors
from headway.training.training import Training
from headway.training.weights import Weights


class Parts(NamedTuple):
    """What an Accelerator consists of; each part owns its state, and knows those before it at most.

    For code that builds on Headway: other than the Accelerator's, these names may change.
    """

    process: Process
    training: Training
    preparer: Preparer
    steps: Steps
    weights: Weights
    tracking: Tracking
    checkpoints: Checkpointer
    preemption: Preemption
    handlers: Handlers


class PartTypes(NamedTuple):
    """What prepares a script's objects, what makes its steps, and which arguments are taken."""

    preparer: type[Preparer] = Preparer
    steps: type[Steps] = Steps
    accepted: Callable[[Any], Any] = lambda given: given


T = TypeVar("T")


class Attribute(Generic[T]):
    """An attribute of a part, under a name of the Accelerator; its text is the part's, or `doc`."""

    def __init__(self, path: str, doc: str = "", *, settable: bool = False) -> None:
        self.__doc__ = doc
        self._read, self._settable = attrgetter(path), settable
        self._owner, _, self._name = path.rpartition(".")

    def __get__(self, accelerator: Any, _: object = None) -> T:
        found: Any = self if accelerator is None else self._read(accelerator)
        return cast(T, found)

    def __set__(self, accelerator: Any, value: T) -> None:
        if not self._settable:
            raise AttributeError(f"{self._name} of an Accelerator cannot be set")
        setattr(attrgetter(self._owner)(accelerator), self._name, value)


class Accelerator:
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
        device: `auto`, `cpu`, `cuda`, `gpu` (cuda, or mps on a Mac), `mps` or `xpu`.
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
            over a prepared loader: `torch`, `cuda`, `xpu`, `generator` (those of samplers, which
            all ranks get in any case). None: `generator` alone.
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

    part_types = PartTypes()  # headway.compat has others

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
        given = SimpleNamespace(**locals())
        reject_unsupported(unsupported, vars(given))
        given = self.part_types.accepted(given)
        connected = connect(given)
        training, project = connected.training, connected.project
        preparer = self.part_types.preparer(
            training,
            connected.data,
            device_placement=device_placement,
            step_scheduler_with_optimizer=step_scheduler_with_optimizer,
            rng_types=rng_types,
            seed=seed,
        )
        tracking = Tracking(connected.world.is_main, given.log_with, project)
        checkpoints = Checkpointer(
            training,
            project,
            began_at=connected.settings.run.began_at,
            beside={RUNS_FILE: tracking.run_ids},
        )
        self.parts = Parts(
            Process(connected.world),
            training,
            preparer,
            self.part_types.steps(training, auto_micro_batch=auto_micro_batch),
            Weights(training),
            tracking,
            checkpoints,
            Preemption(checkpoints, tracking, connected.settings, self.end_training),
            connected.handlers,
        )
        self.state = share(
            connected.world, training.precision.name, connected.dynamo, connected.fsdp_plugin
        )
        self.gradient_state = share_accumulation(training.accumulation)
        tell(connected, strategy)

    # ------------------------------------------------------------------ prepare: Preparer

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Return models, optimizers, data loaders and schedulers made ready, in the given order."""
        return self.parts.preparer.prepare(*args, device_placement=device_placement)

    def prepare_model(
        self,
        model: torch.nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> Any:
        """Return one model made ready."""
        return self.parts.preparer.prepare_model(model, device_placement, evaluation_mode)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> Any:
        """Return one optimizer made ready."""
        return self.parts.preparer.prepare_optimizer(optimizer, device_placement)

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None
    ) -> Any:
        """Return one data loader made ready."""
        return self.parts.preparer.prepare_data_loader(data_loader, device_placement)

    def prepare_scheduler(self, scheduler: LRScheduler) -> Any:
        """Return one scheduler made ready."""
        return self.parts.preparer.prepare_scheduler(scheduler)

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget all prepared objects, free what they held, and begin a new accumulation.

        Returns:
            A None for each of `objects`: `model, optimizer = accelerator.free_memory(model, ...)`.

        Examples:
            >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
            >>> batch = torch.ones(4, 2)
            >>> model, batch = accelerator.free_memory(model, batch)
            >>> accelerator.clear()  # the same, by another name
            []
        """
        freed = [None] * len(objects)
        del objects
        self.parts.training.forget()
        return freed

    clear = free_memory

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a loader that leaves out the first batches of each pass.

        See `headway.skip_first_batches`.

        Examples:
            >>> loader = accelerator.prepare(torch.utils.data.DataLoader(range(6), batch_size=2))
            >>> [batch.tolist() for batch in accelerator.skip_first_batches(loader, 2)]
            [[4, 5]]
        """
        return skip_first_batches(dataloader, num_batches)

    def verify_device_map(self, model: torch.nn.Module) -> bool:
        """Return whether `model` was spread over several devices by a `device_map`.

        Examples:
            >>> accelerator.verify_device_map(torch.nn.Linear(2, 1))
            False
        """
        return is_spread_by_device_map(model)

    device_placement = Attribute[bool](
        "parts.preparer.device_placement",
        "Whether models and batches are moved to `device`; a script may change it.",
        settable=True,
    )
    step_scheduler_with_optimizer = Attribute[bool](
        "parts.preparer.step_scheduler_with_optimizer",
        "Whether a scheduler's `step()` counts only after an optimizer step.",
        settable=True,
    )
    rng_types = Attribute[list[RNGType]](
        "parts.preparer.rng_types",
        "The random generators that all ranks get from rank 0 at each pass over a loader.",
        settable=True,
    )
    dataloader_config = Attribute[DataLoaderConfiguration](
        "parts.preparer.data",
        "How loaders that are prepared from now on share their data out.",
        settable=True,
    )
    even_batches = Attribute[bool](
        "parts.preparer.data.even_batches",
        "See `DataLoaderConfiguration`; a script may change it.",
        settable=True,
    )
    split_batches = Attribute[bool](
        "parts.preparer.data.split_batches", "See `DataLoaderConfiguration`."
    )
    dispatch_batches = Attribute[bool | None](
        "parts.preparer.data.dispatch_batches", "See `DataLoaderConfiguration`."
    )
    use_seedable_sampler = Attribute[bool](
        "parts.preparer.data.use_seedable_sampler", "See `DataLoaderConfiguration`."
    )
    non_blocking = Attribute[bool](
        "parts.preparer.data.non_blocking", "See `DataLoaderConfiguration`."
    )
    use_stateful_dataloader = Attribute[bool](
        "parts.preparer.data.use_stateful_dataloader", "See `DataLoaderConfiguration`."
    )

    # ------------------------------------------------------------------ train: Steps

    def autocast(
        self, autocast_handler: AutocastKwargs | None = None
    ) -> AbstractContextManager[Any]:
        """Return the context in which operations outside a prepared model use the precision."""
        return self.parts.steps.autocast(autocast_handler)

    def backward(
        self, loss: torch.Tensor, *, num_tokens: int | torch.Tensor | None = None, **kwargs: Any
    ) -> None:
        """Add the gradients of `loss` / gradient_accumulation_steps; `kwargs` go to backward()."""
        self.parts.steps.backward(loss, num_tokens=num_tokens, **kwargs)

    def accumulate(self, *models: torch.nn.Module) -> AbstractContextManager[Any]:
        """Begin a micro-batch: every n-th one and the loader's last one make an optimizer step."""
        return self.parts.steps.accumulate(*models)

    def micro_batches(
        self, batch: Any, *, max_size: int | None = None, min_size: int = 1
    ) -> Iterator[Any]:
        """Return the parts of a batch that fit into memory, with `auto_micro_batch=True`."""
        return self.parts.steps.micro_batches(batch, max_size=max_size, min_size=min_size)

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which gradients of `model` stay on their rank."""
        return self.parts.steps.no_sync(model)

    def trigger_sync_in_backward(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context whose backward pass exchanges gradients in spite of `no_sync`."""
        return self.parts.steps.trigger_sync_in_backward(model)

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Let ranks that run out of batches take part in the others' exchanges."""
        return self.parts.steps.join_uneven_inputs(joinables, even_batches, usual=self.even_batches)

    def set_trigger(self) -> None:
        """Let the next `check_trigger()` return True on all ranks; any rank may call this."""
        self.parts.steps.set_trigger()

    def check_trigger(self) -> bool:
        """Return whether any rank called `set_trigger()` since the last check. All must call it."""
        return self.parts.steps.check_trigger()

    def unscale_gradients(
        self, optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None
    ) -> None:
        """Divide gradients by fp16's loss scale, once for each step."""
        self.parts.steps.unscale_gradients(optimizer)

    def clip_grad_norm_(
        self, parameters: Tensors, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Clip the gradients' norm, unless gradients accumulate, and return what it was."""
        return self.parts.steps.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Tensors, clip_value: float) -> None:
        """Clip each gradient to [-clip_value, clip_value], unless gradients accumulate."""
        self.parts.steps.clip_grad_value_(parameters, clip_value)

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
        handler = profile_handler or self.parts.handlers.or_default(ProfileKwargs)
        with profiled(handler, self.process_index) as profiler:
            yield profiler
        if handler.output_trace_dir is not None:
            self.wait_for_everyone()

    sync_gradients = Attribute[bool](
        "parts.training.accumulation.sync_gradients",
        "Whether gradients are due: optimizers step, and ranks exchange gradients; a script that"
        " accumulates by itself may change it.",
        settable=True,
    )

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether an optimizer skipped its last step, because fp16 gradients overflowed."""
        return any(one.step_was_skipped for one in self.parts.training.optimizers)

    gradient_accumulation_steps = Attribute[int](
        "parts.training.accumulation_steps",
        "The number of micro-batches in one optimizer step; a script may change it.",
        settable=True,
    )
    mixed_precision = Attribute[str](
        "parts.training.precision.name", "The precision in use: `no`, `fp16` or `bf16`."
    )

    @property
    def native_amp(self) -> bool:
        """Whether `autocast()`, and models prepared from now on, compute under autocast.

        A script may set it to False; `mixed_precision` stays what it is.
        """
        return self.parts.training.precision.uses_autocast

    @native_amp.setter
    def native_amp(self, uses_autocast: bool) -> None:
        if uses_autocast and self.mixed_precision == "no":
            raise UsageError(
                "native_amp is set to True, but mixed_precision is 'no'",
                where="the script's assignment to .native_amp",
                fix="pass mixed_precision='bf16' to Accelerator()",
            )
        self.parts.training.precision.uses_autocast = uses_autocast

    scaler = Attribute[torch.amp.GradScaler | None](
        "parts.training.precision.scaler",
        "What adapts fp16's loss scale; None in other precisions.",
    )

    # ------------------------------------------------------------------ models: Weights

    def unwrap_model(
        self,
        model: torch.nn.Module,
        keep_fp32_wrapper: bool = True,
        keep_torch_compile: bool = True,
    ) -> torch.nn.Module:
        """Return the model inside DistributedDataParallel or DataParallel, as it was prepared."""
        return self.parts.weights.unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)

    def empty_init(self) -> AbstractContextManager[Any]:
        """Return a context in which models are made without memory for their weights."""
        return self.parts.weights.empty_init()

    def whole(self, model: torch.nn.Module) -> AbstractContextManager[torch.nn.Module]:
        """Give the model that `prepare` was given, with weights that this rank reads in full."""
        return self.parts.weights.whole(model)

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the full state of a model. Call it on every rank: each may hold a part of it."""
        return self.parts.weights.get_state_dict(model, unwrap)

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the weights of `model` on rank 0; every rank has to call this."""
        self.parts.weights.save_model(model, save_directory, max_shard_size, safe_serialization)

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

    # ------------------------------------------------------------------ checkpoints: Checkpointer

    def save_state(
        self,
        output_dir: Folder = None,
        safe_serialization: bool = True,
        *,
        allow_pickle: bool = False,
        wait: bool = True,
        **save_model_func_kwargs: Any,
    ) -> str:
        """Save the whole training as a checkpoint, which is there once it is complete."""
        refuse_keywords(save_model_func_kwargs, "save_state")
        return self.parts.checkpoints.save_state(output_dir, allow_pickle=allow_pickle, wait=wait)

    def load_state(
        self,
        input_dir: Folder = None,
        load_kwargs: dict[str, Any] | None = None,
        *,
        allow_pickle: bool = False,
        strict: bool = True,
        map_location: Any = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Go on with the training that `save_state` saved; the same objects must be prepared."""
        refuse_keywords({**(load_kwargs or {}), **load_model_func_kwargs}, "load_state")
        self.parts.checkpoints.load_state(input_dir, allow_pickle=allow_pickle, strict=strict)

    def wait_for_checkpoint(self) -> None:
        """Wait until the checkpoint that `save_state(wait=False)` began is there."""
        self.parts.checkpoints.wait_for_checkpoint()

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Let checkpoints hold the states of these objects, as they are on rank 0."""
        self.parts.checkpoints.register_for_checkpointing(*objects)

    def register_save_state_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Let every `save_state` call `hook(models, weights, output_dir)` on every rank."""
        return self.parts.checkpoints.register_save_state_pre_hook(hook)

    def register_load_state_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Let every `load_state` call `hook(models, input_dir)` on every rank, before it loads."""
        return self.parts.checkpoints.register_load_state_pre_hook(hook)

    project_configuration = Attribute[ProjectConfiguration](
        "parts.checkpoints.project",
        "Where trackers and checkpoints write, how these are named, and how many stay.",
    )
    project_dir = Attribute[Folder](
        "project_configuration.project_dir", "The folder of the files that this run writes."
    )
    save_iteration = Attribute[int](
        "project_configuration.iteration",
        "The number of the next checkpoint, with automatic naming.",
    )

    # ------------------------------------------------------------------ interruptions: Preemption

    def resume(self, *, fall_back: bool = False, allow_pickle: bool = False) -> ResumedRun:
        """Go on from the newest checkpoint of the project folder, or start afresh."""
        return self.parts.preemption.resume(fall_back=fall_back, allow_pickle=allow_pickle)

    def checkpoint(
        self, every: int | str | None = None, *, allow_pickle: bool = False, wait: bool = True
    ) -> str | None:
        """Save when it is due; save and leave the script when the job has to stop."""
        return self.parts.preemption.checkpoint(every, allow_pickle=allow_pickle, wait=wait)

    should_stop = Attribute[bool]("parts.preemption.should_stop")

    # ------------------------------------------------------------------ trackers: Tracking

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        """Begin a run with the trackers of `log_with`; a run that has begun is ended first."""
        self.parts.tracking.init_trackers(project_name, config, init_kwargs)

    def log(
        self,
        values: dict[str, Any],
        step: int | None = None,
        log_kwargs: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        """Log `values` to all trackers."""
        self.parts.tracking.log(values, step, log_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return the tracker `name` of the run."""
        return self.parts.tracking.get_tracker(name, unwrap)

    log_with = Attribute[list[Chosen]](
        "parts.tracking.log_with",
        "The trackers that were asked for: names, and instances of the script's.",
    )
    trackers = Attribute[list[GeneralTracker]](
        "parts.tracking.trackers",
        "Those of the run; on other ranks than 0 only those that every rank calls.",
    )
    logging_dir = Attribute[Folder](
        "project_configuration.logging_dir", "The folder below which trackers write their files."
    )

    # ------------------------------------------------------------------ all ranks: collectives

    def gather(self, tensor: Any) -> Any:
        """Return the tensors of all ranks, joined along dimension 0 in the order of the ranks.

        See `headway.utils.gather`.

        Examples:
            >>> accelerator.gather(torch.tensor([0.5, 0.25]))
            tensor([0.5000, 0.2500])
        """
        return collectives.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather results for samples of the current batch, without repeats, in the data's order.

        Call it inside the loop over a prepared loader. Samples that were repeated to give all ranks
        equally many are left out. `loss.repeat(batch_size)` is cut to as many as the batch has.

        Args:
            input_data: tensors of shape [samples of this rank's batch, ...], alone or nested; or a
                list of objects, one for each sample. With `even_batches=False` the ranks without a
                part of the last batch are not in the loop any more: its results are gathered among
                the others, of which rank 0 is always one.
            use_gather_object: gather tensors as objects, too.

        Returns:
            The same nesting with tensors of shape [samples of all ranks' batches, ...], or one
            list of objects, on every rank.

        Raises:
            UsageError: there is something else than tensors, and it is not a list.

        Examples:
            >>> loader = accelerator.prepare(torch.utils.data.DataLoader(range(3), batch_size=2))
            >>> for batch in loader:
            ...     accelerator.gather_for_metrics(batch > 1)
            tensor([False, False])
            tensor([True])
        """
        return gather_for_metrics(input_data, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the sum, mean or maximum over ranks of each tensor, times `scale`.

        See `headway.utils.reduce`, where the default is the mean.

        Examples:
            >>> accelerator.reduce(torch.tensor([1.0, 2.0]), "mean")
            tensor([1., 2.])
        """
        return collectives.reduce(tensor, reduction, scale)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False
    ) -> Any:
        """Pad each tensor along `dim` to the largest size that any rank has there.

        See `headway.utils.pad_across_processes`.

        Examples:
            >>> accelerator.pad_across_processes(torch.ones(2, 3), dim=1).shape
            torch.Size([2, 3])
        """
        return collectives.pad_across_processes(tensor, dim, pad_index, pad_first)

    def broadcast(self, tensor: Any, from_process: int = 0) -> Any:
        """Overwrite each tensor by that of rank `from_process`, and return it.

        See `headway.utils.broadcast`.

        Examples:
            >>> accelerator.broadcast(torch.tensor([1, 2]))
            tensor([1, 2])
        """
        return collectives.broadcast(tensor, from_process)

    # ------------------------------------------------------------------ this rank: Process

    def wait_for_everyone(self) -> None:
        """Wait until every rank has called this."""
        self.parts.process.wait_for_everyone()

    def main_process_first(self) -> AbstractContextManager[None]:
        """Return a context that rank 0 leaves before the others enter it."""
        return self.parts.process.main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Return a context that each machine's first rank leaves before the others enter it."""
        return self.parts.process.local_main_process_first()

    def on_main_process(self, function: Function) -> Function:
        """Let a function run on rank 0 only; elsewhere it returns None."""
        return self.parts.process.on_main_process(function)

    def on_local_main_process(self, function: Function) -> Function:
        """Let a function run on each machine's first rank only; elsewhere it returns None."""
        return self.parts.process.on_local_main_process(function)

    def on_last_process(self, function: Function) -> Function:
        """Let a function run on the last rank only; elsewhere it returns None."""
        return self.parts.process.on_last_process(function)

    def on_process(
        self, function: Callable[..., Any] | None = None, process_index: int | None = None
    ) -> Any:
        """Let a function run on one rank only; elsewhere it returns None."""
        return self.parts.process.on_process(function, process_index)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """Let a function run on one rank of each machine only; elsewhere it returns None."""
        return self.parts.process.on_local_process(function, local_process_index)

    def split_between_processes(
        self, inputs: Any, apply_padding: bool = False
    ) -> AbstractContextManager[Any]:
        """Return a context that gives this rank's part of `inputs`, in the order of the ranks."""
        return self.parts.process.split_between_processes(inputs, apply_padding)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once on each machine."""
        self.parts.process.print(*args, **kwargs)

    device = Attribute[torch.device]("parts.process.device")

    distributed_type = Attribute[DistributedType](
        "state.distributed_type", "How the ranks work together."
    )

    num_processes = Attribute[int]("parts.process.num_processes")
    process_index = Attribute[int]("parts.process.process_index")
    local_process_index = Attribute[int]("parts.process.local_process_index")
    is_main_process = Attribute[bool]("parts.process.is_main_process")
    is_local_main_process = Attribute[bool]("parts.process.is_local_main_process")
    is_last_process = Attribute[bool]("parts.process.is_last_process")
    use_distributed = Attribute[bool]("parts.process.use_distributed")

    @property
    def multi_device(self) -> bool:
        """Whether there are several ranks, each with a GPU of its own and the whole model."""
        return self.distributed_type is DistributedType.MULTI_GPU

    is_fsdp2 = Attribute[bool](
        "parts.training.strategy.shards",
        "Whether models are sharded, by `torch.distributed.fsdp.fully_shard`.",
    )

    # ------------------------------------------------------------------ as the script has set it

    @property
    def ddp_handler(self) -> DistributedDataParallelKwargs | None:
        """The one in `kwargs_handlers`, if there is one."""
        return self.parts.handlers.of(DistributedDataParallelKwargs)

    @property
    def scaler_handler(self) -> GradScalerKwargs | None:
        """The one in `kwargs_handlers`, if there is one."""
        return self.parts.handlers.of(GradScalerKwargs)

    @property
    def init_handler(self) -> InitProcessGroupKwargs | None:
        """The one in `kwargs_handlers`, if there is one."""
        return self.parts.handlers.of(InitProcessGroupKwargs)

    @property
    def autocast_handler(self) -> AutocastKwargs | None:
        """The one in `kwargs_handlers`, if there is one."""
        return self.parts.handlers.of(AutocastKwargs)

    @property
    def profile_handler(self) -> ProfileKwargs | None:
        """The one in `kwargs_handlers`, if there is one."""
        return self.parts.handlers.of(ProfileKwargs)

    deepspeed_plugin = None  # what scripts written for Accelerate look at

    deepspeed_plugins = torch_tp_plugin = parallelism_config = torch_device_mesh = fp8_backend = (
        None
    )
    fp8_enabled = has_lomo_optimizer = is_composable_parallelism_enabled = False

    # ------------------------------------------------------------------ the end

    def end_training(self) -> None:
        """End what this run has begun, in this order; call it last, on every rank.

        Signals do what they did before; a checkpoint that is being written is waited for; trackers
        are finished, as they are when the script ends without this call; the process group ends.
        Other ranks are waited for, until they call this or have left the script.

        Raises:
            UsageError: another rank trains on; nothing is ended.
            CheckpointError: the checkpoint could not be saved; all else is ended.

        Examples:
            >>> accelerator.end_training()
        """
        meet_to_end("end_training()")
        self.parts.preemption.release()
        try:
            self.parts.checkpoints.close()
        finally:
            try:
                self.parts.tracking.finish()
            finally:
                leave_world()
        own.note_end_of_training()

    if not TYPE_CHECKING:  # a type checker knows every member that there is

        def __getattr__(self, name: str) -> Any:
            from headway.migration.topics import refuse_member  # only for what is missing

            refuse_member(name, self)
            return object.__getattribute__(self, name)  # raises what it raised before


def _describe(parts: Iterable[type]) -> None:
    """Give each method the whole text that stands with the part's method of its name.

    So `help(accelerator.prepare)` has arguments, errors and examples.
    """
    for part in parts:
        for name, member in vars(part).items():
            if not name.startswith("_") and name in vars(Accelerator) and member.__doc__:
                vars(Accelerator)[name].__doc__ = member.__doc__


_describe((Process, Preparer, Steps, Weights, Checkpointer, Preemption, Tracking))
