"""Batches that are split to fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from headway.data.position import samples_in
from headway.distributed.collectives import any_rank, reduce
from headway.distributed.nested import for_each_part
from headway.errors import OutOfMemory, UsageError
from headway.memory.device import clear_device_cache
from headway.memory.oom import is_out_of_memory
from headway.strategies.strategy import Strategy
from headway.training.accumulation import Accumulation, TokenMean


class MicroBatches:
    """Trains on one batch in parts; where memory runs out on a rank, all start it over in halves.

    Until every rank has computed the gradients of all its parts, gradients stay on their rank and
    no optimizer steps: ranks exchange nothing that one without memory would be missing from. Then
    they agree, and average the gradients in one go. The size that was found stays for all batches
    to come.
    """

    def __init__(
        self,
        accumulation: Accumulation,
        strategy: Strategy,
        token_mean: TokenMean,
        parameters: Callable[[], Iterable[torch.Tensor]],
    ) -> None:
        self._accumulation, self._strategy = accumulation, strategy
        self._token_mean = token_mean
        self._parameters = parameters
        self._earlier: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # of other batches
        self._size: int | None = None  # of a part, found so far
        self._share: float | None = None  # of the current part in its batch; None outside
        self._is_last = self._is_guarded = self._is_lost = self._has_agreed = False

    @property
    def is_active(self) -> bool:
        """Whether the script is in a loop over the parts of a batch."""
        return self._share is not None

    def parts(self, batch: Any, max_size: int | None, min_size: int) -> Iterator[Any]:
        """Yield the parts of `batch`, from the beginning again after memory ran out on a rank."""
        samples = samples_in(batch)
        _check_sizes(samples, max_size, min_size)
        size = min(one for one in (samples, self._size, max_size) if one is not None)
        self._earlier = [(one, one.grad) for one in self._parameters() if one.grad is not None]
        tokens = self._token_mean.pending
        try:
            while True:
                self._drop_gradients()
                self._token_mean.pending = tokens
                self._is_lost = self._has_agreed = False
                for start in range(0, samples, size):
                    self._share = min(size, samples - start) / samples
                    self._is_last = start + size >= samples
                    yield _rows(batch, samples, slice(start, start + size))
                    if self._is_lost:
                        break
                if not (self._is_lost if self._has_agreed else any_rank(self._is_lost)):
                    return
                self._size = size = _next_size(size, min_size)
        finally:
            self._share = None
            self._add_earlier_gradients()

    @contextmanager
    def guard(self, no_sync: AbstractContextManager[Any]) -> Iterator[None]:
        """Enter `no_sync` for one part; where memory runs out in it, leave it without an error."""
        self._accumulation.sync_gradients = False
        self._is_guarded = True
        try:
            with no_sync:
                yield
        except Exception as error:
            if not isinstance(error, _Lost) and (self._has_agreed or not is_out_of_memory(error)):
                raise
            self._is_lost = True
        finally:
            self._is_guarded = False

    def weighed(self, loss: torch.Tensor, *, by_tokens: bool) -> torch.Tensor:
        """Return the loss of a part, times its share in the batch unless its tokens weigh it."""
        if not self._is_guarded or self._share is None:
            raise UsageError(
                "backward() in a loop over micro_batches(), but not in accumulate()",
                where="the script's loop over accelerator.micro_batches(...)",
                fix="put the loop's body into `with accelerator.accumulate(model):`",
            )
        return loss if by_tokens else loss * self._share

    def after_backward(self) -> None:
        """Agree after the last part; then average the gradients, if they are due."""
        if not self._is_last:
            return
        self._has_agreed = True
        if any_rank(False):
            raise _Lost
        self._add_earlier_gradients()
        self._accumulation.begin_micro_batch()
        if self._accumulation.sync_gradients:
            self._token_mean.finish(self._parameters())
            self._strategy.average_gradients(self._parameters())

    def _add_earlier_gradients(self) -> None:
        for parameter, gradient in self._earlier:
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad
        self._earlier = []

    def _drop_gradients(self) -> None:
        for parameter in self._parameters():
            parameter.grad = None


class _Lost(Exception):
    """Memory ran out on another rank."""


def _check_sizes(samples: int, max_size: int | None, min_size: int) -> None:
    """Raise UsageError for sizes that no part can have."""
    where = "the script's accelerator.micro_batches(...)"
    for name, size in {"max_size": max_size, "min_size": min_size}.items():
        if size is not None and size < 1:
            raise UsageError(f"{name} is {size}", where=where, fix="pass a number of at least 1")
    if not samples:
        raise UsageError(
            "the batch has no tensor with samples in dimension 0",
            where=where,
            fix="pass tensors of shape [samples, ...], alone or nested, with at least one sample",
        )


def _next_size(size: int, min_size: int) -> int:
    """Return the next size of parts to try, the same on all ranks."""
    clear_device_cache(garbage_collection=True)
    smaller = -int(reduce(torch.tensor(-max(size // 2, min_size)), "max"))
    if any_rank(size <= min_size):
        raise OutOfMemory(
            f"memory runs out with micro-batches of {size} samples, the smallest allowed",
            where="the script's loop over accelerator.micro_batches(...)",
            fix="use a smaller model, shorter inputs, or a device with more memory",
        )
    return smaller


def _rows(data: Any, samples: int, rows: slice) -> Any:
    """Return the rows of everything in `data` that has one for each sample."""
    if isinstance(data, torch.Tensor):
        return data[rows] if data.ndim and len(data) == samples else data
    nested = (torch.Tensor, Mapping, list, tuple)
    if (
        isinstance(data, (list, tuple))
        and len(data) == samples
        and not any(isinstance(one, nested) for one in data)
    ):
        return data[rows]
    return for_each_part(lambda one: _rows(one, samples, rows), data)
