"""The ranks of a run that has one process: a process group that exchanges nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from headway.estimate.child.replacing import replace

_FIRST_RANK = {
    **dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0"),
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def join_as_first(world_size: int, local_world_size: int) -> None:
    """Be rank 0 of `world_size`, for the script's own `init_process_group()` too.

    The backend `fake` is part of torch's own tests; its store has no public name.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    sizes = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(local_world_size)}
    os.environ.update(_FIRST_RANK | sizes)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    replace(dist, "init_process_group", _nothing)


def join_alone() -> None:
    """Let a script that starts a process group of its own have one of one rank."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    start = dist.init_process_group

    def init_process_group(*_: Any, **__: Any) -> None:
        start("fake", store=FakeStore(), rank=0, world_size=1)

    replace(dist, "init_process_group", init_process_group)


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


def replace_object_collectives(world_size: int) -> None:
    """Let objects be the same on all ranks; nothing is pickled."""

    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        object_list[:] = [obj] * len(object_list)

    def gather_object(
        obj: Any, object_gather_list: list[Any] | None = None, *_: Any, **__: Any
    ) -> None:
        if object_gather_list is not None:
            object_gather_list[:] = [obj] * world_size

    def scatter_object_list(
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None = None,
        *_: Any,
        **__: Any,
    ) -> None:
        if scatter_object_input_list is not None:
            scatter_object_output_list[0] = scatter_object_input_list[0]

    replace(dist, "all_gather_object", all_gather_object)
    replace(dist, "gather_object", gather_object)
    replace(dist, "scatter_object_list", scatter_object_list)
    replace(dist, "broadcast_object_list", _nothing)


def replace_data_parallel(
    keep_bucket: Callable[[torch.Tensor, torch.nn.Module], None] | None,
) -> None:
    """Let DistributedDataParallel take the memory that it takes, and exchange nothing.

    Its reducer, in C++, cannot work on fake tensors. It keeps a copy of all gradients in buckets,
    unless gradients are views of them.

    Args:
        keep_bucket: is called with each bucket and its owner; None where another strategy shares
            the model.
    """

    def init(self: Any, module: torch.nn.Module, *_: Any, **options: Any) -> None:
        torch.nn.Module.__init__(self)
        self.module = module
        self.device_ids = self.output_device = None
        self.require_backward_grad_sync = True
        self._buckets = []
        if keep_bucket is not None and not options.get("gradient_as_bucket_view", False):
            trained = [one for one in module.parameters() if one.requires_grad]
            self._buckets = [torch.empty_like(one, requires_grad=False) for one in trained]
            for bucket in self._buckets:
                keep_bucket(bucket, self)

    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    @contextmanager
    def no_sync(self: Any) -> Iterator[None]:
        yield

    for name, stand_in in {
        "__init__": init,
        "forward": forward,
        "no_sync": no_sync,
        "register_comm_hook": _nothing,
        "_set_static_graph": _nothing,
    }.items():
        replace(DistributedDataParallel, name, stand_in)
