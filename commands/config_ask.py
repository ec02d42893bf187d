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

from headway.commands.config_check import SCRIPT, at_rest, plan_for
from headway.commands.config_edit import apply, assignments, checked_values, set_all
from headway.commands.flags import Parser, look_at_machine
from headway.commands.schema import beginning
from headway.config_wizard.interview import Defaults, Prompter, interview
from headway.config_wizard.questions import (
    CANCEL,
    FINISH,
    MORE,
    NONE,
    PLACE,
    PROJECT,
    TEST,
    USER,
    Answers,
    Facts,
    as_words,
    place_of,
    profile_after,
)
from headway.errors import ConfigError, HeadwayError, Problem
from headway.machine import Machine
from headway.profile import (
    PROJECT_FILE,
    Entry,
    choose_profile,
    find_project_profile,
    parse_profile,
    read_profile,
    read_text,
    shown,
)
from headway.profile_edit import unset_value, write_profile
from headway.resolve import Layer
from headway.settings import TABLE, Origin, Raw

_ANSWERED = Origin("user profile", "your answers")


def make_parser(appendix: str = "") -> Parser:
    """Return the parser of `headway config` itself; `appendix` ends its --help."""
    parser = Parser(
        "config",
        "Ask about this machine and write its profile. Enter takes the recommended answer.",
        usage="headway config [flags]\n       headway config <subcommand> ...",
        appendix=appendix,
    )
    parser.flag("--yes", help="ask nothing: the recommended answer to every question")
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
        print(f"\nnothing was written; {_kept(answers)}", file=sys.stderr)
        return 130
    if answers[FINISH] == CANCEL:
        print("nothing was written")
        return 130
    path, values = paths[place_of(facts, answers)], profile_after(facts, answers)
    if parsed.dry_run:
        print(f"headway: would write {shown(path)}:", file=sys.stderr)
        print(_changed(_text(path), path, values), end="")
        return 0
    _write(path, values, answers, facts.machine)
    if not unattended:
        with suppress(OSError):
            os.unlink(_kept_path())
    return _next(parsed, and_test=answers[FINISH] == TEST)


def _write(path: str, values: Mapping[str, Raw], answers: Answers, machine: Machine) -> None:
    try:
        apply(path, lambda text: _changed(text, path, values), machine)
    except ConfigError:
        print(f"headway: note: {_kept(answers)}", file=sys.stderr)
        raise


def _next(parsed: Namespace, and_test: bool) -> int:
    """Say the next command to type, or run `headway test`; return the exit code."""
    words = [] if parsed.profile is None else ["--profile", parsed.profile]
    if and_test:
        from headway.commands.test import main as test

        return test(words)
    if parsed.machine is not None:
        words += ["--machine", parsed.machine, "--dry-run"]
    print(f"next: {shlex.join(['headway', 'launch', *words, SCRIPT])}")
    return 0


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
    if unattended:
        given.setdefault(PLACE, USER)
    profiles = {
        place: {key: entry.raw for key, entry in read_profile(path, f"{place} profile").items()}
        if os.path.lexists(path)
        else {}
        for place, path in paths.items()
    }
    # the user's first, so that the project's win
    defaults: dict[str, Raw] = {**profiles[USER], **profiles.get(PROJECT, {})}
    if not unattended and os.path.exists(_kept_path()):
        defaults |= _read_answers(_kept_path())
    return Facts(
        machine=machine,
        profiles=profiles,
        paths={place: shown(path) for place, path in paths.items()},
        defaults={} if unattended else defaults,
        given=given,
        problems=lambda values: _problems(values, machine),
        can_test=parsed.machine is None,
    )


def _problems(values: Mapping[str, Raw], machine: Machine) -> Sequence[Problem]:
    try:
        plan_for([_layer(values)], machine)
    except HeadwayError as error:
        return error.problems
    return []


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
    text = _text(paths[place])
    after = _changed(text, paths[place], values)
    lines = [line for line in ndiff(text.splitlines(), after.splitlines()) if line[0] != "?"]
    lines = [f"\n{facts.paths[place]}", *(f"  {line}".rstrip() for line in lines)]
    try:
        lines.append(f"A launch: {summary(plan_for([_layer(values)], facts.machine))}\n")
    except HeadwayError as error:
        lines += [f"A launch would be refused: {problem.what}\n" for problem in error.problems]
    return "\n".join(lines)


def _text(path: str) -> str:
    return read_text(path) if os.path.lexists(path) else ""


def _changed(text: str, path: str, values: Mapping[str, Raw]) -> str:
    """Return the profile's text with exactly these values, and all else as it was."""
    text = text or beginning(path)
    present = {key: entry.raw for key, entry in parse_profile(text, path, "profile").items()}
    new = {key: raw for key, raw in values.items() if present.get(key) != raw}
    text = set_all(text, new)
    for key in present.keys() - values.keys() - {"version"}:
        text = unset_value(text, key)
    return text


def _read_answers(path: str) -> dict[str, Raw]:
    """Return the answers in a file: settings, and where to keep the profile."""
    entries = read_profile(path, "answers")
    own = {name: entries.pop(name).raw for name in (PLACE, MORE) if name in entries}
    if own.get(PLACE, USER) not in (USER, PROJECT):
        raise ConfigError(
            f"{PLACE} is {own[PLACE]!r}, but it must be {USER} or {PROJECT}",
            where=shown(path),
            fix=f"write `{PLACE}: {USER}`",
        )
    return {**own, **checked_values({k: entry.raw for k, entry in entries.items()}, shown(path))}


def _kept_path() -> str:
    from platformdirs import user_state_dir

    return os.path.join(user_state_dir("headway", appauthor=False), "answers.yaml")


def _kept(answers: Answers) -> str:
    """Keep the answers for the next run, and return a sentence that says where."""
    answers = {n: answer for n, answer in answers.items() if n != FINISH and answer != NONE}
    if not answers:
        return "`headway config` begins again"
    try:
        write_profile(_kept_path(), answers)
    except ConfigError:
        words = [
            f"--set={name}={as_words(answer)}" for name, answer in answers.items() if name in TABLE
        ]
        return f"to go on: {shlex.join(['headway', 'config', *words])}"
    return f"your answers are kept in {shown(_kept_path())}; `headway config` offers them again"
