"""Gathers per-sample results from all ranks, without duplicates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from headway.data.active_loader import LoaderLoop, current_loop
from headway.distributed import collectives
from headway.distributed.call_barrier import runs_ahead
from headway.distributed.nested import for_each_part, is_dataclass_object, leaves, only_tensors
from headway.distributed.world import rank_and_size
from headway.errors import Code, UsageError

CALL = "the script's gather_for_metrics(...)"


class SampleObjects:
    """A list with one object per sample of this rank, nested in other results."""

    def __init__(self, entries: list[Any]) -> None:
        self.entries = entries


def gather_for_metrics(
    input_data: Any, use_gather_object: bool = False, *, strict: bool = True
) -> Any:
    """Gather results for samples; see `Accelerator.gather_for_metrics`.

    Without `strict`, results that do not belong to samples are gathered unchanged.
    """
    loop, size = current_loop(), rank_and_size()[1]
    num_ranks = len(loop.batch.rank_sizes) or size  # the other ranks have left this loop

    def gather(part: Any) -> Any:
        if isinstance(part, SampleObjects):
            if num_ranks < size:
                return collectives.gather_among_first(part.entries, num_ranks, True)
            return collectives.gather_object(part.entries)
        if not only_tensors(part):
            return for_each_part(gather, part, is_collective=True)
        if num_ranks < size:
            return collectives.gather_among_first(part, num_ranks, False)
        tensors = [*leaves(part)]
        if (_are_even(loop, tensors) and runs_ahead(tensors)) or not (
            loop.batch.padded or loop.ended_loop
        ):
            return collectives.gather(part)
        return collectives.gather_uneven(part)

    return gather(_without_repeats(input_data, loop, use_gather_object, strict))


def _without_repeats(part: Any, loop: LoaderLoop, as_objects: bool, strict: bool) -> Any:
    """Drop results of repeated samples; lists become `SampleObjects`."""
    is_tensor = isinstance(part, torch.Tensor)
    if part is None or (is_tensor and part.ndim == 0):
        return part
    if is_tensor or _are_objects(part, as_objects):
        kept = _rows_to_keep(loop, len(part), strict)
        if kept is None and strict:
            raise _not_for_samples(f"{len(part)} results", loop)
        part = part if kept is None else part[:kept]
        return part if is_tensor and not as_objects else SampleObjects([*part])
    if isinstance(part, (list, tuple, Mapping)) or is_dataclass_object(part):
        if strict and isinstance(part, list) and _has_tensor_per_sample(part, loop):
            raise _not_for_samples("a list with one tensor per sample", loop)
        return for_each_part(lambda p: _without_repeats(p, loop, as_objects, strict), part)
    raise _not_for_samples(f"a {type(part).__name__}", loop)


def _rows_to_keep(loop: LoaderLoop, rows: int, strict: bool) -> int | None:
    """Return how many of this rank's results to keep; the rest belong to repeated samples.

    Return None if there are neither k rows per sample of the current batch, nor one row per sample
    of an epoch that ended during that batch.
    """
    ended = loop.ended_loop
    kept = _rows_of_batch(loop, rows, strict)
    if ended is None or rows != ended.samples:
        return kept if ended is None or loop.loader is not None else None
    if loop.loader is not None and kept not in (None, rows - ended.repeated):
        raise UsageError(
            f"gather_for_metrics() got {rows} results, which may belong to the last batch or to"
            " the epoch that ended during that batch",
            where=CALL,
            fix="gather results of the outer loop's batch before the inner loop, and results of"
            " the inner loop inside it",
            code=Code.METRICS,
        )
    return rows - ended.repeated


def _rows_of_batch(loop: LoaderLoop, rows: int, strict: bool) -> int | None:
    """Return how many rows of the batch to keep; the rest belong to repeated samples.

    If a short batch has as many rows as a full batch, one row per sample is kept. If the number of
    rows is also k per sample of the short batch, one row per sample is kept if full batches had
    one, and all k rows if they had more; otherwise, UsageError is raised.
    """
    rank, size = rank_and_size()
    samples, new = loop.batch.of_rank(rank, size)
    if not samples:  # unknown
        return rows
    full = loop.batch.full // (len(loop.batch.rank_sizes) or size)
    each, rest = divmod(rows, samples)
    if rows == full > samples and (rest or not loop.rows or 1 in loop.rows):
        if strict and not rest and loop.rows != {1}:
            raise UsageError(
                f"gather_for_metrics() got {rows} results, which is ambiguous: one per sample of a"
                f" full batch, or {each} per sample of the last batch, which has {samples} samples",
                where=CALL,
                fix="pass one result per sample, such as loss.repeat(len(batch)), or one row of"
                f" {each} results per sample: results.reshape({samples}, {each}, ...)",
                code=Code.METRICS,
            )
        return new
    if each and not rest and samples >= full:
        loop.rows.add(each)
    return None if rest else each * new


def _has_tensor_per_sample(part: list[Any], loop: LoaderLoop) -> bool:
    """Return whether a list has as many tensors as a short batch has samples, but longer ones."""
    rank, size = rank_and_size()
    samples, _ = loop.batch.of_rank(rank, size)
    full = loop.batch.full // (len(loop.batch.rank_sizes) or size)
    has_more = any(isinstance(one, torch.Tensor) and one.shape[:1] == (full,) for one in part)
    return 1 < len(part) == samples < full and has_more


def _are_even(loop: LoaderLoop, tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether all ranks have the same number of samples, and one row per sample."""
    batch = loop.batch
    samples, _ = batch.of_rank(*rank_and_size())
    is_whole = loop.ended_loop is None and not batch.rank_sizes and batch.samples == batch.padded
    return is_whole and all(tensor.ndim == 0 or len(tensor) == samples for tensor in tensors)


def _are_objects(part: Any, as_objects: bool) -> bool:
    """Return whether `part` is a list or tuple of one object per sample, such as strings."""
    if isinstance(part, list):
        return as_objects or not part or not only_tensors(part)
    kinds = (torch.Tensor, list, tuple, Mapping)
    is_tuple = isinstance(part, tuple) and not hasattr(part, "_fields")
    return is_tuple and not any(isinstance(entry, kinds) for entry in part)


def _not_for_samples(what: str, loop: LoaderLoop) -> UsageError:
    samples, _ = loop.batch.of_rank(*rank_and_size())
    had = f"{samples} samples" if samples else "a different number of samples"
    return UsageError(
        f"gather_for_metrics() got {what}, but this rank's last batch has {had}",
        where=CALL,
        fix="pass one or k rows per sample of the batch, including any that collate_fn drops, or,"
        " after the loop, one row per sample of the epoch; pass lists with one tensor per sample"
        " with use_gather_object=True; call accelerator.gather(...) for other"
        " tensors, and headway.utils.gather_object([...]) for other objects",
        code=Code.METRICS,
    )
