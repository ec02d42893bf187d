"""Reads SLURM's lists of nodes and of numbers for each node. Pure.

scontrol, which could do it, is missing in most containers. Source: `man slurm.conf`, NodeName;
`man sbatch`, SLURM_TASKS_PER_NODE.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

_MAX_NODES = 1_000_000  # more than any cluster has: the list is wrong, not long
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_REPEATED = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


def read_nodelist(text: str) -> list[str]:
    """Return the names of the nodes in a list such as `rack[1-2]n[03-04],login`, in its order.

    Raises:
        ValueError: it is no such list.

    Examples:
        >>> read_nodelist("rack[1-2]n[03-04],login")
        ['rack1n03', 'rack1n04', 'rack2n03', 'rack2n04', 'login']
    """
    nodes: list[str] = []
    for pattern in _split(text):
        parts = re.split(r"\[([^][]*)\]", pattern)  # a name's fixed parts, and the ranges between
        if not pattern or any(char in part for part in parts for char in "[]"):
            raise ValueError(f"{text!r} is not a list of nodes")
        choices = [list(_numbers(part)) if odd % 2 else [part] for odd, part in enumerate(parts)]
        nodes += map("".join, product(*choices))
    return nodes


def read_repeated(text: str) -> list[int]:
    """Return the numbers, one for each node, in a text such as `2(x3),1`.

    Raises:
        ValueError: it is no such text.

    Examples:
        >>> read_repeated("2(x3),1")
        [2, 2, 2, 1]
    """
    numbers: list[int] = []
    for part in text.split(","):
        match = _REPEATED.fullmatch(part)
        if match is None or int(match[2] or 1) > _MAX_NODES:
            raise ValueError(f"{text!r} is not a list of numbers for nodes")
        numbers += [int(match[1])] * int(match[2] or 1)
    return numbers


def _split(text: str) -> list[str]:
    """Split at the commas that are outside of brackets."""
    return re.split(r",(?![^[]*\])", text)


def _numbers(ranges: str) -> Iterator[str]:
    """Yield 03, 04, 7 for 03-04,7: with as many digits as the start of the range."""
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if not 0 <= int(last) - int(first) < _MAX_NODES:
            raise ValueError(f"{ranges!r} is not a list of numbers or ranges")
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{len(first)}}"
