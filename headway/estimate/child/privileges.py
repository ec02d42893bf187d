"""Lets root, as whom containers often run, be no more than a user who may read all files.

Source: capabilities(7) and linux/capability.h.
"""

from __future__ import annotations

import ctypes
import signal
import struct
import sys

_SIGNAL_AT_PARENTS_DEATH = 1  # prctl(2)
_VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3: two words of each set
_DAC_OVERRIDE, _DAC_READ_SEARCH, _SYS_RESOURCE = 1, 2, 24
_KEPT = 1 << _DAC_OVERRIDE | 1 << _DAC_READ_SEARCH | 1 << _SYS_RESOURCE
"""To read the files of others, and to raise limits of its own."""


def end_with_parent() -> None:
    """Let the kernel kill this process when the one that it was forked from has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SIGNAL_AT_PARENTS_DEATH, int(signal.SIGKILL), 0, 0, 0)


def drop() -> None:
    """Give up, for good, what only root may do: mounts, the clock, owners, modules, devices."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = struct.pack("=Ii", _VERSION, 0)
    present = ctypes.create_string_buffer(24)
    if libc.capget(header, present):
        return
    effective, permitted, *_ = struct.unpack("=6I", present.raw)
    libc.capset(header, struct.pack("=6I", effective & _KEPT, permitted & _KEPT, 0, 0, 0, 0))
