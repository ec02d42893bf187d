"""Sizes in bytes, for people."""

from __future__ import annotations


def size(nbytes: int) -> str:
    """Return bytes for people: 31.42 GiB."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.1f} {unit}" if unit != "B" else f"{nbytes} B"
        value /= 1024
    return f"{value:.2f} GiB"
