"""Selects and finds profiles, and reads their text; `profile.py` parses it."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from headway.errors import ConfigError, did_you_mean
from headway.settings.profile_trust import chmod_fix, find_distrust, owner_name

VARIABLE = "HEADWAY_PROFILE"
PROJECT_FILE = "headway.yaml"
DEFAULT_NAME = "default"
MAX_BYTES = 2**20


class ProfileChoice(NamedTuple):
    """The selected profile of this user."""

    name: str  # a name, or a path
    path: str
    chosen_by: str  # the flag, variable or file that selects it; empty for the default

    def must_exist(self) -> None:
        """Check that the selected profile exists.

        Raises:
            ConfigError: it does not exist.
        """
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

    Args:
        flag: the value of --profile; it overrides HEADWAY_PROFILE, which overrides
            `headway config use`.
        environ: read for HEADWAY_PROFILE and the folder of the profiles.
        flag_origin: where `flag` comes from, for messages.

    Raises:
        ConfigError: the name is invalid.
    """
    is_named = flag is not None or VARIABLE in environ
    if flag is not None:
        name, chosen_by = flag, flag_origin
    elif VARIABLE in environ:
        name, chosen_by = environ[VARIABLE], f"environment {VARIABLE}"
    else:
        selection = selection_path(environ)
        name, chosen_by = DEFAULT_NAME, ""
        if is_there(selection):
            name, chosen_by = read_text(selection).strip(), shown(selection)
    if is_path(name):
        return ProfileChoice(name, _absolute(name, chosen_by), chosen_by)
    if not _is_name(name):
        raise ConfigError(
            f"invalid profile name {name!r}",
            where=chosen_by,
            fix="use letters, digits, '-', '_' and '.', or a path to a YAML file"
            + (f"; or `unset {VARIABLE}`" if is_named and flag is None else "")
            + ("" if is_named else f"; `headway config use {DEFAULT_NAME}` selects the default"),
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
    if "linux" in sys.platform:  # the same folder as platformdirs, without its import time
        return _xdg_folder(environ, "XDG_CONFIG_HOME", ".config")
    from platformdirs import user_config_dir

    return user_config_dir("headway", appauthor=False)


def _xdg_folder(environ: Mapping[str, str], variable: str, below_home: str) -> str:
    folder = environ.get(variable, "")
    if not os.path.isabs(folder):  # the XDG specification says to ignore relative paths
        folder = os.path.join(_home(), below_home)
    return os.path.join(folder, "headway")


def _home() -> str:
    """Return this user's home folder; `/` for a user without an entry in the password database."""
    home = os.path.expanduser("~")
    if home == "/" and hasattr(os, "getuid"):  # HOME is empty
        import pwd

        with suppress(KeyError):  # as in a container with an arbitrary user id
            home = pwd.getpwuid(os.getuid()).pw_dir
    return home if os.path.isabs(home) else "/"


def find_project_profile(start: str = ".", trusted: str | None = None) -> str | None:
    """Return the nearest `headway.yaml` from `start` upward, or None.

    The search ends after the home folder, at the root, or at a file system boundary.

    Args:
        start: the folder to begin in.
        trusted: a path that this user has named, accepted whoever may write it.

    Raises:
        ConfigError: the file found belongs neither to this user nor to root, or all may write it;
            its `env` could make this user's processes load another user's code.
    """
    home = os.path.realpath(_home())
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
    distrust = find_distrust(path)
    if distrust is not None:
        raise ConfigError(
            f"{distrust.what}, so {PROJECT_FILE} is not trusted",
            where=f"project profile {shown(path)}",
            fix="; or, ".join(filter(None, (distrust.fix, _naming(path)))),
        )


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
    home = _home()
    return "~" + path[len(home) :] if path.startswith(home + os.sep) else path


def is_there(path: str) -> bool:
    """Return whether `path` exists, also as a broken link.

    Raises:
        ConfigError: the folder cannot be searched, so that an existing profile would be ignored.
    """
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


def read_text(path: str, kind: str = "profile", *, may_be_pipe: bool = False) -> str:
    """Return the text of the file at `path`, a profile or another `kind` of file.

    Args:
        path: of the file.
        kind: what the file is, for messages.
        may_be_pipe: accept a pipe or terminal, and read it to its end.

    Raises:
        ConfigError: unreadable, not a regular file, larger than MAX_BYTES, or not UTF-8.
    """
    waits = 0 if may_be_pipe else getattr(os, "O_NONBLOCK", 0)
    try:
        handle = os.open(path, os.O_RDONLY | waits)
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode) or not (may_be_pipe or stat.S_ISREG(mode)):
            os.close(handle)
            raise ConfigError(
                f"the {kind} is not a file", where=shown(path), fix="pass a regular file"
            )
        with open(handle, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(
            "the file does not exist", where=shown(path), fix="pass a file that exists"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"the {kind} cannot be read: {error.strerror}",
            where=shown(path),
            fix="pass a file that you may read",
        ) from None
    if len(data) > MAX_BYTES:
        raise ConfigError(
            f"the {kind} is larger than {MAX_BYTES // 2**20} MiB, the limit",
            where=shown(path),
            fix="pass another file, or shorten this one",
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"the {kind} is not UTF-8 text",
            where=f"{shown(path)}, line {line}",
            fix="save the file as UTF-8",
        ) from None
