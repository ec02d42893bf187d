"""One rank: its place among the others, collectives, and code for some ranks only."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar, cast

import torch

from headway import collectives
from headway.data.active_loader import current_loop
from headway.splitting import part_of
from headway.world import DistributedType, World, barrier, leave_world

Function = TypeVar("Function", bound=Callable[..., Any])


class Process:
    """This rank, as the script sees it."""

    def __init__(self, world: World) -> None:
        self._world = world

    @property
    def device(self) -> torch.device:
        return self._world.device

    @property
    def distributed_type(self) -> DistributedType:
        return self._world.distributed_type

    @property
    def num_processes(self) -> int:
        """The number of ranks on all machines together (the world size)."""
        return self._world.ranks.world_size

    @property
    def process_index(self) -> int:
        return self._world.ranks.rank

    @property
    def local_process_index(self) -> int:
        return self._world.ranks.local_rank

    @property
    def is_main_process(self) -> bool:
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        return self.process_index == self.num_processes - 1

    @property
    def use_distributed(self) -> bool:
        """Whether there are several ranks."""
        return self.num_processes > 1

    def wait_for_everyone(self) -> None:
        """Wait until every rank has called this."""
        barrier(self.device)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Return a context that rank 0 leaves before the others enter it."""
        return self._goes_first(self.is_main_process)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Return a context that each machine's first rank leaves before the others enter it."""
        return self._goes_first(self.is_local_main_process)

    @contextmanager
    def _goes_first(self, is_first: bool) -> Iterator[None]:
        if not is_first:
            self.wait_for_everyone()
        yield
        if is_first:
            self.wait_for_everyone()

    def on_main_process(self, function: Function) -> Function:
        """Let a function run on rank 0 only; elsewhere it returns None."""
        return _only_if(self.is_main_process, function)

    def on_local_main_process(self, function: Function) -> Function:
        """Let a function run on each machine's first rank only; elsewhere it returns None."""
        return _only_if(self.is_local_main_process, function)

    def on_process(
        self, function: Callable[..., Any] | None = None, process_index: int | None = None
    ) -> Any:
        """Let a function run on one rank only; elsewhere it returns None.

        Either `on_process(function, 1)` or `@accelerator.on_process(process_index=1)`.
        """
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)
        return _only_if(self.process_index == process_index, function)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """Let a function run on one rank of each machine only; elsewhere it returns None.

        Either `on_local_process(function, 1)` or `@state.on_local_process(local_process_index=1)`.
        """
        if function is None:
            return functools.partial(self.on_local_process, local_process_index=local_process_index)
        return _only_if(self.local_process_index == local_process_index, function)

    def on_last_process(self, function: Function) -> Function:
        """Let a function run on the last rank only; elsewhere it returns None."""
        return _only_if(self.is_last_process, function)

    def split_between_processes(
        self, inputs: Any, apply_padding: bool = False
    ) -> AbstractContextManager[Any]:
        """Return a context that gives this rank's part of `inputs`, in the order of the ranks.

        One rank gets `inputs` itself. See `headway.splitting.part_of`.

        Args:
            inputs: a list, tuple, tensor, array or `datasets.Dataset` that all ranks have, or a
                dict of those, all of one length; the first ranks get one more if need be.
            apply_padding: repeat the last element until all parts are equally long, as `gather`
                needs them; tensors are then on `device`.

        Raises:
            UsageError: `inputs` is of another kind, or the lengths in a dict differ.
        """
        if not self.use_distributed:
            return nullcontext(inputs)
        return nullcontext(part_of(inputs, self._world, apply_padding))

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once on each machine."""
        if self.is_local_main_process:
            print(*args, **kwargs)


class Group(Process):
    """This rank, with all that it exchanges with the others."""

    @property
    def multi_device(self) -> bool:
        """Whether there are several ranks, like `use_distributed`."""
        return self.use_distributed

    def gather(self, tensor: Any) -> Any:
        """See `headway.collectives.gather`."""
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
        """
        loop = current_loop()

        def drop_repeats(gathered: Any) -> Any:
            return loop.drop_repeats(gathered, self.num_processes)

        as_objects = use_gather_object or not collectives.only_tensors(input_data)
        shares = loop.batch.shares
        if shares and len(shares) < self.num_processes:
            gathered = collectives.gather_among_first(input_data, len(shares), as_objects)
        elif as_objects:
            gathered = collectives.gather_object(input_data)
        else:
            gathered = (collectives.gather_uneven if shares else collectives.gather)(input_data)
        if as_objects:
            return drop_repeats(gathered)
        return collectives.for_each_tensor(drop_repeats, gathered)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """See `headway.collectives.reduce`; here the default is the sum."""
        return collectives.reduce(tensor, reduction, scale)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False
    ) -> Any:
        """See `headway.collectives.pad_across_processes`."""
        return collectives.pad_across_processes(tensor, dim, pad_index, pad_first)

    def broadcast(self, tensor: Any, from_process: int = 0) -> Any:
        """See `headway.collectives.broadcast`."""
        return collectives.broadcast(tensor, from_process)

    def end_training(self) -> None:
        """End the process group; call it last, on every rank."""
        leave_world()


def _only_if(condition: bool, function: Function) -> Function:
    @functools.wraps(function)
    def run_here(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if condition else None

    return cast(Function, run_here)
