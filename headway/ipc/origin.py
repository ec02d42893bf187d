"""The origin of a setting's value."""

from enum import IntEnum
from typing import NamedTuple


class Layer(IntEnum):
    """Kinds of sources. The sources of a launch come first, in order of increasing precedence."""

    DEFAULT = 0
    DETECTED = 1  # from the machine
    CLUSTER = 2  # a variable set by the scheduler or MPI
    USER_PROFILE = 3
    PROJECT_PROFILE = 4
    ENVIRONMENT = 5
    FLAG = 6
    # sources outside a launch have no precedence
    PROFILE = 7  # a single profile
    ASSIGNMENT = 8  # NAME=VALUE on a command line
    ANSWERS = 9  # answers in `headway config`
    IMPORTED = 10  # a file or command line of another tool
    SCRIPT = 11  # an argument in the script

    @property
    def label(self) -> str:
        """The name shown in messages, such as "user profile"."""
        return self.name.lower().replace("_", " ")


class Origin(NamedTuple):
    """The origin of a value. Use its `str` only in messages; base decisions on the fields."""

    layer: Layer
    file: str = ""  # with ~ for the home folder
    line: int | None = None  # line of the key in the file, from 1
    variable: str = ""  # environment variable
    flag: str = ""  # command-line flag
    reason: str = ""  # reason for the value, or a note on its source

    def __str__(self) -> str:
        if self.file:
            line = "" if self.line is None else f", line {self.line}"
            place = f"{self.layer.label} {self.file}{line}"
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

    @property
    def is_user_set(self) -> bool:
        """Whether the user set the value. Default, detected and cluster values are not user-set."""
        return self.layer > Layer.CLUSTER

    @property
    def is_for_this_launch(self) -> bool:
        """Whether a flag or variable set the value for this launch only."""
        return self.layer in (Layer.ENVIRONMENT, Layer.FLAG)

    def with_reason(self, reason: str) -> "Origin":
        return self._replace(reason=f"{self.reason}; {reason}" if self.reason else reason)


DEFAULT = Origin(Layer.DEFAULT)
