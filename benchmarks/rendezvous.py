"""How machines meet: the channel beside a counter in torch's store and torch's c10d, in one run.

    python benchmarks/rendezvous.py                      # 8, 64, 256 and 1,000 agents
    python benchmarks/rendezvous.py --agents 8,64 --idle-s 60
    python benchmarks/rendezvous.py --json result.json

Agents are simulated, all on this host: machine 0 is a process, and all others are in another one. A
join is timed from the first connection until the last agent may start its ranks: for the channel
with authentication, comparison of the machines, and one connection from each machine to another.
Bytes are those of the whole loopback device, with the headers of Ethernet, IP and TCP. Idle traffic
is the heartbeats at the default timeout. torch's c10d runs up to 64 agents: 256 take it minutes.
Where other programs use the loopback device, root can have one of its own:

    unshare --net sh -c "ip link set lo up; python benchmarks/rendezvous.py"
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

KEY = b"a key for the benchmark"
TIMEOUT_S = 15.0
C10D_AT_MOST = 64


class Cost(NamedTuple):
    """What one join of all agents has taken."""

    seconds: float
    device_bytes: int
    idle_device_bytes_per_s: float | None = None


def device_bytes() -> int:
    """Return how many bytes the loopback device has carried."""
    devices = psutil.net_io_counters(pernic=True)
    return int(devices["lo" if "lo" in devices else "lo0"].bytes_sent)


class Agents:
    """The other end of many connections, by one thread.

    Args:
        address: of the hub.
        count: how many agents, machine 0 not counted.
    """

    def __init__(self, address: tuple[str, int], count: int) -> None:
        from headway.launcher.multinode.connection import Connection

        self.rounds = 0
        self._selector = selectors.DefaultSelector()
        self._probes: list[socket.socket] = []
        for machine in range(1, count + 1):
            link = socket.create_connection(address)
            connection = Connection(link, KEY, is_hub=False)
            connection.flush()
            self._selector.register(link, selectors.EVENT_READ, [machine, connection, False])

    def serve_until(self, condition: Callable[[], bool]) -> None:
        """Answer machine 0 until something is so."""
        while not condition():
            for key, _ in self._selector.select(0.05):
                self._serve(key.data)

    def _serve(self, agent: list[Any]) -> None:
        from headway.launcher.multinode import messages

        machine, connection, has_joined = agent
        for message in connection.receive():
            if isinstance(message, messages.Probe):
                socket.create_connection((message.address, message.port)).close()
                connection.put(messages.Probed(""))
            elif isinstance(message, messages.Accepted):
                probe = socket.create_server(("127.0.0.1", 0))
                self._probes.append(probe)
                connection.put(messages.MachineReady(probe.getsockname()[1], None, 1))
            elif isinstance(message, messages.StartRound):
                self.rounds += 1
            elif isinstance(message, messages.MachineHeartbeat):
                connection.put(messages.MachineHeartbeat())
        if connection.has_greeted and not has_joined:
            agent[2] = True
            connection.put(introduction(machine, self._total))
        connection.flush()

    @property
    def _total(self) -> int:
        return len(self._selector.get_map()) + 1


def introduction(machine: int, machines: int) -> Any:
    """Return what a machine of a real launch tells."""
    from headway.launcher.multinode.messages import Join, MachineFacts

    host = f"node{machine:04d}.cluster.local"
    return Join(machine, machines, machines, host, MachineFacts({}, {}))


def _run_agents(address: tuple[str, int], count: int, end: Any) -> None:
    agents = Agents(address, count)
    agents.serve_until(lambda: agents.rounds == count)
    end.send(time.monotonic())
    agents.serve_until(end.poll)


def channel(count: int, idle_s: float) -> Cost:
    """Have `count` agents meet over the channel."""
    from headway.launcher.multinode.coordinator import Coordinator
    from headway.launcher.multinode.hub import Hub
    from headway.launcher.multinode.hub_client import HubClient
    from headway.launcher.multinode.messages import MachineFacts, MachineReady, Probed

    before = device_bytes()
    began = time.monotonic()
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    coordinator = Coordinator(
        least=count,
        most=count,
        max_restarts=0,
        join_timeout_s=600,
        machine_timeout_s=TIMEOUT_S,
        facts=MachineFacts({}, {}),
        log=print,
        now=began,
    )
    hub = Hub(listener, KEY, coordinator, TIMEOUT_S, print)
    main = HubClient(hub.own_end, KEY, TIMEOUT_S)
    main.send(introduction(0, count))
    probe = socket.create_server(("127.0.0.1", 0))
    main.send(MachineReady(probe.getsockname()[1], 29501, 1))
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    others = context.Process(target=_run_agents, args=(listener.getsockname(), count - 1, theirs))
    began = time.monotonic()
    others.start()
    main.wait(lambda: main.probe is not None, 600)
    main.send(Probed(""))
    ended = ours.recv()
    main.wait(lambda: main.round is not None, 600)
    ended = max(ended, time.monotonic())
    on_device = device_bytes() - before
    time.sleep(idle_s)
    idle_on_device = device_bytes() - before - on_device
    ours.send(None)
    others.join()
    main.close()
    hub.close(0)
    probe.close()
    return Cost(ended - began, on_device, idle_on_device / idle_s)


def in_threads(count: int, act: Callable[[int], None]) -> Cost:
    """Have a thread for each agent act at once."""
    before = device_bytes()
    threads = [threading.Thread(target=act, args=(number,)) for number in range(count)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Cost(time.monotonic() - began, device_bytes() - before)


def counter(count: int) -> Cost:
    """Have `count` agents count each other in torch's store, and wait for the last one."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    port = listener.getsockname()[1]
    limit = timedelta(seconds=600)
    main = TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        timeout=limit,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )

    def act(_: int) -> None:
        store = TCPStore("127.0.0.1", port, timeout=limit, wait_for_workers=False)
        if store.add("joined", 1) == count:
            store.set("open", "1")
        store.wait(["open"], limit)

    cost = in_threads(count, act)
    del main
    return cost


def c10d(count: int) -> Cost:
    """Have `count` agents meet by torch's c10d rendezvous."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    endpoint = f"127.0.0.1:{port}"
    handlers = []

    def act(number: int) -> None:
        parameters = RendezvousParameters(
            "c10d", endpoint, "benchmark", count, count, is_host=number == 0
        )
        backend, store = create_backend(parameters)
        handler = create_handler(store, backend, parameters)
        handlers.append(handler)
        handler.next_rendezvous()

    cost = in_threads(count, act)
    for handler in handlers:
        handler.shutdown()
    return cost


def measured(measure: Callable[..., Cost], *arguments: Any) -> Cost:
    """Measure in a process of its own, whose memory and sockets end with it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_send, args=(theirs, measure, arguments))
    process.start()
    theirs.close()
    cost = Cost(*ours.recv())
    process.join()
    return cost


def _send(end: Any, measure: Callable[..., Cost], arguments: tuple[Any, ...]) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    end.send(tuple(measure(*arguments)))
    end.close()
    os._exit(0)  # torch's threads are not waited for


def _per_s(value: float | None) -> str:
    return "-" if value is None else f"{value / 1000:.1f} kB/s"


def main() -> None:
    """Measure, print the table, and write it where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, add_help=True)
    parser.add_argument("--agents", default="8,64,256,1000")
    parser.add_argument("--idle-s", type=float, default=30.0, help="to watch the idle traffic")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    contenders: dict[str, Callable[[int], Cost]] = {
        "headway's channel": lambda count: measured(channel, count, options.idle_s),
        "a counter in TCPStore": lambda count: measured(counter, count),
        "torch's c10d": lambda count: measured(c10d, count),
    }
    heading = ("join", "bytes", "idle")
    print(f"{'agents':>6}  {'by':<22}" + "".join(f"{name:>16}" for name in heading))
    rows = []
    for count in map(int, options.agents.split(",")):
        for name, measure in contenders.items():
            if measure is contenders["torch's c10d"] and count > C10D_AT_MOST:
                continue
            cost = measure(count)
            rows.append({"agents": count, "by": name, **cost._asdict()})
            cells = [
                f"{cost.seconds:.2f} s",
                f"{cost.device_bytes / 1e6:.2f} MB",
                _per_s(cost.idle_device_bytes_per_s),
            ]
            print(f"{count:>6}  {name:<22}" + "".join(f"{cell:>16}" for cell in cells), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
