"""Results of all ranks for the samples that they were given, each sample once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from headway.data.active_loader import LoaderLoop, current_loop
from headway.distributed import collectives
from headway.distributed.meeting import runs_ahead
from headway.distributed.nested import for_each_part, is_dataclass_object, leaves, only_tensors
from headway.distributed.world import rank_and_size
from headway.errors import UsageError

CALL = "the script's gather_for_metrics(...)"


class SampleObjects:
    """Objects for the samples of this rank, in the place of their list among other results."""

    def __init__(self, entries: list[Any]) -> None:
        self.entries = entries


def gather_for_metrics(
    input_data: Any, use_gather_object: bool = False, *, strict: bool = True
) -> Any:
    """Gather results for samples; see `Accelerator.gather_for_metrics`.

    Without `strict`, results that are not for samples are gathered as they are.
    """
    loop, size = current_loop(), rank_and_size()[1]
    results = _without_repeats(input_data, loop, use_gather_object, strict)
    num_ranks = len(loop.batch.shares) or size  # the others are not in this loop any more

    def gather(part: Any) -> Any:
        if isinstance(part, SampleObjects):
            if num_ranks < size:
                return collectives.gather_among_first(part.entries, num_ranks, True)
            return collectives.gather_object(part.entries)
        if num_ranks < size:
            return collectives.gather_among_first(part, num_ranks, False)
        tensors = [leaf for leaf in leaves(part) if isinstance(leaf, torch.Tensor)]
        if (_are_even(loop, tensors) and runs_ahead(tensors)) or not (
            loop.batch.padded or loop.passed
        ):
            return collectives.gather(part)
        return collectives.gather_uneven(part)

    return gather(results) if only_tensors(results) else _for_each(gather, results)


def _without_repeats(data: Any, loop: LoaderLoop, as_objects: bool, strict: bool) -> Any:
    """Return results without those of repeated samples; lists become `SampleObjects`."""

    def without_repeats(part: Any) -> Any:
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
            return for_each_part(without_repeats, part)
        raise _not_for_samples(f"a {type(part).__name__}", loop)

    return without_repeats(data)


def _rows_to_keep(loop: LoaderLoop, rows: int, strict: bool) -> int | None:
    """Return how many of this rank's results, the first, are not of repeated samples.

    None: there are neither as many as samples in a pass that has ended in the current batch, nor
    k for each sample of that batch.
    """
    passed = loop.passed
    kept = _rows_of_batch(loop, rows, strict)
    if passed is None or rows != passed.samples:
        return kept if passed is None or loop.loader is not None else None
    if loop.loader is not None and kept not in (None, rows - passed.repeated):
        raise UsageError(
            f"gather_for_metrics() got {rows} results: the samples of the last batch, or of the"
            " pass that has ended in it?",
            where=CALL,
            fix="gather those of the outer loop's batch before the inner loop, or those of the"
            " inner loop in it",
        )
    return rows - passed.repeated


def _rows_of_batch(loop: LoaderLoop, rows: int, strict: bool) -> int | None:
    """Return how many results are for samples of the batch; as many as a full one has are cut.

    Where they make k for each sample of a shorter batch as well, they are cut if full batches had
    one for each, k for each if those had others, and refused if that is not known.
    """
    rank, size = rank_and_size()
    samples, new = loop.batch.of_rank(rank, size)
    if not samples:  # nothing is known
        return rows
    full = loop.batch.full // (len(loop.batch.shares) or size)
    each, rest = divmod(rows, samples)
    if rows == full > samples and (rest or not loop.rows or 1 in loop.rows):
        if strict and not rest and loop.rows != {1}:
            raise UsageError(
                f"gather_for_metrics() got {rows} results, as many as a full batch has: those of"
                f" the {samples} samples of the last batch, or {each} for each of them?",
                where=CALL,
                fix=f"pass one for each sample, such as loss.repeat(len(batch)), or {each} for each"
                f" in one row: results.reshape({samples}, {each}, ...)",
            )
        return new
    if each and not rest and samples >= full:
        loop.rows.add(each)
    return None if rest else each * new


def _are_even(loop: LoaderLoop, tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether all ranks have one row for each sample of equally many."""
    batch = loop.batch
    samples, _ = batch.of_rank(*rank_and_size())
    is_whole = loop.passed is None and not batch.shares and batch.samples == batch.padded
    return is_whole and all(tensor.ndim == 0 or len(tensor) == samples for tensor in tensors)


def _are_objects(part: Any, as_objects: bool) -> bool:
    """Return whether a list, or a tuple as torch collates strings, has one entry for a sample."""
    if isinstance(part, list):
        return as_objects or not part or not only_tensors(part)
    kinds = (torch.Tensor, list, tuple, Mapping)
    is_tuple = isinstance(part, tuple) and not hasattr(part, "_fields")
    return is_tuple and not any(isinstance(entry, kinds) for entry in part)


def _for_each(gather: Any, part: Any) -> Any:
    if isinstance(part, (SampleObjects, torch.Tensor)):
        return gather(part)
    return for_each_part(lambda part: _for_each(gather, part), part)


def _not_for_samples(what: str, loop: LoaderLoop) -> UsageError:
    samples, _ = loop.batch.of_rank(*rank_and_size())
    had = f"{samples} samples" if samples else "another number of samples"
    return UsageError(
        f"gather_for_metrics() got {what}, and this rank's last batch has {had}",
        where=CALL,
        fix="pass one row, or equally many, for each sample of the batch, or of the whole pass"
        " after its loop; call accelerator.gather(...) for other tensors, and"
        " gather_object([...]) of headway.utils for other objects",
    )
