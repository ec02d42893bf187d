"""Local SGD: ranks train on their own, and average their weights every so many steps."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType

import torch

from headway.accelerator import Accelerator
from headway.distributed.collectives import average_in_place
from headway.distributed.meeting import meet
from headway.errors import UsageError


class LocalSGD:
    """A context in which ranks exchange weights every few steps, in place of gradients each step.

    Leaving the context averages once more, unless by an error. `save_state` needs equal weights: in
    the context it is refused between two averagings. A run that goes on counts its steps anew;
    with another number of ranks it has rank 0's optimizer on all of them. Source: Stich, Local SGD
    Converges Fast and Communicates Little, ICLR 2019.

    Args:
        accelerator: the one that prepared `model`.
        model: its trained parameters are averaged.
        local_sgd_steps: calls of `step()` from one averaging to the next, at least 1.
        enabled: False exchanges gradients in every step, as without this context.

    Raises:
        UsageError: `local_sgd_steps` is below 1.

    Examples:
        >>> import torch
        >>> from headway import Accelerator
        >>> from headway.local_sgd import LocalSGD
        >>> accelerator = Accelerator(cpu=True)
        >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
        >>> with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8) as local_sgd:
        ...     for batch in torch.ones(3, 4, 2):
        ...         with accelerator.accumulate(model):
        ...             accelerator.backward(model(batch).mean())
        ...         local_sgd.step()
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        local_sgd_steps: int,
        enabled: bool = True,
    ) -> None:
        if local_sgd_steps < 1:
            raise UsageError(
                f"local_sgd_steps is {local_sgd_steps}",
                where="the script's LocalSGD(...)",
                fix="pass a number of at least 1",
            )
        self.enabled = enabled and accelerator.num_processes > 1
        self.num_steps = 0
        self._steps, self._model = accelerator.parts.steps, model
        self._local_sgd_steps = local_sgd_steps
        self._no_sync = ExitStack()

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            self._no_sync.enter_context(self._steps.training_alone(self._model))
            self._steps.training.note_equal_weights()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._no_sync.close()
        if self.enabled and error is None:
            self._average()
            self._steps.training.train_together()

    def step(self) -> None:
        """Count one step of training; average the weights if enough have been made."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self._local_sgd_steps == 0:
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        meet("an averaging of LocalSGD")
        average_in_place(one for one in self._model.parameters() if one.requires_grad)
        self._steps.training.note_equal_weights()
