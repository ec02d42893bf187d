"""`headway config --answers FILE`: the answers in a file, taken instead of asking."""

from __future__ import annotations

from collections.abc import Mapping

from headway.commands.config.assignments import checked_entries
from headway.config_wizard.questions import NO, PROJECT, USER, YES
from headway.config_wizard.texts import MORE, PLACE
from headway.contract.origin import Layer
from headway.errors import Problem
from headway.settings.profile import Entry, parse_profile
from headway.settings.profile_files import read_text

QUESTIONS = {PLACE: (USER, PROJECT), MORE: (NO, YES)}
"""The possible answers to the questions that are not settings."""


def read_answers(path: str) -> dict[str, Entry]:
    """Return the answers in a file or pipe (/dev/stdin), by the question's name.

    Raises:
        ConfigError: all problems of the file, at once.
    """
    entries = parse_profile(read_text(path, "answers file", may_be_pipe=True), path, Layer.ANSWERS)
    entries.pop("version", None)
    return checked_answers(entries)


def checked_answers(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return the answers as a profile holds them; those in QUESTIONS are not settings.

    Raises:
        ConfigError: all problems of the answers, at once.
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
