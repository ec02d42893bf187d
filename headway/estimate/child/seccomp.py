"""Lets the kernel refuse, to native code too, what Landlock does not know: processes, signals,
modes of files, sockets.

A filter of system calls: seccomp(2), linux/filter.h and linux/audit.h. It sees the numbers in a
call's arguments, and not the text that they point at.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import socket
import struct
import sys
from collections.abc import Iterable, Mapping
from typing import NamedTuple

CHANGING_IOCTLS = (0x40086602, 0x40046602, 0x401C5820, 0x5412)
"""FS_IOC_SETFLAGS, FS_IOC32_SETFLAGS, FS_IOC_FSSETXATTR; TIOCSTI, which types into a terminal."""

_REFUSED = {  # numbers on x86_64 and aarch64; calls since 424 have the same on both
    "execve": (59, 221),
    "execveat": (322, 281),
    "fork": (57, None),
    "vfork": (58, None),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438),
    "ptrace": (101, 117),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "setxattrat": (463, 463),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
    "io_uring_setup": (425, 425),
    "connect": (42, 203),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "semctl": (66, 191),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
}
_CLONE, _CLONE3 = (56, 220), (435, 435)
_IOCTL, _PRLIMIT, _SOCKET = (16, 29), (302, 261), (41, 198)
_KILL, _TGKILL = (62, 129), (234, 131)

_CLONE_THREAD = 0x10000
_STREAMS = tuple(  # SOCK_STREAM, with SOCK_NONBLOCK and SOCK_CLOEXEC
    socket.SOCK_STREAM | one | other for one in (0, 0o4000) for other in (0, 0o2000000)
)
_ALIEN_NUMBERS = 0x40000000  # of the calls of x32

_SET_FILTER, _ALL_THREADS = 1, 1  # seccomp(2)
_NO_NEW_PRIVILEGES = 38  # prctl(2)

_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16  # in struct seccomp_data
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000

_Instruction = tuple[int, int, int, int]  # code, how far to jump if true, if false, operand


class _Machine(NamedTuple):
    column: int  # of the tables above
    audit_number: int
    seccomp: int  # the number of seccomp(2)


_MACHINES = {"x86_64": _Machine(0, 0xC000003E, 317), "aarch64": _Machine(1, 0xC00000B7, 277)}


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def confine() -> bool:
    """Refuse all threads of this process, for good, to start processes and to change others.

    Calls fail with EPERM. Threads can be started as before.

    Returns:
        Whether the kernel does so; it does not on other machines than x86_64 and aarch64.
    """
    machine = _MACHINES.get(platform.machine())
    if sys.platform != "linux" or machine is None or sys.maxsize < 2**32:
        return False
    instructions = _filter(machine, os.getpid())
    packed = b"".join(struct.pack("=HBBI", *one) for one in instructions)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        return False
    program = _Program(len(instructions), packed)
    found: int = libc.syscall(machine.seccomp, _SET_FILTER, _ALL_THREADS, ctypes.byref(program))
    return found == 0


def _filter(machine: _Machine, pid: int) -> list[_Instruction]:
    """Return the program that the kernel runs at each call of the process `pid`."""
    rules = {
        **{numbers: [_fail(errno.EPERM)] for numbers in _REFUSED.values()},
        _CLONE: [
            _load_argument(0),
            (_IF_ANY_BIT, 1, 0, _CLONE_THREAD),
            _fail(errno.EPERM),
            _allow(),
        ],
        _CLONE3: [_fail(errno.ENOSYS)],  # its flags are in memory; libraries then take clone
        _IOCTL: _all_but(1, CHANGING_IOCTLS),
        _PRLIMIT: _only({0: (0, pid)}),
        _SOCKET: _only({0: (socket.AF_UNIX,), 1: _STREAMS}),
        _KILL: _only({0: (pid,)}),
        _TGKILL: _only({0: (pid,)}),
    }
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_IF_EQUAL, 1, 0, machine.audit_number),
        _fail(errno.ENOSYS),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_IF_AT_LEAST, 0, 1, _ALIEN_NUMBERS),
        _fail(errno.ENOSYS),
    ]
    for numbers, rule in rules.items():
        number = numbers[machine.column]
        if number is not None:
            program += [(_IF_EQUAL, 0, len(rule), number), *rule]
    return [*program, _allow()]


def _only(allowed: Mapping[int, Iterable[int]]) -> list[_Instruction]:
    """Return a rule that allows a call if each of these arguments is one of these numbers."""
    rule = []
    for index, values in allowed.items():
        rule += [_load_argument(index), *_jumps(values), _fail(errno.EPERM)]
    return [*rule, _allow()]


def _all_but(index: int, refused: Iterable[int]) -> list[_Instruction]:
    """Return a rule that allows a call unless this argument is one of these numbers."""
    return [_load_argument(index), *_jumps(refused), _allow(), _fail(errno.EPERM)]


def _jumps(values: Iterable[int]) -> list[_Instruction]:
    """Return comparisons that skip the one instruction behind them if any holds."""
    listed = tuple(values)
    return [(_IF_EQUAL, len(listed) - index, 0, one) for index, one in enumerate(listed)]


def _load_argument(index: int) -> _Instruction:
    return (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * index)  # its lower half, of a little-endian number


def _fail(code: int) -> _Instruction:
    return (_RETURN, 0, 0, _ERROR | code)


def _allow() -> _Instruction:
    return (_RETURN, 0, 0, _ALLOW)
