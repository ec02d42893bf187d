"""What `from headway import Accelerator` does differently from Accelerate, for the same script."""

from __future__ import annotations

from typing import NamedTuple


class Difference(NamedTuple):
    """How a call differs.

    Args:
        how: what a script sees.
        why: the reason, or what to do.
        is_in_compat: `headway.compat` differs in this, too.
    """

    how: str
    why: str
    is_in_compat: bool = False


_CLIP = Difference(
    "gradients are left alone while they accumulate; in Accelerate each partial sum is clipped",
    "the norm of a partial sum is not the gradient's",
)

DIFFERENCES = {
    "Accelerator.prepare(scheduler)": Difference(
        "the schedule steps once for each optimizer step; in Accelerate once for each rank",
        "remove a factor num_processes from its length",
    ),
    "Accelerator.prepare(loader)": Difference(
        "a last round that is not whole is shared out evenly; in Accelerate filled with repeats",
        "fewer samples count twice in the last step of an epoch",
        is_in_compat=True,
    ),
    "Accelerator.load_state": Difference(
        "a loader goes on in the epoch that it was in; in Accelerate it begins the epoch anew",
        "remove code that skips batches, other than skip_first_batches()",
    ),
    "Accelerator.clip_grad_norm_": _CLIP,
    "Accelerator.clip_grad_value_": _CLIP,
}
"""By the text of a `Need`."""
