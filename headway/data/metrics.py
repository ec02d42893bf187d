"""Results for the samples of a loop, gathered from all ranks without repeats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from headway import collectives, containers
from headway.data.active_loader import current_loop
from headway.errors import UsageError
from headway.world import rank_and_size


def gather_for_metrics(input_data: Any, use_gather_object: bool = False) -> Any:
    """Gather results for samples of the current batch; see `Accelerator.gather_for_metrics`."""
    loop, size = current_loop(), rank_and_size()[1]

    def drop_repeats(gathered: Any) -> Any:
        return loop.drop_repeats(gathered, size)

    as_objects = use_gather_object or not containers.only_tensors(input_data)
    if as_objects:
        _check_one_for_each_sample(input_data)
    shares = loop.batch.shares
    if shares and len(shares) < size:
        gathered = collectives.gather_among_first(input_data, len(shares), as_objects)
    elif as_objects:
        gathered = collectives.gather_object(input_data)
    else:
        gathered = (collectives.gather_uneven if shares else collectives.gather)(input_data)
    if as_objects:
        return drop_repeats(gathered)
    return containers.for_each_tensor(drop_repeats, gathered)


def _check_one_for_each_sample(data: Any) -> None:
    """Raise UsageError if `data` does not hold one object for each sample."""
    if isinstance(data, (str, bytes, Mapping)) or not isinstance(data, Iterable):
        raise UsageError(
            f"gather_for_metrics() got a {type(data).__name__} with other things than tensors",
            where="the script's gather_for_metrics(...)",
            fix="call it for each entry: with tensors, or a list of one object for each sample",
        )
