"""The program on the command line: it is there, readable, and something that Python runs."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import NamedTuple

from headway.commands.flags import Parsed, bad_words
from headway.errors import ConfigError, did_you_mean
from headway.launcher.plan.program import LIBRARIES, RUNTIMES, Program
from headway.settings.profile_files import chmod_fix

_HEAD_BYTES = 512
_SCRIPT_BYTES, _MAX_MODULES = 2**20, 50  # that are looked at
_MAIN = "__main__.py"
_SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "csh", "tcsh", "fish")
_EXECUTABLES = (b"\x7fELF", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")  # of Linux and macOS
_DESCRIPTORS = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")  # each process has its own
_ZIP = b"PK\x03\x04"


def require_torch() -> None:
    """Raise what `import torch` would, without the import, before a child is started for it."""
    if find_spec("torch") is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")


class _Kind(NamedTuple):
    """A kind of file that Python cannot run."""

    name: str
    fix: str  # with the field {script}


_NOTEBOOK = _Kind(
    "a Jupyter notebook",
    "`jupyter nbconvert --to script {script}`, then launch the .py file that it writes",
)
_SHELL_SCRIPT = _Kind(
    "a shell script",
    "name the Python script that it runs, or run it in each process: "
    "headway launch --no-python bash {script}",
)
_PROFILE = _Kind("a YAML file", "pass a profile with --profile {script}, before the script")
_EXECUTABLE = _Kind("a compiled program", "headway launch --no-python {script}")
_ARCHIVE = _Kind(f"a zip archive without a {_MAIN}", "name a Python script")
_BINARY = _Kind("a binary file", "name a Python script")

_BY_SUFFIX = {
    ".ipynb": _NOTEBOOK,
    **dict.fromkeys([f".{shell}" for shell in _SHELLS], _SHELL_SCRIPT),
    **dict.fromkeys((".yaml", ".yml"), _PROFILE),
}


def program_from(parsed: Parsed, rest: Sequence[str]) -> Program:
    """Return the program and its arguments, from the words after the launcher's own flags.

    Raises:
        ConfigError: no program is given, it cannot be read, or Python cannot run it.
    """
    if parsed.module is not None:
        package = parsed.module.partition(".")[0]
        files = [*_files_of(parsed.module, "", ""), os.path.join(package, _MAIN)]
        read = [(b"", {package}), *_read(files, "")]
        return Program(parsed.module, tuple(rest), "module", libraries=_libraries_in(read))
    if not rest:
        raise bad_words("no script given", fix="headway launch train.py")
    name, *args = rest
    if parsed.no_python:
        return Program(_executable(name), tuple(args), "program")
    if _is_interpreter(name):
        raise bad_words(
            f"{name!r} is the Python interpreter, not a script",
            fix="leave it out: headway launch train.py",
        )
    _check_script(name)
    is_stream = _is_stream(name)
    program = Program(name, tuple(args), is_stream=is_stream)
    return program if is_stream or os.path.isdir(name) else _with_imports(program)


def _with_imports(program: Program) -> Program:
    """Return the program with what its script imports: by its text, and its own modules' texts.

    A launch of one process is plain Python, unless a library is joined in it; so this is known
    without an import.
    """
    read = _read([program.name], os.path.dirname(program.name))
    runtimes = (*(name.partition(".")[0] for name in RUNTIMES), "torch")
    runtime = next((name for name in runtimes if name in read[0][1]), "")
    return program._replace(
        imports="" if any(b"headway" in text for text, _ in read) else runtime,
        libraries=_libraries_in(read),
    )


def _libraries_in(read: list[tuple[bytes, set[str]]]) -> tuple[str, ...]:
    return tuple(name for name in LIBRARIES if any(name in packages for _, packages in read))


def _read(files: list[str], folder: str) -> list[tuple[bytes, set[str]]]:
    """Return the text of each of these files, and the packages that it imports.

    And so for the modules below a folder that they come to import.
    """
    read = []
    for file in files:  # which grows
        text = _text_in(file)
        imported = _imported_in(text)
        read.append((text, {name.partition(".")[0] for name in imported}))
        own = os.path.dirname(file)
        for name in imported if len(files) < _MAX_MODULES else ():
            files += [one for one in _files_of(name, folder, own) if one not in files]
    return read


def _text_in(file: str) -> bytes:
    try:
        with open(file, "rb") as opened:
            return opened.read(_SCRIPT_BYTES)
    except OSError:  # Python will say so
        return b""


def _imported_in(text: bytes) -> set[str]:
    """Return the modules that the lines of a script import, as far as they show."""
    imported = set()
    for word, _, rest in (line.strip().partition(b" ") for line in _lines_with(b"import", text)):
        if word in (b"import", b"from"):
            source, _, names = rest.partition(b";")[0].replace(b"(", b"").rpartition(b"import ")
            source = source.strip() if word == b"from" else b""
            first = [words[0] for words in map(bytes.split, names.split(b",")) if words]
            inner = [source + b"."[: not source.endswith(b".")] + one for one in first]
            found = [source, *inner] if source else first
            imported |= {name.decode(errors="replace") for name in found}
    return imported


def _lines_with(word: bytes, text: bytes) -> Iterator[bytes]:
    """Yield the lines that have a word in them; to look at each line would take milliseconds."""
    at = text.find(word)
    while at >= 0:
        end = (text.find(b"\n", at) + 1) or len(text)
        yield text[text.rfind(b"\n", 0, at) + 1 : end]
        at = text.find(word, end)


def _files_of(name: str, folder: str, own: str) -> Iterator[str]:
    """Yield the files below a script's folder that an import executes.

    Absolute names are looked up in `folder`, those with dots before them from `own`, the folder of
    the file with the import.
    """
    parts = name.lstrip(".").split(".")
    depth = len(name) - len(".".join(parts))
    place = folder if not depth else os.path.join(own, *[".."] * (depth - 1))
    for part in filter(str.isidentifier, parts):
        place = os.path.join(place, part)
        yield from filter(os.path.isfile, (f"{place}.py", os.path.join(place, "__init__.py")))


def _is_stream(script: str) -> bool:
    """Return whether only one process, and the one that has it open, can read the script."""
    of_this_process = script.startswith(_DESCRIPTORS)
    return of_this_process or not (os.path.isfile(script) or os.path.isdir(script))


def _check_script(script: str) -> None:
    """Refuse what is not there, cannot be read, or is of a kind that Python cannot run."""
    is_folder = os.path.isdir(script)
    file = os.path.join(script, _MAIN) if is_folder else script
    try:
        mode = os.stat(file).st_mode
        head = _head(file) if stat.S_ISREG(mode) else b""  # a pipe can be read only once
    except PermissionError:
        raise bad_words(
            f"no permission to read script {script!r}", fix=_permission_fix(file)
        ) from None
    except OSError as error:
        if is_folder:
            raise bad_words(
                f"{script!r} is a directory without a {_MAIN}, not a script",
                fix="name the script inside it",
            ) from None
        raise _missing(script, error) from None
    kind = _kind_of(file, head)
    if kind is not None:
        raise bad_words(
            f"{script!r} is {kind.name}, not a Python script",
            fix=kind.fix.format(script=_quoted(script)),
        )


def _head(file: str) -> bytes:
    with open(file, "rb") as opened:
        return opened.read(_HEAD_BYTES)


def _kind_of(file: str, head: bytes) -> _Kind | None:
    """Return what else a file is, by its suffix or its first bytes; None: Python may run it."""
    suffix = os.path.splitext(file)[1].lower()
    if suffix in _BY_SUFFIX:
        return _BY_SUFFIX[suffix]
    if head.startswith(_EXECUTABLES):
        return _EXECUTABLE
    if head.startswith(_ZIP):
        return None if _has_main(file) else _ARCHIVE
    if not suffix and _runs_in_a_shell(head):
        return _SHELL_SCRIPT
    is_compiled = suffix == ".pyc"
    return _BINARY if b"\0" in head and not is_compiled else None


def _runs_in_a_shell(head: bytes) -> bool:
    """Return whether the first line names a shell: #!/bin/sh, #!/usr/bin/env bash."""
    line = head.partition(b"\n")[0].decode(errors="replace")
    words = line.removeprefix("#!").split()
    if not line.startswith("#!") or not words:
        return False
    is_env = os.path.basename(words[0]) == "env"
    return any(os.path.basename(word) in _SHELLS for word in words[: 1 + is_env])


def _has_main(archive: str) -> bool:
    import zipfile

    try:
        with zipfile.ZipFile(archive) as opened:
            return bool({_MAIN, f"{_MAIN}c"} & set(opened.namelist()))
    except zipfile.BadZipFile:
        return False


def _is_interpreter(name: str) -> bool:
    """Return whether the word is a Python: python, python3.12, /usr/bin/python3."""
    return os.path.basename(name).rstrip("0123456789.") == "python"


def _missing(script: str, error: OSError) -> ConfigError:
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return bad_words(
            f"script {script!r} cannot be read: {error.strerror}", fix="check the path"
        )
    close = _similar_file(script)
    return bad_words(
        f"script {script!r} not found" + (f"; did you mean {close!r}?" if close else ""),
        fix="check the path; a module is run with -m",
    )


def _permission_fix(file: str) -> str:
    """Return what opens the file, or the first folder above it that is closed to this user."""
    from pathlib import Path

    path = Path(os.path.abspath(file))
    is_effective = os.access in os.supports_effective_ids
    for folder in reversed(path.parents):
        if not os.access(folder, os.X_OK, effective_ids=is_effective):
            path = folder
            break
    if path.stat().st_uid != os.geteuid():
        return f"ask the owner of {path} for permission to read it"
    if path.is_dir():
        return f"{path} is your folder: allow yourself to enter it, or name another script"
    return chmod_fix("u+r", str(path)) or "name a file"


def _quoted(path: str) -> str:
    """Return a path for a shell, also for programs that look for a mere name elsewhere."""
    import shlex

    return shlex.quote(path if os.path.dirname(path) else os.path.join(".", path))


def _executable(name: str) -> str:
    from shutil import which

    path = which(name)
    if path is None and os.path.dirname(name) and os.path.isfile(name):
        raise bad_words(
            f"{name!r} is not executable",
            fix=(chmod_fix("+x", name) or "name a program that you may execute")
            + "; a Python script needs no --no-python",
        )
    if path is None:
        raise ConfigError(
            f"executable {name!r} not found",
            where="the command line, and PATH",
            fix="check the name; a Python script needs no --no-python",
        )
    return path


def _similar_file(script: str) -> str | None:
    folder = os.path.dirname(script)
    try:
        files = [name for name in os.listdir(folder or ".") if name.endswith(".py")]
    except OSError:
        return None
    close = did_you_mean(os.path.basename(script), files)
    return close and os.path.join(folder, close)
