"""The commands in a shell script or line, as far as they can be read without running it. Pure."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

_INNER = r"[^()]*"  # brackets in pairs, up to five deep
for _ in range(5):
    _INNER = rf"(?:[^()]|\({_INNER}\))*"
_TOKEN = re.compile(
    rf"""
    (?P<blank>[ \t]+)
  | (?P<comment>\#[^\n]*)
  | (?P<redirection>\d*(?:<<<|<<-?|<&|<>|<|&>>?|>>|>&|>\||>))
  | (?P<word>\(\((?:[^()\n]|\([^()\n]*\))*\)\)|(?:  # ((arithmetic)) is one, too
        [^\s'"\\`$;&|<>()]
      | \\.
      | '[^']*'
      | "(?:[^"\\$]|\\.|\$(?!\()|\$\({_INNER}\))*"
      | `[^`]*`
      | \$\({_INNER}\)
      | \$\{{[^}}]{{0,999}}\}}
      | \$(?![({{])
    )+)
  | (?P<operator>&&|\|\||;;|\|&|[;&|()\n])
  | (?P<open>.[^\n]*)
    """,
    re.VERBOSE | re.DOTALL,
)
_PIECE = re.compile(r"""'([^']*)'|"((?:[^"\\]|\\.)*)"|\\(.)|(.)""", re.DOTALL)

_ASSIGNED = r"^((?:[A-Za-z_]\w*=)?)"
_HOME = re.compile(_ASSIGNED + r"~(?=/|$)")
_OTHERS_HOME = re.compile(_ASSIGNED + r"~(?!/|$)")


TABLE_ROW = "\n|"
"""Joins what no shell would: the cells of a table, in a text that is no script."""


class Word(NamedTuple):
    """One word of a command."""

    text: str  # without its quotes
    raw: str  # as it stands in the shell
    is_plain: bool = True  # nothing in it is for the shell to replace

    @classmethod
    def of(cls, text: str) -> Word:
        """Return the word that a shell has read already."""
        return cls(text, shlex.quote(text))

    @classmethod
    def read(cls, raw: str) -> Word:
        """Return the word that stands so in a shell's text; ~ is this user's home folder."""
        raw_home = _HOME.sub(lambda found: found[1] + shlex.quote(os.path.expanduser("~")), raw)
        text, is_plain = "", not _OTHERS_HOME.match(raw)
        for single, double, escaped, lone in _PIECE.findall(raw_home):
            replaced = lone in ("$", "`") or re.search(r"[$`]", re.sub(r"\\.", "", double))
            is_plain = is_plain and not replaced
            text += single + re.sub(r'\\([$`"\\])', r"\1", double) + escaped + lone
        return cls(text, raw, is_plain)


class Command(NamedTuple):
    """A command without its redirections."""

    words: tuple[Word, ...]
    joined_by: str = ""  # the operator before it
    is_open: bool = False  # a quote or bracket in it is not closed, or they are nested too deep
    brackets: tuple[int, ...] = ()  # where those around it begin


def commands_in(text: str) -> Iterator[Command]:
    """Yield the commands of a shell's text, those in brackets and after keywords included."""
    text = text.replace("\r\n", "\n").replace("\\\n", "")
    words: list[Word] = []
    joined_by, is_open, redirection, at = "", False, "", 0
    brackets: tuple[int, ...] = ()
    ends: list[str] = []  # of the here-documents that begin on this line, as patterns
    while found := _TOKEN.match(text, at):
        at, token = found.end(), found.group()
        if found.lastgroup == "operator":
            if words or is_open:
                yield Command(tuple(words), joined_by, is_open, brackets)
            begins = not words and joined_by in ("", "\n")
            is_table = token == "|" and (begins or joined_by == TABLE_ROW)
            words, is_open, redirection = [], False, ""
            joined_by = TABLE_ROW if is_table else token
            if token in "()":
                brackets = (*brackets, at) if token == "(" else brackets[:-1]
            while token == "\n" and ends:
                end = re.compile(ends.pop(0), re.MULTILINE).search(text, at)
                at = end.end() if end else len(text)
        elif found.lastgroup == "word":
            if redirection in ("<<", "<<-"):
                tabs = r"\t*" if redirection == "<<-" else ""
                ends.append(rf"^{tabs}{re.escape(Word.read(token).text)}$")
            elif not redirection:
                words.append(Word.read(token))
            redirection = ""
        elif found.lastgroup == "redirection":
            redirection = token.lstrip("0123456789")
        elif found.lastgroup == "open":
            is_open = True
            if words:  # it may be a part of the last one
                raw = words[-1].raw + token
                words[-1] = Word(raw, raw, is_plain=False)
    if words or is_open:
        yield Command(tuple(words), joined_by, is_open, brackets)
