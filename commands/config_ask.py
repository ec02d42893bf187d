"""`headway config`: asks about this machine, or takes the answers from elsewhere, and writes the
profile.
"""

from __future__ import annotations

import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import ndiff

from headway.commands.config_check import SCRIPT, at_rest, plan_for, refusals
from headway.commands.config_edit import apply, assignments, checked_values, set_all
from headway.commands.flags import Parser, look_at_machine
from headway.commands.schema import beginning
from headway.config_wizard.interview import Defaults, Prompter, interview
from headway.config_wizard.questions import (
    CANCEL,
    FINISH,
    MORE,
    NO,
    NONE,
    PLACE,
    PROJECT,
    TEST,
    USER,
    YES,
    Answers,
    Facts,
    as_words,
    place_of,
    profile_after,
)
from headway.errors import ConfigError, HeadwayError, Problem
from headway.machine import Machine
from headway.profile import Entry, parse_profile, read_profile
from headway.profile_edit import unset_value, write_profile
from headway.profile_files import (
    PROJECT_FILE,
    choose_profile,
    find_project_profile,
    is_there,
    shown,
    text_at,
)
from headway.resolve import Layer, typed
from headway.settings import TABLE, Origin, Raw, Settings

_GIVEN = "given"
"""The key of what --set and --answers said, in the file of kept answers."""

_OWN_ANSWERS = {PLACE: (USER, PROJECT), MORE: (NO, YES)}
"""The answers to questions that are no settings."""

_ANSWERED = Origin("user profile", "your answers")


def make_parser(appendix: str = "") -> Parser:
    """Return the parser of `headway config` itself; `appendix` ends its --help."""
    parser = Parser(
        "config",
        "Ask about this machine and write its profile. Enter takes the recommended answer.",
        usage="headway config [flags]\n       headway config <subcommand> ...",
        appendix=appendix,
    )
    parser.flag(
        "--yes",
        help="ask nothing: device, processes and precision become what fits this machine best, and "
        "the rest of a profile stays",
    )
    parser.flag(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="set this, and do not ask for it (repeatable)",
    )
    parser.flag("--answers", metavar="FILE", help="ask nothing: take the answers from FILE")
    parser.flag("--dry-run", help="print what would be written, and write nothing")
    parser.profile_flag()
    parser.machine_flag()
    return parser


def ask(argv: Sequence[str], appendix: str = "") -> int:
    """Hold the conversation, write the profile, and say what to type next."""
    parsed = make_parser(appendix).parse_flags(argv)
    unattended = parsed.yes or parsed.answers is not None
    paths = _paths(parsed.profile)
    facts = _facts(parsed, paths, unattended)
    prompter: Prompter = Defaults(lambda _: None) if unattended else _prompter()
    prompter.say(_introduction(facts))
    answers: dict[str, str] = {}
    try:
        interview(facts, answers, prompter, lambda answers: _summary(facts, paths, answers))
    except KeyboardInterrupt:
        kept = _kept(parsed, facts, paths[place_of(facts, answers)], answers)
        print(f"\nnothing was written; {kept}", file=sys.stderr)
        return 130
    if answers[FINISH] == CANCEL:
        print("nothing was written")
        return 130
    path = paths[place_of(facts, answers)]
    if parsed.dry_run:
        print(f"headway: would write {shown(path)}:", file=sys.stderr)
        print(_changed(text_at(path), path, facts, answers), end="")
        return 0
    try:
        apply(path, lambda text: _changed(text, path, facts, answers), facts.machine)
    except ConfigError:
        print(f"headway: note: {_kept(parsed, facts, path, answers)}", file=sys.stderr)
        raise
    if not unattended and os.path.exists(_kept_path()) and any(_read_kept(parsed, paths)):
        with suppress(OSError):
            os.unlink(_kept_path())
    return _next(parsed, and_test=answers[FINISH] == TEST)


def _next(parsed: Namespace, and_test: bool) -> int:
    """Say the next command to type, or run `headway test`; return the exit code."""
    if and_test:
        from headway.commands.test import main as test

        return test(_same_flags(parsed))
    words = [*_same_flags(parsed), *(["--dry-run"] if parsed.machine is not None else [])]
    print(f"next: {shlex.join(['headway', 'launch', *words, SCRIPT])}")
    return 0


def _same_flags(parsed: Namespace) -> list[str]:
    """Return the flags by which another command means the same profile and machine."""
    flags = {"--profile": parsed.profile, "--machine": parsed.machine}
    return [word for name, value in flags.items() if value is not None for word in (name, value)]


def _paths(profile: str | None) -> dict[str, str]:
    """Return where a profile can be kept, by the name of the place; the likelier one first."""
    user = choose_profile(profile).path
    if profile is not None:
        return {USER: user}
    project = find_project_profile()
    if project is not None:
        return {PROJECT: project, USER: user}
    try:
        return {USER: user, PROJECT: os.path.abspath(PROJECT_FILE)}
    except FileNotFoundError:  # the working directory has been removed
        return {USER: user}


def _facts(parsed: Namespace, paths: Mapping[str, str], unattended: bool) -> Facts:
    machine = at_rest(look_at_machine(parsed, os.environ)[0])
    given: dict[str, Raw] = _read_answers(parsed.answers) if parsed.answers else {}
    given |= assignments(parsed.set, "flag --set")
    if given.get(PLACE, USER) not in paths:
        raise ConfigError(
            f"{PLACE} is {given[PLACE]}, but here the profile is kept in {shown(paths[USER])}",
            where=shown(parsed.answers),
            fix=f"write `{PLACE}: {USER}`, or leave --profile out",
        )
    if unattended:
        given.setdefault(PLACE, USER)
    layers = {
        place: read_profile(path, f"{place} profile") if is_there(path) else {}
        for place, path in paths.items()
    }
    for layer in layers.values():
        typed([layer])
    profiles = {
        place: {key: entry.raw for key, entry in layer.items()} for place, layer in layers.items()
    }
    # the user's first, so that the project's win
    defaults: dict[str, Raw] = {**profiles[USER], **profiles.get(PROJECT, {})}
    if not unattended and os.path.exists(_kept_path()):
        kept, kept_given = _read_kept(parsed, paths)
        defaults |= kept
        given = {**kept_given, **given}
    return Facts(
        machine=machine,
        profiles=profiles,
        paths={place: shown(path) for place, path in paths.items()},
        defaults={} if unattended else defaults,
        given=given,
        problems=lambda values: _problems(values, machine, list(layers.values())),
        can_test=parsed.machine is None,
    )


def _problems(
    values: Mapping[str, Raw], machine: Machine, profiles: Sequence[Layer] = ()
) -> Sequence[Problem]:
    """Return what a launch would refuse; what stands in one of `profiles` is said to be there."""
    there = {(name, str(entry.raw)): entry for layer in profiles for name, entry in layer.items()}
    layer = {
        name: there.get((name, str(entry.raw)), entry) for name, entry in _layer(values).items()
    }
    return refusals([layer], machine)


def _layer(values: Mapping[str, Raw]) -> Layer:
    return {name: Entry(raw, _ANSWERED) for name, raw in values.items()}


def _prompter() -> Prompter:
    from headway.config_wizard.prompts import PlainPrompter, TerminalPrompter

    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    dumb = os.environ.get("TERM", "") in ("", "dumb", "unknown") and os.name != "nt"
    return TerminalPrompter() if is_terminal and not dumb else PlainPrompter()


def _introduction(facts: Facts) -> str:
    machine = facts.machine
    device, why = machine.best_device()
    found = (
        f"{machine.cores_reason}; {why}" if device == "cpu" else f"{why}, {machine.cores_reason}"
    )
    enter = "your earlier answer" if facts.defaults else "what fits this machine best"
    return f"Found here: {found}.\nEnter takes {enter}, ? explains, < goes back."


def _summary(facts: Facts, paths: Mapping[str, str], answers: Answers) -> str:
    """Return the profile as a difference to what stands there, and what a launch makes of it."""
    from headway.launcher.describe import summary

    place, values = place_of(facts, answers), profile_after(facts, answers)
    text = text_at(paths[place])
    after = _changed(text, paths[place], facts, answers)
    lines = [line for line in ndiff(text.splitlines(), after.splitlines()) if line[0] != "?"]
    lines = [f"\n{facts.paths[place]}", *(f"  {line}".rstrip() for line in lines)]
    try:
        lines.append(f"A launch: {summary(plan_for([_layer(values)], facts.machine))}\n")
    except HeadwayError as error:
        lines += [f"A launch would be refused: {problem.what}\n" for problem in error.problems]
    return "\n".join(lines)


def _changed(text: str, path: str, facts: Facts, answers: Answers) -> str:
    """Return the profile's text with what the answers change, and all else as it is now."""
    before = _flat(facts.profiles[place_of(facts, answers)]) if text else {}
    after = _flat(profile_after(facts, answers))
    text = text or beginning(path)
    now = _flat({key: entry.raw for key, entry in parse_profile(text, path, "profile").items()})
    changed = {k: raw for k, raw in after.items() if raw not in (before.get(k), now.get(k))}
    text = set_all(text, changed)
    for key in before.keys() - after.keys() & now.keys():
        text = unset_value(text, key)
    return text


def _flat(values: Mapping[str, Raw]) -> dict[str, Raw]:
    """Return the values with each variable of `env` for itself."""
    variables = Settings.env.kind(values.get("env", {}))
    rest = {key: raw for key, raw in values.items() if key != "env"}
    return {**rest, **{f"env.{name}": text for name, text in variables.items()}}


def _read_answers(path: str) -> dict[str, Raw]:
    """Return the answers in a file: settings, and where to keep the profile."""
    return _answers_of(read_profile(path, "answers"), path)


def _answers_of(entries: dict[str, Entry], path: str) -> dict[str, Raw]:
    own = {name: entries.pop(name).raw for name in _OWN_ANSWERS if name in entries}
    for name, raw in own.items():
        first, second = _OWN_ANSWERS[name]
        if raw not in (first, second):
            raise ConfigError(
                f"{name} is {raw!r}, but it must be {first} or {second}",
                where=shown(path),
                fix=f"write `{name}: {first}`",
            )
    return {**own, **checked_values({k: entry.raw for k, entry in entries.items()}, shown(path))}


def _kept_path() -> str:
    from platformdirs import user_state_dir

    return os.path.join(user_state_dir("headway", appauthor=False), "answers.yaml")


def _kept(parsed: Namespace, facts: Facts, path: str, answers: Answers) -> str:
    """Keep the answers for the next run, and return a sentence that says where."""
    answers = {n: answer for n, answer in answers.items() if n != FINISH and answer != NONE}
    given = {name: as_words(raw) for name, raw in facts.given.items()}
    command = ["headway", "config", *_same_flags(parsed)]
    if not answers and not given:
        return f"`{shlex.join(command)}` begins again"
    whose: dict[str, Raw] = {"profile": path, "machine": _machine_name(parsed)}
    try:
        write_profile(_kept_path(), {**answers, **whose, **({_GIVEN: given} if given else {})})
    except ConfigError:
        words = [
            f"--set={name}={as_words(answer)}"
            for name, answer in {**given, **answers}.items()
            if name.partition(".")[0] in TABLE
        ]
        return f"to go on: {shlex.join([*command, *words])}"
    where = shown(_kept_path())
    return f"your answers are kept in {where}; `{shlex.join(command)}` offers them again"


def _read_kept(
    parsed: Namespace, paths: Mapping[str, str]
) -> tuple[dict[str, Raw], dict[str, Raw]]:
    """Return the answers kept by the last run, and what was given to it and was not asked.

    Those for another profile or machine are left alone, and a file that cannot be read is set
    aside: it must not keep anybody from answering.
    """
    path = _kept_path()
    try:
        entries = read_profile(path, "answers")
        whose = [entries.pop(name).raw for name in ("profile", "machine") if name in entries]
        given = entries.pop(_GIVEN).raw if _GIVEN in entries else {}
        if len(whose) < 2 or whose[0] not in paths.values() or whose[1] != _machine_name(parsed):
            return {}, {}
        if not isinstance(given, Mapping):
            raise ConfigError(f"{_GIVEN} is no map", where=shown(path), fix="remove the file")
        layer = {name: Entry(raw, Origin("argument", shown(path))) for name, raw in given.items()}
        return _answers_of(entries, path), _answers_of(layer, path)
    except ConfigError as error:
        aside = f"{path}.broken"
        with suppress(OSError):
            os.replace(path, aside)
        what = f"the answers kept by the last run are set aside in {shown(aside)}"
        print(f"headway: note: {what}: {error.problems[0].what}", file=sys.stderr)
        return {}, {}


def _machine_name(parsed: Namespace) -> str:
    import platform

    return parsed.machine or platform.node() or "this one"
