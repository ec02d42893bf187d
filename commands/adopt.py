"""`headway adopt SCRIPT...`: list the Accelerate names in scripts, and change their imports."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import NamedTuple

from headway.commands.flags import Parser
from headway.commands.tables import print_table
from headway.errors import Code, ConfigError, Problem
from headway.migration import scripts

_LISTED = 5  # line numbers shown per name, and scripts
SCRIPTS = "SCRIPT: a script, or a folder to search for .py files that import accelerate"
_GUIDES = (
    (
        ("transformers", "trl", "sentence_transformers", "diffusers"),
        "its library imports accelerate itself: run it unchanged with `headway launch`, or with"
        " `headway launch --replace-accelerate` to use Headway's runtime",
    ),
    (
        ("lightning", "pytorch_lightning", "lightning_fabric"),
        "Lightning has its own runtime: run it unchanged with `headway launch`",
    ),
    (
        ("torch",),
        "torchrun scripts run unchanged; for the lines to change, see the page `Coming from another"
        " library` of Headway's documentation",
    ),
)
"""Advice for scripts that do not import Accelerate, by imported package; the first match wins."""


class _Report(NamedTuple):
    path: str
    rows: list[scripts.Finding]
    before: str
    after: str

    @property
    def is_complete(self) -> bool:
        return all(row.status != scripts.MISSING for row in self.rows)


def main(argv: Sequence[str]) -> int:
    """Run `headway adopt`; return 1 if a script uses a name that Headway lacks."""
    parser = Parser(
        "adopt",
        "List the names that scripts use from Hugging Face Accelerate, with all known differences "
        "in Headway, and with alternatives for missing names. Not every difference affects the "
        "script. Show a diff of the imports. Exit with 1 if a name is missing.",
        usage="headway adopt [--write] [--compat] SCRIPT...",
        appendix=f"\n{SCRIPTS}\n",
    )
    parser.flag("--write", help="change the imports in the scripts, and nothing else")
    parser.flag(
        "--compat",
        help="import only from headway.compat, which behaves like Accelerate where Headway differs",
    )
    parsed, words = parser.parse_words(argv)
    if not words:
        parser.error("no script given")
    reports: list[_Report] = []
    problems: list[Problem] = []
    paths = list(dict.fromkeys(path for word in words for path in scripts.find_scripts(word)))
    for path in paths:
        try:
            script = scripts.read_script(path)
            if script.imports:
                reports.append(_report(path, script, parsed.compat))
            elif path in words:
                print(f"{path} does not import accelerate: {_guide(script)}")
        except ConfigError as error:
            problems += error.problems
    for report in reports:
        _print(report, parsed.write)
        if parsed.write:
            scripts.replace_script(report.path, report.after)
    incomplete = sum(not report.is_complete for report in reports)
    missing = f"names are missing in {incomplete} of {len(reports)} scripts"
    counts = missing if incomplete else "no name is missing"
    differ = sum(row.status == scripts.DIFFERS for report in reports for row in report.rows)
    check = (
        f"; check the {differ} rows marked `{scripts.DIFFERS}`, which may change results"
        if differ
        else ""
    )
    done = "imports changed" if parsed.write else "pass --write to change the imports"
    nothing = "no script imports accelerate: nothing to change"
    summary = f"{counts}{check}; {done}" if reports else nothing
    print(f"{summary}; scripts read: {_listed(paths) or 'none'}")
    if problems:
        raise ConfigError.of(problems)
    return int(incomplete > 0)


def _report(path: str, script: scripts.Script, compat: bool) -> _Report:
    try:
        after = scripts.with_new_imports(script, compat=compat)
    except ValueError as error:
        raise ConfigError(
            f"cannot change the imports: {error}",
            where=path,
            fix="write each import of Accelerate on a separate line",
            code=Code.EDIT_BY_HAND,
        ) from None
    return _Report(path, scripts.findings_of(script, compat=compat), script.text, after)


def _guide(script: scripts.Script) -> str:
    if "headway" in script.packages:
        return "it already imports headway"
    found = (guide for packages, guide in _GUIDES if script.packages.intersection(packages))
    return next(found, "it imports neither accelerate nor torch")


def _print(report: _Report, is_written: bool) -> None:
    print(report.path)
    cells = [
        (_listed(row.lines), row.status, row.name, f"{row.what}\n{row.instead}".strip())
        for row in report.rows
    ]
    print_table(("line", "result", "name", "what Headway does"), cells)
    if not is_written:
        texts = report.before.splitlines(), report.after.splitlines()
        print("", *difflib.unified_diff(*texts, report.path, report.path, lineterm=""), sep="\n")
    print()


def _listed(items: Sequence[object]) -> str:
    more = f" and {len(items) - _LISTED} more" if len(items) > _LISTED else ""
    return ", ".join(map(str, items[:_LISTED])) + more
