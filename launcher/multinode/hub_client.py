"""Connects to machine 0's hub, and stores the received messages in a thread."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from headway.ipc.signals import SignalSafeEvent
from headway.launcher.multinode import messages
from headway.launcher.multinode.connection import Connection, clock_time, closed, lost_link, silence
from headway.launcher.multinode.network import CHECK_EVERY_S, plain_address


class HubClient:
    """A connection to the hub, served by a thread."""

    def __init__(self, link: socket.socket, key: bytes, machine_timeout_s: float) -> None:
        self.accepted: messages.Accepted | None = None
        self.refused: messages.Rejected | None = None
        self.missing: messages.Missing | None = None
        self.probe: messages.Probe | None = None
        self.round: messages.StartRound | None = None
        self.restart: messages.Restart | None = None  # requested since the last round
        self.ended_by: messages.Failed | None = None
        self.is_all_done = False
        self.stopping: messages.Signalled | None = None
        self.on_grace_end: Callable[[], None] = lambda: None
        """Called in the thread when another machine ends the run's grace period."""
        self.lost: str | None = None  # reason for the loss of machine 0
        self.is_silent = False  # machine 0 was lost after a timeout
        self.peer_error: messages.InvalidPeer | None = None  # the peer is not machine 0
        self.own_address, self.address_of_machine_0 = _addresses(link)
        self.connection = Connection(link, key, is_hub=False)
        self.timeout_s = machine_timeout_s
        self._to_send: deque[messages.Message] = deque()
        self._wakeup = SignalSafeEvent()
        self._is_closing = False
        self._selector = selectors.DefaultSelector()
        self._wakeup_reader, self._wakeup_writer = socket.socketpair()
        self._selector.register(self._wakeup_reader, selectors.EVENT_READ)
        self._selector.register(link, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="headway-member", daemon=True)
        self._thread.start()

    def send(self, message: messages.Message) -> None:
        """Queue a message, which is sent after the hub's greeting."""
        self._to_send.append(message)
        self._wake()

    def wait(self, condition: Callable[[], bool], within_s: float) -> bool:
        """Wait up to `within_s` seconds for `condition()` or `is_over`; return `condition()`."""
        until = time.monotonic() + within_s
        while not condition() and not self.is_over and (left_s := until - time.monotonic()) > 0:
            self._wakeup.wait(min(left_s, CHECK_EVERY_S))
        return condition()

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, or the connection is lost."""
        return self.ended_by is not None or self.refused is not None or self.is_lost

    @property
    def is_lost(self) -> bool:
        """Whether the connection was lost before the end of the run."""
        return self.lost is not None or self.peer_error is not None

    @property
    def is_closed_unanswered(self) -> bool:
        """Whether the peer, such as a tunnel, closed the connection without answering."""
        answers = (self.accepted, self.refused, self.ended_by)
        return self.lost is not None and not any(answer is not None for answer in answers)

    def close(self) -> None:
        """Send the queued messages and close the connection."""
        self._is_closing = True
        self._wake()
        while self._thread.is_alive():
            self._thread.join(CHECK_EVERY_S)
        self._wakeup_writer.close()

    def _wake(self) -> None:
        with suppress(OSError):  # the thread has exited
            self._wakeup_writer.send(b"\0")

    def _serve(self) -> None:
        received_at = polled_at = time.monotonic()
        try:
            while not (self._is_closing and not self._has_unsent):
                ready = self._selector.select(self.timeout_s / 4)
                now = time.monotonic()
                if now > polled_at + self.timeout_s / 2:  # this process was suspended
                    received_at = now
                polled_at = now
                for key, events in ready:
                    if key.fileobj is self._wakeup_reader:
                        self._wakeup_reader.recv(4096)
                    elif events & selectors.EVENT_READ:
                        received_at = now
                        self._receive()
                self._send_all()
                if self.accepted is not None and now > received_at + self.timeout_s:
                    self._report_timeout(now - received_at)
                    break
        except messages.InvalidPeer as error:
            self.peer_error = error
        except (EOFError, OSError) as error:
            if self.connection.has_part and not self.connection.has_greeted:
                self.peer_error = messages.protocol_mismatch()
            else:
                self.lost = self.lost or closed(error)
        finally:
            self.connection.close()
            self._selector.close()
            self._wakeup_reader.close()
            self._wakeup.set()

    def _report_timeout(self, seconds: float) -> None:
        """Report the timeout to machine 0, which may still receive messages."""
        self.lost = silence(seconds)
        self.is_silent = True
        self.connection.put(messages.HeartbeatLost(clock_time(seconds)))
        self.connection.flush()

    @property
    def _has_unsent(self) -> bool:
        can_send = self.connection.has_greeted and bool(self._to_send)
        return can_send or self.connection.has_unsent

    def _receive(self) -> None:
        for message in self.connection.receive():
            self._handle(message)
        self._wakeup.set()

    def _handle(self, message: messages.Message) -> None:
        if isinstance(message, messages.Accepted):
            self.timeout_s = message.machine_timeout_s
            self.accepted = message
        elif isinstance(message, messages.MachineHeartbeat):
            self._to_send.append(message)
        elif isinstance(message, messages.StartRound):
            self.restart, self.probe = None, None
            self.round = message
        elif isinstance(message, messages.Restart):
            self.restart = message
        elif isinstance(message, messages.Failed):
            self.ended_by = message
        elif isinstance(message, messages.AllDone):
            self.is_all_done = True
        elif isinstance(message, messages.Rejected):
            self.refused = message
        elif isinstance(message, messages.Missing):
            self.missing = message
        elif isinstance(message, messages.HeartbeatLost):
            self.lost = lost_link(message, "this machine")
        elif isinstance(message, messages.Probe):
            self.probe = message
        elif isinstance(message, messages.Signalled):
            self.stopping = message
            if message.ends_grace:
                self.on_grace_end()
        else:
            raise messages.InvalidPeer(f"{type(message).__name__} is not a message from machine 0")

    def _send_all(self) -> None:
        while self.connection.has_greeted and self._to_send:
            self.connection.put(self._to_send.popleft())
        self.connection.flush_watched(self._selector)


def _addresses(link: socket.socket) -> tuple[str, str]:
    """Return both ends' IP addresses, or empty strings if machine 0 is connected to itself."""
    if link.family not in (socket.AF_INET, socket.AF_INET6):
        return "", ""
    return plain_address(link.getsockname()), plain_address(link.getpeername())
