"""Choices for `mixed_precision` and `strategy`, and parsing of `wrap`."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class NumberFormat(NamedTuple):
    """Properties of a precision that are known without importing torch."""

    help: str  # shown by the wizard
    dtype: str  # torch's name for the dtype of matrix products
    tolerance: float = 5e-2  # largest weight difference from fp32 after one step
    capability: tuple[int, int] = (0, 0)  # minimum compute capability of an NVIDIA GPU
    fallback: str = "no"  # the precision to use on older GPUs


PRECISIONS: Mapping[str, NumberFormat] = {
    "no": NumberFormat("fp32 throughout, the most memory", "float32", 1e-5),
    "fp16": NumberFormat(
        "half the memory; a small range, so gradients are scaled", "float16", 1e-2
    ),
    "bf16": NumberFormat(
        "half the memory, with the range of fp32", "bfloat16", capability=(8, 0), fallback="fp16"
    ),
}
"""Precisions by the names used in profiles, flags and scripts."""


def other_precisions(unsupported: Sequence[str]) -> list[str]:
    """Return the reduced precisions that are not in `unsupported`."""
    return [name for name in PRECISIONS if name not in ("no", *unsupported)]


DDP, FSDP, HSDP = "ddp", "fsdp", "hsdp"
SHARDED = (FSDP, HSDP)
STRATEGIES = (DDP, FSDP, HSDP)
AUTO = "auto"  # as `strategy` it means ddp; as `wrap`, the repeated blocks

SHARDING_SETTINGS = ("strategy", "shard_size", "wrap", "activation_checkpointing", "cpu_offload")
"""Settings that select and configure the strategy."""


def read_wrap(raw: object) -> str:
    """Return `wrap` in canonical form: `auto`, comma-separated class names, or a number.

    Raises ValueError with the reason as its message.
    """
    parts = raw if isinstance(raw, (list, tuple, set, frozenset)) else str(raw).split(",")
    names = [name for part in parts if (name := str(part).strip())]
    if names == [AUTO]:
        return AUTO
    if len(names) == 1 and names[0].isdecimal() and names[0].isascii():
        if not 0 < int(names[0][:20]) < 10**18:
            raise ValueError("not a valid number of parameters")
        return str(int(names[0]))
    if not names or not all(name.isidentifier() for name in names):
        raise ValueError("not auto, class names or a number of parameters")
    return ",".join(dict.fromkeys(names))
