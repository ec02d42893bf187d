"""The messages between launchers: lines of JSON, authenticated by HMAC-SHA256.

Each end first sends a line with a nonce. Every later line starts with a tag: the HMAC of the line's
content and sequence number, under a key that is derived from the run's key, both nonces and the
direction. Lines that were forged, replayed, reordered, reflected or sent on another connection are
refused. Messages are not encrypted.
"""

from __future__ import annotations

import binascii
import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from typing import NamedTuple

from headway.ipc.records import CrashSite, StepStats
from headway.ipc.typed import decode, encode

PROTOCOL = "headway-channel/2"
MAX_GREETING = 128  # bytes of a line without a tag: a greeting or a refusal
MAX_LINE = 2**20  # bytes
MAX_DETAILS = 50_000  # characters
_TAG_BYTES = 16  # half of SHA-256's output: RFC 2104, section 5
_TAG_CHARS = 22  # in base64
_GREETING = re.compile(rb"headway-channel/(\d{1,9}) ([0-9a-f]{32}) (keyed|open)")
_REFUSAL = re.compile(rb"headway-channel refused: (key|version)")


class MachineFacts(NamedTuple):
    """The values, by name, on which machines must or should agree."""

    must_agree: Mapping[str, str]
    should_agree: Mapping[str, str]


class Join(NamedTuple):
    """A machine's first message, which identifies it."""

    machine: int | None  # its rank; None: machine 0 assigns one
    least: int  # its minimum number of machines
    most: int
    host: str
    facts: MachineFacts


class MachineReady(NamedTuple):
    """The machine runs no ranks and waits for a round."""

    probe_port: int  # to which another machine connects
    store_port: int | None  # of torch's store; None except on machine 0
    num_ranks: int  # on the machine


class Probed(NamedTuple):
    """The result of a probe."""

    problem: str  # empty if the machine was reached


class Failed(NamedTuple):
    """A failure that a machine reports; if machine 0 sends it, the failure that ended the run."""

    machine: int
    host: str
    cause: str
    where: str
    details: str
    fix: str
    exit_code: int
    suspicion: int = 0  # of being a consequence: 0 none, 1 silent exit, 2 communication error
    ago_s: float = 0.0  # seconds from the failure to this message
    is_final: bool = False  # a restart would not help
    site: CrashSite | None = None
    repeats: str = ""  # description of the repetition, set by machine 0


class Done(NamedTuple):
    """All ranks of the machine succeeded; `silent_exit` describes a rank that exited silently."""

    silent_exit: Failed | None = None


class Signalled(NamedTuple):
    """A signal on the sending machine stops the run; machine 0 notifies the other machines."""

    signal: int
    host: str
    ends_grace: bool = False  # the second Ctrl-C: the ranks get no more time to stop


class MachineHeartbeat(NamedTuple):
    """Shows that the sender is running; machines answer the heartbeats of machine 0."""


class StepTiming(NamedTuple):
    rank: int
    stats: StepStats


class HeartbeatLost(NamedTuple):
    """The sender received nothing within the timeout, and is leaving the run."""

    since: str  # time of day of the last message


class Leave(NamedTuple):
    """The machine leaves the run and will close the connection."""


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
    """All machines of the round are ready: start the ranks."""

    number: int
    machine: int  # the rank of the receiver
    num_machines: int
    first_rank: int  # on the receiver
    world_size: int  # the number of ranks on all machines
    address: str  # of the receiver, as seen by other machines
    store_port: int
    notes: tuple[str, ...] = ()  # the receiver's differences from machine 0


class Restart(NamedTuple):
    """Stop the ranks and prepare for the next round."""

    cause: str
    number: int  # of the restart; 0 if it is not counted


class AllDone(NamedTuple):
    """All ranks of the run succeeded."""


Message = (
    Join | MachineReady | Probed | Failed | Done | Signalled | MachineHeartbeat | StepTiming
) | (HeartbeatLost | Leave | Accepted | Rejected | Missing | Probe | StartRound | Restart | AllDone)


class InvalidPeer(Exception):
    """The received data is not from a launcher of this run."""

    def __init__(self, text: str, reason: str = "") -> None:
        super().__init__(text)
        self.reason = reason
        """`key` or `version` if the peer's key or version differs, otherwise empty."""


class Greeting(NamedTuple):
    """The first line that each end sends, without a tag."""

    nonce: str
    has_key: bool

    def line(self) -> bytes:
        return f"{PROTOCOL} {self.nonce} {'keyed' if self.has_key else 'open'}\n".encode()


def new_greeting(key: bytes) -> Greeting:
    return Greeting(secrets.token_hex(16), bool(key))


def read_greeting(line: bytes) -> Greeting:
    """Parse a greeting; raises InvalidPeer if it is malformed or from another version."""
    match = _GREETING.fullmatch(line)
    if match is None:
        raise protocol_mismatch()
    if f"headway-channel/{int(match[1])}" != PROTOCOL:
        raise InvalidPeer(f"it uses version {int(match[1])} of the protocol", "version")
    return Greeting(match[2].decode(), match[3] == b"keyed")


def protocol_mismatch() -> InvalidPeer:
    """Return the exception for a peer that does not start with a greeting."""
    return InvalidPeer("it does not use the protocol of Headway's launchers")


def refusal(reason: str) -> bytes:
    """Return the untagged line with the reason for a refusal: `key` or `version`."""
    return f"headway-channel refused: {reason}\n".encode()


class Session:
    """Authenticates the messages of a connection; an empty key provides no protection."""

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
        """Return the message in the next line; raises InvalidPeer if the line is invalid."""
        tag, content = line[:_TAG_CHARS], line[_TAG_CHARS:]
        if not hmac.compare_digest(tag, _tag(self._receiving, self._num_received, content)):
            if match := _REFUSAL.fullmatch(line):
                raise InvalidPeer("it refused this machine", match[1].decode())
            raise InvalidPeer("a message was not authenticated with the key of this run", "key")
        self._num_received += 1
        try:
            message: Message = decode(Message, content)
        except ValueError as error:
            raise InvalidPeer(f"a message cannot be read: {error}") from None
        return message


def _tag(key: bytes, number: int, content: bytes) -> bytes:
    whole = hmac.digest(key, number.to_bytes(8, "big") + content, hashlib.sha256)
    return binascii.b2a_base64(whole[:_TAG_BYTES], newline=False)[:_TAG_CHARS]
