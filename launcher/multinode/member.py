"""A machine's end of the channel: a thread that stores the messages from machine 0."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from headway.ipc.signals import Bell
from headway.launcher.multinode import messages
from headway.launcher.multinode.connect import CHECK_EVERY_S, plain_address
from headway.launcher.multinode.connection import Connection, ended, lost_link, silence, time_of_day


class Member:
    """A machine's membership. Its thread sets the attributes; `word` returns the progress."""

    def __init__(
        self, link: socket.socket, key: bytes, machine_timeout_s: float, word: Callable[[], str]
    ) -> None:
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
        """Called by the thread when another machine ends the run's grace period."""
        self.lost: str | None = None  # why machine 0 was lost
        self.is_silent = False  # machine 0 was lost because it sent nothing
        self.unacceptable: messages.Unacceptable | None = None  # the other end is not machine 0
        self.has_greeted = False
        self.own_address, self.address_of_machine_0 = _addresses(link)
        self.connection = Connection(link, key, is_hub=False)
        self.timeout_s = machine_timeout_s
        self._word = word
        self._last_word = ""
        self._to_send: deque[messages.Message] = deque()
        self._bell = Bell()
        self._is_closing = False
        self._selector = selectors.DefaultSelector()
        self._woken_end, self._waking_end = socket.socketpair()
        self._selector.register(self._woken_end, selectors.EVENT_READ)
        self._selector.register(link, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="headway-member", daemon=True)
        self._thread.start()

    def send(self, message: messages.Message) -> None:
        """Queue a message, which is sent once the other end has greeted."""
        self._to_send.append(message)
        self._wake()

    def wait(self, is_so: Callable[[], bool], within_s: float) -> bool:
        """Wait for `is_so`, or for the end of the run or connection; return `is_so()`."""
        until = time.monotonic() + within_s
        while not is_so() and not self.is_over and (left_s := until - time.monotonic()) > 0:
            self._bell.wait(min(left_s, CHECK_EVERY_S))
        return is_so()

    @property
    def is_over(self) -> bool:
        """Whether further messages from machine 0 are irrelevant."""
        return self.ended_by is not None or self.refused is not None or self.is_lost

    @property
    def is_lost(self) -> bool:
        """Whether the connection ended before the run."""
        return self.lost is not None or self.unacceptable is not None

    @property
    def is_closed_unanswered(self) -> bool:
        """Whether the other end, such as a tunnel, closed the connection without an answer."""
        answers = (self.accepted, self.refused, self.ended_by)
        return self.lost is not None and not any(answer is not None for answer in answers)

    def close(self) -> None:
        """Send the queued messages and close the connection."""
        self._is_closing = True
        self._wake()
        while self._thread.is_alive():
            self._thread.join(CHECK_EVERY_S)
        self._waking_end.close()

    def _wake(self) -> None:
        with suppress(OSError):  # the thread has ended
            self._waking_end.send(b"\0")

    def _serve(self) -> None:
        heard_at = polled_at = time.monotonic()
        try:
            while not (self._is_closing and not self._has_unsent):
                ready = self._selector.select(self.timeout_s / 4)
                now = time.monotonic()
                if now > polled_at + self.timeout_s / 2:  # this process was suspended
                    heard_at = now
                polled_at = now
                for key, events in ready:
                    if key.fileobj is self._woken_end:
                        self._woken_end.recv(4096)
                    elif events & selectors.EVENT_READ and self._receive():
                        heard_at = now
                self._send_all()
                if self.accepted is not None and now > heard_at + self.timeout_s:
                    self._leave_unheard(now - heard_at)
                    break
        except messages.Unacceptable as error:
            self.unacceptable = error
        except (EOFError, OSError) as error:
            if self.connection.has_part and not self.has_greeted:
                self.unacceptable = messages.not_ours()
            else:
                self.lost = self.lost or ended(error)
        finally:
            self.connection.close()
            self._selector.close()
            self._woken_end.close()
            self._bell.ring()

    def _leave_unheard(self, seconds: float) -> None:
        """Send machine 0, which may still receive it, the reason for closing the connection."""
        self.lost = silence(seconds)
        self.is_silent = True
        self.connection.put(messages.HeartbeatLost(time_of_day(seconds)))
        self.connection.flush()

    @property
    def _has_unsent(self) -> bool:
        can_send = self.has_greeted and bool(self._to_send)
        return can_send or self.connection.has_unsent

    def _receive(self) -> bool:
        has_come = False
        for message in self.connection.receive():
            has_come = True
            self._take(message)
        if self.connection.has_greeted and not self.has_greeted:
            self.has_greeted = has_come = True
        self._bell.ring()
        return has_come

    def _take(self, message: messages.Message) -> None:
        if isinstance(message, messages.Accepted):
            self.timeout_s = message.machine_timeout_s
            self.accepted = message
        elif isinstance(message, messages.Beat):
            word = self._word()
            self._to_send.append(messages.Beat("" if word == self._last_word else word))
            self._last_word = word
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
            raise messages.Unacceptable(f"{type(message).__name__} is not a message from machine 0")

    def _send_all(self) -> None:
        while self.has_greeted and self._to_send:
            self.connection.put(self._to_send.popleft())
        self.connection.flush_watched(self._selector)


def _addresses(link: socket.socket) -> tuple[str, str]:
    """Return the addresses of both ends; empty for machine 0's connection to itself."""
    if link.family not in (socket.AF_INET, socket.AF_INET6):
        return "", ""
    return plain_address(link.getsockname()), plain_address(link.getpeername())
