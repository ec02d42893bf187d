"""Replacements for calls that do not work with fake tensors or without other ranks.

Loaders read real data in this process; torch.compile is skipped. Saved files are empty and loaded
tensors are fake. Checkpoints of Headway and torch.distributed are not loaded, because the script
has already created tensors with the same shapes. A resumed script is estimated from the start. A
single process represents all ranks: it communicates with no other rank and shards the model as
configured.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only
from torch.utils.data import dataloader

from headway.checkpoint import loading, training_state
from headway.checkpoint.checkpointer import Checkpointer
from headway.checkpoint.manifest import read_manifest
from headway.distributed.world import World
from headway.estimate.child.fake_mode import ScriptMode
from headway.estimate.child.patching import nothing, replace, replace_everywhere
from headway.ipc.choices import DDP, SHARDED
from headway.strategies.fsdp import sharded_as
from headway.strategies.strategy import Strategy, StrategySettings
from headway.training import accelerator_setup

Note = Callable[[str], None]

_NOT_MAPPED = 2**62  # an address that is never mapped
_LOADED = "loading is skipped: the script starts from the beginning"
_FIRST_RANK = {
    **dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0"),
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def patch_loaders(mode: ScriptMode, observe: Callable[[torch.Tensor], None]) -> None:
    """Patch data loaders to read real data without workers and yield fake tensors.

    Relies on the private `_SingleProcessDataLoaderIter` and `DataLoader._get_iterator`.
    """
    single: Any = dataloader._SingleProcessDataLoaderIter

    class Iterator(single):  # type: ignore[misc]
        def __init__(self, loader: Any) -> None:
            with _disable_current_modes():
                super().__init__(loader)

        def _next_data(self) -> Any:
            with _disable_current_modes():
                data = super()._next_data()
            data = tree_map_only(torch.Tensor, mode.faked, data)
            tree_map_only(torch.Tensor, observe, data)
            return data

    def get_iterator(self: Any) -> Any:
        vars(self).update(num_workers=0, prefetch_factor=None, persistent_workers=False)
        vars(self).update(timeout=0, pin_memory=False)
        return Iterator(self)

    replace(torch.utils.data.DataLoader, "_get_iterator", get_iterator)
    replace(torch.Tensor, "share_memory_", lambda self: self)  # there are no workers


def patch_tensor_reads(mode: ScriptMode) -> None:
    """Patch functions that read all values of a tensor; unknown values are read as ones."""
    random_permutation = torch.randperm

    def randperm(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device", None)
        with _disable_current_modes():
            permutation = random_permutation(*args, **kwargs)
        return mode.faked(permutation)

    def as_format(self: FakeTensor, format_spec: str) -> str:
        return format(self.item() if self.dim() == 0 else str(self), format_spec)

    def as_array(self: FakeTensor, dtype: Any = None, copy: Any = None) -> Any:
        array = mode.array(self)
        return array if dtype is None else array.astype(dtype)

    def deepcopy(self: FakeTensor, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copied: Any = self.detach().clone().requires_grad_(self.requires_grad)
            is_parameter = isinstance(self, torch.nn.Parameter)
            memo[id(self)] = (
                torch.nn.Parameter(copied, self.requires_grad) if is_parameter else copied
            )
        return memo[id(self)]

    replace(torch, "randperm", randperm)
    replace(FakeTensor, "__deepcopy__", deepcopy)
    replace(FakeTensor, "numpy", lambda self, **_: mode.array(self))
    replace(FakeTensor, "__array__", as_array)
    replace(FakeTensor, "tolist", lambda self: mode.array(self).tolist())
    replace(FakeTensor, "__format__", as_format)


def patch_compile(note: Note) -> None:
    def compile(model: Any = None, *_: Any, **__: Any) -> Any:
        note("torch.compile is skipped: memory that compiled code saves or needs is not counted")
        return (lambda function: function) if model is None else model

    for owner in (torch, torch.nn.Module):
        replace(owner, "compile", compile)


def patch_grad_scaler() -> None:
    """Patch the gradient scaler to always step. Relies on `GradScaler._maybe_opt_step`."""

    def step(_: Any, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)

    replace(torch.amp.GradScaler, "_maybe_opt_step", step)


def patch_data_ptr() -> None:
    """Give each fake storage a unique address, because scripts detect tied weights by address."""
    address_of = torch.UntypedStorage.data_ptr

    def of_storage(self: torch.UntypedStorage) -> int:
        return _NOT_MAPPED + self._cdata if self.device.type == "meta" else address_of(self)

    def of_tensor(self: FakeTensor) -> int:
        return of_storage(self.untyped_storage()) + int(self.storage_offset()) * self.element_size()

    replace(torch.UntypedStorage, "data_ptr", of_storage)
    replace(FakeTensor, "data_ptr", of_tensor)


def patch_resize(resized: Callable[[torch.UntypedStorage], None]) -> None:
    """Pass each resized storage to `resized`, because FSDP resizes storages without an operator."""
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> None:
        resize(storage, size)
        resized(storage)

    replace(torch.UntypedStorage, "resize_", resize_)


def patch_saving(note: Note) -> None:
    """Patch torch, safetensors and Headway to save empty files."""

    def skip(*_: Any, **__: Any) -> None:
        note("saving is skipped")

    def save(*args: Any, **kwargs: Any) -> None:
        skip()
        file = kwargs.get("f") or kwargs.get("filename") or args[1]
        if isinstance(file, (str, os.PathLike)):
            open(file, "wb").close()

    def skip_in_thread(*_: Any, **__: Any) -> Future[None]:
        skip()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    replace(torch, "save", save)
    for name in ("save_file", "save_model"):
        replace(safetensors.torch, name, save)
    for name in ("save", "save_state_dict"):
        replace(dcp, name, skip)
    replace(dcp, "async_save", skip_in_thread)
    replace(Checkpointer, "save_to", skip)


def patch_loading(note: Note) -> None:
    """Make checkpoint loading a no-op, but fail if a Headway checkpoint does not exist."""

    def skip(*_: Any, **__: Any) -> None:
        note(_LOADED)

    def load_checkpoint(folder: Path, like: Any = None, **_: Any) -> None:
        read_manifest(folder)
        note(_LOADED)

    for name in ("load", "load_state_dict"):
        replace(dcp, name, skip)
    replace(loading, "load_checkpoint", load_checkpoint)
    nothing_to_restore = SimpleNamespace(check=nothing, check_models=nothing, apply=nothing)
    replace(training_state, "SavedState", lambda *_, **__: nothing_to_restore)


def patch_safetensors(mode: ScriptMode) -> None:
    """Patch safetensors, which is native code, to map real files and return fake tensors."""
    opened = safetensors.safe_open

    def open_file(
        filename: Any, framework: str, device: Any = "cpu", *args: Any, **kwargs: Any
    ) -> _FakeReader:
        def faked(tensor: torch.Tensor) -> torch.Tensor:
            return mode.faked(tensor).to(device)

        return _FakeReader(opened(filename, framework, "cpu", *args, **kwargs), faked)

    replace_everywhere("safe_open", open_file)


class _FakeReader:
    def __init__(self, real: Any, faked: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._real, self._faked = real, faked

    def __enter__(self) -> Any:
        self._real.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._real.__exit__(*error)

    def get_slice(self, name: str) -> _FakeReader:
        return _FakeReader(self._real.get_slice(name), self._faked)

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._real, name)
        return lambda *args, **kwargs: self._read(call, *args, **kwargs)

    def __getitem__(self, part: Any) -> Any:
        return self._read(self._real.__getitem__, part)

    def _read(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            found = call(*args, **kwargs)
        return tree_map_only(torch.Tensor, self._faked, found)


def init_fake_ranks(world_size: int, local_world_size: int) -> None:
    """Make this process rank 0 of `world_size`; a single rank joins a group only on request.

    The `fake` backend is part of torch's tests; its store has no public name.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    start = dist.init_process_group

    def init_process_group(*_: Any, **__: Any) -> None:
        if not dist.is_initialized():
            start("fake", store=FakeStore(), rank=0, world_size=world_size)

    if world_size > 1:
        sizes = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(local_world_size)}
        os.environ.update(_FIRST_RANK | sizes)
        init_process_group()
    replace(dist, "init_process_group", init_process_group)


def patch_object_collectives(world_size: int) -> None:
    """Patch object collectives to return this rank's objects without pickling."""

    def all_gather_object(object_list: list[Any], obj: Any, *_: Any, **__: Any) -> None:
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

    for patch in (all_gather_object, gather_object, scatter_object_list):
        replace(dist, patch.__name__, patch)
    replace(dist, "broadcast_object_list", nothing)


def patch_ddp(classify: Callable[[torch.Tensor, str], None] | None) -> None:
    """Patch DistributedDataParallel to allocate its buckets without communication.

    Its C++ reducer does not support fake tensors. A real reducer copies all gradients to buckets
    unless they are views of the buckets. `classify` is the ledger's method, or None with other
    strategies.
    """

    def init(self: Any, module: torch.nn.Module, *_: Any, **options: Any) -> None:
        torch.nn.Module.__init__(self)
        self.module = module
        self.device_ids = self.output_device = None
        self.require_backward_grad_sync = True
        self._buckets = []
        if classify is not None and not options.get("gradient_as_bucket_view", False):
            trained = [p for p in module.parameters() if p.requires_grad]
            self._buckets = [torch.empty_like(p, requires_grad=False) for p in trained]
            for bucket in self._buckets:
                classify(bucket, "gradients")

    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    @contextmanager
    def no_sync(self: Any) -> Iterator[None]:
        yield

    for name, patch in {
        "__init__": init,
        "forward": forward,
        "no_sync": no_sync,
        "register_comm_hook": nothing,
        "_set_static_graph": nothing,
    }.items():
        replace(DistributedDataParallel, name, patch)


def patch_strategy_choice(note: Note) -> None:
    """Replace the strategy that a script passes to its Accelerator with the trial's strategy."""
    choose = accelerator_setup.strategy_for

    def strategy_for(world: World, chosen: str | Strategy, settings: StrategySettings) -> Strategy:
        if chosen in SHARDED or settings.activation_checkpointing:
            note("the compared strategies replace the strategy of the script's Accelerator")
        plain = settings._replace(activation_checkpointing=False, cpu_offload=False)
        return choose(world, DDP, plain)

    replace_everywhere("strategy_for", strategy_for)


def shard(
    model: torch.nn.Module,
    units: Iterable[torch.nn.Module],
    optimizers: Iterable[torch.optim.Optimizer],
    mesh: DeviceMesh,
) -> None:
    """Shard a model's units across the ranks with torch's `fully_shard`.

    Optimizers are switched to the sharded parameters and keep their state.
    `_get_device_from_mesh`, which FSDP's modules import by name, is patched, because FSDP would
    otherwise use the mesh's device, which is a CPU without an index.
    """
    from torch.distributed.fsdp import fully_shard

    whole = dict(model.named_parameters(remove_duplicate=False))
    device = next(iter(whole.values())).device
    replace_everywhere("_get_device_from_mesh", lambda _: device)
    for unit in units:
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    shards = dict(model.named_parameters(remove_duplicate=False))
    replaced = {id(whole[name]): shards[name] for name in whole}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [replaced.get(id(p), p) for p in group["params"]]
        for old in [p for p in optimizer.state if id(p) in replaced]:
            new, state = replaced[id(old)], optimizer.state.pop(old)
            optimizer.state[new] = {name: sharded_as(new, value) for name, value in state.items()}
