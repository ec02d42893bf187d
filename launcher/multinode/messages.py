"""The messages between launchers, one line of JSON each, authenticated by HMAC-SHA256.

Each end first sends one plain line with a nonce. Every later line begins with the tag of its
content and of its number on the connection, under a key that is derived from the run's key, both
nonces and the direction: what is forged, repeated, reordered, reflected or of another connection
is refused. Nothing is encrypted.
"""

from __future__ import annotations

import binascii
import hashlib
import hmac
import re
import secrets
from typing import NamedTuple, get_args

from headway.ipc.records import CrashSite, Figures
from headway.ipc.typed import decode, encode, kinds_of

PROTOCOL = "headway-channel/1"
MAX_GREETING = 128  # bytes, as of every line that is not authenticated
MAX_LINE = 2**20  # bytes
MAX_DETAILS = 50_000  # characters
_TAG_BYTES = 16  # half of SHA-256's output: RFC 2104, section 5
_TAG_CHARS = 22  # in base64
_GREETING = re.compile(rb"headway-channel/(\d{1,9}) ([0-9a-f]{32}) (keyed|open)")
_REFUSAL = re.compile(rb"headway-channel refused: (key|version)")


class Fact(NamedTuple):
    """Something that machines must have in common, or should."""

    name: str
    value: str


class MachineFacts(NamedTuple):
    must_agree: tuple[Fact, ...]
    should_agree: tuple[Fact, ...]


class Join(NamedTuple):
    """A machine's first message: who it is."""

    machine: int | None  # its rank; None: machine 0 gives it one
    least: int  # machines that it expects
    most: int
    host: str
    facts: MachineFacts


class MachineReady(NamedTuple):
    """The machine runs no rank, and waits for a round."""

    probe_port: int  # on which it listens, to be tried by another machine
    store_port: int | None  # of torch's store, from machine 0


class Probed(NamedTuple):
    """Whether the machine that it was to try has been reached."""

    problem: str  # empty: reached


class Failed(NamedTuple):
    """How a run failed: a machine reports it, and machine 0 tells all which failure ended it."""

    machine: int
    host: str
    cause: str
    where: str
    details: str
    fix: str
    exit_code: int
    suspicion: int = 0  # that it is the cause: 0 none, 1 it left silently, 2 in communication
    ago_s: float = 0.0  # when it happened, before the message was sent
    is_final: bool = False  # a restart would not help
    site: CrashSite | None = None
    repeats: str = ""  # how it is the failure before it, as machine 0 has found


class Done(NamedTuple):
    """All ranks of the machine have ended well; `left` describes one that left silently."""

    left: Failed | None = None


class Signalled(NamedTuple):
    """A signal stops the run, on the machine that sends it; machine 0 tells the others."""

    signal: int
    host: str
    ends_grace: bool = False  # the second Ctrl-C: the ranks get no more time to stop


class Beat(NamedTuple):
    word: str  # of its ranks: how far they are; empty: as before


class Timing(NamedTuple):
    rank: int
    figures: Figures


class HeartbeatLost(NamedTuple):
    """The sender has heard nothing for too long, and leaves: the link to it is cut."""

    since: str  # the time of day


class Leave(NamedTuple):
    """The machine leaves the run, and its connection will close."""


class Accepted(NamedTuple):
    machine_timeout_s: float


class Rejected(NamedTuple):
    what: str
    where: str
    fix: str


class Missing(NamedTuple):
    text: str


class Probe(NamedTuple):
    label: str
    address: str
    port: int


class StartRound(NamedTuple):
    """All machines of the round are there: start the ranks."""

    number: int
    machine: int  # the rank of the receiver
    num_machines: int
    num_restarts: int  # so far, in the whole run
    address: str  # of the receiver, as the others see it
    store_port: int
    notes: tuple[str, ...] = ()  # how the receiver differs from machine 0


class Restart(NamedTuple):
    """Stop the ranks, and be ready for the next round."""

    cause: str
    number: int  # of the restart; 0: this one is not counted


class AllDone(NamedTuple):
    """All ranks of the run have ended well."""


Message = (
    Join | MachineReady | Probed | Failed | Done | Signalled | Beat | Timing | HeartbeatLost | Leave
) | (Accepted | Rejected | Missing | Probe | StartRound | Restart | AllDone)

_KINDS = kinds_of(*get_args(Message))


class Unacceptable(Exception):
    """What has come is not what the other end of this channel would send."""

    def __init__(self, text: str, reason: str = "") -> None:
        super().__init__(text)
        self.reason = reason
        """`key` or `version` where the other end has another one, else empty."""


class Greeting(NamedTuple):
    """The plain first line of each end."""

    nonce: str
    has_key: bool

    def line(self) -> bytes:
        return f"{PROTOCOL} {self.nonce} {'keyed' if self.has_key else 'open'}\n".encode()


def new_greeting(key: bytes) -> Greeting:
    return Greeting(secrets.token_hex(16), bool(key))


def read_greeting(line: bytes) -> Greeting:
    """Return the greeting in a line; Unacceptable if it is none, or that of another version."""
    match = _GREETING.fullmatch(line)
    if match is None:
        raise not_ours()
    if f"headway-channel/{int(match[1])}" != PROTOCOL:
        raise Unacceptable(f"it speaks version {int(match[1])} of the protocol", "version")
    return Greeting(match[2].decode(), match[3] == b"keyed")


def not_ours() -> Unacceptable:
    """Return the exception for an end that begins with something else than a greeting."""
    return Unacceptable("it does not speak the protocol of Headway's launchers")


def refusal(reason: str) -> bytes:
    """Return the plain line that says why a connection is closed: `key` or `version`."""
    return f"headway-channel refused: {reason}\n".encode()


class Session:
    """The authenticated messages of one connection; with an empty key anybody can send them."""

    def __init__(self, key: bytes, ours: Greeting, theirs: Greeting, *, is_hub: bool) -> None:
        nonces = [ours.nonce, theirs.nonce] if is_hub else [theirs.nonce, ours.nonce]

        def derived(direction: str) -> bytes:
            text = " ".join([PROTOCOL, direction, *nonces])
            return hmac.digest(key, text.encode(), "sha256")

        to_hub, from_hub = derived("to machine 0"), derived("from machine 0")
        self._sending, self._receiving = (from_hub, to_hub) if is_hub else (to_hub, from_hub)
        self._num_sent = self._num_received = 0

    def seal(self, message: Message) -> bytes:
        content = encode(message)[:-1]
        tag = _tag(self._sending, self._num_sent, content)
        self._num_sent += 1
        return tag + content + b"\n"

    def open(self, line: bytes) -> Message:
        """Return the message in the next line; Unacceptable if the other end did not send it."""
        tag, content = line[:_TAG_CHARS], line[_TAG_CHARS:]
        if not hmac.compare_digest(tag, _tag(self._receiving, self._num_received, content)):
            if match := _REFUSAL.fullmatch(line):
                raise Unacceptable("it refuses this machine", match[1].decode())
            raise Unacceptable("a message was not made with the key of this run", "key")
        self._num_received += 1
        try:
            message: Message = decode(_KINDS, content)
        except ValueError as error:
            raise Unacceptable(f"a message cannot be read: {error}") from None
        return message


def _tag(key: bytes, number: int, content: bytes) -> bytes:
    whole = hmac.digest(key, number.to_bytes(8, "big") + content, hashlib.sha256)
    return binascii.b2a_base64(whole[:_TAG_BYTES], newline=False)[:_TAG_CHARS]
