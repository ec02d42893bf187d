"""A hub with the coordinator of a run that needs all of its machines and never restarts."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from headway.launcher.machines.coordinator import Coordinator
from headway.launcher.machines.hub import Hub
from headway.launcher.machines.messages import Facts


def open_hub(
    listener: socket.socket,
    machines: int = 2,
    key: bytes = b"",
    timeout_s: float = 60.0,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[Hub, Coordinator]:
    coordinator = Coordinator(
        least=machines,
        most=machines,
        max_restarts=0,
        join_timeout_s=600,
        machine_timeout_s=timeout_s,
        facts=Facts((), ()),
        say=say,
        now=time.monotonic(),
    )
    return Hub(listener, key, coordinator, timeout_s, say), coordinator
