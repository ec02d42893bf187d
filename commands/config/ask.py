"""`headway config`: ask about this machine, or take the answers from flags or a file, and write the
profile.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

from headway.commands.config.check import SCRIPT
from headway.commands.config.edit import apply
from headway.commands.config.facts import facts_of, paths_of
from headway.commands.config.summary import changed, introduction, summary
from headway.commands.flags import Parsed, Parser
from headway.config_wizard.interview import Defaults, Prompter, interview
from headway.config_wizard.questions import CANCEL, TEST, UNCONFIRMED, place_of, profile_after
from headway.config_wizard.texts import FINISH
from headway.contract import signals
from headway.contract.notes import say
from headway.errors import STOP_SIGNALS, ConfigError
from headway.settings.profile_edit import masked_profile
from headway.settings.profile_files import shown, text_at


def make_parser(appendix: str = "") -> Parser:
    """Return the parser of `headway config`; its --help ends with `appendix`."""
    parser = Parser(
        "config",
        "Ask about this machine and write its profile. Enter accepts the recommended answer.",
        usage="headway config [flags]\n       headway config <subcommand> ...",
        appendix=appendix,
    )
    parser.flag(
        "--yes",
        help="do not ask: set device, processes and precision to what suits this machine best, and "
        "keep the rest of the profile",
    )
    parser.flag(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="set this, and do not ask for it (repeatable); place=project works too",
    )
    parser.flag(
        "--answers",
        metavar="FILE",
        help="do not ask: read the answers from FILE, in the format of a profile; `place: user` or "
        "`place: project` in it chooses which profile to write",
    )
    parser.flag("--dry-run", help="print what would be written, and write nothing")
    parser.secrets_flag()
    parser.profile_flag()
    parser.machine_flag()
    return parser


def ask(argv: Sequence[str], appendix: str = "", subcommands: Collection[str] = ()) -> int:
    """Ask, write the profile, and print the next command to type."""
    parser = make_parser(appendix)
    parsed, words = parser.parse_words(argv)
    if words:
        _reject_words(parser, parsed, words, subcommands)
    unattended = parsed.yes or parsed.answers is not None
    paths = paths_of(parsed.profile)
    facts = facts_of(parsed, paths, unattended)
    prompter: Prompter = Defaults(lambda _: None) if unattended else _prompter()
    prompter.say(introduction(facts))
    try:
        with _stop_signals_as_interrupts(prompter) as seen:
            answers = interview(
                facts, prompter, partial(summary, facts, paths, parsed.show_secrets)
            )
            if seen:  # the exception was raised in a __del__ or a weakref callback, and lost
                raise KeyboardInterrupt
    except (KeyboardInterrupt, OSError) as stop:
        if isinstance(stop, OSError) and not seen:  # a closed terminal cannot be restored
            raise
        try:
            print("\nnothing was written", file=sys.stderr)
            sys.stdout.flush()
        except OSError:  # the terminal is closed; the exit code is still right
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        return 128 + (seen[0] if seen else signal.SIGINT)
    if answers[FINISH] == UNCONFIRMED:
        raise ConfigError(
            "the input ended before the last question was answered; nothing was written",
            where="standard input",
            fix="`headway config --yes` writes the recommended answers without asking; a pipe must "
            "answer every question, the last one with `write`",
        )
    if answers[FINISH] == CANCEL:
        print("nothing was written")
        return 130
    path = paths[place_of(facts, answers)]
    if parsed.dry_run:
        say(f"would write {shown(path)}:")
        text = changed(text_at(path), path, facts, answers)
        print(text if parsed.show_secrets else masked_profile(text), end="")
        return 0
    apply(
        path,
        lambda text: changed(text, path, facts, answers),
        facts.machine,
        requested=profile_after(facts, answers),
    )
    return _print_next(parsed, and_test=answers[FINISH] == TEST)


def _reject_words(
    parser: Parser, parsed: Parsed, words: Sequence[str], subcommands: Collection[str]
) -> NoReturn:
    """Raise for words after the flags; a subcommand must come before them."""
    if words[0] not in subcommands:
        parser.error(f"unexpected argument {words[0]!r}")
    profile = [] if parsed.profile is None else ["--profile", parsed.profile]
    raise ConfigError(
        f"the subcommand {words[0]} must come before its flags",
        where="the command line",
        fix=f"`{shlex.join(['headway', 'config', words[0], *profile, *words[1:]])}`",
    )


@contextmanager
def _stop_signals_as_interrupts(prompter: Prompter) -> Iterator[list[int]]:
    """Interrupt the prompter on SIGINT, SIGTERM and SIGHUP (a closed terminal); yield what came.

    A signal that is ignored (as SIGHUP under nohup) stays ignored.
    """
    seen: list[int] = []

    def stop(number: int, _: object) -> None:
        seen.append(number)
        if len(seen) == 1:
            prompter.interrupt()

    numbers = [one for one in STOP_SIGNALS if signals.is_usual(signal.getsignal(one))]
    before = signals.trap(stop, *numbers)
    try:
        yield seen
    finally:
        signals.put_back(dict.fromkeys(before, signal.SIG_IGN) if seen else before)


def _print_next(parsed: Parsed, and_test: bool) -> int:
    """Print the next command to type, after `headway test` if asked for; return the exit code."""
    if and_test:
        from headway.commands.test import main as test

        exit_code = test(_same_flags(parsed))
        if exit_code:
            return exit_code
    words = [*_same_flags(parsed), *(["--dry-run"] if parsed.machine is not None else [])]
    print(f"next: {shlex.join(['headway', 'launch', *words, SCRIPT])}")
    if parsed.machine is None and shutil.which("kubectl"):
        export = shlex.join(["headway", "config", "export", *words, "--format", "k8s"])
        print(f"on Kubernetes: {export} --image IMAGE --name train > train.yaml")
    return 0


def _same_flags(parsed: Parsed) -> list[str]:
    """Return the flags that name the same profile and machine for another command."""
    flags = {"--profile": parsed.profile, "--machine": parsed.machine}
    return [word for name, value in flags.items() if value is not None for word in (name, value)]


def _prompter() -> Prompter:
    from headway.config_wizard.prompts import PlainPrompter, TerminalPrompter

    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    dumb = os.environ.get("TERM", "") in ("", "dumb", "unknown") and os.name != "nt"
    return TerminalPrompter() if is_terminal and not dumb else PlainPrompter()
