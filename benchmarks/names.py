"""Which names of Accelerate scripts need, and which of them the installed Headway has.

    python benchmarks/names.py FOLDER...                 # a table of what is missing
    python benchmarks/names.py --all --json FOLDER...    # everything that is used

Scripts are read, not run. "files with all" counts the files that have all they need once this name
and all above it are there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from headway.commands.tables import print_table
from headway.errors import ConfigError
from headway.migration.judging import Status, verdicts
from headway.migration.reading import Need, Script
from headway.migration.scripts import find_scripts, read_script


class Row(NamedTuple):
    """One thing that scripts need.

    Args:
        need: what it is.
        status: what becomes of it.
        num_files: how many files need it.
        num_complete: how many files have all they need once this and all rows before it are there.
    """

    need: str
    status: str
    num_files: int
    num_complete: int


class Count(NamedTuple):
    """What a collection of scripts needs.

    Args:
        num_files: how many import Accelerate.
        num_complete: how many of them have all they need.
        rows: first what is there, then what is missing; the most wanted first.
        unread: files that could not be read, and why.
    """

    num_files: int
    num_complete: int
    rows: list[Row]
    unread: list[str]


def count(paths: Sequence[str]) -> Count:
    """Read all scripts below `paths`, and count what they need."""
    unread: list[str] = []
    needs = [
        {need: verdict.status for need, verdict in verdicts(script).items()}
        for script in _scripts(paths, unread)
    ]
    missing = [{need for need, status in one.items() if not status.is_there} for one in needs]
    rows: list[Row] = []
    added: set[Need] = set()
    for need, status, num_files in _ranked(needs):
        if not status.is_there:
            added.add(need)
        complete = sum(one <= added for one in missing)
        rows.append(Row(str(need), status.value, num_files, complete))
    return Count(len(needs), sum(not one for one in missing), rows, unread)


def _scripts(paths: Sequence[str], unread: list[str]) -> Iterator[Script]:
    for path in dict.fromkeys(path for folder in paths for path in find_scripts(folder)):
        try:
            _, script = read_script(path)
        except ConfigError as error:
            unread.append(str(error))
            continue
        if script.imports:
            yield script


def _ranked(needs: Sequence[dict[Need, Status]]) -> list[tuple[Need, Status, int]]:
    """Return what is needed with its status and number of files: what is there, then the rest."""
    num_files: dict[Need, int] = {}
    status: dict[Need, Status] = {}
    for one in needs:
        for need in one:
            num_files[need] = num_files.get(need, 0) + 1
        status |= one
    ranked = sorted(num_files, key=lambda need: (-num_files[need], str(need)))
    ranked.sort(key=lambda need: not status[need].is_there)
    return [(need, status[need], num_files[need]) for need in ranked]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folders", nargs="+", metavar="FOLDER")
    parser.add_argument("--all", action="store_true", help="list what is there, too")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parsed = parser.parse_args()
    found = count(parsed.folders)
    shown = [row for row in found.rows if parsed.all or row.status not in _THERE]
    if parsed.json:
        print(json.dumps(found._asdict() | {"rows": [row._asdict() for row in shown]}, indent=2))
        return
    cells = [(str(row.num_files), str(row.num_complete), row.status, row.need) for row in shown]
    print_table(("files", "files with all", "result", "name"), cells)
    print(f"{found.num_complete} of {found.num_files} files have all they need")
    for text in found.unread:
        print(f"not read: {text}")


_THERE = [status.value for status in Status if status.is_there]

if __name__ == "__main__":
    main()
