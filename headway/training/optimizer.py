"""Optimizers and schedulers that respect gradient accumulation, and their hyperparameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.optim.lr_scheduler import LRScheduler

from headway.data.script_loaders import AttributeProxy
from headway.distributed.collectives import reduce
from headway.distributed.world import rank_and_size
from headway.errors import Code, UsageError, WrongType
from headway.ipc.progress import Progress, process_progress
from headway.precision.precision import Precision
from headway.state import AcceleratorState, GradientState
from headway.training.accumulation import Accumulation

Groups = Sequence[Mapping[str, Any]]
"""Hyperparameters of each parameter group, or of a scheduler and its inner schedulers."""

_PLAIN = (bool, int, float, str, type(None))
_PROGRESS = ("last_epoch", "best", "base_lrs", "last_lr")  # or derived from the optimizer's
WORDS = {"lr": "learning rate"}


def note_discarded(progress: Progress, owner: str) -> None:
    if rank_and_size()[0] == 0:
        progress.log_note(
            f"zero_grad() of {owner} discarded the gradients of earlier micro-batches before a step"
            " used them; fix: call optimizer.zero_grad() after optimizer.step(); in a GAN, also"
            " call requires_grad_(False) on these weights for the loss of the other model"
        )


def _of_optimizer(name: str) -> property:
    """Return a property that reads and sets an attribute of the wrapped optimizer."""
    return property(
        lambda self: getattr(self.optimizer, name),
        lambda self, value: setattr(self.optimizer, name, value),
    )


class PreparedOptimizer(AttributeProxy, torch.optim.Optimizer):
    """Wraps the script's optimizer, and steps only when gradients are due.

    While gradients accumulate, `step()` and `zero_grad()` do nothing. All other attributes are
    forwarded to the wrapped optimizer, `.optimizer`.

    An optimizer created without `prepare` uses the process's `GradientState` and fp32, and rejects
    a scaler. `device_placement` has no effect: optimizer state is on the device of the weights.
    """

    _inner = "optimizer"
    _after_step: Callable[[int], int] | None = None  # returns the step of its next call

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device_placement: bool = True,
        scaler: torch.amp.GradScaler | None = None,
        *,
        accumulation: Accumulation | None = None,
        precision: Precision | None = None,
        after_step: Callable[[int], int] | None = None,
        averages_losses: bool = False,
    ) -> None:
        if scaler is not None and precision is None:
            raise UsageError(
                f"{type(self).__name__}() got a scaler without an Accelerator",
                where=f"the script's {type(self).__name__}(...)",
                fix="prepare the optimizer with an Accelerator(mixed_precision='fp16')",
                code=Code.NOT_PREPARED,
            )
        self.optimizer = optimizer  # super().__init__ would create a second set of parameter groups
        self.device_placement = device_placement
        self._accumulation = accumulation or self.gradient_state.accumulation
        self._precision = precision or Precision().set_up(self.accelerator_state.device)
        self._progress = process_progress()
        self._averages_losses = averages_losses
        self.step_count = 0  # steps that changed the weights
        self._after_step = after_step
        self._next_call = after_step(0) if after_step is not None else 0
        self.step_was_skipped = False  # the last step, due to an fp16 overflow
        self.hyperparameters = optimizer_options(optimizer)  # as passed to prepare(), or loaded
        if optimizer.state:  # loaded before the model moved to its device
            optimizer.load_state_dict(optimizer.state_dict())

    def follow(self, accumulation: Accumulation, precision: Precision) -> None:
        self._accumulation, self._precision = accumulation, precision

    @property
    def accelerator_state(self) -> AcceleratorState:
        return AcceleratorState()

    @property
    def gradient_state(self) -> GradientState:
        return GradientState()

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The fp16 gradient scaler; None in other precisions."""
        return self._precision.scaler

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights, unless gradients are accumulating or have overflowed (fp16).

        Return the first result of `closure`, as torch's optimizers do. With several ranks, the
        optimizer receives the mean of the ranks' losses, which matches the averaged gradients.
        """
        accumulation, progress = self._accumulation, self._progress
        losses: list[Any] = []
        if closure is not None:
            closure = self._recording(closure, losses)
        if not accumulation.sync_gradients:
            return None
        if accumulation.step.pending is not None:
            raise UsageError(
                "optimizer.step() was called before the last backward(num_tokens=...) of the step",
                where="the script's accelerator.accumulate(...)",
                fix="call backward(num_tokens=...) in each micro-batch, on every rank",
                code=Code.ACCUMULATION,
            )
        self.step_was_skipped = self._precision.step(self.optimizer, closure)
        torch.clear_autocast_cache()  # an open autocast() keeps casts of the old weights
        accumulation.use_gradients()
        if not self.step_was_skipped:
            self.step_count = done = self.step_count + 1
            progress.num_trained += 1
            if progress.is_watched:
                progress.end_step(done)
            if done >= self._next_call and self._after_step is not None:
                self._next_call = self._after_step(done)
        return losses[0] if losses else None

    def _recording(self, closure: Callable[[], Any], losses: list[Any]) -> Callable[[], Any]:
        if not self._accumulation.sync_gradients:
            raise UsageError(
                "optimizer.step(closure) does not support gradient accumulation",
                where="the script's optimizer.step(...)",
                fix="call accelerator.backward(loss) before optimizer.step(), without a closure; or"
                " train with gradient_accumulation_steps=1",
                code=Code.UNSUPPORTED,
            )

        def recording() -> Any:
            loss = closure()
            if self._averages_losses and loss is not None:
                loss = reduce(torch.as_tensor(loss, device=self.accelerator_state.device), "mean")
            losses.append(loss)
            return loss

        return recording

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, unless they are accumulating."""
        accumulation = self._accumulation
        if accumulation.sync_gradients:
            if accumulation.num_backward and accumulation.step.is_fresh:
                groups = self.param_groups  # one backward pass of the step is missing
                if any(p.grad is not None for group in groups for p in group["params"]):
                    note_discarded(self._progress, "a prepared optimizer")
            self._precision.gradients_dropped(self.optimizer)
            self.optimizer.zero_grad(set_to_none)
            accumulation.num_backward = 0

    @property
    def is_withheld(self) -> bool:
        """Whether the last `step()` was skipped because of accumulation or an fp16 overflow."""
        return self.step_was_skipped or not self._accumulation.sync_gradients

    param_groups: Any = _of_optimizer("param_groups")
    state: Any = _of_optimizer("state")
    state_dict: Any = _of_optimizer("state_dict")
    load_state_dict: Any = _of_optimizer("load_state_dict")
    add_param_group: Any = _of_optimizer("add_param_group")

    def train(self) -> None:
        """Switch a schedule-free optimizer to train mode; a no-op for other optimizers."""
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()

    def eval(self) -> None:
        """Switch a schedule-free optimizer to eval mode; a no-op for other optimizers."""
        if hasattr(self.optimizer, "eval"):
            self.optimizer.eval()

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise WrongType(
            f"a prepared {type(self.optimizer).__name__} was called like a model",
            where="the script's call",
            fix="assign the results of prepare() in the order of its arguments, for example"
            " `model, optimizer = accelerator.prepare(model, optimizer)`",
            code=Code.WRONG_TYPE,
        )

    def __repr__(self) -> str:
        return f"Prepared{self.optimizer!r}"

    def __getstate__(self) -> dict[str, Any]:
        # schedulers patch `step` of the instance; `_after_step` belongs to the Accelerator
        own = ("step", "_after_step")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


class PreparedScheduler(AttributeProxy):
    """Wraps the script's scheduler, and steps once per optimizer step.

    A schedule is defined in optimizer steps, independently of the number of ranks and of
    `split_batches`. `step()` does nothing if the optimizer has not updated the weights since the
    scheduler's last step, because gradients are accumulating or have overflowed (fp16). Scripts can
    therefore call `step()` in each iteration or once per epoch, or use it to fast-forward a new
    schedule. Accelerate steps a schedule once per rank.

    With `step_scheduler_with_optimizer=False`, every call steps the scheduler.

    Attributes:
        seen_steps: the optimizer's step count at the scheduler's last step.
    """

    _inner = "scheduler"
    seen_steps = 0

    def __init__(
        self, scheduler: LRScheduler, optimizer: PreparedOptimizer, step_with_optimizer: bool
    ) -> None:
        self.scheduler = scheduler
        self._optimizer = optimizer
        self._step_with_optimizer = step_with_optimizer
        self.seen_steps = optimizer.step_count
        self.hyperparameters = scheduler_options(scheduler)  # as passed to prepare(), or loaded

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step, unless the optimizer skipped its step; arguments are passed to the scheduler."""
        steps = self._optimizer.step_count
        if steps == self.seen_steps and self._step_with_optimizer and self._optimizer.is_withheld:
            return
        self.seen_steps = steps
        self.scheduler.step(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Prepared{type(self.scheduler).__name__}"


# ------------------------------------------------------------------ hyperparameters


def optimizer_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    groups = [plain_items(group) for group in optimizer.param_groups]
    for group in groups:
        if "initial_lr" in group:  # then a schedule has changed `lr`
            group["lr"] = group.pop("initial_lr")
    return groups


def scheduler_options(scheduler: Any) -> list[dict[str, Any]]:
    state: dict[str, Any] = getattr(scheduler, "state_dict", dict)()
    items = {name: value for name, value in plain_items(state).items() if name[0] != "_"}
    inner = [g for sub in getattr(scheduler, "_schedulers", ()) for g in scheduler_options(sub)]
    return [{name: items[name] for name in items if name not in _PROGRESS}, *inner]


def plain_items(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the items that can be printed: numbers, strings and sequences of these."""
    items = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        parts = value if isinstance(value, (list, tuple)) else [value]
        if all(isinstance(part, _PLAIN) for part in parts):
            items[name] = value
    return items


def scheduler_paths(scheduler: Any, path: str) -> list[str]:
    """Return the paths of a scheduler and its parts, in the order of `scheduler_options`."""
    paths = [path]
    for number, part in enumerate(getattr(scheduler, "_schedulers", ())):
        paths += scheduler_paths(part, f"{path}._schedulers[{number}]")
    return paths


def override_notes(
    given: Groups, before: Groups, loaded: Groups, setters: Sequence[str]
) -> Iterator[str]:
    """Yield a note for each hyperparameter of the script that the checkpoint overrides.

    `before` holds the values with which the run that saved the checkpoint started, so values that
    changed during that run, such as a decayed learning rate, cause no note. `setters` are format
    strings for code that sets a value, one for each group.
    """
    lines = [
        f"note: {WORDS.get(name, name)} {new[name]} from the checkpoint overrides {value} from the"
        " script; to use the script's value, set it afterwards: "
        f"{setter.format(name=name, value=value)}"
        for group, old, new, setter in zip(given, before, loaded, setters, strict=False)
        for name, value in group.items()
        if value not in (old.get(name, value), new.get(name, value))
    ]
    yield from dict.fromkeys(lines)
