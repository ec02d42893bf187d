"""`headway explain`: the page of an error, by the id that ends its first line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.commands.running import run


def test_an_error_is_explained_by_the_id_at_the_end_of_its_first_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("headway.yaml").write_text("num_procesess: 2\nnum_processes: two\n")
    code, text = run("config", "validate", "headway.yaml")
    ids = re.findall(r"^error: .* \[(HW\d+)\]\n  from: .*\n  fix:  .*", text, re.MULTILINE)
    assert (code, sorted(ids)) == (1, ["HW001", "HW002"])
    for word in ("HW002", "hw002", "[HW002]"):
        code, text = run("explain", word)
        assert code == 0
        cause, example, fix = text.splitlines()
        assert cause.startswith("HW002: A value is invalid")
        assert example == "  example: `headway launch --num-processes two train.py`"
        assert fix.startswith("  fix:     Pass a value")


def test_all_errors_are_listed_also_as_json() -> None:
    code, text = run("explain")
    listed = json.loads(run("explain", "--json")[1])
    assert code == 0
    assert len(text.splitlines()) == len(listed) + 1 > 50
    assert re.search(r"^HW002 +A value is invalid for its setting, flag or variable$", text, re.M)
    assert json.loads(run("explain", "HW002", "--json")[1]) == listed[1]
    assert set(listed[1]) == {"id", "cause", "example", "fix"}


def test_an_unknown_id_gets_no_other_id() -> None:
    code, text = run("explain", "HW02")
    assert code == 2
    assert text.startswith("error: unknown error ID 'HW02'")
    assert "`headway launch --help` explains the settings" in text
    assert "did you mean" not in text
