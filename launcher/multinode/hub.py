"""The server of a multi-node run: a thread on machine 0 that serves all machines."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from headway.launcher.multinode import messages
from headway.launcher.multinode.connection import Connection, clock_time, closed, lost_link, silence
from headway.launcher.multinode.coordinator import Coordinator
from headway.launcher.multinode.network import plain_address

BEATS_PER_TIMEOUT = 3  # two heartbeats may be lost before a machine counts as lost
_BUSY_INTERVAL_S = 0.05  # between ticks while machines join or a decision is due
_GREETING_TIMEOUT_S = 10.0  # from a connection to its first message
_MAX_LOGGED = 10  # refused connections that are logged
_JOIN_POLL_S = 0.1  # signal handlers can run between the waits


class _PeerState:
    def __init__(self, connection: Connection, address: str, reached_at: str, now: float) -> None:
        self.connection = connection
        self.address = address  # empty for machine 0 itself
        self.reached_at = reached_at
        self.received_at = self.began_at = now
        self.has_joined = False
        self.is_refused = False


class Hub:
    """Serves the machines of a run. Only its thread uses the coordinator and the listener."""

    def __init__(
        self,
        listener: socket.socket,
        key: bytes,
        coordinator: Coordinator,
        machine_timeout_s: float,
        log: Callable[[str], None],
    ) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._key = key
        self._coordinator = coordinator
        self._timeout_s = machine_timeout_s
        self._beat_s = machine_timeout_s / BEATS_PER_TIMEOUT
        self._log = log
        self.peers: dict[int, _PeerState] = {}
        self._num_peers = self._num_logged = 0
        self._close_at = float("inf")
        self._beat_at = time.monotonic() + self._beat_s
        self._accept_at = 0.0
        self._selector = selectors.DefaultSelector()
        self._wakeup_reader, self._wakeup_writer = socket.socketpair()
        self._selector.register(self._wakeup_reader, selectors.EVENT_READ)
        self._selector.register(listener, selectors.EVENT_READ)
        own, self.own_end = socket.socketpair()  # machine 0's connection to itself
        self._add(own, "", "")
        self._thread = threading.Thread(target=self._serve, name="headway-hub", daemon=True)
        self._thread.start()

    def close(self, within_s: float) -> None:
        """Stop once all machines have left and late machines are notified, or after `within_s`."""
        self._close_at = time.monotonic() + within_s
        with suppress(OSError):  # the thread has exited
            self._wakeup_writer.send(b"\0")
        while self._thread.is_alive():
            self._thread.join(_JOIN_POLL_S)
        self._wakeup_writer.close()

    def _serve(self) -> None:
        polled_at = tick_at = time.monotonic()
        try:
            while self._close_at == float("inf") or self._is_needed:
                ready = self._selector.select(self._wait_s())
                now = time.monotonic()
                if now > polled_at + self._timeout_s / 2:  # this process was suspended
                    for peer in self.peers.values():
                        peer.received_at = peer.began_at = now
                polled_at = now
                for key, events in ready:
                    self._handle_event(key, events, now)
                if now >= tick_at:
                    tick_at = now + _BUSY_INTERVAL_S
                    self._check_timeouts(now)
                    self._coordinator.tick(now)
                self._send_all()
                if now > self._close_at:
                    break
        finally:
            for number in list(self.peers):
                self._drop(number)
            self._listener.close()
            self._selector.close()
            self._wakeup_reader.close()

    @property
    def _is_needed(self) -> bool:
        """Whether machines are connected, or late machines must be notified of the run's end."""
        has_members = any(peer.has_joined for peer in self.peers.values())
        return has_members or self._coordinator.num_unnotified > 0

    def _wait_s(self) -> float:
        if self._coordinator.is_busy or self._close_at < float("inf"):
            return _BUSY_INTERVAL_S
        return min(self._beat_s, max(self._beat_at - time.monotonic(), 0))

    def _handle_event(self, key: selectors.SelectorKey, events: int, now: float) -> None:
        if key.data is not None:
            if key.data in self.peers:
                self._serve_peer(key.data, events, now)
        elif key.fileobj is self._wakeup_reader:
            self._wakeup_reader.recv(4096)
        else:
            self._accept(now)

    def _accept(self, now: float) -> None:
        if now < self._accept_at:  # the waiting connection makes `select` return at once
            time.sleep(_BUSY_INTERVAL_S)
            return
        try:
            link, address = self._listener.accept()
            self._add(link, plain_address(address), plain_address(link.getsockname()))
        except BlockingIOError:  # already closed
            pass
        except OSError as error:  # too many open files, or already closed
            self._accept_at = now + 1
            self._log_first(f"cannot accept a connection: {error.strerror}")

    def _add(self, link: socket.socket, address: str, reached_at: str) -> None:
        now = time.monotonic()
        connection = Connection(link, self._key, is_hub=True)
        self._num_peers += 1
        self.peers[self._num_peers] = _PeerState(connection, address, reached_at, now)
        self._selector.register(link, selectors.EVENT_READ, self._num_peers)
        with suppress(OSError):  # already closed: the next read reports it
            connection.flush_watched(self._selector)

    def _serve_peer(self, number: int, events: int, now: float) -> None:
        peer = self.peers[number]
        try:
            if peer.is_refused:
                peer.connection.discard()
                return
            if events & selectors.EVENT_WRITE:
                peer.connection.flush_watched(self._selector)
            if events & selectors.EVENT_READ:
                for message in peer.connection.receive():
                    peer.received_at = now
                    self._handle(number, message, now)
        except messages.InvalidPeer as error:
            self._refuse(number, str(error), error.reason)
            self._coordinator.drop(number, f"its connection broke: {error}", now)
        except (EOFError, OSError) as error:
            self._drop(number)
            self._coordinator.drop(number, closed(error), now)

    def _handle(self, number: int, message: messages.Message, now: float) -> None:
        peer = self.peers[number]
        if peer.has_joined and isinstance(message, messages.HeartbeatLost):
            raise EOFError(lost_link(message, "machine 0"))
        if peer.has_joined:
            self._coordinator.handle(number, message, now)
        elif isinstance(message, messages.Join):
            peer.has_joined = self._coordinator.join(
                number, message, peer.address, peer.reached_at, now
            )
        elif isinstance(message, messages.Leave):  # from a refused machine
            raise EOFError
        else:
            raise messages.InvalidPeer("it has not joined")

    def _check_timeouts(self, now: float) -> None:
        """Send heartbeats, drop silent machines, and refuse connections that do not join."""
        if now >= self._beat_at:
            self._beat_at = now + self._beat_s
            joined = [key for key, peer in self.peers.items() if peer.has_joined]
            self._coordinator.outbox += [(key, messages.MachineHeartbeat()) for key in joined]
        for number, peer in list(self.peers.items()):
            silent_s = now - peer.received_at
            if peer.has_joined and silent_s > self._timeout_s:
                peer.connection.put(messages.HeartbeatLost(clock_time(silent_s)))
                with suppress(OSError):  # already closed
                    peer.connection.flush()
                self._drop(number)
                self._coordinator.drop(number, silence(silent_s), now)
            elif peer.has_joined or now < peer.began_at + _GREETING_TIMEOUT_S or not peer.address:
                continue
            elif peer.is_refused:
                self._drop(number)
            else:
                self._refuse(number, f"it sent no message within {_GREETING_TIMEOUT_S:.0f} s", "")

    def _send_all(self) -> None:
        while self._coordinator.outbox:
            pending, self._coordinator.outbox = self._coordinator.outbox, []
            sendable = [
                (number, message)
                for number, message in pending
                if number in self.peers and not self.peers[number].is_refused
            ]
            for number, message in sendable:
                self.peers[number].connection.put(message)
            for number in dict.fromkeys(number for number, _ in sendable):
                with suppress(OSError):  # the next read reports the loss
                    self.peers[number].connection.flush_watched(self._selector)

    def _refuse(self, number: int, why: str, reason: str) -> None:
        peer = self.peers[number]
        self._log_first(f"refused a connection from {peer.address}: {why}")
        peer.connection.refuse(reason)
        peer.is_refused, peer.has_joined = True, False
        peer.began_at = time.monotonic()
        self._selector.modify(peer.connection.link, selectors.EVENT_READ, number)

    def _log_first(self, line: str) -> None:
        self._num_logged += 1
        if self._num_logged <= _MAX_LOGGED:
            self._log(line)

    def _drop(self, number: int) -> None:
        connection = self.peers.pop(number).connection
        self._selector.unregister(connection.link)
        connection.close()
