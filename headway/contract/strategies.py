"""How ranks can share a model, and how the units of a sharded one are named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

DDP, FSDP, HSDP = "ddp", "fsdp", "hsdp"
SHARDED = (FSDP, HSDP)
STRATEGIES = (DDP, FSDP, HSDP)
AUTO = "auto"  # of a strategy: ddp; of the units: the repeated blocks

SETTINGS = ("strategy", "shard_size", "wrap", "activation_checkpointing", "cpu_offload")
"""The settings that say how ranks share a model."""


def read_wrap(raw: str | Sequence[str] | Mapping[str, str]) -> str:
    """Return `wrap` in its canonical form: `auto`, class names with commas, or a number.

    The message of a ValueError continues "wrap is <raw>, ".
    """
    if isinstance(raw, Mapping):
        raise ValueError("which is a map, not names of classes")
    parts = raw.split(",") if isinstance(raw, str) else raw
    names = [part.strip() for part in parts if part.strip()]
    if names == [AUTO]:
        return AUTO
    if len(names) == 1 and names[0].isdecimal() and names[0].isascii():
        if not 0 < int(names[0][:20]) < 10**18:
            raise ValueError("which is no number of parameters")
        return str(int(names[0]))
    if not names or not all(name.isidentifier() for name in names):
        raise ValueError("which is neither auto, nor names of classes, nor a number of parameters")
    return ",".join(dict.fromkeys(names))
