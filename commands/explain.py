"""`headway explain [ID]`: print an error's cause, an example and the fix, from errors.md."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from headway import errors
from headway.commands.flags import Parser, usage_error
from headway.commands.tables import print_table

_ROW = re.compile(r"^\| (HW\d+) \| (.+) \| (.+) \| (.+) \|$", re.MULTILINE)


class Page(NamedTuple):
    id: str
    cause: str
    example: str
    fix: str


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        "explain",
        "Print the cause of an error, an example, and the fix; without an ID, list all errors.",
        usage="headway explain [ID] [--json]",
        appendix="\nID: the ID at the end of the first line of an error, such as HW002\n",
    )
    parser.flag("--json", help="print {id, cause, example, fix}, or without an ID a list of them")
    parsed, word = parser.parse_flag(argv, "ID")
    found = list(read_pages().values()) if word is None else [_page_of(word)]
    if parsed.json:
        data = [page._asdict() for page in found]
        print(json.dumps(data if word is None else data[0], indent=2))
    elif word is None:
        print_table(
            ("id", "cause"),
            [(page.id, page.cause.rstrip(".").partition(". ")[0]) for page in found],
        )
    else:
        print("{}: {}\n  example: {}\n  fix:     {}".format(*found[0]))
    return 0


def read_pages() -> dict[str, Page]:
    """Return the pages of all errors, by error ID."""
    path = os.path.join(os.path.dirname(errors.__file__), "errors.md")
    with open(path, encoding="utf-8") as file:
        return {row[0]: Page(*row) for row in _ROW.findall(file.read())}


def _page_of(word: str) -> Page:
    page = read_pages().get(word.strip("[]").upper())
    if page is None:
        raise usage_error(
            f"unknown error ID {word!r}",
            fix="run `headway explain` to list all error IDs; `headway launch --help` explains the"
            " settings",
        )
    return page
