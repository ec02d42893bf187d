"""The progress bar of tqdm, on one rank of each machine."""

from __future__ import annotations

from typing import Any

from headway.contract.run import Ranks, read_ranks
from headway.errors import UsageError


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Return `tqdm.auto.tqdm(*args, **kwargs)`, which shows on each machine's first rank only.

    Args:
        main_process_only: False shows the bar of every rank.

    Raises:
        UsageError: the first argument is True or False, as in old versions of Accelerate.
        UsageError: tqdm is not installed.

    Examples:
        >>> from headway.utils import tqdm
        >>> sum(tqdm([1, 2, 3], disable=True))
        6
    """
    if args and isinstance(args[0], bool):
        raise UsageError(
            f"tqdm() got {args[0]} in place of what to iterate over",
            where="the script's tqdm(...)",
            fix=f"pass main_process_only={args[0]}",
        )
    try:
        from tqdm.auto import tqdm as bar
    except ModuleNotFoundError:
        raise UsageError(
            "tqdm is not installed",
            where="the script's tqdm(...)",
            fix="`pip install tqdm`",
        ) from None
    local_rank = (read_ranks() or Ranks()).local_rank
    hidden = main_process_only and local_rank != 0
    return bar(*args, **{**kwargs, "disable": kwargs.get("disable", False) or hidden})
