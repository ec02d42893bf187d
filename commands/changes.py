"""Differences between two runs: settings, arguments, code, variables, machine and versions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from headway.history.record import RunRecord
from headway.history.store import Launch

_UNRELATED_SETTINGS = ("record", "log_dir", "output", "sbatch", "snapshot")
"""Settings that do not affect the computation."""
_MOST_LINES = 60  # maximum number of lines of a diff
_GONE = "-"
_FLAG = re.compile(r"--?[A-Za-z_]")  # not a negative number


class Change(NamedTuple):
    kind: str  # setting, argument, code, variable, machine, launch, package
    name: str
    before: str  # the previous value; `-` if unset
    after: str
    detail: str = ""  # lines of a diff

    def __str__(self) -> str:
        return f"{self.kind} {self.name}: {self.before} -> {self.after}"


def changes(before: RunRecord, after: RunRecord) -> list[Change]:
    """Return the differences between two runs, most important first."""
    old, new = before.start, after.start
    return [
        *_changed("setting", _settings(old), _settings(new)),
        *_changed("argument", _by_flag(old.arguments), _by_flag(new.arguments)),
        *_code(before, after),
        *_changed("variable", _variables(old), _variables(new)),
        *_changed("machine", old.machine, new.machine),
        *_changed("launch", _launch_method(old), _launch_method(new)),
        *_changed("package", before.packages, after.packages),
    ]


def _settings(start: Launch) -> dict[str, str]:
    return {name: text for name, text in start.settings.items() if name not in _UNRELATED_SETTINGS}


def _variables(start: Launch) -> dict[str, str]:
    """Return all variables except Headway's, which are compared as settings."""
    both = {**start.variables, **start.environment}
    return {name: text for name, text in both.items() if not name.startswith("HEADWAY_")}


def _launch_method(start: Launch) -> dict[str, str]:
    return {
        "as a rank, with RANK, LOCAL_RANK, ...": "yes" if start.is_rank else "no",
        "working folder": start.folder,
        "Python": " ".join(start.python),
    }


def _changed(kind: str, old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[Change]:
    for name in dict.fromkeys([*old, *new]):
        before, after = old.get(name, _GONE), new.get(name, _GONE)
        if before != after:
            yield Change(kind, name, before or "''", after or "''")


def _by_flag(words: Sequence[str]) -> dict[str, str]:
    """Return the values of each flag, and each word before the first flag with its position."""
    found: dict[str, list[str]] = {}
    flag = ""
    for number, word in enumerate(words, 1):
        if _FLAG.match(word):
            flag, equals, value = word.partition("=")
            found.setdefault(flag, []).extend([value] if equals else [])
        else:
            found.setdefault(flag or f"at {number}", []).append(word)
    return {name: " ".join(values) if values else "set" for name, values in found.items()}


def _code(before: RunRecord, after: RunRecord) -> Iterator[Change]:
    was, now = before.commit, after.commit
    if was is None or now is None:
        return
    if was.commit != now.commit:
        yield Change("code", "commit", was.commit[:12], now.commit[:12])
    if was.diff is None or now.diff is None:
        yield Change("code", "uncommitted changes", "not known", "not known")
        return
    earlier, later = _by_file(was.diff), _by_file(now.diff)
    for name in dict.fromkeys([*earlier, *later]):
        old, new = earlier.get(name, ""), later.get(name, "")
        if old != new:
            was_edited, is_edited = ("edited" if text else "as committed" for text in (old, new))
            is_edited += " differently" * bool(old and new)
            yield Change("code", name, was_edited, is_edited, _truncated((new or old).splitlines()))


def _by_file(diff: str) -> dict[str, str]:
    """Return the hunks of a git diff by file path."""
    parts = re.split(r"^diff --git ", diff, flags=re.MULTILINE)[1:]
    return {
        part.partition("\n")[0].rpartition(" b/")[2]: part[part.find("\n@@") + 1 :]
        for part in parts
    }


def _truncated(lines: Sequence[str]) -> str:
    more = len(lines) - _MOST_LINES
    return "\n".join([*lines[:_MOST_LINES], *[f"... {more} more lines"] * (more > 0)])
