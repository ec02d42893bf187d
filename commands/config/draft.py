"""`headway config edit`: a draft of a profile in the user's editor, until it is sound."""

from __future__ import annotations

import itertools
import os
import shlex
import stat
import sys
from collections.abc import Sequence
from contextlib import suppress

from headway.commands.config.edit import apply
from headway.commands.config.schema import beginning
from headway.commands.flags import Parser
from headway.errors import ConfigError
from headway.machine.detection import detect_machine
from headway.settings.profile_edit import change_profile
from headway.settings.profile_files import choose_profile, is_there, read_text, shown, text_at
from headway.settings.table import TABLE


def edit(argv: Sequence[str]) -> int:
    """Open a draft of the profile in the user's editor; it replaces the profile if it is sound."""
    parser = Parser("config edit", "Open your profile in $VISUAL or $EDITOR; it is checked first.")
    parser.profile_flag()
    profile = parser.parse_flags(argv).profile
    path = choose_profile(profile).path
    flags = [] if profile is None else ["--profile", profile]
    again = f"`{shlex.join(['headway', 'config', 'edit', *flags])}`"
    before = text_at(path) or beginning(path) + _commented()
    folder, name = os.path.split(os.path.realpath(path))
    draft = os.path.join(folder, f".draft-{name}")
    base = f"{draft}.base"  # the profile that the draft was made from
    mode = stat.S_IMODE(os.stat(path).st_mode) if os.path.exists(path) else None
    _begin(draft, base, before, mode)

    def replace(text: str) -> str:
        if (text or before) != before:
            raise ConfigError(
                "somebody else has changed the profile meanwhile",
                where=shown(path),
                fix=f"take over from your draft what is missing: {shown(draft)}",
            )
        if not os.path.lexists(draft):
            raise ConfigError(
                "the editor has removed the draft, and the profile is as it was",
                where=shown(draft),
                fix=f"{again} begins anew",
            )
        return read_text(draft, "draft")

    is_done = False
    try:
        _open_editor(draft, again)
        if not is_there(path) and text_at(draft) == before:
            print(f"unchanged: there is still no {shown(path)}")
        else:
            apply(path, replace, detect_machine(), draft=draft)
        is_done = True
    finally:
        _tidy_up(draft, base, before, again, is_done)
    return 0


def _tidy_up(draft: str, base: str, before: str, again: str, is_done: bool) -> None:
    """Remove a draft that is of no use any more; else say that it is kept."""
    with suppress(OSError, ConfigError):
        if is_done or text_at(draft) in ("", before):
            for path in (draft, base):
                with suppress(FileNotFoundError):
                    os.unlink(path)
            return
    print(f"headway: note: {again} opens your draft again", file=sys.stderr)


def _begin(draft: str, base: str, before: str, mode: int | None) -> None:
    """Leave a draft to be opened: that of last time, or a new one where the profile has changed."""
    if os.path.lexists(draft):
        if text_at(base) == before:
            print(f"headway: your draft of last time is opened: {shown(draft)}", file=sys.stderr)
            return
        names = (f"{draft}.{number}" for number in itertools.count(1))
        aside = next(name for name in names if not os.path.lexists(name))
        kept = read_text(draft)
        change_profile(aside, lambda _: kept, mode)
        print(
            "headway: note: the profile has changed since your draft of last time, which is kept: "
            f"{shown(aside)}",
            file=sys.stderr,
        )
    change_profile(base, lambda _: before, mode)
    change_profile(draft, lambda _: before, mode)


def _commented() -> str:
    """Return all settings as comments, to be filled in."""
    return "".join(
        f"# {name}: {row.example}  # {row.help}\n" for name, row in TABLE.items() if name != "env"
    )


def _open_editor(path: str, again: str) -> None:
    import subprocess

    named = [os.environ.get(name, "").strip() for name in ("VISUAL", "EDITOR")]
    editor = next(filter(None, named), "vi")
    if not any(named) and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError(
            "no editor is named, and there is no terminal for vi",
            where="environment VISUAL, EDITOR",
            fix="`export EDITOR=...`, or change single keys: `headway config set KEY=VALUE`",
        )
    try:
        exit_code = subprocess.run([*shlex.split(editor), path]).returncode
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the editor {editor!r} cannot be started: {error}",
            where="environment VISUAL, EDITOR",
            fix="`export EDITOR=nano`, or change single keys: `headway config set KEY=VALUE`",
        ) from None
    if exit_code:
        raise ConfigError(
            f"the editor {editor!r} ended with {exit_code}, and the profile is as it was",
            where=shown(path),
            fix=f"try again: {again}; or change single keys: `headway config set`",
        )
