"""What `from headway import Accelerator` does differently from Accelerate, for the same script."""

from __future__ import annotations

from typing import NamedTuple


class Difference(NamedTuple):
    """How a call differs.

    Args:
        how: what a script sees.
        why: the reason.
        is_in_compat: `headway.compat` differs in this, too.
    """

    how: str
    why: str
    is_in_compat: bool = False


_CLIP = Difference(
    "leaves gradients alone while they accumulate; Accelerate clips each partial sum",
    "the norm of a partial sum says nothing of the gradient that is stepped with",
)

DIFFERENCES = {
    "Accelerator.prepare(scheduler)": Difference(
        "the schedule steps once for each optimizer step; Accelerate's steps once for each rank",
        "a schedule then needs no factor num_processes; remove one that the script has",
    ),
    "Accelerator.prepare(loader)": Difference(
        "a last round that is not whole is shared out evenly; Accelerate fills it with repeats",
        "no sample counts twice in the last step of an epoch, but for at most num_processes - 1",
        is_in_compat=True,
    ),
    "Accelerator.clip_grad_norm_": _CLIP,
    "Accelerator.clip_grad_value_": _CLIP,
}
"""By the text of a `Need`."""
