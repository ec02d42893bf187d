"""A library is joined once the script imports it, and nothing is imported for it before."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headway.launcher.plan.program import Hook
from headway.launcher.rank import import_hooks


@pytest.fixture
def hooked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a library `lib_a`, and the module that joins it."""
    (tmp_path / "lib_a.py").write_text("class Trainer: pass\n")
    (tmp_path / "joins_a.py").write_text("def install(library): library.Trainer.is_joined = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(import_hooks, "HOOKS", (Hook("A's Trainer", "lib_a", "joins_a"),))
    for name in ("lib_a", "joins_a"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("hooked")
def test_a_library_is_joined_when_the_script_imports_it_and_not_imported_before() -> None:
    import_hooks.hook_libraries()
    assert not {"lib_a", "joins_a"} & set(sys.modules)
    import lib_a  # type: ignore[import-not-found]

    assert lib_a.Trainer.is_joined


@pytest.mark.usefixtures("hooked")
def test_a_version_that_cannot_be_joined_works_alone_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "joins_a.py").write_text("def install(library): library.Other\n")
    import_hooks.hook_libraries()
    import lib_a

    assert lib_a.Trainer
    assert "lib_a is not hooked" in capsys.readouterr().err
