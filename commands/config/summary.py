"""What `headway config` prints around its questions: what it found, and what it would write."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import ndiff

from headway.commands.config.check import plan_for
from headway.commands.config.edit import flat, set_all
from headway.commands.config.schema import new_profile
from headway.commands.over_ssh import hosts_of
from headway.config_wizard.questions import (
    LAYER_OF,
    PROJECT,
    USER,
    Answers,
    Facts,
    place_of,
    profile_after,
)
from headway.contract.origin import Layer, Origin
from headway.errors import HeadwayError
from headway.settings.profile import Entries, Entry, parse_profile
from headway.settings.profile_edit import masked_profile, unset_value
from headway.settings.profile_files import text_at
from headway.settings.setting import Raw
from headway.settings.table import TABLE


def introduction(facts: Facts) -> str:
    """Return what was found on the machine, and what the keys do."""
    machine = facts.machine
    device, why = machine.best_device()
    found = (
        f"{machine.cores_reason}; {why}" if device == "cpu" else f"{why}, {machine.cores_reason}"
    )
    is_first = not any(facts.profiles.values())
    enter = "what suits this machine best" if is_first else "your earlier answer"
    return f"Found here: {found}.\nEnter accepts {enter}, ? explains, < goes back."


def summary(facts: Facts, paths: Mapping[str, str], show_secrets: bool, answers: Answers) -> str:
    """Return the profile as a diff to the file, and the plan of a launch with it."""
    from headway.launcher.planning.summary import summary

    place, values = place_of(facts, answers), profile_after(facts, answers)
    text = text_at(paths[place])
    after = changed(text, paths[place], facts, answers)
    changes = [line for line in ndiff(text.splitlines(), after.splitlines()) if line[0] != "?"]
    if not show_secrets:
        masked = {**_masked_lines(text), **_masked_lines(after)}
        changes = [line[:2] + masked.get(line[2:], line[2:]) for line in changes]
    lines = [f"\n{facts.paths[place]}", *(f"  {line}".rstrip() for line in changes)]
    try:
        plan = plan_for(_layers(facts, place, values), facts.machine)
        if hosts := hosts_of(plan.settings):
            number = f"{len(hosts)} host{'s' * (len(hosts) != 1)}"
            lines.append(f"A launch: {plan.program.name} on {number} over ssh: {hosts}\n")
        else:
            notes = [f"  note: {note}" for note in plan.notes]
            lines += [f"A launch: {summary(plan)}", *notes, ""]
    except HeadwayError as error:
        lines += [f"A launch would be refused: {problem.what}\n" for problem in error.problems]
    return "\n".join(lines)


def _masked_lines(text: str) -> dict[str, str]:
    """Return the lines of a profile with a secret in them, and what is shown instead."""
    pairs = zip(text.splitlines(), masked_profile(text).splitlines(), strict=True)
    return {line: masked for line, masked in pairs if line != masked}


def _layers(facts: Facts, place: str, values: Mapping[str, Raw]) -> list[Entries]:
    """Return the profiles of a launch, with `values` in place of that at `place`."""
    return [
        {
            name: Entry(raw, Origin(LAYER_OF[where], facts.paths[where]))
            for name, raw in (values if where == place else facts.profiles[where]).items()
        }
        for where in (USER, PROJECT)
        if where in facts.profiles
    ]


def changed(text: str, path: str, facts: Facts, answers: Answers) -> str:
    """Return the profile's text with what the answers change, and everything else unchanged."""
    before = flat(facts.profiles[place_of(facts, answers)]) if text else {}
    after = flat(profile_after(facts, answers))
    text = text or new_profile(path)
    now = flat({key: entry.raw for key, entry in parse_profile(text, path, Layer.PROFILE).items()})
    different = {
        k: raw
        for k, raw in after.items()
        if raw not in (before.get(k), now.get(k))
        and not (k in now and k in TABLE and TABLE[k].are_equal(raw, now[k]))
    }
    text = set_all(text, different)
    for key in before.keys() - after.keys() & now.keys():
        text = unset_value(text, key)
    return text
