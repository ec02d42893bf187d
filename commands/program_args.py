"""The program on the command line: a launch accepts everything that plain Python runs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from headway.commands.flags import Parsed, Parser, usage_error
from headway.errors import Code, ConfigError, did_you_mean
from headway.ipc.paths import installer_of
from headway.launcher.plan.program import Program, finder_in

_not_a_program = partial(usage_error, code=Code.NO_PROGRAM)

_DESCRIPTORS = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")  # different in each process
_PROFILE = ("a YAML file", "pass a profile with --profile {script}, before the script")
_NOT_PYTHON = {  # suffix: description, fix
    ".ipynb": (
        "a Jupyter notebook",
        "run `jupyter nbconvert --to script {script}`, then launch the resulting .py file",
    ),
    ".yaml": _PROFILE,
    ".yml": _PROFILE,
}


def require_torch() -> None:
    """Raise ModuleNotFoundError if torch is not installed, without importing it."""
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")


def program_from(
    parser: Parser, parsed: Parsed, own: Sequence[str], rest: Sequence[str]
) -> Program:
    """Return the program and its arguments from `rest`, the words after the launcher flags `own`.

    Raises ConfigError if the program is missing, does not exist, or is a notebook or a profile.
    """
    rest = rest[1:] if [*rest[:1]] == ["--"] else rest
    if parsed.module is not None:
        if not all(parsed.module.split(".")):
            raise _not_a_program(
                f"invalid module name {parsed.module!r}", fix="pass a name such as package.module"
            )
        return Program(parsed.module, tuple(rest), "module")
    if not rest:
        note = parser.note_on_value(own)
        raise usage_error("no script given", fix=f"run `{parser.prog} train.py`{note}")
    name, *args = rest
    if parsed.no_python:
        return Program(_executable(name), tuple(args), "program")
    _check_script(name, parser, own)
    return Program(name, tuple(args), is_stream=_is_stream(name))


def _is_stream(script: str) -> bool:
    """Return whether the script can be read only once, by the process that opened it."""
    return script.startswith(_DESCRIPTORS) or not (os.path.isfile(script) or os.path.isdir(script))


def _check_script(script: str, parser: Parser, own: Sequence[str]) -> None:
    """Raise if the file is missing, or if its name shows that it is not a script."""
    if os.path.basename(script).rstrip("0123456789.") == "python":
        raise _not_a_program(
            f"{script!r} is the Python interpreter, not a script",
            fix=f"remove it: `{parser.prog} train.py`",
        )
    try:
        os.stat(script)
        if os.path.isfile(script):
            open(script, "rb").close()
    except OSError as error:
        raise _missing(script, error, _fix_of_missing(script, parser, own)) from None
    if not _is_stream(script):
        _check_archive(script)
    kind, fix = _NOT_PYTHON.get(os.path.splitext(script)[1].lower(), ("", ""))
    if kind:
        import shlex

        raise _not_a_program(
            f"{script!r} is {kind}, not a Python script",
            fix=fix.format(script=shlex.quote(script)),
        )


def _check_archive(script: str) -> None:
    """Raise if a folder or zip archive has no __main__.py."""
    finder = finder_in(script)
    if finder is not None and finder.find_spec("__main__") is None:
        kind = "directory" if os.path.isdir(script) else "zip archive"
        raise _not_a_program(
            f"{script!r} is a {kind} without a __main__.py, not a script",
            fix="pass the script inside it, or add a __main__.py that runs it",
        )


def _missing(script: str, error: OSError, fix: str) -> ConfigError:
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return _not_a_program(
            f"script {script!r} cannot be read: {error.strerror}",
            fix="check the path and its permissions",
        )
    close = _similar_file(script)
    return _not_a_program(
        f"script {script!r} not found" + (f"; did you mean {close!r}?" if close else ""),
        fix=fix,
    )


def _fix_of_missing(script: str, parser: Parser, own: Sequence[str]) -> str:
    """Return the fix; it names the preceding flag if `script` may be the flag's value."""
    usual = "check the path; run a module with -m" + parser.note_on_value(own)
    if not own:
        return usual
    spelling, _, value = own[-1].partition("=")
    flag = parser.known[spelling]
    if flag.takes_value and value == flag.default_value:
        written = f"{spelling}={flag.options['metavar']}"
        return f"check the path; pass a value of {spelling} after '=': {written}"
    return usual


def _similar_file(script: str) -> str | None:
    folder = os.path.dirname(script)
    try:
        files = [name for name in os.listdir(folder or ".") if name.endswith(".py")]
    except OSError:
        return None
    close = did_you_mean(os.path.basename(script), files)
    return close and os.path.join(folder, close)


def _executable(name: str) -> str:
    from shutil import which

    path = which(name)
    if path is None:
        raise ConfigError(
            f"executable {name!r} not found",
            where="the command line, and PATH",
            fix="check that the file exists and is executable; a Python script does not need "
            "--no-python",
            code=Code.NO_PROGRAM,
        )
    return path


def other_environment(script: str, python: str, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a note if there is another environment that the user may have meant."""
    beside = os.path.join(os.path.dirname(script), ".venv")
    variables = [environ.get(name, "") for name in ("VIRTUAL_ENV", "CONDA_PREFIX")]
    found = [os.path.abspath(path) for path in (*variables, beside) if os.path.isdir(path)]
    used = os.path.realpath(os.path.dirname(os.path.dirname(os.path.abspath(python))))
    if found and used not in map(os.path.realpath, found):
        other = os.path.join(found[0], "bin", "python")
        yield (
            f"the script runs with {python}, not with {found[0]}; fix: "
            f"`{installer_of(other)} headway`, and launch from there"
        )
