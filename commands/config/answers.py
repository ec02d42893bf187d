"""Answers in files: those that `headway config --answers` replays, and those of a conversation that
was broken off, kept for the next one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress

from headway.commands.config.edit import checked_entries
from headway.config_wizard.questions import (
    FINISH,
    MORE,
    NO,
    NONE,
    PLACE,
    PROJECT,
    USER,
    YES,
    as_words,
)
from headway.contract.origin import Layer, Origin
from headway.errors import ConfigError, Problem
from headway.settings.profile import Entry, parse_profile, read_profile
from headway.settings.profile_edit import write_profile
from headway.settings.profile_files import read_text, shown, state_folder
from headway.settings.table import Raw

QUESTIONS = {PLACE: (USER, PROJECT), MORE: (NO, YES)}
"""The answers to questions that are no settings."""

_GIVEN = "given"
"""The key of what --set and --answers said, in the file of kept answers."""


def read_answers(path: str) -> dict[str, Entry]:
    """Return the answers in a file, or in a pipe such as /dev/stdin, by the question's name.

    Raises:
        ConfigError: all that is wrong with it, at once.
    """
    entries = parse_profile(
        read_text(path, "file of answers", may_be_pipe=True), path, Layer.ANSWERS
    )
    entries.pop("version", None)
    return checked_answers(entries)


def checked_answers(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return answers to questions, which are settings or not, as a profile holds them.

    Raises:
        ConfigError: all that is wrong with them, at once.
    """
    problems = [
        Problem(
            f"{name} is {entries[name].raw!r}, but it must be {first} or {second}",
            str(entries[name].origin),
            f"write `{name}: {first}`",
        )
        for name, (first, second) in QUESTIONS.items()
        if name in entries and entries[name].raw not in (first, second)
    ]
    settings = {name: entry for name, entry in entries.items() if name not in QUESTIONS}
    values = checked_entries(settings, problems)
    return {
        name: entry._replace(raw=values.get(name, entry.raw)) for name, entry in entries.items()
    }


def kept_path(paths: Mapping[str, str], machine: str | None) -> str:
    """Return where the answers of a conversation that was broken off are kept.

    Args:
        paths: the profiles that they may be for, by the name of the place.
        machine: the recorded machine that they are for; None for this one.
    """
    import hashlib
    import platform

    whose = "\0".join([machine or platform.node(), *sorted(paths.values())])
    digest = hashlib.sha256(whose.encode(errors="surrogateescape")).hexdigest()[:12]
    return os.path.join(state_folder(), f"answers-{digest}.yaml")


def keep(path: str, answers: Mapping[str, Raw], given: Mapping[str, Raw]) -> bool:
    """Keep what was answered and given for the next conversation; False where there is nothing.

    Args:
        path: of the file.
        answers: by question.
        given: what was not asked.

    Raises:
        ConfigError: the file cannot be written.
    """
    answers = {n: answer for n, answer in answers.items() if n != FINISH and answer != NONE}
    if not answers and not given:
        return False
    rest = {name: as_words(raw) for name, raw in given.items()}
    write_profile(path, {**answers, **({_GIVEN: rest} if rest else {})}, mode=0o600)  # secrets
    return True


def read_kept(path: str) -> tuple[dict[str, Raw], dict[str, Entry]]:
    """Return the answers kept by the last run, and what was given to it and was not asked.

    A file that cannot be read is set aside: it must not keep anybody from answering.
    """
    if not os.path.exists(path):
        return {}, {}
    try:
        entries = read_profile(path, Layer.ANSWERS)
        given = entries.pop(_GIVEN).raw if _GIVEN in entries else {}
        if not isinstance(given, Mapping):
            raise ConfigError(f"{_GIVEN} is no map", where=shown(path), fix="remove the file")
        origin = Origin(Layer.ANSWERS, reason=shown(path))
        answers = {name: entry.raw for name, entry in checked_answers(entries).items()}
        return answers, checked_answers({name: Entry(raw, origin) for name, raw in given.items()})
    except ConfigError as error:
        aside = f"{path}.broken"
        with suppress(OSError):
            os.replace(path, aside)
        what = f"the answers kept by the last run are set aside in {shown(aside)}"
        print(f"headway: note: {what}: {error.problems[0].what}", file=sys.stderr)
        return {}, {}
