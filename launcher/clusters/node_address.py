"""Asks SLURM for the address of a node whose name is not that of a host."""

from __future__ import annotations

import re
import subprocess

_ANSWERS_WITHIN_S = 10.0


def address_of_node(name: str) -> str | None:
    """Return the address by which SLURM itself reaches a node; None where it does not say.

    The names of nodes need not be those of hosts: NodeAddr in slurm.conf.
    """
    command = ["scontrol", "--oneliner", "show", "node", name]
    try:
        shown = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_ANSWERS_WITHIN_S
        )
    except (OSError, subprocess.TimeoutExpired):  # in a container there may be no scontrol
        return None
    found = re.search(r" NodeAddr=(\S+)", shown.stdout)
    return found[1] if found else None
