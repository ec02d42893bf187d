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

_HALVES = Difference(
    "each batch size that is tried is half of the last one; in Accelerate nine tenths of it",
    "a size that fits is found in fewer attempts",
)

DIFFERENCES = {
    "Accelerator.prepare(scheduler)": Difference(
        "the schedule steps once for each optimizer step; in Accelerate once for each rank",
        "remove a factor num_processes from its length",
    ),
    "Accelerator.prepare(loader)": Difference(
        "a last round that is not whole is shared out evenly; in Accelerate filled with repeats",
        "fewer samples count twice in the last step of an epoch",
    ),
    "Accelerator.join_uneven_inputs": Difference(
        "ranks on CPUs join, too; Accelerate ignores it there, with a warning",
        "a script does the same on every device",
        is_in_compat=True,
    ),
    "Accelerator.reduce": Difference(
        "reduction='none' leaves each rank its own values, in Accelerate it adds up; scale is"
        " applied, in Accelerate on TPUs alone",
        "the arguments mean what they say",
    ),
    "accelerate.find_executable_batch_size": _HALVES,
    "accelerate.utils.find_executable_batch_size": _HALVES,
    "Accelerator.load_state": Difference(
        "a loader goes on in the epoch that it was in; in Accelerate it begins the epoch anew",
        "remove code that skips batches, other than skip_first_batches()",
    ),
    "Accelerator.clip_grad_norm_": _CLIP,
    "Accelerator.clip_grad_value_": _CLIP,
}
"""By the text of a `Need`."""
