"""`headway adopt SCRIPT...`: what scripts take from Accelerate, and their imports changed."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from typing import NamedTuple

from headway.commands.flags import Parser
from headway.commands.tables import print_table
from headway.errors import ConfigError
from headway.migration.alone import AloneCall, calls_alone
from headway.migration.judging import Status, Verdict, verdicts
from headway.migration.reading import Need, Script
from headway.migration.scripts import Source, find_scripts, read_script, replace_script, rewritten

_LISTED = 5  # lines of one name; --json lists all
SCRIPTS = "SCRIPT: a script, or a folder: all .py files below it that import accelerate"


class _Report(NamedTuple):
    """What becomes of one script."""

    path: str
    script: Script
    verdicts: dict[Need, Verdict]
    before: Source
    after: Source

    @property
    def alone(self) -> list[AloneCall]:
        """The calls that not all ranks make."""
        return calls_alone(self.script.tree) if self.script.imports else []

    @property
    def has_all(self) -> bool:
        return all(verdict.status.is_there for verdict in self.verdicts.values())

    def diff(self) -> str:
        """Return the change of the imports, as `patch` reads it."""
        texts = (self.before.text.splitlines(), self.after.text.splitlines())
        lines = difflib.unified_diff(*texts, self.path, self.path, lineterm="")
        return "".join(f"{line}\n" for line in lines)


def main(argv: Sequence[str]) -> int:
    """Run `headway adopt` with these words; return 1 when a script needs what is not there."""
    parser = Parser(
        "adopt",
        "List what scripts take from Hugging Face Accelerate: what works alike, what differs and "
        "why, what is not there and what to use instead; and show the change of their imports. "
        "Exit code 1 if something is not there.",
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
    return 0 if all(report.has_all for report in reports) else 1


def _read_all(words: Sequence[str], compat: bool) -> tuple[list[_Report], list[ConfigError]]:
    """Return a report for each script that imports Accelerate, and what could not be read."""
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
    return _Report(path, script, verdicts(script, compat=compat), source, after)


def _print(reports: Sequence[_Report], is_written: bool) -> None:
    for report in reports:
        print(report.path)
        if not report.script.imports:
            print("does not import accelerate")
        else:
            print_table(("line", "result", "name", "what Headway does"), _rows(report))
        if report.after != report.before and not is_written:
            print(f"\n{report.diff()}", end="")
        print()
    complete = sum(report.has_all for report in reports)
    counts = f"{complete} of {len(reports)} scripts have all that they use"
    changed = sum(report.after != report.before for report in reports)
    done = f"imports changed in {changed}" if is_written else "--write changes the imports"
    print(f"{counts}; {done}" if changed else counts)


def _rows(report: _Report) -> list[tuple[str, str, str, str]]:
    found = sorted(report.verdicts.items(), key=lambda item: list(Status).index(item[1].status))
    differs = Status.DIFFERS.value
    alone = [
        (str(one.line), differs, f"Accelerator.{one.method} under a condition", one.said)
        for one in report.alone
    ]
    return alone + [
        (
            _listed(report.script.needs[need]),
            verdict.status.value,
            str(need),
            "\n".join(filter(None, (verdict.said, verdict.instead))),
        )
        for need, verdict in found
    ]


def _listed(lines: Sequence[int]) -> str:
    more = f" and {len(lines) - _LISTED} more" if len(lines) > _LISTED else ""
    return ", ".join(map(str, lines[:_LISTED])) + more


def _as_json(reports: Sequence[_Report], problems: Sequence[ConfigError]) -> dict[str, object]:
    scripts = [
        {
            "path": report.path,
            "uses": [
                {
                    "name": str(need),
                    "lines": report.script.needs[need],
                    "status": verdict.status.name.lower(),
                    "said": verdict.said,
                    "instead": verdict.instead,
                }
                for need, verdict in report.verdicts.items()
            ],
            "alone": [
                {"line": one.line, "name": f"Accelerator.{one.method}", "said": one.said}
                for one in report.alone
            ],
            "diff": report.diff(),
        }
        for report in reports
    ]
    return {"scripts": scripts, "problems": [str(error) for error in problems]}
