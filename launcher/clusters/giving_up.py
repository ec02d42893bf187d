"""A launcher that fails before it joins tells the other machines, so that none waits for it."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from contextlib import suppress

from headway.contract.origin import Layer
from headway.errors import HeadwayError
from headway.launcher.clusters.channel.coordinator import Coordinator
from headway.launcher.clusters.channel.hub import Hub
from headway.launcher.clusters.channel.joined import failure_of
from headway.launcher.clusters.channel.member import Member
from headway.launcher.clusters.channel.messages import Facts
from headway.launcher.clusters.channel.run_key import run_key_of_machine_0, wait_for_run_key
from headway.launcher.clusters.interfaces import host_port
from headway.launcher.clusters.listening import listening_socket
from headway.launcher.clusters.reaching import listening_host
from headway.launcher.reporting.rank_channel import say
from headway.settings.table import Settings

_STARTS_WITHIN_S = 30.0  # each machine, where a scheduler starts them all at once
_CONNECT_TIMEOUT_S = 5.0
_ANSWER_WITHIN_S = 5.0
_POLL_INTERVAL_S = 0.2


def tell_machines(settings: Settings, environ: Mapping[str, str], error: HeadwayError) -> None:
    """Tell the other machines of a launch why this one cannot take part, if they wait for it.

    Machine 0 is told, and tells the others. A scheduler starts all machines at once, and the others
    may come later; where a person starts one after the other, machine 0 is tried once, and cannot
    tell anybody itself.

    Args:
        settings: of the launch.
        environ: the launcher's, which may hold the run's key.
        error: why.
    """
    if settings.num_machines.is_range or settings.main_address is None:
        return
    start_together = settings.origin("machine_rank").layer is Layer.CLUSTER
    if settings.machine_rank:
        _tell_machine_0(settings, environ, error, _STARTS_WITHIN_S if start_together else 0.0)
    elif start_together:
        _tell_others(settings, environ, error)


def _tell_machine_0(
    settings: Settings, environ: Mapping[str, str], error: HeadwayError, within_s: float
) -> None:
    main = host_port(str(settings.main_address), settings.main_port or 0)
    say(f"telling machine 0 at {main} that this machine cannot take part")
    link = _connected(settings, within_s)
    if link is None:
        return
    key = wait_for_run_key(environ).key
    member = Member(link, key, float(settings.machine_timeout_s), str)
    member.send(failure_of(error, settings.machine_rank or 0))
    member.wait(lambda: False, _ANSWER_WITHIN_S)
    member.close()


def _connected(settings: Settings, within_s: float) -> socket.socket | None:
    until = time.monotonic() + within_s
    while True:
        with suppress(OSError, UnicodeError):
            main = (settings.main_address, settings.main_port)
            return socket.create_connection(main, _CONNECT_TIMEOUT_S)
        if time.monotonic() > until:
            return None
        time.sleep(_POLL_INTERVAL_S)


def _tell_others(settings: Settings, environ: Mapping[str, str], error: HeadwayError) -> None:
    """Listen as machine 0 until all others have come, and tell them."""
    try:
        host = listening_host(str(settings.main_address))
        listener = listening_socket(host, settings.main_port or 0)
    except (OSError, HeadwayError):
        return
    key = run_key_of_machine_0(environ, say)
    timeout_s = float(settings.machine_timeout_s)
    coordinator = Coordinator(
        least=settings.num_machines,
        most=settings.num_machines,
        max_restarts=0,
        join_timeout_s=_STARTS_WITHIN_S,
        machine_timeout_s=timeout_s,
        facts=Facts((), ()),
        say=say,
        now=time.monotonic(),
    )
    coordinator.give_up(failure_of(error, 0))
    hub = Hub(listener, key.key, coordinator, timeout_s, say)
    hub.take_own_end().close()
    hub.close(_STARTS_WITHIN_S)
    key.forget()
