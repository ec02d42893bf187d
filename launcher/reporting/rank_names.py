"""How ranks are named in messages: rank 3, ranks 0, 2-7."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def ranges(ranks: Iterable[int]) -> str:
    """Return 0, 2-7 for 0, 2, 3, 4, 5, 6, 7."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and parts[-1][-1] == rank - 1:
            parts[-1] = [parts[-1][0], rank]
        else:
            parts.append([rank])
    return ", ".join("-".join(map(str, part)) for part in parts)


def named(ranks: Sequence[int]) -> str:
    """Return rank 3, or ranks 0, 2-7."""
    return f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}"
