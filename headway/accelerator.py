"""The object that training scripts use: every method names the part that does the work."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
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
from headway.distributed.handler import Handlers, KwargsHandler, check_call, checked, checks
from headway.distributed.process import Process
from headway.distributed.rng import RNGType
from headway.distributed.world import DistributedType, leave_world
from headway.history import own
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
from headway.trackers.tracker_group import RUNS_FILE, LogWith, Tracking
from headway.training.accumulation import GradientAccumulationPlugin
from headway.training.arguments import Arguments, reject_unsupported
from headway.training.connector import connect, log_overrides
from headway.training.metrics import gather_for_metrics
from headway.training.optimizer import PreparedScheduler
from headway.training.preparer import Preparer
from headway.training.profiling import ProfileKwargs, profiled
from headway.training.replicas import compare_at_end
from headway.training.steps import Steps, Tensors, check_backward
from headway.training.training import Training


class Parts(NamedTuple):
    """What an Accelerator consists of; each part owns its state, and knows those before it at most.

    For code that builds on Headway: other than the Accelerator's, these names may change.
    """

    training: Training
    preparer: Preparer
    steps: Steps
    tracking: Tracking
    checkpoints: Checkpointer
    preemption: Preemption
    handlers: Handlers


PartTypes = tuple[type[Preparer], Callable[[Arguments], Arguments]]
"""How a kind of Accelerator differs: what prepares objects, and which arguments it takes."""


@checks(but=("accumulate", "backward", "checkpoint", "log", "unwrap_model"))
class Accelerator(Process):
    """Prepare a training script for one process or many; names and meanings are Accelerate's.

    Under `headway launch` the launcher's settings apply; an argument given here overrides a profile
    or variable (one line on stderr says so) and may not contradict a flag. Under plain python or
    torchrun the device is the best one there, the precision `no`, the accumulation 1.

    Args:
        device_placement: move models and batches to `device`.
        split_batches: the loaders' batch_size is that of all ranks together, not of each.
        mixed_precision: `no`, `fp16`, `bf16`, or an instance of a Precision of your own.
        gradient_accumulation_steps: micro-batches in one optimizer step.
        cpu: use the CPU, even where there is a GPU.
        device: `auto`, `cpu`, `cuda`, `gpu` (cuda, or mps on a Mac), `mps` or `xpu`.
        dataloader_config: how prepared loaders shard their data.
        log_with: trackers, each a name (`jsonl`, `tensorboard`, `wandb`, `mlflow`, `trackio`), a
            LoggerType or an instance of a GeneralTracker; `all` is all installed.
        project_dir: the folder of the trackers' files and of checkpoints.
        project_config: a ProjectConfiguration: names of checkpoints, and how many are kept.
        resume_from: the checkpoint that `resume()` loads: "latest", its path, or the folder of a
            project, for its newest.
        seed: from 0 to 2**32 - 1, for a run that can be repeated: `set_seed(seed)` is called here,
            prepared loaders shuffle by it and the epoch (or by `data_seed`), and the random
            augmentation of a sample follows from it, the epoch and the sample's number alone,
            whatever rank, worker or restart loads it; see the page on checkpoints.
        global_batch_size: samples in an optimizer step. Prepared loaders get the batch size that
            this means for the ranks and `gradient_accumulation_steps` of the run.
        step_scheduler_with_optimizer: a scheduler's `step()` counts only after an optimizer step.
        gradient_accumulation_plugin: in place of `gradient_accumulation_steps`.
        rng_types: the random generators that rank 0 sends to all ranks at the start of each epoch
            of a prepared loader: `torch`, `cuda`, `xpu`, `generator` (those of samplers, which are
            always sent). None: `generator` alone.
        kwargs_handlers: settings for parts of torch, at most one of each kind:
            DistributedDataParallelKwargs, GradScalerKwargs, InitProcessGroupKwargs, AutocastKwargs,
            ProfileKwargs. One for a part that this run does not use has nothing to do.
        dynamo_backend: compile models with this backend of torch.compile, such as "inductor".
        dynamo_plugin: in place of `dynamo_backend`.
        strategy: how several ranks share a model: `ddp`, a copy each; `fsdp`, a part of each
            parameter; `hsdp`, parts on `shard_size` ranks, and copies of those; `auto` is ddp.
            Or an instance of a Strategy of your own.
        shard_size: ranks that hold the parts of one copy, with `hsdp`.
        wrap: the units that are gathered at a time: `auto` for the blocks that the model repeats,
            class names, or the smallest number of parameters.
        activation_checkpointing: compute activations of each unit again in the backward pass.
        cpu_offload: keep the parts of parameters, gradients and optimizer states on the CPU.
        forward_methods: names of methods that use weights, and do not call `forward()` alone, of
            models that ranks share; `generate` needs no mention.
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

        Examples of the methods start with `import torch` and `accelerator = Accelerator(cpu=True)`,
        on one rank.
    """

    part_types: PartTypes = (Preparer, lambda arguments: arguments)  # headway.compat has others

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
        given = Arguments.among(locals())
        if unsupported:
            reject_unsupported(unsupported, signature(Accelerator).parameters)
        make_preparer, accepted = self.part_types
        arguments = accepted(given)
        connected = connect(arguments)
        super().__init__(connected.world)
        training, project = connected.training, connected.project
        preparer = make_preparer(
            training,
            connected.data,
            device_placement=device_placement,
            step_scheduler_with_optimizer=step_scheduler_with_optimizer,
            rng_types=rng_types,
            seed=seed,
            forward_methods=forward_methods or (),
        )
        tracking = Tracking(connected.world.is_main, arguments.log_with, project)
        checkpoints = Checkpointer(
            training,
            project,
            began_at=connected.settings.run.began_at,
            beside={RUNS_FILE: tracking.run_ids},
        )
        self.parts = Parts(
            training,
            preparer,
            Steps(training),
            tracking,
            checkpoints,
            Preemption(checkpoints, tracking, connected.settings, self.end_training),
            connected.handlers,
        )
        self.state = share(
            connected.world, training.precision, connected.dynamo, connected.fsdp_plugin
        )
        self.gradient_state = share_accumulation(training.accumulation)
        log_overrides(connected, strategy)

    # ------------------------------------------------------------------ prepare: Preparer

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, data loaders and schedulers; return them in the same order.

        One argument gives the object itself, several a tuple. An object of another kind, or one
        that is prepared already, is returned as it is. What another Accelerator has prepared
        follows this one from now on.

        Args:
            args: torch's objects, or those of classes derived from torch's.
            device_placement: for each argument, whether it is moved to `device`.

        Raises:
            UsageError: a model is spread over several devices, a scheduler's optimizer has not been
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
        """Prepare one model, as `prepare` does; an object of another kind raises UsageError.

        Args:
            device_placement: whether it is moved to `device`; None is the Accelerator's setting.
            evaluation_mode: the model will not be trained: it computes in the precision and is
                compiled, but its ranks exchange nothing.

        Examples:
            >>> teacher = accelerator.prepare_model(torch.nn.Linear(2, 1), evaluation_mode=True)
            >>> teacher(torch.ones(4, 2)).shape
            torch.Size([4, 1])
        """
        preparer = self.parts.preparer
        make = partial(preparer.make_model, trains=not evaluation_mode)
        return preparer.prepare_object(make, model, device_placement)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> Any:
        """Prepare one optimizer, as `prepare` does; an object of another kind raises UsageError.

        `device_placement` has no effect: an optimizer's state is where its weights are.
        """
        preparer = self.parts.preparer
        return preparer.prepare_object(preparer.make_optimizer, optimizer, device_placement)

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None
    ) -> Any:
        """Prepare one data loader, as `prepare` does; an object of another kind raises UsageError.

        `device_placement` says whether batches are moved to `device`, as in `prepare_model`.

        Examples:
            >>> loader = torch.utils.data.DataLoader(range(3), batch_size=2)
            >>> [batch.tolist() for batch in accelerator.prepare_data_loader(loader)]
            [[0, 1], [2]]
        """
        preparer = self.parts.preparer
        return preparer.prepare_object(preparer.make_loader, data_loader, device_placement)

    def prepare_scheduler(self, scheduler: LRScheduler | PreparedScheduler) -> Any:
        """Prepare one scheduler, as `prepare` does; an object of another kind raises UsageError.

        Examples:
            >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
            >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
            >>> optimizer = accelerator.prepare_optimizer(optimizer)  # before its scheduler
            >>> scheduler = accelerator.prepare_scheduler(scheduler)
            >>> optimizer.step(), scheduler.step(), scheduler.get_last_lr()
            (None, None, [0.05])
        """
        preparer = self.parts.preparer
        return preparer.prepare_object(preparer.make_scheduler, scheduler)

    def free_memory(self, *objects: Any) -> list[None]:
        """Release all prepared objects and their memory, and restart gradient accumulation.

        Return a None for each of `objects`. `clear` is another name of this method.

        Examples:
            >>> model, batch = accelerator.prepare(torch.nn.Linear(2, 1)), torch.ones(4, 2)
            >>> model, batch = accelerator.free_memory(model, batch)
            >>> accelerator.clear()
            []
        """
        freed = [None] * len(objects)
        del objects
        self.parts.training.forget()
        return freed

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
        """Whether a scheduler's `step()` counts only after an optimizer step."""
        return self.parts.preparer.step_scheduler_with_optimizer

    @property
    def rng_types(self) -> list[RNGType]:
        """The random generators that all ranks get from rank 0 at each pass over a loader."""
        return self.parts.preparer.rng_types

    @rng_types.setter
    def rng_types(self, value: list[RNGType]) -> None:
        self.parts.preparer.rng_types = value

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """How loaders that are prepared from now on shard their data."""
        return self.parts.preparer.data

    @dataloader_config.setter
    def dataloader_config(self, value: DataLoaderConfiguration) -> None:
        self.parts.preparer.data = value

    @property
    def even_batches(self) -> bool:
        """See `DataLoaderConfiguration`; a script may change it."""
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
        """Return the context in which operations outside a prepared model use the precision.

        `autocast_handler` replaces the Accelerator's; `AutocastKwargs(enabled=False)` goes back to
        fp32.

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
        """Add the gradients of `loss` / gradient_accumulation_steps; `kwargs` go to backward().

        Args:
            loss: a mean over the micro-batch; with `num_tokens` the sum over its tokens.
            num_tokens: how many tokens of this rank `loss` is the sum of, 0 or more. The gradients
                of an optimizer step are then those of the mean over all tokens of all its
                micro-batches and ranks, as of one large batch. While gradients accumulate, all
                micro-batches of the step need it, each in its only backward pass.

        Raises:
            UsageError: `num_tokens` with a loss of several elements, with a `gradient`, under
                `no_sync()`, or, while gradients accumulate, for one of several backward passes of
                a micro-batch.

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
        """Start a micro-batch: every n-th, and the last of a loader, completes an optimizer step.

        The context that is returned is for the forward and backward pass of `models`, or of all
        prepared models. The last step of an epoch may have fewer than n micro-batches; each still
        counts 1/n.

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
        """Return a context in which gradients of `model` stay on their rank."""
        return self.parts.steps.no_sync(model)

    def trigger_sync_in_backward(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context whose backward pass exchanges gradients in spite of `no_sync`.

        For several forward passes under `no_sync(model)`, the backward pass of the last of which
        exchanges the gradients of all. It does nothing with one rank.

        Examples:
            >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
            >>> with accelerator.no_sync(model):
            ...     first, second = (model(torch.ones(4, 2)).mean() for _ in range(2))
            ...     accelerator.backward(first)
            ...     with accelerator.trigger_sync_in_backward(model):
            ...         accelerator.backward(second)
        """
        return self.parts.steps.trigger_sync_in_backward(model)

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Allow ranks to have different numbers of batches; see torch's Join.

        Args:
            joinables: prepared models, and other `torch.distributed.algorithms.Joinable`.
            even_batches: in the block, in place of the Accelerator's setting; with False each rank
                gets the batches that there are.

        Examples:
            >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
            >>> with accelerator.join_uneven_inputs([model], even_batches=False):
            ...     accelerator.backward(model(torch.ones(3, 2)).mean())
        """
        return self.parts.steps.join_uneven_inputs(joinables, even_batches, usual=self.even_batches)

    def set_trigger(self) -> None:
        """Make the next `check_trigger()` return True on all ranks; any rank may call this."""
        self.parts.steps.set_trigger()

    def check_trigger(self) -> bool:
        """Return whether any rank called `set_trigger()` since the last check. All must call it.

        Examples:
            >>> accelerator.set_trigger()
            >>> accelerator.check_trigger(), accelerator.check_trigger()
            (True, False)
        """
        return self.parts.steps.check_trigger()

    def unscale_gradients(
        self, optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None
    ) -> None:
        """Divide gradients by fp16's loss scale, once for each step; else there is nothing to do.

        `optimizer` is one or several, whose gradients they are; None means all that are prepared.

        Examples:
            >>> accelerator.unscale_gradients()  # before the script reads or changes gradients
        """
        self.parts.steps.unscale_gradients(optimizer)

    def clip_grad_norm_(
        self, parameters: Tensors, max_norm: float, norm_type: float | Literal["inf"] = 2
    ) -> torch.Tensor:
        """Clip the gradients' norm, unless gradients accumulate, and return what it was.

        Args:
            max_norm: the largest norm of all gradients together.
            norm_type: 2 is the Euclidean norm; `inf` the largest absolute value.

        Returns:
            The norm before, without fp16's loss scale; a tensor of shape [].

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
        """Clip each gradient to [-clip_value, clip_value], unless gradients accumulate.

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
        """Profile the block; with `output_trace_dir`, all ranks' traces are there at its end.

        The context gives a `torch.profiler.profile`; call its `step()` after each step where there
        is a schedule. `profile_handler` replaces the one in `kwargs_handlers`.

        Examples:
            >>> from headway import ProfileKwargs
            >>> with accelerator.profile(ProfileKwargs(activities=["cpu"])) as profiler:
            ...     product = torch.ones(2, 3) @ torch.ones(3, 4)
            >>> "aten::mm" in {event.key for event in profiler.key_averages()}
            True
        """
        handler = profile_handler or self.parts.handlers.or_default(ProfileKwargs)
        return profiled(handler, self.process_index)

    @property
    def sync_gradients(self) -> bool:
        """Whether gradients are due: optimizers step, and ranks exchange gradients.

        A script that accumulates by itself may change it.
        """
        return self.parts.training.accumulation.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.parts.training.accumulation.sync_gradients = value

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether an optimizer skipped its last step, because fp16 gradients overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self.parts.training.optimizers)

    @property
    def gradient_accumulation_steps(self) -> int:
        """The number of micro-batches in one optimizer step; a script may change it."""
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
        """What adapts fp16's loss scale; None in other precisions."""
        return self.parts.training.precision.scaler

    # ------------------------------------------------------------------ models: Training

    def unwrap_model(
        self,
        model: torch.nn.Module,
        keep_fp32_wrapper: bool = True,
        keep_torch_compile: bool = True,
    ) -> torch.nn.Module:
        """Return the model inside DistributedDataParallel or DataParallel, as it was prepared.

        See `headway.utils.extract_model_from_parallel`.

        Examples:
            >>> model = torch.nn.Linear(2, 1)
            >>> accelerator.unwrap_model(accelerator.prepare(model)) is model
            True
        """
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    def empty_init(self) -> AbstractContextManager[Any]:
        """Return a context in which models are made without memory for their weights.

        Only where the strategy shards them: `prepare` then initialises one unit after the other by
        the `reset_parameters()` of its modules, or takes what rank 0 has loaded since. With other
        strategies models are made as ever.

        Examples:
            >>> with accelerator.empty_init():
            ...     model = torch.nn.Linear(2, 1)
            >>> accelerator.prepare(model).weight.shape
            torch.Size([1, 2])
        """
        return self.parts.training.strategy.empty_init()

    @contextmanager
    def whole(self, model: torch.nn.Module) -> Iterator[torch.nn.Module]:
        """Return a context with the model as it was before `prepare`, whose weights are whole here.

        Where the model is sharded, every rank has to enter the context, and what is written to the
        weights in it is lost.

        Examples:
            >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
            >>> with accelerator.whole(model) as inner:
            ...     inner.weight.shape
            torch.Size([1, 2])
        """
        training = self.parts.training
        inner = training.inner(model, "whole(...)")
        with training.strategy.whole(inner):
            yield inner

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the full state of any model. Call it on every rank: each may hold a part of it.

        With `unwrap`, the names are those of the weights in the model itself, without wrappers.

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
        """Write the weights of any model on rank 0; every rank must call this.

        The files are those of Hugging Face libraries. Those of an earlier save into the same
        folder, which is created if need be, are removed.

        Args:
            max_shard_size: the size of a file's tensors, in bytes or such as "5MB" (10**6 bytes) or
                "5MiB" (2**20 bytes). A larger tensor gets its own file.
            safe_serialization: write `model.safetensors`, instead of `pytorch_model.bin` by
                torch.save.

        Raises:
            UsageError: `max_shard_size` is not a size, `save_directory` is a file, or a weight has
                no data (on the meta device).

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
            read_full=training.strategy.read_full,
            writes=training.world.is_main,
        )

    def save(
        self, obj: Any, f: str | os.PathLike[str] | IO[bytes], safe_serialization: bool = False
    ) -> None:
        """Write `obj` on rank 0, atomically: see `headway.utils.save`.

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
        """Save the whole training as a checkpoint; return its folder.

        It appears once it is complete, and holds models, optimizers, schedulers, the loss scale,
        registered objects, the positions of prepared loaders, and each rank's random number
        generators; inside of gradient accumulation also each rank's gradients. An older checkpoint
        at the same place is replaced in one step; other files in its folder stay.

        Every rank must call it; in a loop over a loader at the end of the body, as what follows
        there is not part of it. For weights that one rank writes by itself, see `save`.

        Args:
            output_dir: the folder that it becomes, on a disk that all machines share. With
                `automatic_checkpoint_naming` it has no effect, as in Accelerate: the name is not
                the script's to choose.
            safe_serialization: without effect; there is one format, and nothing in it is pickled.
            allow_pickle: pickle the states of registered objects that hold anything else than
                values and tensors. `load_state` then needs it, too.
            wait: False: return once the state is copied to the memory of the CPU, which is kept for
                the next one; a thread writes the checkpoint, which exists when
                `wait_for_checkpoint` returns, and none of it before. The next `save_state` or
                `load_state`, `end_training` and the end of the script wait, too.

        Raises:
            UsageError: there is no folder to save to, or not every rank calls it.
            CheckpointError: a rank could not save; raised on all, and older checkpoints remain. Or
                the one before, which was not waited for, could not be saved; then this one is not.

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
        """Resume the training that `save_state` saved; the same objects must be prepared.

        The checkpoint is verified in full, and compared with all objects; only then do they change.
        A loader whose epoch was not complete resumes at its next sample. With another number of
        ranks than the run that saved it, generators stay as they are.

        Args:
            input_dir: the folder of the checkpoint. None: the newest, with
                `automatic_checkpoint_naming`.
            load_kwargs: nothing that it could hold is needed.
            allow_pickle: load registered objects that were pickled, which can run any code.
            strict: False: load the weights that both a model and the checkpoint have.
            map_location: without effect: everything goes where the live objects are.

        Raises:
            UsageError: there is no folder to load from. Or a `load_state_dict` has failed, and some
                objects have changed: start the training again.
            CheckpointError: the checkpoint is missing, damaged or hostile, or does not fit; raised
                on all ranks, and no object has changed, except for what a hook may have done.
        """
        unsupported = {**(load_kwargs or {}), **load_model_func_kwargs}
        reject_unsupported(unsupported, (), "the script's load_state(...)")
        self.parts.checkpoints.load_state(input_dir, allow_pickle=allow_pickle, strict=strict)

    def wait_for_checkpoint(self) -> None:
        """Take the checkpoint that `checkpoint` has made due, and wait until the last is written.

        Raises:
            CheckpointError: a rank could not save it; raised on all, and older checkpoints remain.
        """
        self.parts.checkpoints.wait_for_checkpoint()

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Include these objects' states, as they are on rank 0, in checkpoints.

        Args:
            objects: each with `state_dict()`, which returns tensors, numbers, strings, and lists,
                tuples and dicts of these, and `load_state_dict(state)`.

        Raises:
            UsageError: some have no such methods, and are named; then none is registered.

        Examples:
            >>> average = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(2, 1))
            >>> accelerator.register_for_checkpointing(average)
        """
        self.parts.checkpoints.register_for_checkpointing(*objects)

    def register_save_state_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Make every `save_state` call `hook(models, weights, output_dir)` on every rank.

        Args:
            hook: gets the models as they were before `prepare`, their state dicts, and the folder
                in which the checkpoint is being written, to which it may add files. What it leaves
                in the list `weights` on rank 0 is saved. If models are sharded, it must leave the
                same names on every rank.

        Returns:
            A handle, whose `remove()` takes the hook away.

        Examples:
            >>> from pathlib import Path
            >>> def note(models, weights, output_dir):
            ...     _ = (Path(output_dir) / "note.txt").write_text(f"{len(models)} models")
            >>> handle = accelerator.register_save_state_pre_hook(note)
        """
        return self.parts.checkpoints.register_save_state_pre_hook(hook)

    def register_load_state_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Make every `load_state` call `hook(models, input_dir)` on every rank before it loads.

        Args:
            hook: gets the models as they were before `prepare`, and the folder of the checkpoint,
                which has been verified. The models that it removes from the list are not loaded.

        Returns:
            A handle, whose `remove()` takes the hook away.

        Examples:
            >>> handle = accelerator.register_load_state_pre_hook(lambda models, input_dir: None)
            >>> handle.remove()
        """
        return self.parts.checkpoints.register_load_state_pre_hook(hook)

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """Where trackers and checkpoints write, how these are named, and how many stay."""
        return self.parts.checkpoints.project

    @property
    def project_dir(self) -> Folder:
        """The folder of the files that this run writes."""
        return self.project_configuration.project_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next checkpoint, with automatic naming."""
        return self.project_configuration.iteration

    # ------------------------------------------------------------------ interruptions: Preemption

    def resume(self, *, fall_back: bool = False, allow_pickle: bool = False) -> ResumedRun:
        """Resume from the newest checkpoint of the project folder, if any; rank 0 logs which.

        Call it on every rank after `prepare` and `register_for_checkpointing`. The checkpoints that
        count are those of `checkpoint` and `save_state` in `project_dir` and in `checkpoints`
        below.

        Args:
            fall_back: if the newest is damaged, resume from the newest that is whole.
            allow_pickle: as in `load_state`.

        Raises:
            UsageError: there is no project folder.
            CheckpointError: the newest is damaged, or does not fit; or what
                `Accelerator(resume_from=...)` or `headway launch --resume` asks for is not a
                checkpoint.
        """
        return self.parts.preemption.resume(fall_back=fall_back, allow_pickle=allow_pickle)

    def checkpoint(
        self, every: int | str | None = None, *, allow_pickle: bool = False, wait: bool = True
    ) -> str | None:
        """Save when a save is due; save and exit when the job must stop.

        Call it on every rank at the end of the loop's body, in each iteration: where nothing is due
        it costs next to nothing, and between the micro-batches of a step it does nothing. A job
        must stop after SIGTERM, SIGUSR1, SIGHUP (the terminal is closed) or Ctrl-C to one of the
        ranks or to the launcher, and at its `--time-limit`. Then all ranks leave after the same
        step, by SystemExit with code 75 ("saved, run me again"); after Ctrl-C with 130. Signals are
        noted from the first call on.

        It lies between two batches: in a loop over a prepared loader a checkpoint that is due is
        taken, and the job left, when the loop asks for its next batch; after the last batch when
        the next epoch begins, by `wait_for_checkpoint` or `end_training`. Elsewhere at once.

        A checkpoint is `checkpoints/step_00000100` in the project folder. The newest `total_limit`
        of this kind stay, or 2 if the project's configuration has no limit.

        Args:
            every: optimizer steps ("every 100th": 100), or a duration such as "10m" or "1h30m";
                None saves once, between micro-batches as well.
            allow_pickle: as in `save_state`.
            wait: False: as in `save_state`, a thread writes while training continues. When the job
                must stop, the call waits all the same.

        Returns:
            The folder of the checkpoint that was saved or is due.

        Raises:
            UsageError: there is no project folder, no optimizer has been prepared, `every` is
                neither a number of steps nor a duration, or `resume` came before `prepare`.
            CheckpointError: a rank could not save; raised on all, and older checkpoints remain.
                With `wait=False` by the next call that saves. A script that is to train on catches
                it. Or the project folder has checkpoints of an earlier run, and this one has loaded
                none.

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
        if {type(allow_pickle), type(wait)} != {bool}:  # as fast as can be
            check_call(Accelerator.checkpoint, (), {"allow_pickle": allow_pickle, "wait": wait})
        return self.parts.preemption.checkpoint(every, allow_pickle=allow_pickle, wait=wait)

    @property
    def should_stop(self) -> bool:
        """Whether the job has to stop; for loops in which `checkpoint(every=...)` has no place.

        Every rank must ask equally often, and gets the same answer. `checkpoint()` then saves and
        leaves.

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
        """Start a run with the trackers of `log_with`; an active run is finished first.

        Args:
            project_name: what the trackers call the project or experiment.
            config: the hyperparameters, by name.
            init_kwargs: for each tracker's name, keywords for its constructor; those of trackers
                that are not used are ignored.

        Raises:
            UsageError: `init_kwargs` has a name that no tracker has.

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
            values: numbers and texts by name; tensors of one number are numbers, and mappings
                groups of them. Trackers differ in what else they take.
            step: the training step that they belong to.
            log_kwargs: for each tracker's name, keywords for its `log`.

        Raises:
            UsageError: `log_kwargs` has a name that no tracker has.
        """
        self.parts.tracking.log(values, step, log_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return the tracker `name` of the run; with `unwrap` what it wraps, such as wandb's run.

        On ranks that do not call it, and where `log_with` was not given, it is a `NoTracker`, whose
        attributes and methods do nothing, and which is false.

        Raises:
            UsageError: `log_with` has no such tracker, or `init_trackers` was not called.
        """
        return self.parts.tracking.get_tracker(name, unwrap)

    @property
    def log_with(self) -> list[Chosen]:
        """The trackers that were asked for: names, and instances of the script's."""
        return self.parts.tracking.log_with

    @property
    def trackers(self) -> list[GeneralTracker]:
        """Those of the run; on other ranks than 0 only those that every rank calls."""
        return self.parts.tracking.trackers

    @property
    def logging_dir(self) -> Folder:
        """The folder below which trackers write their files."""
        return self.project_configuration.logging_dir

    # ------------------------------------------------------------------ all ranks: collectives

    def gather(self, tensor: Any) -> Any:
        """Return the tensors of all ranks, joined along dimension 0 in the order of the ranks.

        See `headway.utils.gather`, and the functions there of the names below.

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
        """Gather results for samples of the current batch, without repeats, in the data's order.

        Call it inside the loop over a prepared loader. Samples that were repeated to give all ranks
        equally many are dropped. As many rows as a full batch has are cut to the last batch
        (`loss.repeat(batch_size)`), or refused where they may be several for each sample. After a
        pass, the results for all its samples are gathered rank by rank.

        Args:
            input_data: tensors with one row, or k rows, for each sample of this rank's last batch,
                or one for each of the whole pass after its loop; scalars; lists of objects with as
                many entries; or tuples, mappings and dataclasses of these. With
                `even_batches=False` the ranks without a part of the last batch are not in the loop
                any more: its results are gathered among the others, of which rank 0 is always one.
            use_gather_object: gather tensors and lists of tensors as objects, too.

        Returns:
            The same nesting on every rank, with tensors of shape [rows of all ranks, ...], of shape
            [world size] for scalars, and lists of objects.

        Raises:
            UsageError: there is something else, which `gather` or `gather_object` gathers.

        Examples:
            >>> loader = accelerator.prepare(torch.utils.data.DataLoader(range(3), batch_size=2))
            >>> [accelerator.gather_for_metrics(batch > 1) for batch in loader]
            [tensor([False, False]), tensor([True])]
        """
        return gather_for_metrics(input_data, use_gather_object)

    def reduce(self, tensor: Any, reduction: Reduction = "sum", scale: float = 1.0) -> Any:
        """Return the sum, mean or maximum over ranks of each tensor, times `scale`."""
        return collectives.reduce(tensor, reduction, scale)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: float | bool = 0, pad_first: bool = False
    ) -> Any:
        """Pad each tensor along `dim` to the largest size that any rank has there."""
        return collectives.pad_across_processes(tensor, dim, pad_index, pad_first)

    def broadcast(self, tensor: Any, from_process: int = 0) -> Any:
        """Overwrite each tensor by that of rank `from_process`, and return it."""
        return collectives.broadcast(tensor, from_process)

    # ------------------------------------------------------------------ this rank: see Process

    @property
    def distributed_type(self) -> DistributedType:
        """How the ranks work together."""
        return self.state.distributed_type

    @property
    def multi_device(self) -> bool:
        """Whether there are several ranks, each with a GPU of its own and the whole model."""
        return self.distributed_type is DistributedType.MULTI_GPU

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded, by `torch.distributed.fsdp.fully_shard`."""
        return self.parts.training.strategy.shards

    # ------------------------------------------------------------------ as the script has set it

    deepspeed_plugin = None  # what scripts written for Accelerate look at

    deepspeed_plugins = torch_tp_plugin = parallelism_config = torch_device_mesh = fp8_backend = (
        None
    )
    fp8_enabled = has_lomo_optimizer = is_composable_parallelism_enabled = False

    # ------------------------------------------------------------------ the end

    def end_training(self) -> None:
        """End what this run has started, in this order; call it last, on every rank.

        A checkpoint that is being written is waited for, whatever signals come; then they do what
        they did before; trackers are finished, as they are without this call; the process group
        ends. Other ranks are waited for, until they call this or have left the script.

        Raises:
            UsageError: another rank trains on, or has other weights; nothing is ended.
            CheckpointError: the checkpoint could not be saved; all else is ended.
        """
        compare_at_end(self.parts.training, has_split=self.has_split)
        with ExitStack() as ends:
            ends.callback(leave_world)
            ends.callback(self.parts.tracking.finish)
            ends.callback(self.parts.preemption.release)
            self.parts.checkpoints.close()
        own.note_end_of_training()

    if not TYPE_CHECKING:  # a type checker knows every member that there is

        def __getattr__(self, name: str) -> Any:
            from headway.migration.topics import refuse_member  # only for what is missing

            refuse_member(name, self)
            return object.__getattribute__(self, name)  # raises what it raised before
