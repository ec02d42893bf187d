"""One rank: its place among the others, collectives, and code for some ranks only."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar, cast

import torch

from headway import collectives, containers
from headway.data.active_loader import current_loop
from headway.errors import UsageError
from headway.meeting import barrier, watch
from headway.splitting import part_of
from headway.world import DistributedType, World, leave_world

Function = TypeVar("Function", bound=Callable[..., Any])


class Process:
    """This rank, as the script sees it."""

    def __init__(self, world: World) -> None:
        self._world = world
        watch()

    @property
    def device(self) -> torch.device:
        """The device of this rank's model and batches."""
        return self._world.device

    @property
    def distributed_type(self) -> DistributedType:
        """How the ranks work together."""
        return self._world.distributed_type

    @property
    def num_processes(self) -> int:
        """The number of ranks on all machines together (the world size)."""
        return self._world.ranks.world_size

    @property
    def process_index(self) -> int:
        """The number of this rank among those of all machines, from 0."""
        return self._world.ranks.rank

    @property
    def local_process_index(self) -> int:
        """The number of this rank among those of its machine, from 0."""
        return self._world.ranks.local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first rank of its machine."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the rank with the highest number."""
        return self.process_index == self.num_processes - 1

    @property
    def use_distributed(self) -> bool:
        """Whether there are several ranks."""
        return self.num_processes > 1

    def wait_for_everyone(self) -> None:
        """Wait until every rank has called this.

        Examples:
            >>> accelerator.wait_for_everyone()
        """
        barrier(self.device)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Return a context that rank 0 leaves before the others enter it.

        Examples:
            >>> with accelerator.main_process_first():
            ...     lines = ["rank 0 downloads and unpacks", "the others read"]
        """
        return self._goes_first(self.is_main_process)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Return a context that each machine's first rank leaves before the others enter it.

        Examples:
            >>> with accelerator.local_main_process_first():
            ...     lines = ["one rank of each machine downloads", "the others read"]
        """
        return self._goes_first(self.is_local_main_process)

    @contextmanager
    def _goes_first(self, is_first: bool) -> Iterator[None]:
        if not is_first:
            self.wait_for_everyone()
        yield
        if is_first:
            self.wait_for_everyone()

    def on_main_process(self, function: Function) -> Function:
        """Let a function run on rank 0 only; elsewhere it returns None.

        Examples:
            >>> @accelerator.on_main_process
            ... def report(text):
            ...     print(text)
            >>> report("once")
            once
        """
        return _only_if(self.is_main_process, function)

    def on_local_main_process(self, function: Function) -> Function:
        """Let a function run on each machine's first rank only; elsewhere it returns None.

        Examples:
            >>> @accelerator.on_local_main_process
            ... def report(text):
            ...     print(text)
            >>> report("once on each machine")
            once on each machine
        """
        return _only_if(self.is_local_main_process, function)

    def on_process(
        self, function: Callable[..., Any] | None = None, process_index: int | None = None
    ) -> Any:
        """Let a function run on one rank only; elsewhere it returns None.

        Either `on_process(function, 1)` or `@accelerator.on_process(process_index=1)`. A single
        rank runs it, whatever the number.

        Raises:
            UsageError: there is no `process_index`.

        Examples:
            >>> @accelerator.on_process(process_index=1)
            ... def report(text):
            ...     print(text)
            >>> report("by rank 1, or the only one")
            by rank 1, or the only one
        """
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)
        return self._only_on(process_index, self.process_index, function, "process_index")

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """Let a function run on one rank of each machine only; elsewhere it returns None.

        Either `on_local_process(function, 1)` or `@state.on_local_process(local_process_index=1)`.
        A single rank runs it, whatever the number.

        Raises:
            UsageError: there is no `local_process_index`.

        Examples:
            >>> @accelerator.on_local_process(local_process_index=0)
            ... def report(text):
            ...     print(text)
            >>> report("once on each machine")
            once on each machine
        """
        if function is None:
            return functools.partial(self.on_local_process, local_process_index=local_process_index)
        return self._only_on(
            local_process_index, self.local_process_index, function, "local_process_index"
        )

    def _only_on(self, wanted: int | None, own: int, function: Function, argument: str) -> Function:
        if wanted is None:
            raise UsageError(
                f"there is no {argument} for the function",
                where=f"the script's on_{argument.removesuffix('_index')}(...)",
                fix=f"pass {argument}=0, or use on_main_process",
            )
        return _only_if(own == wanted or not self.use_distributed, function)

    def on_last_process(self, function: Function) -> Function:
        """Let a function run on the last rank only; elsewhere it returns None.

        Examples:
            >>> @accelerator.on_last_process
            ... def report(text):
            ...     print(text)
            >>> report("once")
            once
        """
        return _only_if(self.is_last_process, function)

    def split_between_processes(
        self, inputs: Any, apply_padding: bool = False
    ) -> AbstractContextManager[Any]:
        """Return a context that gives this rank's part of `inputs`, in the order of the ranks.

        One rank gets `inputs` itself.

        Args:
            inputs: a list, tuple, tensor, array or `datasets.Dataset` that all ranks have, or a
                dict of those, all of one length; the first ranks get one more if need be.
            apply_padding: repeat the last element until all parts are equally long, as `gather`
                needs them; tensors are then on `device`.

        Raises:
            UsageError: `inputs` is of another kind, or the lengths in a dict differ.

        Examples:
            >>> with accelerator.split_between_processes(["a", "b", "c"]) as prompts:
            ...     prompts
            ['a', 'b', 'c']
        """
        if not self.use_distributed:
            return nullcontext(inputs)
        return nullcontext(part_of(inputs, self._world, apply_padding))

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once on each machine.

        Examples:
            >>> accelerator.print("loss", 0.5)
            loss 0.5
        """
        if self.is_local_main_process:
            print(*args, **kwargs)


class Group(Process):
    """This rank, with all that it exchanges with the others."""

    @property
    def multi_device(self) -> bool:
        """Whether there are several ranks, each with a GPU of its own and the whole model."""
        return self.distributed_type is DistributedType.MULTI_GPU

    def gather(self, tensor: Any) -> Any:
        """Return the tensors of all ranks, joined along dimension 0 in the order of the ranks.

        See `headway.utils.gather`.

        Args:
            tensor: tensors of the same shape [n, ...] or [] and dtype on every rank, alone or
                nested in lists, tuples and mappings.

        Returns:
            The same nesting with tensors of shape [world size * n, ...], or [world size] for
            scalars, on every rank.

        Raises:
            UsageError: there is something else than tensors.

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
        loop = current_loop()

        def drop_repeats(gathered: Any) -> Any:
            return loop.drop_repeats(gathered, self.num_processes)

        as_objects = use_gather_object or not containers.only_tensors(input_data)
        if as_objects:
            _check_one_for_each_sample(input_data)
        shares = loop.batch.shares
        if shares and len(shares) < self.num_processes:
            gathered = collectives.gather_among_first(input_data, len(shares), as_objects)
        elif as_objects:
            gathered = collectives.gather_object(input_data)
        else:
            gathered = (collectives.gather_uneven if shares else collectives.gather)(input_data)
        if as_objects:
            return drop_repeats(gathered)
        return containers.for_each_tensor(drop_repeats, gathered)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the sum, mean or maximum over ranks of each tensor, times `scale`.

        See `headway.utils.reduce`, where the default is the mean.

        Args:
            tensor: tensors of the same shape and dtype on every rank, alone or nested; they are not
                changed.
            reduction: `sum`, `mean`, `max` or `none`.
            scale: factor for the result.

        Raises:
            UsageError: another reduction, or something else than tensors.

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

        Args:
            tensor: tensors whose sizes may differ between ranks in `dim` only, alone or nested.
            dim: a dimension; a tensor without it is returned as it is.
            pad_index: the value to pad with.
            pad_first: pad at the beginning instead of the end.

        Raises:
            UsageError: there is something else than tensors.

        Examples:
            >>> accelerator.pad_across_processes(torch.ones(2, 3), dim=1).shape
            torch.Size([2, 3])
        """
        return collectives.pad_across_processes(tensor, dim, pad_index, pad_first)

    def broadcast(self, tensor: Any, from_process: int = 0) -> Any:
        """Overwrite each tensor by that of rank `from_process`, and return it.

        Args:
            tensor: tensors of the same shape and dtype on every rank, alone or nested.
            from_process: a rank.

        Raises:
            UsageError: there is something else than tensors.

        Examples:
            >>> accelerator.broadcast(torch.tensor([1, 2]))
            tensor([1, 2])
        """
        return collectives.broadcast(tensor, from_process)

    def end_training(self) -> None:
        """End the process group; call it last, on every rank."""
        leave_world()


def _check_one_for_each_sample(data: Any) -> None:
    """Raise UsageError if `data` does not hold one object for each sample."""
    if isinstance(data, (str, bytes, Mapping)) or not isinstance(data, Iterable):
        raise UsageError(
            f"gather_for_metrics() got a {type(data).__name__} with other things than tensors",
            where="the script's gather_for_metrics(...)",
            fix="call it for each entry: with tensors, or a list of one object for each sample",
        )


def _only_if(condition: bool, function: Function) -> Function:
    @functools.wraps(function)
    def run_here(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if condition else None

    return cast(Function, run_here)
