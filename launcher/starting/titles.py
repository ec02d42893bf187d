"""What `ps`, `top` and `pkill` call a process. Linux only; elsewhere nothing changes."""

from __future__ import annotations

from contextlib import suppress


def set_title(title: str) -> None:
    """Overwrite this process's arguments with `title`, which `ps` then shows.

    Source: proc(5), /proc/pid/stat fields 48 and 49 (arg_start, arg_end).
    """
    import ctypes

    try:
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        start, end = int(fields[45]), int(fields[46])
    except (OSError, ValueError, IndexError):
        return
    if end > start:
        text = title.encode(errors="surrogateescape")[: end - start - 1]
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def set_name(name: str) -> None:
    """Set the name of this process, of at most 15 characters, which `top` and `killall` use.

    Source: proc(5), /proc/self/comm.
    """
    with suppress(OSError), open("/proc/self/comm", "w", encoding="ascii") as file:
        file.write(name)
