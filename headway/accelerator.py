"""The `Accelerator` class for training scripts; its methods delegate to its components."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from inspect import signature
from typing import IO, TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from headway.checkpoint.checkpointer import Checkpointer
from headway.checkpoint.files import original_names, save, save_weights
from headway.checkpoint.preemption import Preemption, ResumedRun
from headway.data.configuration import DataLoaderConfiguration
from headway.data.loader import skip_first_batches
from headway.distributed import collectives
from headway.distributed.collectives import Reduction
from headway.distributed.handler import KwargsHandler, check_call, checked, checks
from headway.distributed.process import Process
from headway.distributed.rng import RNGType
from headway.distributed.world import DistributedType, leave_world
from headway.history import process_record
from headway.precision.precision import AutocastKwargs, Precision
from headway.state import share, share_accumulation
from headway.strategies.compilation import (
    DynamoBackend,
    TorchDynamoPlugin,
    extract_model_from_parallel,
)
from headway.strategies.sharding import FullyShardedDataParallelPlugin
from headway.strategies.strategy import Strategy
from headway.trackers.choice import Chosen
from headway.trackers.project import Folder, ProjectConfiguration
from headway.trackers.tracker import GeneralTracker
from headway.trackers.tracker_group import LogWith, Tracking
from headway.training.accelerator_setup import log_overrides, set_up_accelerator
from headway.training.accumulation import GradientAccumulationPlugin
from headway.training.arguments import Arguments, reject_unsupported
from headway.training.metrics import gather_for_metrics
from headway.training.optimizer import PreparedScheduler
from headway.training.preparer import Preparer
from headway.training.profiling import ProfileKwargs, profiled
from headway.training.replicas import compare_at_end
from headway.training.steps import Steps, Tensors, check_backward
from headway.training.training import Training


class Parts(NamedTuple):
    """The components of an Accelerator; each uses only the components listed before it.

    Code that extends Headway may use the components, but they may change between versions.
    """

    training: Training
    preparer: Preparer
    steps: Steps
    tracking: Tracking
    checkpoints: Checkpointer
    preemption: Preemption
    handlers: dict[type[KwargsHandler], Any]


@checks(but=("accumulate", "backward", "checkpoint", "log", "unwrap_model"))
class Accelerator(Process):
    """Runs a training script on one or more processes, with Accelerate's names and semantics.

    Under `headway launch`, the launcher's settings apply. An argument must not contradict a flag;
    an argument that overrides a profile or variable is logged. Under plain python or torchrun, the
    defaults are the best available device, precision `no` and no accumulation.

    Args:
        device_placement: move models and batches to `device`.
        split_batches: the loaders' batch_size is the total over all ranks, not per rank.
        mixed_precision: `no`, `fp16`, `bf16`, or an instance of a custom Precision.
        gradient_accumulation_steps: number of micro-batches per optimizer step.
        cpu: use the CPU even if a GPU is available.
        device: `auto`, `cpu`, `cuda`, `gpu` (cuda, or mps on a Mac), `mps` or `xpu`.
        dataloader_config: options for sharding the data of prepared loaders.
        log_with: trackers, each a name (`jsonl`, `tensorboard`, `wandb`, `mlflow`, `trackio`), a
            LoggerType or a GeneralTracker instance; `all` selects all installed trackers.
        project_dir: the folder for the trackers' files and for checkpoints.
        project_config: a ProjectConfiguration, which sets checkpoint naming, `total_limit` etc.
        resume_from: the checkpoint that `resume()` loads: "latest", the path of a checkpoint, or a
            project folder, whose newest checkpoint is loaded.
        seed: 0 to 2**32 - 1, for a reproducible run. It is passed to `set_seed`, and seeds the
            shuffling of prepared loaders (unless `data_seed` is set) and random augmentation, which
            then depends only on the seed, the epoch and the sample's position in the epoch, not on
            the rank, worker or restart that loads the sample; see the page on checkpoints.
        global_batch_size: samples per optimizer step. The batch size of prepared loaders is
            computed from it, the number of ranks and `gradient_accumulation_steps`.
        step_scheduler_with_optimizer: step a scheduler only after an optimizer step.
        gradient_accumulation_plugin: replaces `gradient_accumulation_steps`.
        rng_types: the random generators whose states rank 0 broadcasts at the start of each epoch
            of a prepared loader: `torch`, `cuda`, `xpu` or `generator` (the samplers' generators,
            which are always broadcast). None selects `generator` only.
        kwargs_handlers: settings for parts of torch, at most one of each kind:
            DistributedDataParallelKwargs, GradScalerKwargs, InitProcessGroupKwargs, AutocastKwargs,
            ProfileKwargs. A handler for a part that this run does not use has no effect.
        dynamo_backend: compile models with this torch.compile backend, such as "inductor".
        dynamo_plugin: replaces `dynamo_backend`.
        strategy: how a model is distributed: `ddp` replicates it; `fsdp` shards each parameter
            over all ranks; `hsdp` shards over `shard_size` ranks and replicates the shards; `auto`
            is `ddp`; an instance of a custom Strategy is also accepted.
        shard_size: the number of ranks over which `hsdp` shards each replica.
        wrap: the modules to shard and all-gather as units: `auto` for the model's repeated blocks,
            class names, or a minimum number of parameters.
        activation_checkpointing: recompute the activations of each unit in the backward pass.
        cpu_offload: keep sharded parameters, gradients and optimizer states on the CPU.
        forward_methods: names of methods other than `forward()` that use the weights of a sharded
            or replicated model directly; `generate` is always included.
        fsdp_plugin: a FullyShardedDataParallelPlugin, which replaces `strategy`, `shard_size`,
            `wrap`, `activation_checkpointing` and `cpu_offload`.
        unsupported: Accelerate's other arguments raise UsageError unless they are None.

    Raises:
        UsageError: an argument is invalid or unknown, or contradicts a flag.
        MachineError: this machine does not support the device or precision.
        LaunchError: the ranks cannot form a process group.

    Examples:
        >>> import torch
        >>> from headway import Accelerator
        >>> accelerator = Accelerator(cpu=True)
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = accelerator.prepare(model, optimizer)
        >>> accelerator.backward(model(torch.ones(4, 2)).mean())
        >>> optimizer.step()

        The methods' examples assume `import torch` and `accelerator = Accelerator(cpu=True)` on one
        rank.
    """

    _preparer_type: type[Preparer] = Preparer  # headway.compat overrides it

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = False,
        mixed_precision: str | Precision | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool = False,
        *,
        device: str | None = None,
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
        resume_from: Folder = None,
        seed: int | None = None,
        global_batch_size: int | None = None,
        strategy: str | Strategy | None = None,
        shard_size: int | None = None,
        wrap: str | Sequence[str] | int | None = None,
        activation_checkpointing: bool | None = None,
        cpu_offload: bool | None = None,
        forward_methods: Sequence[str] | str | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        **unsupported: NoReturn,
    ) -> None:
        given = Arguments.select(locals())
        reject_unsupported(unsupported, signature(Accelerator).parameters)
        arguments = self._accepted(given)
        setup = set_up_accelerator(arguments)
        training, project = setup.training, setup.project
        super().__init__(training.world)
        preparer = self._preparer_type(
            training,
            setup.data,
            device_placement=device_placement,
            step_scheduler_with_optimizer=step_scheduler_with_optimizer,
            rng_types=rng_types,
            seed=seed,
            forward_methods=forward_methods or (),
        )
        tracking = Tracking(self.is_main_process, arguments.log_with, project)
        began_at = setup.run.began_at
        checkpoints = Checkpointer(training, project, began_at=began_at, runs=tracking.runs)
        self.parts = Parts(
            training,
            preparer,
            Steps(training),
            tracking,
            checkpoints,
            Preemption(checkpoints, tracking, setup.run, self.end_training),
            setup.handlers,
        )
        self.state = share(self.world, training.precision, setup.dynamo, setup.fsdp_plugin)
        self.gradient_state = share_accumulation(training.accumulation)
        log_overrides(setup, strategy)

    def _accepted(self, arguments: Arguments) -> Arguments:
        """Check and change the constructor's arguments; overridden by headway.compat."""
        return arguments

    # ------------------------------------------------------------------ prepare: Preparer

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, data loaders and schedulers; return them in the same order.

        Returns the object itself for a single argument, and a tuple for several. Objects of other
        types and already prepared objects are returned unchanged. Objects that another Accelerator
        has prepared are registered with this Accelerator.

        Args:
            args: torch objects, or instances of subclasses of torch's classes.
            device_placement: for each argument, whether to move it to `device`.

        Raises:
            UsageError: a model spans several devices, a scheduler's optimizer has not been
                prepared, or a loader cannot be sharded.

        Examples:
            >>> model = torch.nn.Linear(2, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> loader = torch.utils.data.DataLoader(torch.ones(6, 2), batch_size=4)
            >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            >>> [model(batch).shape for batch in loader]
            [torch.Size([4, 1]), torch.Size([2, 1])]
        """
        return self.parts.preparer.prepare(*args, device_placement=device_placement)

    def prepare_model(
        self,
        model: torch.nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> Any:
        """Prepare one model, as `prepare` does; other types raise UsageError.

        Args:
            device_placement: whether to move the model to `device`; None uses the Accelerator's
                setting.
            evaluation_mode: prepare the model for inference: mixed precision and compilation
                apply, but gradients are not synchronized.

        Examples:
            >>> teacher = accelerator.prepare_model(torch.nn.Linear(2, 1), evaluation_mode=True)
            >>> teacher(torch.ones(4, 2)).shape
            torch.Size([4, 1])
        """
        return self.parts.preparer.prepare(
            model, device_placement=[device_placement], trains=not evaluation_mode
        )

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> Any:
        """Prepare one optimizer, as `prepare` does; other types raise UsageError.

        `device_placement` has no effect: an optimizer's state is on the device of its parameters.
        """
        return self.parts.preparer.prepare(optimizer, device_placement=[device_placement])

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None
    ) -> Any:
        """Prepare one data loader, as `prepare` does; other types raise UsageError.

        `device_placement` controls whether batches are moved to `device`, as in `prepare_model`.

        Examples:
            >>> loader = torch.utils.data.DataLoader(range(3), batch_size=2)
            >>> [batch.tolist() for batch in accelerator.prepare_data_loader(loader)]
            [[0, 1], [2]]
        """
        return self.parts.preparer.prepare(data_loader, device_placement=[device_placement])

    def prepare_scheduler(self, scheduler: LRScheduler | PreparedScheduler) -> Any:
        """Prepare one scheduler, as `prepare` does; other types raise UsageError.

        Examples:
            >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
            >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
            >>> optimizer = accelerator.prepare_optimizer(optimizer)  # before its scheduler
            >>> scheduler = accelerator.prepare_scheduler(scheduler)
            >>> optimizer.step(), scheduler.step(), scheduler.get_last_lr()
            (None, None, [0.05])
        """
        return self.parts.preparer.prepare(scheduler)

    def free_memory(self, *objects: Any) -> list[None]:
        """Release all prepared objects and their memory, and reset gradient accumulation.

        Returns one None per object in `objects`. `clear` is an alias of this method.

        Examples:
            >>> model, batch = accelerator.prepare(torch.nn.Linear(2, 1)), torch.ones(4, 2)
            >>> model, batch = accelerator.free_memory(model, batch)
            >>> accelerator.clear()
            []
        """
        self.parts.training.forget()
        return [None] * len(objects)

    clear = free_memory

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a loader that skips the first batches of each epoch.

        See `headway.skip_first_batches`.

        Examples:
            >>> loader = accelerator.prepare(torch.utils.data.DataLoader(range(6), batch_size=2))
            >>> [batch.tolist() for batch in accelerator.skip_first_batches(loader, 2)]
            [[4, 5]]
        """
        return skip_first_batches(dataloader, num_batches)

    @property
    def device_placement(self) -> bool:
        """Whether models and batches are moved to `device`."""
        return self.parts.preparer.device_placement

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """Whether schedulers step only after an optimizer step."""
        return self.parts.preparer.step_scheduler_with_optimizer

    @property
    def rng_types(self) -> list[RNGType]:
        """The random generators whose states rank 0 broadcasts before each epoch of a loader."""
        return self.parts.preparer.rng_types

    @rng_types.setter
    def rng_types(self, value: list[RNGType]) -> None:
        self.parts.preparer.rng_types = value

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """The options for sharding data; changes apply to loaders that are prepared afterwards."""
        return self.parts.preparer.data

    @dataloader_config.setter
    def dataloader_config(self, value: DataLoaderConfiguration) -> None:
        self.parts.preparer.data = value

    @property
    def even_batches(self) -> bool:
        """See `DataLoaderConfiguration`; can be assigned."""
        return self.parts.preparer.data.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.parts.preparer.data.even_batches = value

    @property
    def split_batches(self) -> bool:
        """See `DataLoaderConfiguration`."""
        return self.parts.preparer.data.split_batches

    # ------------------------------------------------------------------ train: Steps

    def autocast(
        self, autocast_handler: AutocastKwargs | None = None
    ) -> AbstractContextManager[Any]:
        """Return an autocast context for operations outside a prepared model.

        `autocast_handler` overrides the Accelerator's handler; `AutocastKwargs(enabled=False)`
        switches back to fp32.

        Examples:
            >>> accelerator = Accelerator(cpu=True, mixed_precision="bf16")
            >>> with accelerator.autocast():
            ...     product = torch.ones(2, 3) @ torch.ones(3, 4)
            >>> product.dtype
            torch.bfloat16
        """
        return self.parts.training.precision.autocast(autocast_handler)

    def backward(
        self, loss: torch.Tensor, *, num_tokens: int | torch.Tensor | None = None, **kwargs: Any
    ) -> None:
        """Accumulate the gradients of `loss` / gradient_accumulation_steps.

        Args:
            loss: the mean over the micro-batch; with `num_tokens`, the sum over its tokens.
            num_tokens: number of tokens summed in `loss` on this rank, at least 0. The gradients of
                an optimizer step are then those of the mean loss over the tokens of all its
                micro-batches and ranks, as for one large batch. With gradient accumulation, pass
                `num_tokens` and call backward exactly once in every micro-batch of the step.
            kwargs: passed to `loss.backward()`.

        Raises:
            UsageError: `num_tokens` was passed with a loss of several elements, with a `gradient`,
                under `no_sync()`, or with several backward passes per accumulated micro-batch.

        Examples:
            >>> weight = torch.nn.Parameter(torch.ones(4))
            >>> accelerator.backward((3 * weight).sum(), num_tokens=4)
            >>> weight.grad
            tensor([0.7500, 0.7500, 0.7500, 0.7500])
        """
        try:
            self.parts.steps.backward(loss, num_tokens, kwargs)
        except (AttributeError, TypeError, RuntimeError):
            check_call(Accelerator.backward, (self, loss), {"num_tokens": num_tokens})
            check_backward(loss, kwargs)
            raise

    def accumulate(self, *models: torch.nn.Module) -> AbstractContextManager[Any]:
        """Start a micro-batch, and return a context for its forward and backward pass.

        An optimizer step of `models` is complete after n = `gradient_accumulation_steps`
        micro-batches, or at the last micro-batch of a loader. By default, `models` are all prepared
        models. The last step of an epoch may have fewer micro-batches; each still has weight 1/n.

        Examples:
            >>> accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
            >>> for _ in range(4):
            ...     with accelerator.accumulate():
            ...         accelerator.sync_gradients
            False
            True
            False
            True
        """
        return self.parts.steps.accumulate(models)

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which the gradients of `model` are not synchronized across ranks."""
        training = self.parts.training
        return training.accumulation.refusing_tokens(training.strategy.no_sync(model))

    def trigger_sync_in_backward(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which a backward pass synchronizes gradients despite `no_sync`.

        Use it for the last of several backward passes under `no_sync(model)`, to synchronize the
        gradients of all these passes. It has no effect with one rank.

        Examples:
            >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
            >>> with accelerator.no_sync(model):
            ...     first, second = (model(torch.ones(4, 2)).mean() for _ in range(2))
            ...     accelerator.backward(first)
            ...     with accelerator.trigger_sync_in_backward(model):
            ...         accelerator.backward(second)
        """
        return self.parts.training.strategy.sync_in_backward(model)

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Allow ranks to have different numbers of batches; see torch's Join.

        Args:
            joinables: prepared models, and other `torch.distributed.algorithms.Joinable` objects.
            even_batches: overrides the Accelerator's setting inside the block. With False, no
                samples are repeated, so ranks may have different numbers of batches.

        Examples:
            >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
            >>> with accelerator.join_uneven_inputs([model], even_batches=False):
            ...     accelerator.backward(model(torch.ones(3, 2)).mean())
        """
        return self.parts.steps.join_uneven_inputs(joinables, even_batches, usual=self.even_batches)

    def set_trigger(self) -> None:
        """Make the next `check_trigger()` return True on all ranks; can be called on any rank."""
        self.parts.steps.is_triggered = True

    def check_trigger(self) -> bool:
        """Return whether any rank has called `set_trigger()` since the last check.

        Every rank must call this.

        Examples:
            >>> accelerator.set_trigger()
            >>> accelerator.check_trigger(), accelerator.check_trigger()
            (True, False)
        """
        return self.parts.steps.check_trigger()

    def unscale_gradients(
        self, optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None
    ) -> None:
        """Divide gradients by the fp16 loss scale, once per step; a no-op in other precisions.

        `optimizer` is one optimizer or several; None means all prepared optimizers.

        Examples:
            >>> accelerator.unscale_gradients()  # before the script reads or changes gradients
        """
        self.parts.steps.unscale_gradients(optimizer)

    def clip_grad_norm_(
        self, parameters: Tensors, max_norm: float, norm_type: float | Literal["inf"] = 2
    ) -> torch.Tensor:
        """Clip the gradient norm unless gradients are accumulating; return the original norm.

        Args:
            max_norm: the maximum total norm of the gradients.
            norm_type: the p of the p-norm; `inf` for the infinity norm.

        Returns:
            The norm before clipping, as a tensor of shape []; fp16 gradients are unscaled first.

        Examples:
            >>> weight = torch.nn.Parameter(torch.ones(4))
            >>> accelerator.backward((3 * weight).sum())
            >>> accelerator.clip_grad_norm_([weight], max_norm=1.0)
            tensor(6.)
            >>> weight.grad
            tensor([0.5000, 0.5000, 0.5000, 0.5000])
        """
        return self.parts.steps.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Tensors, clip_value: float) -> None:
        """Clip each gradient to [-clip_value, clip_value], unless gradients are accumulating.

        Examples:
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> accelerator.backward((3 * weight).sum())
            >>> accelerator.clip_grad_value_(weight, clip_value=0.5)
            >>> weight.grad
            tensor([0.5000, 0.5000])
        """
        self.parts.steps.clip_grad_value_(parameters, clip_value)

    def profile(
        self, profile_handler: ProfileKwargs | None = None
    ) -> AbstractContextManager[torch.profiler.profile]:
        """Profile the block; with `output_trace_dir`, write the traces of all ranks afterwards.

        The context yields a `torch.profiler.profile`; if it has a schedule, call `profiler.step()`
        after each step. `profile_handler` overrides the ProfileKwargs in `kwargs_handlers`.

        Examples:
            >>> from headway import ProfileKwargs
            >>> with accelerator.profile(ProfileKwargs(activities=["cpu"])) as profiler:
            ...     product = torch.ones(2, 3) @ torch.ones(3, 4)
            >>> "aten::mm" in {event.key for event in profiler.key_averages()}
            True
        """
        handler = profile_handler or self.parts.handlers[ProfileKwargs]
        return profiled(handler, self.process_index)

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-batch synchronizes gradients and steps the optimizers.

        Scripts that implement their own accumulation may set this property.
        """
        return self.parts.training.accumulation.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.parts.training.accumulation.sync_gradients = value

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether an optimizer skipped its last step because fp16 gradients overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self.parts.training.optimizers)

    @property
    def gradient_accumulation_steps(self) -> int:
        """The number of micro-batches per optimizer step; can be assigned."""
        return self.parts.training.accumulation.steps

    @gradient_accumulation_steps.setter
    @checked
    def gradient_accumulation_steps(self, steps: int) -> None:
        self.parts.training.set_accumulation_steps(steps)

    @property
    def mixed_precision(self) -> str:
        """The precision in use: `no`, `fp16` or `bf16`."""
        return self.parts.training.precision.name

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The fp16 gradient scaler; None in other precisions."""
        return self.parts.training.precision.scaler

    # ------------------------------------------------------------------ models: Training

    def unwrap_model(
        self,
        model: torch.nn.Module,
        keep_fp32_wrapper: bool = True,
        keep_torch_compile: bool = True,
    ) -> torch.nn.Module:
        """Return the model that was passed to `prepare`, without its distributed wrapper.

        See `headway.utils.extract_model_from_parallel`.

        Examples:
            >>> model = torch.nn.Linear(2, 1)
            >>> accelerator.unwrap_model(accelerator.prepare(model)) is model
            True
        """
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    def empty_init(self) -> AbstractContextManager[Any]:
        """Return a context in which models are created without allocating their weights.

        This has an effect only with strategies that shard models: `prepare` then initializes one
        unit at a time by calling its modules' `reset_parameters()`, or uses weights that rank 0 has
        already loaded. With other strategies, models are created as usual.

        Examples:
            >>> with accelerator.empty_init():
            ...     model = torch.nn.Linear(2, 1)
            >>> accelerator.prepare(model).weight.shape
            torch.Size([1, 2])
        """
        return self.parts.training.strategy.empty_init()

    @contextmanager
    def unsharded(self, model: torch.nn.Module) -> Iterator[torch.nn.Module]:
        """Return a context that yields the unwrapped model with its full, unsharded weights.

        If the model is sharded, every rank must enter the context, and changes made to the weights
        inside it are discarded.

        Examples:
            >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
            >>> with accelerator.unsharded(model) as inner:
            ...     inner.weight.shape
            torch.Size([1, 2])
        """
        training = self.parts.training
        inner = training.inner(model, "unsharded(...)")
        with training.strategy.unsharded(inner):
            yield inner

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the full state dict of a model; every rank must call this.

        With `unwrap`, the keys are those of the unwrapped model.

        Examples:
            >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
            >>> list(accelerator.get_state_dict(model))
            ['weight', 'bias']
        """
        training = self.parts.training
        inner = training.inner(model, "get_state_dict(...)")
        state = training.strategy.state_dict(inner if unwrap else model)
        return original_names(state) if unwrap else state

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the weights of a model on rank 0; every rank must call this.

        The file names are those of Hugging Face libraries. The folder is created if necessary, and
        the files of an earlier save are removed from it.

        Args:
            max_shard_size: the maximum size of a file's tensors in bytes, or a string such as "5MB"
                (5 * 10**6 bytes) or "5MiB" (5 * 2**20 bytes). A larger tensor gets its own file.
            safe_serialization: write `model.safetensors` instead of `pytorch_model.bin`, which
                `torch.save` writes.

        Raises:
            UsageError: `max_shard_size` is not a size, `save_directory` is a file, or a weight is
                on the meta device.

        Examples:
            >>> from pathlib import Path
            >>> accelerator.save_model(accelerator.prepare(torch.nn.Linear(2, 1)), "weights")
            >>> [path.name for path in Path("weights").iterdir()]
            ['model.safetensors']
        """
        training = self.parts.training
        save_weights(
            training.strategy.weights_to_save(training.inner(model, "save_model(...)")),
            save_directory,
            max_shard_size,
            safe_serialization,
            writes=training.world.is_main,
        )

    def save(
        self, obj: Any, f: str | os.PathLike[str] | IO[bytes], safe_serialization: bool = False
    ) -> None:
        """Write `obj` atomically on rank 0; see `headway.utils.save`.

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
        """Save the full training state as a checkpoint, and return the checkpoint's folder.

        The checkpoint is committed once it is complete. It contains models, optimizers, schedulers,
        the loss scale, registered objects, the positions of prepared loaders, each rank's random
        number generators and, during gradient accumulation, each rank's gradients. An older
        checkpoint in the same folder is replaced atomically; other files in the folder are kept.

        Every rank must call it. Inside a loop over a loader, call it at the end of the body: state
        that changes later in the iteration is not saved. To write weights on one rank, use `save`.

        Args:
            output_dir: the checkpoint's folder, on a file system that all machines share. Ignored
                with `automatic_checkpoint_naming`, as in Accelerate.
            safe_serialization: has no effect; there is one format, which contains no pickles.
            allow_pickle: pickle the states of registered objects that contain anything other than
                values and tensors. `load_state` then needs `allow_pickle=True` as well.
            wait: with False, return once the state is copied to CPU memory, from which a thread
                writes it. The memory is reused for the next checkpoint. `wait_for_checkpoint`,
                `save_state`, `load_state`, `end_training` and the end of the script wait until the
                checkpoint is committed.

        Raises:
            UsageError: there is no folder to save to, or not every rank calls `save_state`.
            CheckpointError: a rank could not save, or the previous save with `wait=False` failed,
                in which case nothing is saved. All ranks raise it, and older checkpoints are kept.

        Examples:
            >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
            >>> folder = accelerator.save_state("runs/last", wait=False)
            >>> accelerator.wait_for_checkpoint()
            >>> accelerator.load_state(folder)
        """
        reject_unsupported(save_model_func_kwargs, (), "the script's save_state(...)")
        return self.parts.checkpoints.save_state(output_dir, allow_pickle=allow_pickle, wait=wait)

    def load_state(
        self,
        input_dir: Folder = None,
        load_kwargs: dict[str, Any] | None = None,
        *,
        allow_pickle: bool = False,
        strict: bool = True,
        map_location: Literal["cpu", "on_device"] | torch.device | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load a checkpoint written by `save_state`; the same objects must be prepared.

        The checkpoint is verified and compared with all objects before any of them changes. After a
        restart, the checksums of this launch's checkpoints are not compared again.
        A loader that was saved in the middle of an epoch resumes at its next sample. If the number
        of ranks differs from the saved run's, random number generators are not restored.

        Args:
            input_dir: the checkpoint's folder. With `automatic_checkpoint_naming`, None loads the
                newest checkpoint.
            load_kwargs: unsupported; must be empty.
            allow_pickle: load registered objects that were pickled, which can run arbitrary code.
            strict: with False, load only the weights that both model and checkpoint contain.
            map_location: has no effect; state is loaded to the device of the live objects.

        Raises:
            UsageError: there is no folder to load from, or a `load_state_dict` failed after some
                objects had changed; the training run must then be restarted.
            CheckpointError: the checkpoint is missing, damaged, malicious or incompatible. All
                ranks raise it before any object changes, except for changes made by a hook.
        """
        unsupported = {**(load_kwargs or {}), **load_model_func_kwargs}
        reject_unsupported(unsupported, (), "the script's load_state(...)")
        self.parts.checkpoints.load_state(input_dir, allow_pickle=allow_pickle, strict=strict)

    def wait_for_checkpoint(self) -> None:
        """Save the checkpoint that `checkpoint` scheduled, if any, and wait until it is written.

        Raises:
            CheckpointError: a rank could not save; raised on all ranks. Older checkpoints are kept.
        """
        self.parts.checkpoints.wait_for_checkpoint()

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Include the state of these objects, taken from rank 0, in checkpoints.

        All ranks load rank 0's state: do not register an object whose state differs between ranks.
        In the first save, a note names such objects.

        Args:
            objects: must have `load_state_dict(state)` and `state_dict()`, which returns tensors,
                numbers, strings, and lists, tuples and dicts of these.

        Raises:
            UsageError: an object lacks these methods, in which case no object is registered.

        Examples:
            >>> average = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(2, 1))
            >>> accelerator.register_for_checkpointing(average)
        """
        self.parts.checkpoints.register_for_checkpointing(*objects)

    def register_save_state_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Register a hook that `save_state` calls on every rank before saving.

        Args:
            hook: called as `hook(models, weights, output_dir)` with the unwrapped models, their
                state dicts, and the folder in which the checkpoint is being written. The hook may
                add files to the folder. The state dicts that remain in the list `weights` on rank 0
                are saved. If models are sharded, the same keys must remain on every rank.

        Returns:
            A handle whose `remove()` removes the hook.

        Examples:
            >>> from pathlib import Path
            >>> def note(models, weights, output_dir):
            ...     _ = (Path(output_dir) / "note.txt").write_text(f"{len(models)} models")
            >>> handle = accelerator.register_save_state_pre_hook(note)
        """
        return self.parts.checkpoints.register_save_state_pre_hook(hook)

    def register_load_state_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Register a hook that `load_state` calls on every rank before loading.

        Args:
            hook: called as `hook(models, input_dir)` with the unwrapped models and the folder of
                the verified checkpoint. Models that the hook removes from the list are not loaded.

        Returns:
            A handle whose `remove()` removes the hook.

        Examples:
            >>> handle = accelerator.register_load_state_pre_hook(lambda models, input_dir: None)
            >>> handle.remove()
        """
        return self.parts.checkpoints.register_load_state_pre_hook(hook)

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """The project's folders, checkpoint naming and `total_limit`."""
        return self.parts.checkpoints.project

    @property
    def project_dir(self) -> Folder:
        """The folder for the files that this run writes."""
        return self.project_configuration.project_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next automatically named checkpoint."""
        return self.project_configuration.iteration

    # ------------------------------------------------------------------ interruptions: Preemption

    def resume(self, *, fall_back: bool = False, allow_pickle: bool = False) -> ResumedRun:
        """Resume from the newest checkpoint in the project folder, if any, and log its path.

        Call this on every rank after `prepare` and `register_for_checkpointing`. It considers the
        checkpoints that `checkpoint` and `save_state` wrote to `project_dir` and to the subfolder
        `checkpoints`.

        Args:
            fall_back: if the newest checkpoint is damaged, resume from the newest intact one.
            allow_pickle: as in `load_state`.

        Raises:
            UsageError: there is no project folder.
            CheckpointError: the newest checkpoint is damaged or incompatible, or the path in
                `Accelerator(resume_from=...)` or `headway launch --resume` is not a checkpoint.
        """
        return self.parts.preemption.resume(fall_back=fall_back, allow_pickle=allow_pickle)

    def checkpoint(
        self, every: int | str | None = None, *, allow_pickle: bool = False, wait: bool = True
    ) -> str | None:
        """Save if a save is due; save and exit if the job must stop.

        Call this on every rank at the end of the loop body, in each iteration. It is cheap when no
        save is due, and a no-op between the micro-batches of a step. A job must stop after a rank
        or the launcher receives SIGTERM, SIGUSR1, SIGHUP (closed terminal), SIGXCPU (CPU time) or
        Ctrl-C, and at its `--time-limit`. All ranks then raise SystemExit after the same step, with
        code 75 ("saved, restart me"), or 130 after Ctrl-C. Signals are handled from the first call.

        Checkpoints are saved between batches. In a loop over a prepared loader, a checkpoint is
        saved when the loop requests its next batch; after the last batch, it is saved when the next
        epoch starts, or in `wait_for_checkpoint` or `end_training`. Outside of such loops,
        checkpoints are saved immediately.

        Checkpoints have names such as `checkpoints/step_00000100` in the project folder. The newest
        `total_limit` checkpoints are kept, or 2 if the project's configuration sets no limit.

        Args:
            every: a number of optimizer steps, or a duration such as "10m" or "1h30m"; None saves
                on every call, even between micro-batches. "auto" saves at Young's interval,
                sqrt(2 * median duration of the last 3 saves * mean time between failures); until
                the first failure of this training run, the mean is taken to be 6 hours. The first
                save with "auto" is immediate, to measure its duration. A new run saves more often:
                after a tenth of its training time, but at least 20 durations of a save apart.
            allow_pickle: as in `save_state`.
            wait: with False, a thread writes while training continues, as in `save_state`. If the
                job must stop, `checkpoint` waits anyway.

        Returns:
            The folder of the checkpoint that was saved or is due.

        Raises:
            UsageError: there is no project folder, no optimizer has been prepared, `every` is
                invalid, or `resume` was called before `prepare`.
            CheckpointError: a rank could not save. All ranks raise it, and older checkpoints are
                kept. With `wait=False`, the next call that saves raises it. Catch it to continue
                training. It is also raised if the project folder contains checkpoints of an earlier
                run and this run has not loaded any of them.

        Examples:
            >>> accelerator = Accelerator(cpu=True, project_dir="runs/digits")
            >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
            >>> run = accelerator.resume()
            >>> run.epoch, run.step, run.samples
            (0, 0, 0)
            >>> accelerator.checkpoint()
            'runs/digits/checkpoints/step_00000000'
            >>> accelerator.end_training()
        """
        if {type(allow_pickle), type(wait)} != {bool}:  # skips check_call in the common case
            check_call(Accelerator.checkpoint, (), {"allow_pickle": allow_pickle, "wait": wait})
        return self.parts.preemption.checkpoint(every, allow_pickle=allow_pickle, wait=wait)

    @property
    def should_stop(self) -> bool:
        """Whether the job must stop; for loops that cannot call `checkpoint(every=...)`.

        The value is the same on all ranks, and every rank must read it the same number of times.
        If it is True, `checkpoint()` saves and exits.

        Examples:
            >>> accelerator = Accelerator(cpu=True, project_dir="runs/gpt")
            >>> for round in range(3):
            ...     if accelerator.should_stop:
            ...         accelerator.checkpoint()
            >>> accelerator.end_training()
        """
        return self.parts.preemption.should_stop

    # ------------------------------------------------------------------ trackers: Tracking

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        """Start a run with the trackers of `log_with`, after finishing the active run, if any.

        Args:
            project_name: the name of the project or experiment in the trackers.
            config: the hyperparameters, by name.
            init_kwargs: keyword arguments for the trackers' constructors, by tracker name; entries
                for trackers that are not in use are ignored.

        Raises:
            UsageError: `init_kwargs` contains the name of an unknown tracker.

        Examples:
            >>> accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir="runs")
            >>> accelerator.init_trackers("digits", config={"lr": 0.1})
            >>> accelerator.log({"loss": torch.tensor(0.5), "test": {"accuracy": 0.9}}, step=1)
            >>> accelerator.get_tracker("jsonl").path.parent.as_posix()
            'runs/digits'
            >>> accelerator.end_training()
        """
        self.parts.tracking.init_trackers(project_name, config, init_kwargs)

    def log(
        self,
        values: dict[str, Any],
        step: int | None = None,
        log_kwargs: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        """Log `values` to all trackers.

        Args:
            values: numbers, single-element tensors and strings by name, or nested mappings of
                these. Some trackers support other types.
            step: the training step of the values.
            log_kwargs: keyword arguments for the trackers' `log`, by tracker name.

        Raises:
            UsageError: `log_kwargs` contains the name of an unknown tracker.
        """
        self.parts.tracking.log(values, step, log_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return the tracker `name`; with `unwrap`, the wrapped object, such as wandb's run.

        On ranks where the tracker is not active, or without `log_with`, returns a `NoTracker`,
        which is falsy and whose attributes and methods do nothing.

        Raises:
            UsageError: `log_with` does not include the tracker, or `init_trackers` was not called.
        """
        return self.parts.tracking.get_tracker(name, unwrap)

    @property
    def log_with(self) -> list[Chosen]:
        """The requested trackers: their names, or instances created by the script."""
        return self.parts.tracking.log_with

    @property
    def trackers(self) -> list[GeneralTracker]:
        """The active trackers; on ranks other than 0, only those that run on every rank."""
        return self.parts.tracking.trackers

    @property
    def logging_dir(self) -> Folder:
        """The folder in which trackers write their files."""
        return self.project_configuration.logging_dir

    # ------------------------------------------------------------------ all ranks: collectives

    def gather(self, tensor: Any) -> Any:
        """Return the tensors of all ranks, concatenated along dimension 0 in rank order.

        The result has no gradients. See `headway.utils.gather`; the methods below are also named
        like functions in that module.

        Examples:
            >>> accelerator.gather(torch.tensor([0.5, 0.25]))
            tensor([0.5000, 0.2500])
            >>> accelerator.reduce(torch.tensor([1.0, 2.0]), "mean")
            tensor([1., 2.])
            >>> accelerator.pad_across_processes(torch.ones(2, 3), dim=1).shape
            torch.Size([2, 3])
            >>> accelerator.broadcast(torch.tensor([1, 2]), from_process=0)
            tensor([1, 2])
        """
        return collectives.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather results for the samples of the current batch in dataset order, without duplicates.

        Call this inside the loop over a prepared loader. Samples that were repeated to even out the
        batches are dropped. If the last batch is short, results with a full batch's number of rows
        (`loss.repeat(batch_size)`) are truncated to the last batch's size. After the loop, results
        for all samples of the epoch are gathered rank by rank.

        Args:
            input_data: tensors with one row, or k rows, per sample of this rank's current batch;
                scalars; lists with one object per row; or tuples, mappings and dataclasses of
                these. After the loop, pass one row per sample of the epoch. With
                `even_batches=False`, ranks without a share of the last batch have left the loop.
                Its results are gathered from the remaining ranks, which include rank 0.
            use_gather_object: also gather tensors and lists of tensors as objects.

        Returns:
            The same nesting on every rank, with tensors of shape [rows of all ranks, ...], or
            [world size] for scalars, and lists of objects.

        Raises:
            UsageError: the data is of another kind, which `gather` or `gather_object` may support,
                or it is ambiguous whether results must be truncated.

        Examples:
            >>> loader = accelerator.prepare(torch.utils.data.DataLoader(range(3), batch_size=2))
            >>> [accelerator.gather_for_metrics(batch > 1) for batch in loader]
            [tensor([False, False]), tensor([True])]
        """
        return gather_for_metrics(input_data, use_gather_object)

    def reduce(self, tensor: Any, reduction: Reduction = "sum", scale: float = 1.0) -> Any:
        """Return the sum, mean or maximum of each tensor over all ranks, multiplied by `scale`."""
        return collectives.reduce(tensor, reduction, scale)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: float | bool = 0, pad_first: bool = False
    ) -> Any:
        """Pad each tensor along `dim` to the largest size on any rank."""
        return collectives.pad_across_processes(tensor, dim, pad_index, pad_first)

    def broadcast(self, tensor: Any, from_process: int = 0) -> Any:
        """Overwrite each tensor with its value on rank `from_process`, and return the data."""
        return collectives.broadcast(tensor, from_process)

    # ------------------------------------------------------------------ this rank: see Process

    @property
    def distributed_type(self) -> DistributedType:
        """The type of distributed setup."""
        return self.state.distributed_type

    @property
    def multi_device(self) -> bool:
        """Whether there are several ranks, each with its own GPU and a full model replica."""
        return self.distributed_type is DistributedType.MULTI_GPU

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded with `torch.distributed.fsdp.fully_shard`."""
        return self.parts.training.strategy.shards

    # ------------------------------------------------------------------ unsupported features

    # read by scripts written for Accelerate
    deepspeed_plugin = deepspeed_plugins = torch_tp_plugin = parallelism_config = None
    torch_device_mesh = fp8_backend = None
    fp8_enabled = has_lomo_optimizer = is_composable_parallelism_enabled = False

    # ------------------------------------------------------------------ finish

    def end_training(self) -> None:
        """Finish the run; call this last, on every rank.

        It waits for a checkpoint that is being written, regardless of signals; then it restores the
        signal handlers, finishes trackers (which also happens without this call), waits until the
        other ranks call this or have exited the script, and destroys the process group.

        Raises:
            UsageError: another rank is still training, or the ranks' weights differ. Nothing has
                been shut down.
            CheckpointError: the checkpoint could not be saved; everything else has been shut down.
        """
        compare_at_end(self.parts.training, has_split=self.has_split)
        with ExitStack() as ends:
            ends.callback(leave_world)
            ends.callback(self.parts.tracking.finish)
            ends.callback(self.parts.preemption.release)
            self.parts.checkpoints.close()
        process_record.mark_ended()

    if not TYPE_CHECKING:  # type checkers must report missing members

        def __getattr__(self, name: str) -> Any:
            from headway.migration.missing import raise_if_missing  # only then

            raise_if_missing(name, self)
            return object.__getattribute__(self, name)  # raises the original AttributeError
