"""Selects and finds profiles, and reads their text; `profile.py` parses it.

A profile that was found, and not named, is trusted only if nobody else could have written it: its
`env` can make this user's processes load code.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from headway.contract import user_folders
from headway.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    import grp

VARIABLE = "HEADWAY_PROFILE"
PROJECT_FILE = "headway.yaml"
DEFAULT_NAME = "default"
MAX_BYTES = 2**20
PIPE_BEGINS_WITHIN_S = 15.0


class ProfileChoice(NamedTuple):
    """The selected profile of this user."""

    name: str  # a name, or a path
    path: str
    chosen_by: str  # the flag, variable or file that selects it; empty for the default

    def must_exist(self) -> None:
        """Raise ConfigError unless the selected profile exists."""
        if not is_there(self.path):
            folder = os.path.dirname(self.path)
            close = None if is_path(self.name) else did_you_mean(self.name, profile_names(folder))
            raise ConfigError(
                f"profile {self.name!r} does not exist"
                + (f"; did you mean {close!r}?" if close else ""),
                where=self.chosen_by or shown(self.path),
                fix="`headway config list` shows all profiles; "
                f"`headway config --profile {self.name}` creates this one",
            )


def choose_profile(
    flag: str | None = None,
    environ: Mapping[str, str] = os.environ,
    flag_origin: str = "flag --profile",
) -> ProfileChoice:
    """Return the selected profile of this user, whether or not it exists.

    `flag`, the value of --profile, overrides HEADWAY_PROFILE, and that `headway config use`;
    `flag_origin` is where it comes from, for messages.
    """
    selection, way_out = selection_path(environ), ""
    name, chosen_by = DEFAULT_NAME, ""
    if flag is not None:
        name, chosen_by = flag, flag_origin
    elif VARIABLE in environ:
        name, chosen_by = environ[VARIABLE], f"environment {VARIABLE}"
        way_out = f"; or `unset {VARIABLE}`"
    elif is_there(selection):
        name, chosen_by = read_text(selection).strip(), shown(selection)
        way_out = f"; `headway config use {DEFAULT_NAME}` selects the default"
    if is_path(name):
        return ProfileChoice(name, _absolute(name, chosen_by), chosen_by)
    if not _is_name(name):
        raise ConfigError(
            f"invalid profile name {name!r}",
            where=chosen_by,
            fix=f"use letters, digits, '-', '_' and '.', or a path to a YAML file{way_out}",
        )
    return ProfileChoice(name, os.path.join(user_folder(environ), f"{name}.yaml"), chosen_by)


def _absolute(name: str, chosen_by: str) -> str:
    try:
        return os.path.abspath(os.path.expanduser(name))
    except FileNotFoundError:
        raise ConfigError(
            f"{name!r} is in the working directory, which has been removed",
            where=chosen_by,
            fix="`cd` to a folder that exists, or pass an absolute path",
        ) from None


def is_path(name: str) -> bool:
    """Return whether `name` is a path rather than the name of a profile."""
    return "/" in name or os.sep in name or name.endswith((".yaml", ".yml"))


def _is_name(name: str) -> bool:
    return name[:1].isalnum() and all(char.isalnum() or char in "-_." for char in name)


def profile_names(folder: str) -> list[str]:
    """Return the names of the profiles in `folder`, sorted."""
    try:
        files = os.listdir(folder)
    except OSError:
        return []
    stems = (file.removesuffix(".yaml") for file in files if file.endswith(".yaml"))
    return sorted(stem for stem in stems if _is_name(stem))


def selection_path(environ: Mapping[str, str] = os.environ) -> str:
    """Return the path of the file that `headway config use` writes: the name of a profile."""
    return os.path.join(user_folder(environ), "selected")


def user_folder(environ: Mapping[str, str] = os.environ) -> str:
    """Return the folder of this user's profiles, whether or not it exists."""
    return user_folders.user_folder("config", environ)


def find_project_profile(start: str = ".", trusted: str | None = None) -> str | None:
    """Return the nearest `headway.yaml` from `start` upward, or None.

    The search ends after the home folder, at the root, or at a file system boundary. A path that
    this user has named, `trusted`, is accepted whoever may write it.
    """
    home = os.path.realpath(user_folders.home())
    try:
        folder = os.path.realpath(start)
    except FileNotFoundError:  # the working directory has been removed
        return None
    device = os.stat(folder).st_dev
    while True:
        path = os.path.join(folder, PROJECT_FILE)
        if os.path.lexists(path):
            if trusted is None or os.path.realpath(trusted) != os.path.realpath(path):
                _refuse_distrusted(path)
            return path
        parent = os.path.dirname(folder)
        if folder in (home, parent) or os.stat(parent).st_dev != device:
            return None
        folder = parent


def _refuse_distrusted(path: str) -> None:
    """Raise ConfigError unless only this user and root could have written the file at `path`.

    One of them must own it; others may write neither the file nor, unless it is sticky, a folder
    above it, in which they could put another in its place. The same holds for the file that a link
    points to.
    """
    if not hasattr(os, "getuid"):
        return
    what, fix = "", ""
    for one in dict.fromkeys((os.path.realpath(path), *_folders_above(path))):
        if not what and _is_open_to_all(one):
            what, fix = f"all users may write {one}", chmod_fix("o-w", one)
    for owner in {os.lstat(path).st_uid, os.stat(path).st_uid if os.path.exists(path) else 0}:
        if owner not in (os.getuid(), 0):
            what, fix = f"{path} is owned by user {owner}, not by you or root", ""
    if what:
        raise ConfigError(
            f"{what}, so {PROJECT_FILE} is not trusted",
            where=f"project profile {shown(path)}",
            fix="; or, ".join(filter(None, (fix, _naming(path)))),
        )


def _folders_above(path: str) -> Iterator[str]:
    for one in (os.path.abspath(path), os.path.realpath(path)):
        while one != os.path.dirname(one):
            one = os.path.dirname(one)
            yield one


def _is_open_to_all(path: str) -> bool:
    mode = os.stat(path).st_mode if os.path.exists(path) else 0
    is_sticky_folder = stat.S_ISDIR(mode) and mode & stat.S_ISVTX
    return bool(mode & stat.S_IWOTH and not is_sticky_folder)


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


def group_may_not_set_env(path: str, group: str) -> ConfigError:
    """Return the error for a project profile with `env` that the members of a group may write."""
    return ConfigError(
        f"{PROJECT_FILE} sets env, which can load code, and all of group {group} may write it",
        where=f"project profile {shown(path)}, owned by {owner_name(path)}",
        fix="; or, ".join(filter(None, (chmod_fix("g-w", path), _naming(path)))),
    )


def _naming(path: str) -> str:
    import shlex

    quoted = shlex.quote(path)
    name = shown(path) if quoted == path else quoted
    return f"if you trust it, select it: `--profile {name}`, or `export {VARIABLE}={name}`"


def shown(path: str) -> str:
    """Return `path` with ~ for the home folder."""
    home = user_folders.home()
    return "~" + path[len(home) :] if path.startswith(home + os.sep) else path


def _wait_for_writer(pipe: int) -> None:
    """Wait until there is something in a pipe, or its writers have closed it.

    Raises:
        OSError: nothing comes, as of a named pipe that nobody writes to.
    """
    import errno
    import select

    waiting = select.poll()
    waiting.register(pipe, select.POLLIN)
    if not waiting.poll(PIPE_BEGINS_WITHIN_S * 1000):
        what = f"nobody has written into the pipe within {PIPE_BEGINS_WITHIN_S:.0f} s"
        raise OSError(errno.ETIMEDOUT, what)


def is_there(path: str) -> bool:
    """Return whether `path` exists, also as a broken link; raise where that cannot be known."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise ConfigError(
            f"cannot check whether the profile exists: {error.strerror}",
            where=shown(path),
            fix=f"fix the permissions of {shown(os.path.dirname(path))} and its parent folders, "
            "or set XDG_CONFIG_HOME to a folder that you can read",
        ) from None
    return True


def text_at(path: str) -> str:
    """Return the text like `read_text`, empty if the file does not exist."""
    return read_text(path) if is_there(path) else ""


def read_text(
    path: str, kind: str = "profile", *, where: str = "", may_be_pipe: bool = False
) -> str:
    """Return the text of a file of at most MAX_BYTES.

    `kind` and `where` say what the file is and what named it, for messages. If it `may_be_pipe`, a
    terminal is accepted, and a pipe that begins within PIPE_BEGINS_WITHIN_S.
    """
    where = where or shown(path)
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode) or not (may_be_pipe or stat.S_ISREG(mode)):
            os.close(handle)
            raise ConfigError(f"the {kind} is not a file", where=where, fix="pass a regular file")
        with open(handle, "rb") as file:
            if stat.S_ISFIFO(mode):
                _wait_for_writer(handle)
            os.set_blocking(handle, True)
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"the {kind} {path!r} cannot be read: {error.strerror}",
            where=where,
            fix="pass a file that exists and that you may read",
        ) from None
    if len(data) > MAX_BYTES:
        raise ConfigError(
            f"the {kind} is larger than {MAX_BYTES // 2**20} MiB, the limit",
            where=where,
            fix="pass another file, or shorten this one",
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"the {kind} is not UTF-8 text",
            where=f"{where}, line {line}",
            fix="save the file as UTF-8",
        ) from None
