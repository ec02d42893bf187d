"""`headway config`: asks about this machine, or takes the answers from elsewhere, and writes the
profile.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from difflib import ndiff
from functools import partial
from typing import NoReturn

from headway.commands.config_answers import (
    QUESTIONS,
    checked_answers,
    keep,
    kept_path,
    read_answers,
    read_kept,
)
from headway.commands.config_check import SCRIPT, at_rest, plan_for, refusals
from headway.commands.config_edit import apply, assignments, flat, set_all
from headway.commands.flags import Parser, look_at_machine
from headway.commands.schema import beginning
from headway.config_wizard.interview import Defaults, Prompter, interview
from headway.config_wizard.questions import (
    ALWAYS_ASKED,
    CANCEL,
    FINISH,
    NONE,
    PLACE,
    PROJECT,
    TEST,
    USER,
    Answers,
    Facts,
    are_alike,
    as_words,
    place_of,
    profile_after,
)
from headway.errors import ConfigError, HeadwayError, Problem
from headway.machine import Machine
from headway.profile import Entry, parse_profile, read_profile
from headway.profile_edit import unset_value
from headway.profile_files import (
    PROJECT_FILE,
    choose_profile,
    find_project_profile,
    is_there,
    shown,
    text_at,
)
from headway.resolve import Layer, environment_layer, typed
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
        help="set this, and do not ask for it (repeatable); place=project is an answer, too",
    )
    parser.flag(
        "--answers",
        metavar="FILE",
        help="ask nothing: take the answers from FILE, which is written like a profile; "
        "`place: user` or `place: project` in it says where to keep that",
    )
    parser.flag("--dry-run", help="print what would be written, and write nothing")
    parser.profile_flag()
    parser.machine_flag()
    return parser


def ask(argv: Sequence[str], appendix: str = "") -> int:
    """Hold the conversation, write the profile, and say what to type next."""
    parser = make_parser(appendix)
    parsed, words = parser.parse_words(argv)
    if words:
        _refuse_words(parser, parsed, words)
    unattended = parsed.yes or parsed.answers is not None
    paths = _paths(parsed.profile)
    facts = _facts(parsed, paths, unattended)
    prompter: Prompter = Defaults(lambda _: None) if unattended else _prompter()
    prompter.say(_introduction(facts))
    answers: dict[str, str] = {}
    taken_back: dict[str, str] = {}
    summary = partial(_summary, facts, paths)
    try:
        with _stop_signals_as_interrupts() as seen:
            interview(facts, answers, taken_back, prompter, summary)
            if seen:  # a __del__ or a weakref's callback has swallowed the exception
                raise KeyboardInterrupt
    except (KeyboardInterrupt, OSError) as stop:
        if isinstance(stop, OSError) and not seen:  # a terminal that was closed cannot be tidied
            raise
        kept = _keep(parsed, facts, paths, {**taken_back, **answers})
        try:
            print(f"\nnothing was written; {kept}", file=sys.stderr)
            sys.stdout.flush()
        except OSError:  # nobody is there to read it; the exit code is true all the same
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        return 128 + (seen[0] if seen else signal.SIGINT)
    except ConfigError:
        if answers and sys.stdin.isatty():  # then what was given is possible
            kept = _keep(parsed, facts, paths, {**taken_back, **answers})
            print(f"headway: note: {kept}", file=sys.stderr)
        raise
    if answers[FINISH] == CANCEL:
        if not unattended:
            _forget(paths, parsed)
        print("nothing was written")
        return 130
    path = paths[place_of(facts, answers)]
    if parsed.dry_run:
        print(f"headway: would write {shown(path)}:", file=sys.stderr)
        print(_changed(text_at(path), path, facts, answers), end="")
        return 0
    try:
        apply(
            path,
            lambda text: _changed(text, path, facts, answers),
            facts.machine,
            said=profile_after(facts, answers),
        )
    except ConfigError:
        if not unattended:
            print(f"headway: note: {_keep(parsed, facts, paths, answers)}", file=sys.stderr)
        raise
    if not unattended:
        _forget(paths, parsed)
    return _next(parsed, and_test=answers[FINISH] == TEST)


def _refuse_words(parser: Parser, parsed: Namespace, words: Sequence[str]) -> NoReturn:
    """Refuse what follows the flags; a subcommand stands before them."""
    from headway.commands.config import SUBCOMMANDS

    if words[0] not in SUBCOMMANDS:
        parser.error(f"{words[0]!r} is not expected here")
    profile = [] if parsed.profile is None else ["--profile", parsed.profile]
    raise ConfigError(
        f"the subcommand {words[0]} comes before its flags",
        where="the command line",
        fix=f"`{shlex.join(['headway', 'config', words[0], *profile, *words[1:]])}`",
    )


def _forget(paths: Mapping[str, str], parsed: Namespace) -> None:
    """Remove the answers kept by an earlier run."""
    with suppress(OSError):
        os.unlink(kept_path(paths, parsed.machine))


@contextmanager
def _stop_signals_as_interrupts() -> Iterator[list[int]]:
    """Let SIGTERM, and the SIGHUP of a terminal that is closed, be what Ctrl-C is; yield what came.

    A SIGHUP that is ignored already (nohup) stays so.
    """
    seen: list[int] = []

    def stop(number: int, _: object) -> None:
        seen.append(number)
        if len(seen) == 1:
            raise KeyboardInterrupt

    before = {
        number: signal.signal(number, stop)
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) == signal.SIG_DFL
    }
    try:
        yield seen
    finally:
        for number, old in before.items():
            signal.signal(number, signal.SIG_IGN if seen else old)


def _next(parsed: Namespace, and_test: bool) -> int:
    """Say the next command to type, after `headway test` if asked for; return the exit code."""
    if and_test:
        from headway.commands.test import main as test

        exit_code = test(_same_flags(parsed))
        if exit_code:
            return exit_code
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
    project = find_project_profile(trusted=user)
    if project is not None:
        return {PROJECT: project, USER: user} if project != user else {USER: user}
    try:
        return {USER: user, PROJECT: os.path.abspath(PROJECT_FILE)}
    except FileNotFoundError:  # the working directory has been removed
        return {USER: user}


def _facts(parsed: Namespace, paths: Mapping[str, str], unattended: bool) -> Facts:
    machine = at_rest(look_at_machine(parsed, os.environ)[0])
    if parsed.machine is None:
        typed([environment_layer()])  # what is wrong there is said before any question
    given = read_answers(parsed.answers) if parsed.answers else {}
    given |= _set_by_flag(parsed.set)
    if PLACE in given and given[PLACE].raw not in paths:
        raise ConfigError(
            f"{PLACE} is {given[PLACE].raw}, but here the profile is kept in {shown(paths[USER])}",
            where=str(given[PLACE].origin),
            fix=f"write `{PLACE}: {USER}`, or leave --profile out",
        )
    if unattended:
        given.setdefault(PLACE, Entry(USER, _ANSWERED))
    layers = {
        place: read_profile(path, f"{place} profile") if is_there(path) else {}
        for place, path in paths.items()
    }
    for layer in layers.values():
        typed([layer])
    profiles = {
        place: {key: entry.raw for key, entry in layer.items()} for place, layer in layers.items()
    }
    kept: dict[str, Raw] = {}
    if not unattended:
        kept, kept_given = read_kept(kept_path(paths, parsed.machine))
        for name in ALWAYS_ASKED & kept_given.keys() - given.keys():  # it may have been a mistake
            kept[name] = kept_given.pop(name).raw
        if kept_given.keys() - given.keys():
            words = " ".join(f"--set {n}={as_words(e.raw)}" for n, e in kept_given.items())
            print(
                f"headway: note: set by the last run, and not asked: {words} (--set changes it)",
                file=sys.stderr,
            )
        given = {**kept_given, **given}
    sources = [*layers.values(), given]
    return Facts(
        machine=machine,
        profiles=profiles,
        paths={place: shown(path) for place, path in paths.items()},
        defaults=kept,
        given={name: entry.raw for name, entry in given.items()},
        problems=lambda values: _problems(values, machine, sources),
        afresh=unattended,
        can_test=parsed.machine is None,
    )


def _set_by_flag(words: Sequence[str]) -> dict[str, Entry]:
    """Return what --set says of settings, and of the questions that are none."""
    questions = {name: raw for name, _, raw in (word.partition("=") for word in words)}
    settings = [word for word in words if word.partition("=")[0] not in QUESTIONS]
    origin = Origin("assignment", "flag --set")
    entries = {name: Entry(questions[name], origin) for name in QUESTIONS & questions.keys()}
    values = assignments(settings, "flag --set")
    return checked_answers(entries) | {name: Entry(raw, origin) for name, raw in values.items()}


def _problems(
    values: Mapping[str, Raw], machine: Machine, sources: Sequence[Layer] = ()
) -> Sequence[Problem]:
    """Return what a launch would refuse; what stands in one of `sources` is said to be there."""
    there = {(name, str(entry.raw)): entry for layer in sources for name, entry in layer.items()}
    layer = {}
    for name, entry in _layer(values).items():
        said = there.get((name, str(entry.raw)), entry).origin
        # all of it will stand in one file, where nothing gives way to anything
        layer[name] = entry._replace(origin=said._replace(layer=_ANSWERED.layer))
    return refusals([layer], machine)


def _layer(values: Mapping[str, Raw]) -> Layer:
    return {name: Entry(raw, _ANSWERED) for name, raw in values.items()}


def _prompter() -> Prompter:
    from headway.config_wizard.prompts import PlainPrompter, TerminalPrompter

    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    dumb = os.environ.get("TERM", "") in ("", "dumb", "unknown") and os.name != "nt"
    return TerminalPrompter() if is_terminal and not dumb else PlainPrompter()


def _keep(parsed: Namespace, facts: Facts, paths: Mapping[str, str], answers: Answers) -> str:
    """Keep the answers for the next run, and return a sentence that says where."""
    path = kept_path(paths, parsed.machine)
    all_answers = {**facts.defaults, **answers}
    command = ["headway", "config", *_same_flags(parsed)]
    try:
        if not keep(path, all_answers, facts.given):
            return f"`{shlex.join(command)}` begins again"
    except ConfigError:
        words = [
            f"--set={name}={as_words(answer)}"
            for name, answer in {**facts.given, **all_answers}.items()
            if (name.partition(".")[0] in TABLE or name == PLACE) and answer != NONE
        ]
        return f"to go on: {shlex.join([*command, *words])}"
    kept = shown(path)
    return f"your answers are kept in {kept}; `{shlex.join(command)}` offers them again"


def _layers(facts: Facts, place: str, values: Mapping[str, Raw]) -> list[Layer]:
    """Return the profiles that a launch would find, with `values` at their place."""
    return [
        {
            name: Entry(raw, Origin(f"{where} profile", f"{where} profile {facts.paths[where]}"))
            for name, raw in (values if where == place else facts.profiles[where]).items()
        }
        for where in (USER, PROJECT)
        if where in facts.profiles
    ]


def _introduction(facts: Facts) -> str:
    machine = facts.machine
    device, why = machine.best_device()
    found = (
        f"{machine.cores_reason}; {why}" if device == "cpu" else f"{why}, {machine.cores_reason}"
    )
    is_first = not facts.defaults and not any(facts.profiles.values())
    enter = "what fits this machine best" if is_first else "your earlier answer"
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
        plan = plan_for(_layers(facts, place, values), facts.machine)
        lines += [f"A launch: {summary(plan)}", *(f"  note: {note}" for note in plan.notes), ""]
    except HeadwayError as error:
        lines += [f"A launch would be refused: {problem.what}\n" for problem in error.problems]
    return "\n".join(lines)


def _changed(text: str, path: str, facts: Facts, answers: Answers) -> str:
    """Return the profile's text with what the answers change, and all else as it is now."""
    before = flat(facts.profiles[place_of(facts, answers)]) if text else {}
    after = flat(profile_after(facts, answers))
    text = text or beginning(path)
    now = flat({key: entry.raw for key, entry in parse_profile(text, path, "profile").items()})
    changed = {
        k: raw
        for k, raw in after.items()
        if raw not in (before.get(k), now.get(k))
        and not (k in now and k in TABLE and are_alike(k, raw, now[k]))
    }
    text = set_all(text, changed)
    for key in before.keys() - after.keys() & now.keys():
        text = unset_value(text, key)
    return text
