"""`headway adopt SCRIPT...`: what scripts take from Accelerate, and their imports changed."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from typing import NamedTuple

from headway.commands.flags import Parser
from headway.commands.tables import print_table
from headway.errors import ConfigError
from headway.migration.listing import Row, Status, rows_of
from headway.migration.reading import Script
from headway.migration.scripts import Source, find_scripts, read_script, replace_script, rewritten

_LISTED = 5  # lines of one name; --json lists all
SCRIPTS = "SCRIPT: a script, or a folder: all .py files below it that import accelerate"
_GUIDES = (
    (
        ("transformers", "trl", "sentence_transformers", "diffusers"),
        "its library imports accelerate itself: start it with `headway launch` as it is;"
        " docs/launching.md and docs/from-accelerate.md have what holds then",
    ),
    (
        ("lightning", "pytorch_lightning", "lightning_fabric"),
        "Lightning has a runtime of its own: start it with `headway launch` as it is; see"
        " docs/from-lightning.md",
    ),
    (
        ("torch",),
        "docs/from-pytorch.md has the lines to change; a script for torchrun runs as it is, see"
        " docs/from-torchrun.md",
    ),
)
"""What is said of a script without Accelerate, by the first packages of which it imports one."""


class _Report(NamedTuple):
    """What becomes of one script."""

    path: str
    rows: list[Row]  # empty where it does not import Accelerate
    guide: str
    before: Source
    after: Source

    @property
    def is_complete(self) -> bool:
        return all(row.status is not Status.MISSING for row in self.rows)

    def diff(self) -> str:
        """Return the change of the imports, as `patch` reads it."""
        texts = (self.before.text.splitlines(), self.after.text.splitlines())
        lines = difflib.unified_diff(*texts, self.path, self.path, lineterm="")
        return "".join(f"{line}\n" for line in lines)


def main(argv: Sequence[str]) -> int:
    """Run `headway adopt` with these words; return 1 when a script uses what is missing."""
    parser = Parser(
        "adopt",
        "List the names that scripts import from Hugging Face Accelerate and use: which are the "
        "same, what differs and why, and what is missing and what to use instead. Every known "
        "difference of a name is listed, whether it applies or not. Show the change of the "
        "imports. Exit code 1 if something is missing.",
        usage="headway adopt [--write] [--compat] [--json] SCRIPT...",
        appendix=f"\n{SCRIPTS}\n",
    )
    parser.flag("--write", help="change the imports in the scripts, and nothing else in them")
    parser.flag(
        "--compat",
        help="import from headway.compat only, which behaves as Accelerate does where the two "
        "differ",
    )
    parser.flag("--json", help="print one JSON object: {scripts, problems}")
    parsed, words = parser.parse_words(argv)
    if not words:
        parser.error("no script given")
    reports, problems = _read_all(words, parsed.compat)
    if parsed.write:
        for report in reports:
            if report.after != report.before:
                replace_script(report.path, report.after)
    if parsed.json:
        print(json.dumps(_as_json(reports, problems), indent=2))
    else:
        _print(reports, parsed.write)
    if problems:
        raise ConfigError.of([problem for error in problems for problem in error.problems])
    return 0 if all(report.is_complete for report in reports) else 1


def _read_all(words: Sequence[str], compat: bool) -> tuple[list[_Report], list[ConfigError]]:
    """Return a report for each script that imports Accelerate or is named, and the errors."""
    reports, problems = [], []
    for path in dict.fromkeys(path for word in words for path in find_scripts(word)):
        try:
            source, script = read_script(path)
            if script.imports or path in words:
                reports.append(_report(path, source, script, compat))
        except ConfigError as error:
            problems.append(error)
    return reports, problems


def _report(path: str, source: Source, script: Script, compat: bool) -> _Report:
    try:
        after = rewritten(source, script, compat=compat)
    except ValueError as error:
        raise ConfigError(
            f"the imports cannot be changed: {error}",
            where=path,
            fix="write each import of Accelerate on a line of its own",
        ) from None
    rows = rows_of(script, compat=compat)
    return _Report(path, rows, "" if script.imports else _guide(script), source, after)


def _guide(script: Script) -> str:
    if "headway" in script.packages:
        return "it imports headway already"
    found = (guide for packages, guide in _GUIDES if script.packages.intersection(packages))
    return next(found, "it imports neither accelerate nor torch")


def _print(reports: Sequence[_Report], is_written: bool) -> None:
    for report in reports:
        print(report.path)
        if report.guide:
            print(f"does not import accelerate: {report.guide}")
        else:
            print_table(("line", "result", "name", "what Headway does"), _cells(report.rows))
        if report.after != report.before and not is_written:
            print(f"\n{report.diff()}", end="")
        print()
    of_accelerate = [report for report in reports if not report.guide]
    if not of_accelerate:
        print("no script imports accelerate: nothing to change")
        return
    incomplete = sum(not report.is_complete for report in of_accelerate)
    missing = f"names are missing in {incomplete} of {len(of_accelerate)} scripts"
    counts = missing if incomplete else "nothing is missing"
    changed = sum(report.after != report.before for report in reports)
    done = f"imports changed in {changed}" if is_written else "--write changes the imports"
    print(f"{counts}; {done}" if changed else counts)


def _cells(rows: Sequence[Row]) -> list[tuple[str, str, str, str]]:
    return [
        (
            _listed(row.lines),
            row.status.value,
            row.name,
            "\n".join(filter(None, (row.what, row.instead))),
        )
        for row in rows
    ]


def _listed(lines: Sequence[int]) -> str:
    more = f" and {len(lines) - _LISTED} more" if len(lines) > _LISTED else ""
    return ", ".join(map(str, lines[:_LISTED])) + more


def _as_json(reports: Sequence[_Report], problems: Sequence[ConfigError]) -> dict[str, object]:
    scripts = [
        {
            "path": report.path,
            "uses": [row._asdict() | {"status": row.status.value} for row in report.rows],
            "guide": report.guide,
            "diff": report.diff(),
        }
        for report in reports
    ]
    return {"scripts": scripts, "problems": [str(error) for error in problems]}
