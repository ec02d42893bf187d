"""Collectives on nested lists, tuples, mappings and dataclasses of tensors.

Without a process group, all functions work as with a single rank.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from headway.distributed.call_barrier import barrier, call_barrier, runs_ahead
from headway.distributed.handler import check_range, checked
from headway.distributed.nested import for_each_tensor, tensors_with_paths
from headway.distributed.world import group_device, rank_and_size
from headway.errors import Code, UsageError

T = TypeVar("T")
Reduction = Literal["sum", "mean", "max", "none"]


def gather(tensor: Any) -> Any:
    """Return the tensors of all ranks, concatenated along dimension 0 in rank order.

    Args:
        tensor: a tensor of shape [n, ...] or [], with the same shape and dtype on every rank, or
            lists, tuples and mappings of such tensors.

    Returns:
        The same nesting with tensors of shape [world size * n, ...], or [world size] for scalars
        (also with one rank), on every rank. With several ranks, they have no gradients; use
        `torch.distributed.nn.functional.all_gather` in a loss.

    Raises:
        UsageError: the data contains objects other than tensors.
        DifferentTensors: keys, shapes or dtypes differ between ranks; raised on all ranks. Tensors
            on GPUs are compared only with TORCH_DISTRIBUTED_DEBUG=INFO.

    Examples:
        >>> import torch
        >>> from headway.utils import gather
        >>> gather({"x": torch.tensor([1, 2]), "loss": torch.tensor(0.5)})  # with one rank
        {'x': tensor([1, 2]), 'loss': tensor([0.5000])}
    """
    require_same_tensors(tensor, "gather")
    return for_each_tensor(gather_same_shape, tensor, strict="gather")


def gather_uneven(tensor: Any) -> Any:
    def gather_tensor(t: torch.Tensor) -> torch.Tensor:
        if t.ndim == 0:
            return gather_same_shape(t)
        lengths = gather_same_shape(torch.tensor(len(t), device=t.device)).tolist()
        longest = max(lengths)
        gathered = gather_same_shape(_padded(t, longest))
        return torch.cat(
            [gathered[rank * longest :][:length] for rank, length in enumerate(lengths)]
        )

    require_same_tensors(tensor, "gather", but_dimension=0)
    return for_each_tensor(gather_tensor, tensor, strict="gather")


@checked
def gather_object(object: list[Any]) -> Any:
    """Concatenate all ranks' lists of picklable objects, in rank order.

    Args:
        object: this rank's list; lengths may differ between ranks.

    Examples:
        >>> from headway.utils import gather_object
        >>> gather_object(["the text of this rank"])  # with one rank
        ['the text of this rank']
    """
    _, size = rank_and_size()
    if size == 1:
        return object
    call_barrier("gather_object(...)")
    lists: list[Any] = [None] * size
    dist.all_gather_object(lists, object)
    return [element for items in lists for element in items]


def gather_among_first(data: Any, num_ranks: int, as_objects: bool) -> Any:
    """Gather nested tensors of any size, or lists of objects, from the first `num_ranks` ranks.

    This uses point-to-point messages, because a new group would require calls from all ranks.
    """
    if as_objects:
        return [element for items in _exchange_among_first(data, num_ranks) for element in items]

    def gather_tensor(t: torch.Tensor) -> torch.Tensor:
        rows = t.detach().reshape(1) if t.ndim == 0 else t.detach()
        return torch.cat(_exchange_among_first(rows.cpu(), num_ranks)).to(t.device)

    return for_each_tensor(gather_tensor, data, strict="gather_for_metrics")


def _exchange_among_first(own: Any, num_ranks: int) -> list[Any]:
    rank, _ = rank_and_size()
    held = []
    for sender in range(num_ranks):
        message = [own]
        if sender != rank:
            dist.recv_object_list(message, sender)
        else:
            for receiver in {*range(num_ranks)} - {rank}:
                dist.send_object_list(message, receiver)
        held.append(message[0])
    return held


@checked
def reduce(tensor: Any, reduction: Reduction = "mean", scale: float = 1.0) -> Any:
    """Return each tensor's sum, mean or maximum over all ranks, multiplied by `scale`.

    Args:
        tensor: a tensor with the same shape and dtype on every rank, or nested tensors. They are
            not modified.
        reduction: `sum`, `mean`, `max` or `none` (every rank keeps its own values).
        scale: a factor for the result.

    Returns:
        The same nesting on every rank, with new tensors of the same shapes and dtypes. Sums of
        integers or bools are int64, as in torch.sum; `scale` and means over several ranks convert
        integers to floating point.

    Raises:
        UsageError: the reduction is invalid, or the data contains objects other than tensors.

    Examples:
        >>> import torch
        >>> from headway.utils import reduce
        >>> reduce(torch.tensor([1.0, 2.0]), "mean", scale=0.5)  # with one rank
        tensor([0.5000, 1.0000])
    """

    def reduce_tensor(t: torch.Tensor) -> torch.Tensor:
        _, size = rank_and_size()
        is_whole = not (t.is_floating_point() or t.is_complex())
        result = t.detach().clone(memory_format=torch.contiguous_format)
        if reduction == "sum" or (reduction == "mean" and size > 1):
            is_half = t.dtype.itemsize < 4
            result = result.long() if is_whole else result.float() if is_half else result
        if size > 1 and reduction != "none":
            dist.all_reduce(result, dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM)
            result = result / size if reduction == "mean" else result
        result = result if is_whole else result.to(t.dtype)
        return result if scale == 1.0 else result * scale

    if reduction != "none":
        require_same_tensors(tensor, "reduce")
    return for_each_tensor(reduce_tensor, tensor, strict="reduce")


@checked
def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Overwrite each tensor with that of rank `from_process`, and return the overwritten data.

    Args:
        tensor: a tensor with the same shape and dtype on every rank, or nested tensors.

    Raises:
        UsageError: the data contains objects other than tensors, or the rank does not exist.

    Examples:
        >>> import torch
        >>> from headway.utils import broadcast
        >>> broadcast(torch.tensor([1, 2]), from_process=0)
        tensor([1, 2])
    """

    def broadcast_tensor(t: torch.Tensor) -> torch.Tensor:
        if rank_and_size()[1] > 1:
            dist.broadcast(t, src=from_process)
        return t

    check_range("broadcast", 0, rank_and_size()[1] - 1, from_process=from_process)
    require_same_tensors(tensor, "broadcast")
    return for_each_tensor(broadcast_tensor, tensor, strict="broadcast")


@checked
def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Overwrite a list of picklable objects with the list of rank `from_process`, and return it.

    Args:
        object_list: a list of the same length on every rank.

    Examples:
        >>> from headway.utils import broadcast_object_list
        >>> broadcast_object_list(["a name", {"lr": 0.1}])
        ['a name', {'lr': 0.1}]
    """
    size = rank_and_size()[1]
    check_range("broadcast_object_list", 0, size - 1, from_process=from_process)
    if size > 1:
        call_barrier("broadcast_object_list(...)")
        dist.broadcast_object_list(object_list, src=from_process)
    return object_list


@checked
def pad_across_processes(
    tensor: Any, dim: int = 0, pad_index: float | bool = 0, pad_first: bool = False
) -> Any:
    """Pad each tensor along `dim` to the largest size on any rank.

    Args:
        tensor: a tensor whose size may differ between ranks only in `dim`, or nested tensors;
            tensors without a dimension `dim` are returned unchanged.
        pad_index: the value to pad with.
        pad_first: pad at the start instead of the end.

    Returns:
        The same nesting, with tensors of shape [..., largest size, ...] and unchanged dtypes.

    Raises:
        UsageError: the data contains objects other than tensors, or a dtype cannot represent
            `pad_index`.
        DifferentTensors: tensors differ in more than `dim`; raised on all ranks, see `gather`.

    Examples:
        >>> import torch
        >>> from headway.utils import pad_across_processes
        >>> pad_across_processes(torch.tensor([1, 2]), pad_index=-100)  # with one rank
        tensor([1, 2])
    """

    def pad_tensor(t: torch.Tensor) -> torch.Tensor:
        fitted = torch.tensor(pad_index).to(t.dtype).item()
        if fitted != pad_index and not t.is_floating_point():
            raise UsageError(
                f"pad_index is {pad_index}, which {t.dtype} cannot represent",
                where="the script's pad_across_processes(...)",
                fix="pass another pad_index, or convert the tensor first: tensor.long()",
                code=Code.BAD_ARGUMENT,
            )
        if not -t.ndim <= dim < t.ndim or rank_and_size()[1] == 1:
            return t
        sizes = gather_same_shape(torch.tensor(t.shape[dim], device=t.device))
        return _padded(t, int(sizes.max()), dim, pad_index, pad_first)

    require_same_tensors(tensor, "pad_across_processes", but_dimension=dim)
    return for_each_tensor(pad_tensor, tensor, strict="pad_across_processes")


def _padded(
    tensor: torch.Tensor, size: int, dim: int = 0, value: float = 0, first: bool = False
) -> torch.Tensor:
    shape = list(tensor.shape)
    shape[dim] = size - tensor.shape[dim]
    padding = tensor.new_full(shape, value)
    return torch.cat([padding, tensor] if first else [tensor, padding], dim=dim)


def wait_for_everyone() -> None:
    """Wait until every rank has called this.

    Examples:
        >>> from headway.utils import wait_for_everyone
        >>> wait_for_everyone()
    """
    barrier(group_device())


def gather_same_shape(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a tensor that is known to have the same shape and dtype on all ranks."""
    _, size = rank_and_size()
    if tensor.ndim == 0:
        tensor = tensor.reshape(1)
    if size == 1:
        return tensor
    tensor = tensor.detach().contiguous()
    parts = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(parts, tensor)
    return torch.cat(parts)


def full_tensor(value: T) -> T:
    """Gather a DTensor from all ranks; return any other value unchanged."""
    full: T = getattr(value, "full_tensor", lambda: value)()
    return full


_REMEDIES = {
    "gather": "pass the same keys and dtypes on every rank, and pad the tensors first with"
    " accelerator.pad_across_processes(...), or pass lists to gather_for_metrics(...,"
    " use_gather_object=True)",
    "reduce": "pass the same number of tensors, with the same keys and shapes, on every rank",
    "pad_across_processes": "pass tensors that differ only in that dimension",
    "broadcast": "pass the sender's keys and shapes, or use broadcast_object_list(...)",
}


class DifferentTensors(UsageError, RuntimeError):
    """Raised if ranks pass tensors to a collective that differ in number, key, shape or dtype."""


def require_same_tensors(data: Any, operation: str, *, but_dimension: int | None = None) -> None:
    """Raise DifferentTensors on all ranks if their nested tensors are incompatible.

    Without this check, gloo aborts one rank and returns uninitialized memory to another. Tensors on
    GPUs are compared only with TORCH_DISTRIBUTED_DEBUG=INFO, because the check would delay ranks
    that run ahead of their GPUs. Sizes may differ along `but_dimension`.
    """
    _, size = rank_and_size()
    if size == 1:
        return
    tensors = [*tensors_with_paths(data)]
    if runs_ahead(tensor for _, tensor in tensors):
        return
    described = [f"{path} {_described(tensor, but_dimension)}" for path, tensor in tensors]
    own = ", ".join(map(str.strip, described)) or "no tensor"
    all_descriptions = call_barrier(f"{operation}(...)", own)
    if all_descriptions is None:
        return
    other = next(rank for rank in range(size) if all_descriptions[rank] != all_descriptions[0])
    raise DifferentTensors(
        f"{operation}() got different tensors: {all_descriptions[0]} on rank 0, "
        f"{all_descriptions[other]} on rank {other}",
        where=f"the script's {operation}(...)",
        fix=_REMEDIES[operation],
        code=Code.TENSORS_DIFFER,
        is_of_all_ranks=True,
    )


def _described(tensor: torch.Tensor, but_dimension: int | None) -> str:
    sizes = [*map(str, tensor.shape)]
    if but_dimension is not None and -len(sizes) <= but_dimension < len(sizes):
        sizes[but_dimension] = "any"
    return f"{str(tensor.dtype).removeprefix('torch.')}[{', '.join(sizes)}]"
