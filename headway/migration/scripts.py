"""Finds the Python scripts below folders, and reads and replaces them."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress

from headway.errors import ConfigError
from headway.migration.reading import Script
from headway.migration.rewriting import Source

_VIRTUAL_ENVIRONMENT = "pyvenv.cfg"
_NOTEBOOK = ".ipynb"


def find_scripts(path: str) -> Iterator[str]:
    """Return `path` itself, or all `.py` files below it, in order.

    Hidden folders and virtual environments are left out.

    Raises:
        ConfigError: there is no such file, or it is a notebook.
    """
    if path.endswith(_NOTEBOOK):
        raise ConfigError(
            f"{path} is a Jupyter notebook, and only scripts are read",
            where="the command line",
            fix=f"`jupyter nbconvert --to script {shlex.quote(path)}`, or change the imports in its"
            " cells",
        )
    if not os.path.exists(path):
        raise ConfigError(
            f"there is no {path}", where="the command line", fix="name a script or a folder"
        )
    if not os.path.isdir(path):
        yield path
        return
    for folder, folders, files in os.walk(path):
        if _VIRTUAL_ENVIRONMENT in files:
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__")))
        yield from (os.path.join(folder, name) for name in sorted(files) if name.endswith(".py"))


def read_script(path: str) -> tuple[Source, Script]:
    """Read and parse a script.

    Raises:
        ConfigError: the file cannot be read, or is not Python.
    """
    try:
        with open(path, "rb") as file:
            source = Source.read(file.read())
        return source, Script(source.text)
    except OSError as error:
        what, where = f"the script cannot be read: {error.strerror}", path
    except SyntaxError as error:
        what, where = f"this is not Python: {error.msg}", f"{path}, line {error.lineno or 1}"
    except (ValueError, RecursionError) as error:
        what, where = f"this is not Python: {error}", path
    raise ConfigError(what, where=where, fix="name Python scripts that run under this Python")


def replace_script(path: str, source: Source) -> None:
    """Replace a script in full or not at all; it keeps its permissions, and a link stays one.

    Raises:
        ConfigError: it cannot be written.
    """
    target = os.path.realpath(path)
    temporary = None
    try:
        effective = os.access in os.supports_effective_ids
        if not os.access(target, os.W_OK, effective_ids=effective):
            raise PermissionError(0, "it is read-only")
        folder, name = os.path.split(target)
        handle, temporary = tempfile.mkstemp(prefix=f".{name}.", dir=folder)
        with open(handle, "wb") as file:
            file.write(source.content)
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(target, temporary)
        os.replace(temporary, target)
        temporary = None
    except OSError as error:
        raise ConfigError(
            f"the script cannot be written: {error.strerror}",
            where=path,
            fix="make it and its folder writable",
        ) from None
    finally:
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)
