"""The choices of `mixed_precision` and `strategy`, and the names of a sharded model's units."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class NumberFormat(NamedTuple):
    """The properties of a precision that need no torch."""

    help: str  # one line that helps to choose
    dtype: str  # of matrix products, by torch's name
    tolerance: float = 5e-2  # the largest difference of the weights from fp32's after one step
    capability: tuple[int, int] = (0, 0)  # the oldest compute capability of NVIDIA's GPUs with it
    instead: str = "no"  # what to use on a GPU that is older


PRECISIONS: Mapping[str, NumberFormat] = {
    "no": NumberFormat("fp32 throughout, the most memory", "float32", 1e-5),
    "fp16": NumberFormat(
        "half the memory; a small range, so gradients are scaled", "float16", 1e-2
    ),
    "bf16": NumberFormat(
        "half the memory, with the range of fp32",
        "bfloat16",
        5e-2,
        capability=(8, 0),
        instead="fp16",
    ),
}
"""By the names that profiles, flags and scripts use."""


def other_precisions(lacking: Sequence[str]) -> list[str]:
    """Return the precisions of a device that lacks these, other than that of the weights."""
    return [name for name in PRECISIONS if name not in ("no", *lacking)]


DDP, FSDP, HSDP = "ddp", "fsdp", "hsdp"
SHARDED = (FSDP, HSDP)
STRATEGIES = (DDP, FSDP, HSDP)
AUTO = "auto"  # of a strategy: ddp; of the units: the repeated blocks

SHARING = ("strategy", "shard_size", "wrap", "activation_checkpointing", "cpu_offload")
"""The settings that say how ranks share a model."""


def read_wrap(raw: object) -> str:
    """Return `wrap` in its canonical form: `auto`, class names with commas, or a number.

    The message of a ValueError continues "wrap is <raw>, ".
    """
    parts = raw if isinstance(raw, (list, tuple, set, frozenset)) else str(raw).split(",")
    names = [name for part in parts if (name := str(part).strip())]
    if names == [AUTO]:
        return AUTO
    if len(names) == 1 and names[0].isdecimal() and names[0].isascii():
        if not 0 < int(names[0][:20]) < 10**18:
            raise ValueError("which is no number of parameters")
        return str(int(names[0]))
    if not names or not all(name.isidentifier() for name in names):
        raise ValueError("which is neither auto, nor names of classes, nor a number of parameters")
    return ",".join(dict.fromkeys(names))
