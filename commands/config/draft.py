"""`headway config edit`: a copy of the profile in the user's editor; it is checked first."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress

from headway.commands.config.check import checked
from headway.commands.config.edit import apply
from headway.commands.config.schema import new_profile
from headway.commands.flags import Parser
from headway.contract.notes import say
from headway.errors import ConfigError
from headway.machine.detection import detect_machine
from headway.settings.profile_files import choose_profile, is_there, read_text, shown, text_at
from headway.settings.table import TABLE


def edit(argv: Sequence[str]) -> int:
    """Open a copy of the profile in the user's editor; it replaces the profile once it is valid."""
    parser = Parser(
        "config edit",
        "Open your profile in $VISUAL or $EDITOR; it is checked before it is written.",
    )
    parser.profile_flag()
    path = choose_profile(parser.parse_flags(argv).profile).path
    before = text_at(path) or new_profile(path) + _commented()
    draft = _write_draft(path, before)
    try:
        if not _edit_until_valid(draft):
            os.unlink(draft)
            print(f"unchanged: {shown(path)}")
            return 2
        text = read_text(draft)

        def replace(now: str) -> str:
            if (now or before) != before:
                raise ConfigError(
                    "the profile has changed since the editor was opened",
                    where=shown(path),
                    fix=f"copy your changes from {shown(draft)} to it",
                )
            return text

        if text == before and not is_there(path):
            print(f"unchanged: there is still no {shown(path)}")
        else:
            apply(path, replace, detect_machine(), replaces_all=True)
        os.unlink(draft)
        return 0
    finally:
        _remove_unless_changed(draft, before)


def _write_draft(path: str, text: str) -> str:
    """Write `text` to a new file beside the profile, which only its owner can read."""
    folder, name = os.path.split(os.path.realpath(path))
    try:
        os.makedirs(folder, exist_ok=True)
        handle, draft = tempfile.mkstemp(f"-{name}", ".edit-", folder)
        with open(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(
            f"no copy of the profile can be written: {error.strerror}",
            where=shown(folder),
            fix="make it a folder that you can write to, or set XDG_CONFIG_HOME",
        ) from None
    return draft


def _commented() -> str:
    """Return all settings as comments, to be filled in."""
    return "".join(
        f"# {name}: {row.example}  # {row.help}\n" for name, row in TABLE.items() if name != "env"
    )


def _edit_until_valid(draft: str) -> bool:
    """Open the editor until the draft is valid; False when the user gives up.

    Raises:
        ConfigError: the draft is not valid, and there is no terminal to ask on.
    """
    while True:
        _open_editor(draft)
        if not os.path.exists(draft):
            raise ConfigError(
                "the editor has removed the file that it was given",
                where=shown(draft),
                fix="`headway config edit`, and save the file in the editor",
            )
        try:
            checked(read_text(draft), draft, detect_machine())
        except ConfigError as error:
            if not (sys.stdin.isatty() and sys.stdout.isatty()):
                raise
            for problem in error.problems:
                print(f"error: {problem}", file=sys.stderr)
            if not _wants_to_edit_again():
                return False
        else:
            return True


def _wants_to_edit_again() -> bool:
    try:
        reply = input("Edit again? [Y/n] (n discards your changes) ")
    except EOFError:
        raise KeyboardInterrupt from None
    return reply.strip().lower() not in ("n", "no")


def _remove_unless_changed(draft: str, before: str) -> None:
    """Remove a draft that holds nothing of the user's; else say where it is."""
    with suppress(OSError, ConfigError):
        if text_at(draft) in ("", before):
            with suppress(FileNotFoundError):
                os.unlink(draft)
            return
    say(f"note: your changes are in {shown(draft)}")


def _open_editor(path: str) -> None:
    import subprocess

    named = [os.environ.get(name, "").strip() for name in ("VISUAL", "EDITOR")]
    editor = next(filter(None, named), "vi")
    if not any(named) and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError(
            "no editor is set, and there is no terminal for vi",
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
            f"the editor {editor!r} exited with code {exit_code}; the profile is unchanged",
            where=shown(path),
            fix="try again, or change single keys: `headway config set KEY=VALUE`",
        )
