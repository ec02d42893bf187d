"""A non-blocking connection that exchanges messages between launchers."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Iterator
from contextlib import suppress

from headway.ipc.typed import Lines, TooLong
from headway.launcher.multinode import messages

_READ_SIZE = 65536
_MAX_FIRST_LINE = 2**14  # bytes, until the peer is authenticated


class Connection:
    """A connection to another launcher over `link`; `key` is empty if the run has no key."""

    def __init__(self, link: socket.socket, key: bytes, *, is_hub: bool) -> None:
        link.setblocking(False)
        with suppress(OSError):  # not a TCP connection
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.link = link
        self._key = key
        self._is_hub = is_hub
        self._lines = Lines(messages.MAX_GREETING)
        self._greeting = messages.new_greeting(key)
        self._session: messages.Session | None = None
        self._unsent = bytearray(self._greeting.line())

    @property
    def has_greeted(self) -> bool:
        return self._session is not None

    @property
    def has_part(self) -> bool:
        return self._lines.has_part

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def receive(self) -> Iterator[messages.Message]:
        """Yield the received messages.

        Raises InvalidPeer for data that is not from this run, and EOFError or OSError if the
        connection is closed or broken.
        """
        try:
            yield from self._receive()
        except TooLong as error:
            raise messages.InvalidPeer(str(error)) from None

    def _receive(self) -> Iterator[messages.Message]:
        try:
            data = self.link.recv(_READ_SIZE)
        except BlockingIOError:
            return
        if not data:
            raise EOFError
        for line in self._lines.feed(data):
            if self._session is None:
                theirs = messages.read_greeting(line)
                if self._is_hub and theirs.has_key != self._greeting.has_key:
                    one, other = ("a", "none") if theirs.has_key else ("no", "one")
                    raise messages.InvalidPeer(f"it has {one} key, but this run has {other}", "key")
                self._session = messages.Session(
                    self._key, self._greeting, theirs, is_hub=self._is_hub
                )
                self._lines.limit = _MAX_FIRST_LINE
            else:
                message = self._session.open(line)
                self._lines.limit = messages.MAX_LINE
                yield message

    def put(self, message: messages.Message) -> None:
        """Queue a message for the next `flush`."""
        assert self._session is not None, "the other end has greeted"
        self._unsent += self._session.seal(message)

    def flush(self) -> None:
        """Send queued data without blocking."""
        with suppress(BlockingIOError):
            while self._unsent:
                del self._unsent[: self.link.send(self._unsent)]

    def flush_watched(self, selector: selectors.BaseSelector) -> None:
        """Flush; while unsent data remains, make `selector` also wait for writability."""
        self.flush()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        key = selector.get_key(self.link)
        if key.events != events:
            selector.modify(self.link, events, key.data)

    def refuse(self, reason: str) -> None:
        """Send the reason for the refusal to a peer that cannot authenticate."""
        with suppress(OSError):
            self._unsent += messages.refusal(reason or "key")
            self.flush()
            self.link.shutdown(socket.SHUT_WR)

    def discard(self) -> None:
        """Discard received data; closing a link with unread data would reset it too early."""
        with suppress(BlockingIOError):
            if not self.link.recv(_READ_SIZE):
                raise EOFError

    def close(self) -> None:
        self.link.close()


def closed(error: EOFError | OSError) -> str:
    """Describe the loss of a connection; an EOFError may contain the reason."""
    if isinstance(error, EOFError) and error.args:
        return str(error)
    if isinstance(error, (EOFError, ConnectionError)):
        return "its launcher exited"
    return f"the connection to it broke: {error.strerror or error}"


def silence(seconds: float) -> str:
    return f"it sent nothing for {seconds:.0f} s, since {clock_time(seconds)}"


def lost_link(message: messages.HeartbeatLost, of: str) -> str:
    return (
        f"it received nothing from {of} since {message.since}: the link from {of} to it is down, "
        f"or {of} was suspended"
    )


def clock_time(seconds_ago: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time.time() - seconds_ago))
