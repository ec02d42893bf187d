"""The site is built without a warning, needs no other server, and its Python runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs import errors, reference
from headway.contract.origin import Layer
from headway.errors import Code
from headway.settings.profile import parse_profile
from headway.settings.table import TABLE
from tests.distributed.launching import launch, script
from tests.docs.test_screens import ROOT, screens

BLOCK = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
TESTED = {"sh", "console", "python", "yaml"}
SHOWN = {"", "diff", "walk", "files"}  # output, and what tests/architecture compares
OWN_COMMANDS = re.compile(r"\$ headway |pip install ")


def blocks(language: str) -> list[tuple[str, str]]:
    """Return the page and the text of each block in this language."""
    found = [
        (page.name, *match) for page in screens.PAGES for match in BLOCK.findall(page.read_text())
    ]
    return [(page, text) for page, one, _, text in found if one == language]


@pytest.mark.processes
def test_the_site_is_built_without_a_warning_and_needs_no_other_server(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr

    pages = {path.name: path.read_text() for path in site.glob("*.html")}
    for text in pages.values():
        remote = (
            r"""<(?:script|img|iframe)[^>]+src=["']?(?:https?:)?//|<link[^>]+stylesheet[^>]+//"""
        )
        assert not re.search(remote, text)
    assert all(f'id="{name}"' in pages["settings.html"] for name in TABLE)
    assert 'id="headway.accelerator.Accelerator.prepare"' in pages["python.html"]


def test_every_setting_is_in_its_reference() -> None:
    page = reference.settings_page()
    for row in TABLE.values():
        assert f"## {row.name}\n" in page
        assert f"`{row.variable}`" in page


def test_every_code_of_an_error_has_a_cause_and_a_command_that_shows_it() -> None:
    examples = errors.examples()
    assert set(examples) == set(Code)
    with errors.stage():
        for code, example in examples.items():
            assert example.cause
            if example.flags is None:
                assert example.fix
            else:
                assert code in [problem.code for problem in errors.problems_of(example)]


def test_blocks_are_in_languages_that_a_test_runs_or_that_only_show() -> None:
    for page in screens.PAGES:
        languages = {language for language, _, _ in BLOCK.findall(page.read_text())}
        assert languages <= TESTED | SHOWN, page.name
    for page, text in blocks("sh"):
        assert all(map(OWN_COMMANDS.match, text.strip().splitlines())), page


def test_the_profiles_of_the_pages_are_valid() -> None:
    for page, text in blocks("yaml"):
        entries = parse_profile(text, page, Layer.USER_PROFILE)
        assert entries.keys() <= TABLE.keys()
        assert not [fault for entry in entries.values() for fault in entry.faults]


@pytest.mark.distributed
@pytest.mark.processes
@pytest.mark.usefixtures("warm_pythons")
def test_the_python_of_the_pages_runs_on_two_ranks() -> None:
    """All blocks run in one launch, each as a script of its own, one after the other."""
    snippets = blocks("python")
    assert len(snippets) >= 4
    body = "".join(
        f"print({page!r}, flush=True)\nexec(compile({text!r}, {page!r}, 'exec'), {{}})\n"
        for page, text in snippets
    )
    done = launch("-q", "--cpu", "--num-processes", "2", script(body), code=0)
    for page, _ in snippets:
        assert f"[1] {page}\n" in done.stdout
