"""The current rank, code that runs on some ranks only, progress bars and environment variables."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar, cast

import torch

from headway.distributed.call_barrier import barrier, watch
from headway.distributed.handler import check_range, checks
from headway.distributed.nested import is_instance_of, send_to_device
from headway.distributed.world import DistributedType, World
from headway.errors import Code, UsageError
from headway.ipc.run_contract import Ranks, read_ranks

Function = TypeVar("Function", bound=Callable[..., Any])


@checks()
class Process:
    """The current rank; base class of PartialState and Accelerator."""

    _requires_ranks = True  # raise for ranks that do not exist; False in headway.compat

    def __init__(self, world: World) -> None:
        self.world = world
        self.has_split = False  # whether split_between_processes() was called
        watch()

    @property
    def device(self) -> torch.device:
        """The device of this rank's model and batches."""
        return self.world.device

    @property
    def distributed_type(self) -> DistributedType:
        """The type of distributed setup."""
        return self.world.distributed_type

    @property
    def num_processes(self) -> int:
        """The world size, which is the number of ranks on all machines."""
        return self.world.ranks.world_size

    @property
    def process_index(self) -> int:
        """The rank, which is this process's index across all machines, starting at 0."""
        return self.world.ranks.rank

    @property
    def local_process_index(self) -> int:
        """The local rank, which is this process's index on its machine, starting at 0."""
        return self.world.ranks.local_rank

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
        """Whether this is the last rank."""
        return self.process_index == self.num_processes - 1

    @property
    def use_distributed(self) -> bool:
        """Whether there are several ranks."""
        return self.num_processes > 1

    def wait_for_everyone(self) -> None:
        """Wait until every rank has called this."""
        barrier(self.device)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Return a context that the other ranks enter once rank 0 has left it, even with an error.

        Examples:
            >>> with accelerator.main_process_first():
            ...     lines = ["rank 0 downloads and unpacks", "the other ranks read"]
            >>> with accelerator.local_main_process_first():
            ...     lines = ["one rank per machine downloads", "the other ranks read"]
            >>> accelerator.wait_for_everyone()
        """
        return self._first(self.is_main_process)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Return a context that a machine's other ranks enter after its first rank has left it."""
        return self._first(self.is_local_main_process)

    @contextmanager
    def _first(self, is_first: bool) -> Iterator[None]:
        if not is_first:
            self.wait_for_everyone()
        try:
            yield
        finally:  # also after an error that the script catches
            if is_first:
                self.wait_for_everyone()

    def on_main_process(self, function: Function) -> Function:
        """Make a function run on rank 0 only; on other ranks it returns None.

        Examples:
            >>> @accelerator.on_main_process
            ... def report(text):
            ...     print(text)
            >>> report("once")
            once
            >>> @accelerator.on_local_main_process
            ... def clean_up(folder): ...
            >>> @accelerator.on_last_process
            ... def finish(): ...
        """
        return _only_if(self.is_main_process, function)

    def on_local_main_process(self, function: Function) -> Function:
        """Make a function run on each machine's first rank only; on other ranks it returns None."""
        return _only_if(self.is_local_main_process, function)

    def on_process(
        self, function: Callable[..., Any] | None = None, process_index: int | None = None
    ) -> Any:
        """Make a function run on one rank only; on other ranks it returns None.

        Call it as `on_process(function, 1)` or `@accelerator.on_process(process_index=1)`. With a
        single rank, the function always runs. `on_local_process` does the same for one rank of each
        machine.

        Raises:
            UsageError: `process_index` is missing, or no rank has this index.

        Examples:
            >>> @accelerator.on_process(process_index=1)
            ... def report(text):
            ...     print(text)
            >>> report("by rank 1, or the only rank")
            by rank 1, or the only rank
            >>> local = accelerator.on_local_process(report, local_process_index=0)
        """
        return self._on(function, process_index, "process_index")

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """Make a function run on one rank of each machine only; see `on_process`."""
        return self._on(function, local_process_index, "local_process_index")

    def _on(self, function: Any, wanted: int | None, argument: str) -> Any:
        ranks, is_local = self.world.ranks, argument.startswith("local")
        own, size = ranks[1::2] if is_local else ranks[::2]
        called = f"on_{argument.removesuffix('_index')}"
        if wanted is None:
            raise UsageError(
                f"missing argument {argument}",
                where=f"the script's {called}(...)",
                fix=f"pass {argument}=0, or use on_main_process",
                code=Code.BAD_ARGUMENT,
            )
        if self.use_distributed and self._requires_ranks:
            check_range(called, 0, size - 1, **{argument: wanted})
        only = functools.partial(_only_if, own == wanted or not self.use_distributed)
        return only if function is None else only(function)

    def on_last_process(self, function: Function) -> Function:
        """Make a function run on the last rank only; on other ranks it returns None."""
        return _only_if(self.is_last_process, function)

    def split_between_processes(
        self, inputs: Any, apply_padding: bool = False
    ) -> AbstractContextManager[Any]:
        """Return a context that yields this rank's part of `inputs`; parts are in rank order.

        With one rank, it yields `inputs` itself.

        Args:
            inputs: a list, tuple, tensor, array or `datasets.Dataset` that is equal on all ranks,
                or a dict of such values with equal lengths. If the length is not divisible by the
                number of ranks, the first ranks get one more element.
            apply_padding: repeat the last element until all parts have the same length, as `gather`
                requires, and move tensors to `device`.

        Raises:
            UsageError: `inputs` has an unsupported type, or the lengths in a dict differ.

        Examples:
            >>> with accelerator.split_between_processes(["a", "b", "c"]) as prompts:
            ...     prompts
            ['a', 'b', 'c']
        """
        self.has_split = True
        if not self.use_distributed:
            return nullcontext(inputs)
        return nullcontext(part_of(inputs, self.world, apply_padding))

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once on each machine.

        Examples:
            >>> accelerator.print("loss", 0.5)
            loss 0.5
        """
        if self.is_local_main_process:
            print(*args, **kwargs)


def _only_if(condition: bool, function: Function) -> Function:
    @functools.wraps(function)
    def runs_here(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if condition else None

    return cast(Function, runs_here)


def part_of(inputs: Any, world: World, apply_padding: bool) -> Any:
    rank, size = world.ranks.rank, world.ranks.world_size
    length = _length(inputs)
    each, extra = divmod(length, size)
    start = rank * each + min(rank, extra)
    indices = list(range(start, start + each + (rank < extra)))
    if apply_padding and length:
        indices += [length - 1] * (each + (extra > 0) - len(indices))

    def part(data: Any) -> Any:
        if isinstance(data, dict):
            return {key: part(value) for key, value in data.items()}
        if isinstance(data, (list, tuple)):
            return type(data)([data[index] for index in indices])
        if is_instance_of(data, "datasets", "Dataset"):
            return data.select(indices)
        taken = data[indices]
        return send_to_device(taken, world.device) if apply_padding else taken

    return part(inputs)


def _length(inputs: Any) -> int:
    if isinstance(inputs, dict):
        lengths = {_length(value) for value in inputs.values()}
        if len(lengths) > 1:
            raise UsageError(
                f"the values of a dict have different lengths: {sorted(lengths)}",
                where="the script's split_between_processes(...)",
                fix="pass the same number of values for every key",
                code=Code.BAD_ARGUMENT,
            )
        return lengths.pop() if lengths else 0
    is_array = hasattr(inputs, "__array__") and getattr(inputs, "ndim", 0) > 0
    is_dataset = is_instance_of(inputs, "datasets", "Dataset")
    if not (isinstance(inputs, (list, tuple)) or is_array or is_dataset):
        raise UsageError(
            f"a {type(inputs).__name__} cannot be split between processes",
            where="the script's split_between_processes(...)",
            fix="pass a list, tuple, tensor, array or datasets.Dataset, or a dict of such values",
            code=Code.WRONG_TYPE,
        )
    assert isinstance(inputs, Sized)
    return len(inputs)


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Return `tqdm.auto.tqdm(*args, **kwargs)`, shown only on the first rank of each machine.

    Args:
        main_process_only: if False, every rank shows a progress bar.

    Raises:
        ModuleNotFoundError: tqdm is not installed.

    Examples:
        >>> from headway.utils import tqdm
        >>> sum(tqdm([1, 2, 3], disable=True))
        6
    """
    from tqdm.auto import tqdm as bar

    local_rank = (read_ranks() or Ranks()).local_rank
    hidden = main_process_only and local_rank != 0
    return bar(*args, **{**kwargs, "disable": kwargs.get("disable", False) or hidden})


@contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Set environment variables in a context: `with patch_environment(foo=1)` sets FOO to "1".

    The previous values are restored afterwards.

    Examples:
        >>> import os
        >>> from headway.utils import patch_environment
        >>> with patch_environment(my_variable=1):
        ...     os.environ["MY_VARIABLE"]
        '1'
    """
    values = {key.upper(): str(value) for key, value in kwargs.items()}
    before = {key: os.environ[key] for key in values if key in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for key in values:
            os.environ.pop(key, None)
        os.environ.update(before)


@contextmanager
def clear_environment() -> Iterator[None]:
    """Remove all environment variables in a context, and restore them afterwards.

    Examples:
        >>> import os
        >>> from headway.utils import clear_environment
        >>> with clear_environment():
        ...     len(os.environ)
        0
    """
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
