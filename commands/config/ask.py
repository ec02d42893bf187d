"""`headway config`: ask questions about this machine and write its profile."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import ndiff
from functools import partial

from headway.commands.config.check import (
    SCRIPT,
    assignments,
    launch_problems,
    plan_for,
    with_idle_gpus,
)
from headway.commands.config.edit import apply, flat, set_all
from headway.commands.flags import Parsed, Parser, machine_from_flags
from headway.config_wizard.interview import Defaults, Prompter, interview
from headway.config_wizard.questions import (
    CANCEL,
    FINISH,
    LAYER_OF,
    PROJECT,
    TEST,
    USER,
    Answers,
    WizardFacts,
    WizardState,
    profile_after,
)
from headway.errors import HeadwayError, Problem
from headway.ipc.origin import Layer, Origin
from headway.ipc.stderr import log
from headway.launcher.plan.plan import summary as summary_of
from headway.machine.facts import Machine
from headway.settings.profile import (
    PROJECT_FILE,
    Entries,
    Entry,
    exists,
    find_project_profile,
    parse_profile,
    read_profile,
    shown,
    text_at,
    trusted_profile,
)
from headway.settings.profile_edit import BLANK, masked_profile, unset_value
from headway.settings.resolve import environment_layer, parse_layers
from headway.settings.setting import Raw
from headway.settings.table import TABLE

_ANSWERED = Origin(Layer.ANSWERS, reason="your answers")


def make_parser(appendix: str = "") -> Parser:
    """Return the parser of `headway config`; its --help ends with `appendix`."""
    parser = Parser(
        "config",
        "Ask questions about this machine and write its profile. Enter accepts the default answer.",
        usage="headway config [flags]\n       headway config <subcommand> ...",
        appendix=appendix,
    )
    parser.flag(
        "--yes",
        help="do not ask: set device, processes and precision to the best values for this machine, "
        "and keep the rest of the profile",
    )
    parser.flag(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="set this value without asking for it (repeatable)",
    )
    parser.flag("--dry-run", help="print the new profile without writing it")
    parser.shared_flags("--show-secrets", "--profile", "--machine")
    return parser


def ask(argv: Sequence[str], appendix: str = "") -> int:
    parsed = make_parser(appendix).parse_flags(argv)
    paths = paths_of(parsed.profile, parsed.yes)
    facts = facts_of(parsed, paths)
    prompter: Prompter = Defaults() if parsed.yes else _prompter()
    prompter.show(introduction(facts))
    try:
        answers = interview(facts, prompter, partial(summary, facts, paths, parsed.show_secrets))
    except KeyboardInterrupt:
        print("\nnothing was written", file=sys.stderr)
        return 128 + signal.SIGINT
    if answers[FINISH] == CANCEL:
        print("nothing was written")
        return 130
    path = paths[WizardState(facts, answers).place]
    if parsed.dry_run:
        log(f"would write {shown(path)}:")
        text = changed(text_at(path), path, facts, answers)
        print(text if parsed.show_secrets else masked_profile(text), end="")
        return 0
    apply(path, lambda text: changed(text, path, facts, answers), facts.machine)
    return _print_next(parsed, and_test=answers[FINISH] == TEST)


def _print_next(parsed: Parsed, and_test: bool) -> int:
    """Run `headway test` if requested, print the next command, and return the exit code."""
    flags = {"--profile": parsed.profile, "--machine": parsed.machine}
    same = [word for flag, value in flags.items() if value is not None for word in (flag, value)]
    if and_test:
        from headway.commands.test import main as test

        exit_code = test(same)
        if exit_code:
            return exit_code
    words = [*same, *(["--dry-run"] if parsed.machine is not None else [])]
    print(f"next: {shlex.join(['headway', 'launch', *words, SCRIPT])}")
    return 0


def _prompter() -> Prompter:
    from headway.config_wizard.prompts import PlainPrompter, TerminalPrompter

    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    dumb = os.environ.get("TERM", "") in ("", "dumb", "unknown") and os.name != "nt"
    return TerminalPrompter() if is_terminal and not dumb else PlainPrompter()


# inputs of the questions


def paths_of(profile: str | None, unattended: bool) -> dict[str, str]:
    """Return the paths of the profiles that can be written, by place, with the default first.

    There is a single path if --profile sets it, or if no questions are asked.
    """
    user = trusted_profile(profile).path
    project = find_project_profile(trusted=user)
    if project is not None and os.path.realpath(project) == os.path.realpath(user):
        return {PROJECT: user}
    if profile is not None or unattended:
        return {PROJECT if os.path.basename(user) == PROJECT_FILE else USER: user}
    if project is not None:
        return {PROJECT: project, USER: user}
    with suppress(FileNotFoundError):  # the working directory has been removed
        return {USER: user, PROJECT: os.path.abspath(PROJECT_FILE)}
    return {USER: user}


def facts_of(parsed: Parsed, paths: Mapping[str, str]) -> WizardFacts:
    """Return the facts that the questions depend on; raise errors before the first question."""
    machine = with_idle_gpus(machine_from_flags(parsed, os.environ)[0])
    if parsed.machine is None:
        parse_layers([environment_layer()])  # raises before any question is asked
    by_flag = Origin(Layer.ASSIGNMENT, flag="--set")
    given = {n: Entry(raw, by_flag) for n, raw in assignments(parsed.set, by_flag).items()}
    read = {USER: trusted_profile().path, **paths}  # a project's profile overrides the user's
    layers = {
        place: read_profile(path, LAYER_OF[place]) if exists(path) else {}
        for place, path in read.items()
    }
    for layer in layers.values():
        parse_layers([layer])
    profiles = {
        place: {key: entry.raw for key, entry in layer.items()} for place, layer in layers.items()
    }
    sources = [*layers.values(), given]
    return WizardFacts(
        machine=machine,
        profiles=profiles,
        paths={place: shown(path) for place, path in paths.items()},
        given={name: entry.raw for name, entry in given.items()},
        problems=lambda values: problems_of(values, machine, sources),
        redetect=parsed.yes,
        can_test=parsed.machine is None,
    )


def problems_of(
    values: Mapping[str, Raw], machine: Machine, sources: Sequence[Entries] = ()
) -> Sequence[Problem]:
    """Return the problems of a launch with `values`; values in `sources` keep their origin."""
    known = {
        (name, str(entry.raw)): Origin(Layer.ANSWERS, reason=str(entry.origin))
        for layer in sources
        for name, entry in layer.items()
    }
    # a single layer, because the profile will be a single file
    layer = {n: Entry(raw, known.get((n, str(raw)), _ANSWERED)) for n, raw in values.items()}
    return launch_problems([layer], machine)


# output


def introduction(facts: WizardFacts) -> str:
    machine = facts.machine
    device, why = machine.best_device()
    cores = machine.cores_reason
    found = f"{cores}; {why}" if device == "cpu" else f"{why}, {cores}"
    is_first = not any(facts.profiles.values())
    enter = "the best value for this machine" if is_first else "your earlier answer"
    return f"Detected: {found}.\nEnter accepts {enter}, ? explains, < goes back."


def summary(
    facts: WizardFacts, paths: Mapping[str, str], show_secrets: bool, answers: Answers
) -> str:
    """Return a diff of the profile, and the plan of a launch with the new profile."""
    place, values = WizardState(facts, answers).place, profile_after(facts, answers)
    text = text_at(paths[place])
    after = changed(text, paths[place], facts, answers)
    changes = [line for line in ndiff(text.splitlines(), after.splitlines()) if line[0] != "?"]
    if not show_secrets:
        masked = {**_masked_lines(text), **_masked_lines(after)}
        changes = [line[:2] + masked.get(line[2:], line[2:]) for line in changes]
    lines = [f"\n{facts.paths[place]}", *(f"  {line}".rstrip() for line in changes)]
    layers: list[Entries] = []
    for where, profile in {**facts.profiles, place: values}.items():
        origin = Origin(LAYER_OF[where], facts.paths.get(where, ""))
        layers.append({name: Entry(raw, origin) for name, raw in profile.items()})
    try:
        plan = plan_for(layers, facts.machine)
        if hosts := plan.settings.hosts:
            number = f"{len(hosts)} host{'s' * (len(hosts) != 1)}"
            lines.append(f"A launch: {plan.program.name} on {number} over ssh: {hosts}\n")
        else:
            notes = [f"  note: {note}" for note in plan.notes]
            lines += [f"A launch: {summary_of(plan)}", *notes, ""]
    except HeadwayError as error:
        lines += [f"A launch would fail: {problem.what}\n" for problem in error.problems]
    return "\n".join(lines)


def _masked_lines(text: str) -> dict[str, str]:
    """Map each line that contains a secret, in the text of a profile, to its masked form."""
    pairs = zip(text.splitlines(), masked_profile(text).splitlines(), strict=True)
    return {line: masked for line, masked in pairs if line != masked}


def changed(text: str, path: str, facts: WizardFacts, answers: Answers) -> str:
    """Apply the answers to the text of a profile; everything else remains unchanged."""
    before = flat(facts.profiles[WizardState(facts, answers).place]) if text else {}
    after = flat(profile_after(facts, answers))
    text = text or BLANK
    now = flat({key: entry.raw for key, entry in parse_profile(text, path, Layer.PROFILE).items()})
    different = {
        k: raw
        for k, raw in after.items()
        if raw not in (before.get(k), now.get(k))
        and not (k in now and k in TABLE and TABLE[k].parse(raw) == TABLE[k].parse(now[k]))
    }
    text = set_all(text, different)
    for key in before.keys() - after.keys() & now.keys():
        text = unset_value(text, key)
    return text
