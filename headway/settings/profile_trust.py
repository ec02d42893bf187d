"""Who else could have written a project's profile, whose `env` can make processes load code."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import grp


class Distrust(NamedTuple):
    """Why a file is not trusted."""

    what: str
    fix: str  # a command; empty: none that is this user's to run


def find_distrust(path: str) -> Distrust | None:
    """Return why the file at `path` is not trusted; None if only its owner's word counts.

    The owner must be this user or root; others may write neither the file nor, unless it is sticky,
    a folder above it, in which they could put another file or folder in its place. The same holds
    for the file that a link points to.
    """
    if not hasattr(os, "getuid"):
        return None
    for owner in {os.lstat(path).st_uid, os.stat(path).st_uid if os.path.exists(path) else 0}:
        if owner not in (os.getuid(), 0):
            return Distrust(f"{path} is owned by user {owner}, not by you or root", "")
    for one in dict.fromkeys((os.path.realpath(path), *_folders_above(path))):
        if os.path.exists(one) and _is_open_to_all(os.stat(one)):
            return Distrust(f"all users may write {one}", chmod_fix("o-w", one))
    return None


def chmod_fix(change: str, path: str) -> str:
    """Return the command, in backticks, that changes the mode of a regular file of this user.

    Empty for all else: a link may point to a device or a folder that the whole machine uses.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        return ""
    import shlex

    name = path if os.path.dirname(path) else os.path.join(".", path)  # it may begin with a dash
    return f"`chmod {change} {shlex.quote(name)}`"


def _folders_above(path: str) -> Iterator[str]:
    for one in (os.path.abspath(path), os.path.realpath(path)):
        while one != os.path.dirname(one):
            one = os.path.dirname(one)
            yield one


def _is_open_to_all(status: os.stat_result) -> bool:
    is_sticky_folder = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    return bool(status.st_mode & stat.S_IWOTH and not is_sticky_folder)


def writing_group(path: str) -> str:
    """Return the group that may write the file at `path`; empty for none, or a private one.

    A group is private if it is the primary one of this user or root, is named as they are, and has
    no other members, as most systems make one for each user.
    """
    if not hasattr(os, "getuid"):
        return ""
    import grp

    status = os.stat(path)
    if not status.st_mode & stat.S_IWGRP:
        return ""
    try:
        group = grp.getgrgid(status.st_gid)
    except KeyError:
        return str(status.st_gid)
    is_private = any(_is_private_to(uid, group) for uid in (os.getuid(), 0))
    return "" if is_private else group.gr_name


def _is_private_to(uid: int, group: grp.struct_group) -> bool:
    import pwd

    try:
        user = pwd.getpwuid(uid)
    except KeyError:
        return False
    is_own = (user.pw_gid, user.pw_name) == (group.gr_gid, group.gr_name)
    return is_own and not {*group.gr_mem} - {user.pw_name}


def owner_name(path: str) -> str:
    """Return the name of the user who owns the file at `path`."""
    import pwd

    uid = os.stat(path).st_uid
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
