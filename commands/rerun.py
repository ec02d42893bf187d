"""`headway rerun [RUN]`: launch once more what a run has launched."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence

from headway.commands.elsewhere import Moved, moved, words_elsewhere
from headway.commands.flags import Parser
from headway.commands.runs import RUN
from headway.contract.notes import say
from headway.contract.secrets import MASK
from headway.errors import ConfigError, LaunchError
from headway.history.record import Commit, Record
from headway.history.snapshot import Snapshot, code_in, git, snapshot_of
from headway.history.store import find
from headway.launcher.plan.program import Program
from headway.launcher.remote.orders import OF_ONE_RUN

_WHERE = "the record of the run"


def main(argv: Sequence[str]) -> int:
    """Run `headway rerun` with these words and return the exit code."""
    from headway.commands.launch import main as launch

    parser = Parser(
        "rerun",
        "Launch once more what a run has launched, with the same words, in the same folder, and "
        "with the settings that it had from variables. The command line is printed first.",
        usage="headway rerun [--at-commit] [--dry-run] [RUN]",
        appendix=f"\n{RUN}\n",
    )
    parser.flag(
        "--at-commit",
        help="run the code as it was: the commit of the run with its uncommitted changes, in a "
        "worktree of its own",
    )
    parser.flag("--dry-run", help="print the command line, and launch nothing")
    parsed, name = parser.parse_one(argv, "run")
    record = find(name)
    _refuse_unknown(record)
    start = record.start
    program = Program(start.program, start.arguments, start.kind)
    num_own = len(start.command) - len(start.arguments) - (start.kind != "module")
    own = start.command[:num_own]
    if parsed.at_commit:
        again = _at_commit(record, program, is_dry=parsed.dry_run)
    elif start.code:
        again = _of_copy(record, program)
    else:
        again = Moved(program, {})
    words = words_elsewhere(own, again.program, without=())
    variables = {**_variables(record), **again.variables}
    assigned = [f"{name}={_quoted(value)}" for name, value in variables.items()]
    line = " ".join([*assigned, "headway launch", *map(_quoted, words)])
    say(f"cd {_quoted(start.folder)} && {line}")
    if parsed.dry_run:
        return 0
    os.chdir(start.folder)
    os.environ.update(variables)
    return launch(words)


def _quoted(word: str) -> str:
    """Return a word for a shell; what cannot be printed, such as bytes of no UTF-8, as escapes."""
    if word.isprintable():
        return shlex.quote(word)
    escaped = "".join(
        (f"\\{char}" if char in "\\'" else char)
        if char.isprintable()
        else "".join(f"\\x{byte:02x}" for byte in _bytes_of(char))
        for char in word
    )
    return f"$'{escaped}'"


def _bytes_of(char: str) -> bytes:
    """Return the bytes of a character; one alone that Python has escaped, as in a file's name."""
    escaped = 0xDC80 <= ord(char) <= 0xDCFF
    return char.encode("utf-8", "surrogateescape" if escaped else "surrogatepass")


def _refuse_unknown(record: Record) -> None:
    """Refuse what the record does not say whole."""
    start = record.start
    reason = ""
    if not start.command:
        reason = "its command line is too long for a record"
    elif any(MASK in word for word in start.command):
        reason = "its command line had a secret, and records have none"
    elif not os.path.isdir(start.folder):
        reason = f"its folder {start.folder} is not there"
    if reason:
        raise ConfigError(
            f"run {record.name} cannot be launched again: {reason}",
            where=_WHERE,
            fix="type its command line: `headway runs --json` shows script and arguments",
        )


def _variables(record: Record) -> Mapping[str, str]:
    """Return the variables from which the run had settings."""
    held = {
        name: value
        for name, value in record.start.variables.items()
        if name.startswith("HEADWAY_") and name not in OF_ONE_RUN
    }
    if secret := [name for name, value in held.items() if MASK in value]:
        raise ConfigError(
            f"run {record.name} had a secret in {secret[0]}, and records have none",
            where=_WHERE,
            fix=f"type its command line, with {secret[0]} set",
        )
    return held


def _of_copy(record: Record, program: Program) -> Moved:
    """Return the program that runs the same copy of the code."""
    start = record.start
    copy = snapshot_of(start.code)
    if copy is None:
        raise ConfigError(
            f"run {record.name} cannot be launched again: the copy of its code is not there any "
            f"more: {start.code}",
            where=_WHERE,
            fix="pass --at-commit, which restores what git tracked",
        )
    return moved(program, start.folder, copy.root, copy.code)


def _at_commit(record: Record, program: Program, *, is_dry: bool) -> Moved:
    """Return the program that runs the code as it was, in a worktree, made unless `is_dry`."""
    commit = record.commit
    if commit is None or not commit.is_whole or not os.path.isdir(commit.root):
        reason = "its commit is not on record"
        if commit is not None:
            reason = "its repository is not there any more"
        if commit is not None and not commit.is_whole:
            reason = (
                "its uncommitted changes were too long for a record, no UTF-8, or held a secret"
            )
        raise ConfigError(
            f"the code of run {record.name} cannot be restored: {reason}",
            where=_WHERE,
            fix="leave --at-commit out, and check the code out yourself",
        )
    tree = code_in(record.path)
    is_there = snapshot_of(tree) is not None
    if not is_there and os.path.exists(tree):
        raise LaunchError(
            f"the code of run {record.name} is only half in {tree}",
            where=_WHERE,
            fix="wait for the other rerun that restores it; if there is none, remove that folder",
        )
    if not is_there and not is_dry:
        _git(commit, "worktree", "add", "--detach", tree, commit.commit)
        try:
            if commit.diff:
                _git(commit, "-C", tree, "apply", "--index", "-", text=commit.diff)
        except LaunchError:
            _git(commit, "worktree", "remove", "--force", tree)
            raise
        Snapshot(commit.root, commit, tree).write()
        is_there = True
    if commit.untracked:
        some = ", ".join(commit.untracked[:5])
        say(f"note: files that git did not track are not in that code: {some}")
    if os.path.isfile(os.path.join(commit.root, ".gitmodules")):
        say("note: submodules are not in that code")
    say(f"the code of run {record.name} {'is' if is_there else 'will be'} in {tree}")
    has = None if is_there else _files_of(commit).__contains__
    return moved(program, record.start.folder, commit.root, tree, has)


def _files_of(commit: Commit) -> set[str]:
    """Return the files and folders of a commit with its changes."""
    words = ("ls-tree", "--full-tree", "-r", "-t", "-z", "--name-only", commit.commit)
    found = {os.curdir, *git(commit.root, *words).split("\0")}
    found -= {*re.findall(r"^diff --git .* b/(.*)\ndeleted file", commit.diff, re.MULTILINE)}
    return found | {*re.findall(r"^diff --git .* b/(.*)\nnew file", commit.diff, re.MULTILINE)}


def _git(commit: Commit, *words: str, text: str = "") -> None:
    done = subprocess.run(
        ["git", "-C", commit.root, *words], input=text, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise LaunchError(
            f"git could not restore the code: {done.stderr.strip()}",
            where=commit.root,
            fix="leave --at-commit out, and check the code out yourself",
        )
    print(done.stderr, end="", file=sys.stderr)
