"""The batch sizes of loaders that follow from the number of samples in an optimizer step."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, IterableDataset

from headway.data.samplers import changed
from headway.data.sharding import batch_size_of, is_plain, rebuilt
from headway.errors import UsageError

_CALL = "the script's Accelerator(global_batch_size=...)"


def micro_batch_of(global_batch_size: int, num_ranks: int, steps: int) -> int:
    """Return the number of samples in a micro-batch of all ranks together.

    Args:
        global_batch_size: samples in an optimizer step.
        steps: micro-batches in an optimizer step.

    Raises:
        UsageError: the samples cannot be divided evenly.
    """
    parts = num_ranks * steps
    if global_batch_size % parts:
        below = global_batch_size // parts * parts
        sizes = f"{below} or {below + parts}" if below else str(parts)
        over = f"{num_ranks} ranks" + (f" times {steps} micro-batches" if steps > 1 else "")
        raise UsageError(
            f"global_batch_size={global_batch_size} cannot be divided evenly over {over} (a"
            f" multiple of {parts} could be)",
            where=_CALL,
            fix=f"pass global_batch_size={sizes}, or change num_processes or"
            " gradient_accumulation_steps",
        )
    return global_batch_size // steps


def with_micro_batch(loader: Any, size: int) -> Any:
    """Return a loader like `loader`, each of whose batches has `size` samples.

    Raises:
        UsageError: it decides on its batches itself, and they have another size.
    """
    if batch_size_of(loader) == size:
        return loader
    batches = getattr(loader, "batch_sampler", None)
    if is_plain(loader) and isinstance(loader.dataset, IterableDataset) and loader.batch_size:
        return rebuilt(loader, batch_size=size, drop_last=loader.drop_last)
    if is_plain(loader) and type(batches) is BatchSampler:
        batches = BatchSampler(batches.sampler, size, batches.drop_last)
        return changed(loader, batch_sampler=batches, batch_size=loader.batch_size and size)
    own = batch_size_of(loader) or "of its own"
    raise UsageError(
        f"global_batch_size needs batches of {size} samples, and the {type(loader).__name__}'s"
        f" batch size is {own}",
        where=_CALL,
        fix=f"give it batches of {size} samples, or a batch_size in place of a batch sampler of"
        " your own, or leave the loader out of prepare()",
    )
