"""Where a value came from: the layer as data, and the details that a message shows."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Layer(IntEnum):
    """The kinds of sources. Those of a launch come first, from the weakest to the strongest."""

    DEFAULT = 0
    DETECTED = 1  # worked out from the machine
    CLUSTER = 2  # a variable of the scheduler or MPI
    USER_PROFILE = 3
    PROJECT_PROFILE = 4
    ENVIRONMENT = 5
    FLAG = 6
    # these are no part of a launch, and none of them replaces another
    PROFILE = 7  # one that is looked at by itself
    ASSIGNMENT = 8  # NAME=VALUE on a command line
    ANSWERS = 9  # to the questions of `headway config`
    IMPORTED = 10  # another tool's file or command line

    @property
    def label(self) -> str:
        """The name as a person reads it: user profile."""
        return self.name.lower().replace("_", " ")

    def is_weaker_than(self, other: Layer) -> bool:
        """Return whether somebody set both for a launch, where `other` replaces this one."""
        return Layer.DETECTED < self < other <= Layer.FLAG


class Origin(NamedTuple):
    """Where a value came from; `str` is for showing only, and everything that decides reads fields.

    Args:
        layer: the kind of source.
        file: as a person writes it, with ~ for the home folder.
        line: of the key in the file, from 1.
        column: of the key in the file, from 1.
        variable: of the environment.
        flag: of a command line.
        reason: why the value is what it is, or what else is to be said of its source.
    """

    layer: Layer
    file: str = ""
    line: int | None = None
    column: int | None = None
    variable: str = ""
    flag: str = ""
    reason: str = ""

    def __str__(self) -> str:
        column = "" if self.column is None else f", column {self.column}"
        return self._shown(column)

    @property
    def brief(self) -> str:
        """The origin without its column, for a table."""
        return self._shown("")

    @property
    def is_user_set(self) -> bool:
        """Whether a person set the value, rather than a default, the machine or its cluster."""
        return self.layer > Layer.CLUSTER

    @property
    def is_for_this_launch(self) -> bool:
        """Whether the value was set for one launch, by a flag or a variable."""
        return self.layer in (Layer.ENVIRONMENT, Layer.FLAG)

    def because(self, reason: str) -> Origin:
        """Return the origin with one more reason."""
        return self._replace(reason=f"{self.reason}; {reason}" if self.reason else reason)

    def _shown(self, column: str) -> str:
        if self.file:
            line = "" if self.line is None else f", line {self.line}"
            place = f"{self.layer.label} {self.file}{line}{column}"
        elif self.flag:
            place = f"flag {self.flag}"
        elif self.layer is Layer.DETECTED:
            return f"detected: {self.reason}"
        elif self.variable:
            is_own = self.layer is Layer.ENVIRONMENT
            place = f"environment {self.variable}" if is_own else self.variable
        else:
            return self.reason or self.layer.label
        return f"{place} ({self.reason})" if self.reason else place


DEFAULT = Origin(Layer.DEFAULT)
