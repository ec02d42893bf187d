"""The commands in a shell script or line, as far as they can be read without running it. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

_TOKEN = re.compile(
    r"""
    (?P<blank>[ \t]+)
  | (?P<comment>\#[^\n]*)
  | (?P<redirection>\d*(?:<<<|<<-?|<&|<>|<|&>>?|>>|>&|>\||>))
  | (?P<operator>&&|\|\||;;|\|&|[;&|()\n])
  | (?P<word>(?:
        [^\s'"\\`$;&|<>()]
      | \\.
      | '[^']*'
      | "(?:[^"\\]|\\.)*"
      | `[^`]*`
      | \$\((?:[^()]|\([^()]*\))*\)
      | \$\{[^}]{0,999}\}
      | \$
    )+)
  | (?P<open>.[^\n]*)
    """,
    re.VERBOSE | re.DOTALL,
)
_PIECE = re.compile(r"""'([^']*)'|"((?:[^"\\]|\\.)*)"|\\(.)|(.)""", re.DOTALL)


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
        """Return the word that stands so in a shell's text."""
        text, is_plain = "", True
        for single, double, escaped, lone in _PIECE.findall(raw):
            replaced = lone in ("$", "`") or re.search(r"[$`]", re.sub(r"\\.", "", double))
            is_plain = is_plain and not replaced
            text += single + re.sub(r'\\([$`"\\])', r"\1", double) + escaped + lone
        return cls(text, raw, is_plain)


class Command(NamedTuple):
    """A command without its redirections."""

    words: tuple[Word, ...]
    joined_by: str = ""  # the operator before it
    is_open: bool = False  # a quote in it is not closed


def commands_in(text: str) -> Iterator[Command]:
    """Yield the commands of a shell's text, those in brackets and after keywords included."""
    words: list[Word] = []
    joined_by, is_open, is_target = "", False, False
    for found in _TOKEN.finditer(text.replace("\r\n", "\n").replace("\\\n", "")):
        if found.lastgroup == "operator":
            if words or is_open:
                yield Command(tuple(words), joined_by, is_open)
            words, joined_by, is_open, is_target = [], found.group(), False, False
        elif found.lastgroup == "word":
            if not is_target:
                words.append(Word.read(found.group()))
            is_target = False
        elif found.lastgroup == "redirection":
            is_target = True
        elif found.lastgroup == "open":
            is_open = True
    if words or is_open:
        yield Command(tuple(words), joined_by, is_open)
