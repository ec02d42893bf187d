"""The run's key: from the environment, and never shown."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headway.commands.main import main
from headway.errors import ConfigError
from headway.launcher.machines.preflight import describe_run_key, run_key


def test_without_a_key_there_is_none_and_the_way_to_one_is_printed() -> None:
    assert run_key({}) == b""
    assert "openssl rand" in describe_run_key({})


def test_the_environment_has_the_key_and_a_short_one_is_refused() -> None:
    assert run_key({"HEADWAY_RUN_KEY": "0123456789abcdef"}) == b"0123456789abcdef"
    for short in ("", "secret"):
        with pytest.raises(ConfigError) as error:
            run_key({"HEADWAY_RUN_KEY": short})
        assert not short or short not in str(error.value)


def test_a_plan_hides_the_key_from_the_script_and_from_the_reader(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("train.py").touch()
    monkeypatch.setenv("HEADWAY_RUN_KEY", "not to be shown to anybody")
    place = ["--num-machines", "2", "--machine-rank", "1", "--main-address", "n1"]
    assert main(["launch", "--dry-run", "--cpu", *place, "train.py"]) == 0
    out = capsys.readouterr().out
    assert "- HEADWAY_RUN_KEY" in out
    assert "not to be shown" not in out
    assert "machines know each other by HEADWAY_RUN_KEY" in out
    assert os.environ["HEADWAY_RUN_KEY"]
