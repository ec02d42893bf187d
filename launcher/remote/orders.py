"""What the launch over ssh and its agents on the hosts say to each other: lines of JSON.

Everything travels through ssh, which has authenticated both sides. The agents' lines begin with a
word that only this launch knows, because a login shell and the ranks write to the same stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Order(NamedTuple):
    """The first words to an agent: where the launch is to run, and with what."""

    mark: str  # at the beginning of the agent's lines
    folder: str  # the working directory
    script: str | None  # a file, which has to be there
    variables: Mapping[str, str]  # the environment of the launch


class Found(NamedTuple):
    """Whether a launch can begin on a host, and how that is reached; the answer to an order."""

    fault: str = ""  # why nothing can run there
    address: str = ""  # at which ssh has reached the host
    port: int = 0  # a free one


class Question(NamedTuple):
    """Asks an agent from which address it reaches another host."""

    reaches: str


class Route(NamedTuple):
    """The answer to a question."""

    address: str


class Start(NamedTuple):
    """Lets an agent run `headway launch` with these words, and its secret in the environment."""

    words: tuple[str, ...]
    key: str
    stops_within_s: float  # after a stop signal; then the launch is killed


class Signal(NamedTuple):
    """A signal for the launch."""

    number: int


class End(NamedTuple):
    """How the launch has ended: an agent's last words."""

    exit_code: int
    report: str  # the error, as it is printed
