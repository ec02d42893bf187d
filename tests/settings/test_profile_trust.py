"""A project's profile is trusted if this user or root owns it and others may not write it."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from headway.commands.main import main
from headway.errors import ConfigError
from headway.settings.layers import profile_layers
from headway.settings.profile_files import find_project_profile

pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="modes of POSIX")

PROFILE = Path("headway.yaml")


@pytest.fixture(autouse=True)
def written(own_surroundings: None) -> None:
    PROFILE.write_text("max_restarts: 7\n")
    PROFILE.chmod(0o644)
    Path.cwd().chmod(0o755)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to chown")
def test_a_file_of_another_user_is_refused_unless_it_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chown(PROFILE, 12345, 12345)
    with pytest.raises(ConfigError, match="is owned by user 12345"):
        find_project_profile()
    assert main(["config", "show"]) == 2
    assert f"select it: `--profile {PROFILE.resolve()}`" in capsys.readouterr().err
    assert main(["config", "list"]) == 0
    assert main(["config", "show", "--profile", "headway.yaml"]) == 0
    monkeypatch.setenv("HEADWAY_PROFILE", "~/work/headway.yaml")
    assert main(["config", "show"]) == 0
    assert capsys.readouterr().out.count("max_restarts                 7") == 2


def test_a_file_that_all_may_write_is_refused_unless_it_is_named() -> None:
    PROFILE.chmod(0o646)
    with pytest.raises(ConfigError, match="all users may write") as caught:
        profile_layers({})
    assert f"`--profile {PROFILE.resolve()}`" in caught.value.problems[0].fix
    assert profile_layers({}, profile="./headway.yaml")


def test_the_commands_of_a_fix_name_the_file_as_a_shell_reads_it() -> None:
    folder = Path("a b; touch c")
    folder.mkdir()
    (folder / PROFILE).write_text("max_restarts: 7\n")
    (folder / PROFILE).chmod(0o646)
    os.chdir(folder)
    with pytest.raises(ConfigError) as caught:
        profile_layers({})
    _, by_flag, _, by_variable, _ = caught.value.problems[0].fix.split("`")
    path = str(PROFILE.resolve())
    assert shlex.split(by_flag) == ["--profile", path]
    assert shlex.split(by_variable) == ["export", f"HEADWAY_PROFILE={path}"]


def test_a_link_is_as_open_as_the_file_that_it_points_to(tmp_path: Path) -> None:
    PROFILE.rename(tmp_path / "real.yaml")
    PROFILE.symlink_to(tmp_path / "real.yaml")
    assert find_project_profile()
    (tmp_path / "real.yaml").chmod(0o666)
    with pytest.raises(ConfigError, match="all users may write"):
        find_project_profile()


def test_a_file_that_a_group_may_write_is_trusted() -> None:
    PROFILE.chmod(0o664)
    assert find_project_profile()
