"""The torchrun commands in a shell script, with what the script sets before them. Pure."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from itertools import dropwhile

from headway.commands.exchange.imported import Imported
from headway.commands.exchange.shell_lines import TABLE_ROW, Command, Word, commands_in
from headway.commands.exchange.torchrun_line import from_torchrun, is_torchrun, variable
from headway.errors import ConfigError
from headway.machine.facts import Machine

_REFERENCE = re.compile(r"'[^']*'|\\.|\$(?:(\w+)|\{(\w+)\})", re.DOTALL)
_NAMED = re.compile(r"\$\w+|\$\{\w+\}|\b([A-Za-z_]\w*)")  # $N and ${N} only read it
_OPENING = ("if", "for", "while", "until", "case")
_CLOSING = ("fi", "done", "esac")
_KEYWORDS = ("then", "else", "do", "{")
_DECLARING = ("declare", "typeset", "readonly", "local")
_EXPORT_ALL = re.compile(r" (-[a-z]*a|-o allexport)")  # also -ea
_EXPORT_NO_MORE = re.compile(r" (\+[a-z]*a|\+o allexport)")
_OUT_OF_SIGHT = ("source", ".", "eval")  # what these set stands elsewhere
_SHELLS = ("bash", "sh", "zsh", "dash", "ksh")
_SIMPLE = re.compile(r"[\w./:,=@%+-]+")  # a value that is one word in every place


def torchruns_in(text: str, machine: Machine, where: str) -> list[Imported]:
    """Return what each torchrun command in a shell's text means here.

    Args:
        text: a script, or one line.
        machine: this one.
        where: the text was found, for messages.

    Raises:
        ConfigError: such a command cannot be read.
    """
    return _torchruns_in(text, _Variables(), machine, where)


def is_shell_line(words: Sequence[Word]) -> bool:
    """True for the words of a command line that gives a shell its commands: bash -c '...'."""
    return _behind_c(words) is not None


def _behind_c(words: Sequence[Word]) -> int | None:
    """Return the index of the commands that a shell gets by -c, if that is what the words do."""
    shells = [at for at, word in enumerate(words) if word.text.rpartition("/")[2] in _SHELLS]
    for at, word in enumerate(words[:-1]):
        if shells and at > shells[0] and re.fullmatch("-[a-z]*c", word.text):
            return at + 1
    return None


def _torchruns_in(text: str, variables: _Variables, machine: Machine, where: str) -> list[Imported]:
    found = []
    folders: list[tuple[tuple[int, ...], str]] = []  # each with the brackets that it holds in
    depth = 0
    for command in commands_in(text):
        if command.joined_by == TABLE_ROW:
            continue
        before = "".join(cd for held, cd in folders if command.brackets[: len(held)] == held)
        if is_torchrun(command.words):
            one = _torchrun(command, variables, machine, where)
            found.append(one._replace(before=before))
            continue
        inner = _within(command, variables, machine, where)
        found += [one._replace(before=before + one.before) for one in inner]
        line = " ".join(word.raw for word in command.words)
        first = command.words[0].text if command.words else ""
        depth += (first in _OPENING) - (first in _CLOSING)
        variables.note(
            list(dropwhile(lambda word: word.text in _KEYWORDS, command.words)),
            is_certain=not (depth or command.brackets or command.joined_by in ("&&", "||")),
        )
        if first == "cd":
            folders.append((command.brackets, f"{line} && "))
        if first in _OUT_OF_SIGHT:
            variables.out_of_sight.append(line)
    return found


def _torchrun(command: Command, variables: _Variables, machine: Machine, where: str) -> Imported:
    """Return what a torchrun command means here, under the variables that are set before it."""
    if command.is_open:
        raise ConfigError(
            "the command line cannot be read: no closing quotation or bracket",
            where=where,
            fix="write out what is in it, or give the words without quotes around them all",
        )
    words = [variables.filled_in(word) for word in command.words]
    variables.note_named(" ".join(w.raw for w in command.words if not w.is_plain))
    one = from_torchrun([*variables.exported(), *words], machine, where)
    return one._replace(left=[*variables.left(), *one.left])


def _within(
    command: Command, variables: _Variables, machine: Machine, where: str
) -> list[Imported]:
    """Return what the torchrun commands mean that a shell gets by -c."""
    words = [*dropwhile(lambda word: word.text in _KEYWORDS, command.words)]
    index = _behind_c(words)
    if index is None:
        return []
    text = variables.filled_in(words[index]).text
    inner = copy.deepcopy(variables)
    front = [word.raw for word in words[:index] if not variable(word)]
    inner.note([Word.of("export"), *filter(variable, words[:index])], is_certain=True)
    left = [f"{' '.join(front)} (give it the whole `headway launch` line, or leave it out)"]
    if behind := [word.raw for word in words[index + 1 :]]:
        left.append(f"{' '.join(behind)} (only that shell knows their places)")
    found = _torchruns_in(text, inner, machine, where)
    return [one._replace(left=[*left, *one.left]) for one in found]


def _assigned(word: Word) -> str:
    """Return the name of the variable that a word sets or adds to; empty for other words."""
    return variable(word._replace(text=word.text.replace("+=", "=", 1)))


class _Variables:
    """The variables that a script has set so far; all that it said of each, by name."""

    def __init__(self) -> None:
        self._own: dict[str, list[Word]] = {}
        self._exported: set[str] = set()
        self._uncertain: set[str] = set()
        self._used: set[str] = set()
        self._named: set[str] = set()  # by other commands, which may change them
        self._exports_all = False  # set -a
        self.out_of_sight: list[str] = []  # commands that may set more

    def note(self, words: Sequence[Word], *, is_certain: bool) -> None:
        """Note what a command sets, or may set."""
        first = words[0].text if words else ""
        flags = "".join(word.text for word in words[1:] if word.text.startswith("-"))
        is_export = first == "export" or (first in _DECLARING and "x" in flags)
        if first == "unset":
            for word in words:
                self._own.pop(word.text, None)
        elif first == "set":
            line = " ".join(word.text for word in words)
            was = self._exports_all and not _EXPORT_NO_MORE.search(line)
            self._exports_all = was or (is_certain and bool(_EXPORT_ALL.search(line)))
        elif first in ("export", *_DECLARING) or all(map(_assigned, words)):
            # else they are set for that command alone
            is_export = is_export or self._exports_all
            for word in words[first in ("export", *_DECLARING) :]:
                self.note_named(word.raw.partition("=")[2] if not word.is_plain else "")
                name = _assigned(word)
                if name:
                    said = self.filled_in(word)
                    if not variable(word):  # NAME+=: what it is then, a shell knows
                        said = said._replace(is_plain=False)
                    self._own.setdefault(name, []).append(said)
                    self._uncertain |= set() if is_certain else {name}
                if is_export:
                    self._exported.add(name or word.text)
        else:
            self.note_named(" ".join(word.raw for word in words))

    def note_named(self, text: str) -> None:
        """Note the variables that a shell's text names, other than to read them."""
        self._named.update(_NAMED.findall(text))

    def exported(self) -> list[Word]:
        """Return the variables that torchrun inherits and whose value stands there."""
        return [said[0] for name, said in self._own.items() if self._is_known(name, exported=True)]

    def left(self) -> list[str]:
        """Return the others, each with the reason."""
        lines = [f"{line} (what it sets, a shell knows)" for line in self.out_of_sight]
        for name, said in self._own.items():
            if name in self._uncertain:
                reason = "it is set under a condition or in brackets"
            elif len({word.text for word in said}) > 1:
                reason = "it is set several times"
            elif not said[0].is_plain:
                reason = "only a shell knows its value"
            elif name not in self._exported:
                reason = "it is not exported: torchrun does not see it"
            elif name in self._named:
                reason = "another command names it, and may change it"
            else:
                continue
            if name not in self._used or name in self._exported:
                lines.append(f"{', '.join(word.raw for word in said)} ({reason})")
        return lines

    def filled_in(self, word: Word) -> Word:
        """Return a word with the script's variables in it replaced, where that is certain."""

        def value(found: re.Match[str]) -> str:
            name = found[1] or found[2] or ""
            text = self._own[name][0].text.partition("=")[2] if self._is_known(name) else ""
            if not _SIMPLE.fullmatch(text):
                return found.group()
            self._used.add(name)
            return text

        return word if word.is_plain else Word.read(_REFERENCE.sub(value, word.raw))

    def _is_known(self, name: str, *, exported: bool = False) -> bool:
        said = self._own.get(name, [])
        is_one = len({word.text for word in said}) == 1 and said[0].is_plain
        is_certain = is_one and name not in self._uncertain | self._named
        return is_certain and (not exported or name in self._exported)
