"""A project's profile that others could have written is refused, or obeyed with a note."""

from __future__ import annotations

import grp
import os
import pwd
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from headway.commands.main import main
from headway.errors import ConfigError
from headway.settings.layers import profile_layers
from headway.settings.profile_files import find_project_profile, writing_group

pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="modes of POSIX")

PROFILE = Path("headway.yaml")


@pytest.fixture(autouse=True)
def written(own_surroundings: None) -> None:
    PROFILE.write_text("max_restarts: 7\n")
    PROFILE.chmod(0o644)
    Path.cwd().chmod(0o755)


def groups(
    monkeypatch: pytest.MonkeyPatch, name: str, members: list[str], user: str = "anna"
) -> None:
    """Let the file's group have this name and these members, and this user be `user`."""
    gid, uid = PROFILE.stat().st_gid, os.getuid()
    monkeypatch.setattr(
        grp, "getgrgid", lambda _: SimpleNamespace(gr_name=name, gr_gid=gid, gr_mem=members)
    )
    users = {uid: SimpleNamespace(pw_name=user, pw_gid=gid, pw_dir=os.environ["HOME"])}
    monkeypatch.setattr(pwd, "getpwuid", users.__getitem__)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to chown")
def test_a_file_of_another_user_is_refused_unless_it_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chown(PROFILE, 12345, 12345)
    with pytest.raises(ConfigError, match="is owned by user 12345"):
        find_project_profile()
    assert main(["config", "show"]) == 2
    assert "select it: `--profile ~/work/headway.yaml`" in capsys.readouterr().err
    assert main(["config", "list"]) == 0
    assert main(["config", "show", "--profile", "headway.yaml"]) == 0
    monkeypatch.setenv("HEADWAY_PROFILE", "~/work/headway.yaml")
    assert main(["config", "show"]) == 0
    assert capsys.readouterr().out.count("max_restarts                 7") == 2


def test_a_file_that_all_may_write_is_refused_unless_it_is_named() -> None:
    PROFILE.chmod(0o646)
    with pytest.raises(ConfigError, match="all users may write") as caught:
        profile_layers({})
    assert "chmod o-w" in caught.value.problems[0].fix
    assert profile_layers({}, profile="./headway.yaml")


@pytest.mark.parametrize("target", ["/dev/zero", "folder", "hers.yaml"])
def test_no_command_changes_what_is_not_a_regular_file_of_this_user(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("folder").mkdir()
    Path("hers.yaml").touch()
    for path in ("folder", "hers.yaml"):
        Path(path).chmod(0o777)
    PROFILE.unlink()
    PROFILE.symlink_to(target)
    if target == "hers.yaml":  # root may read and write what is another user's
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError) as caught:
        profile_layers({})
    assert "chmod" not in caught.value.problems[0].fix


def test_the_commands_of_a_fix_name_the_file_as_a_shell_reads_it() -> None:
    folder = Path("a b; touch c")
    folder.mkdir()
    (folder / PROFILE).write_text("max_restarts: 7\n")
    (folder / PROFILE).chmod(0o646)
    os.chdir(folder)
    with pytest.raises(ConfigError) as caught:
        profile_layers({})
    _, mend, _, by_flag, _, by_variable, _ = caught.value.problems[0].fix.split("`")
    path = str(PROFILE.resolve())
    assert shlex.split(mend) == ["chmod", "o-w", path]
    assert shlex.split(by_flag) == ["--profile", path]
    assert shlex.split(by_variable) == ["export", f"HEADWAY_PROFILE={path}"]


@pytest.mark.parametrize("is_sticky", [False, True])
@pytest.mark.parametrize("above", [".", "..", "../.."])
def test_a_folder_above_that_all_may_write_is_refused_without_sticky_bit(
    above: str, is_sticky: bool
) -> None:
    folder = Path(above).resolve()
    before = folder.stat().st_mode
    folder.chmod(0o1777 if is_sticky else 0o777)
    try:
        if is_sticky:
            assert find_project_profile() == str(PROFILE.resolve())
        else:
            with pytest.raises(ConfigError, match=f"all users may write {folder}, "):
                find_project_profile()
    finally:
        folder.chmod(before)


def test_a_link_is_as_open_as_the_file_and_the_folders_that_it_points_to(tmp_path: Path) -> None:
    open_folder = tmp_path / "open"
    open_folder.mkdir()
    PROFILE.rename(open_folder / "real.yaml")
    PROFILE.symlink_to(open_folder / "real.yaml")
    assert find_project_profile()
    open_folder.chmod(0o777)
    with pytest.raises(ConfigError, match=f"all users may write {open_folder}, "):
        find_project_profile()


def test_a_labs_group_may_write_a_profile_without_env_and_the_origin_names_the_owner(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    groups(monkeypatch, "lab", ["anna", "ben"])
    PROFILE.chmod(0o664)
    assert main(["config", "show", "--origin"]) == 0
    said = "headway.yaml, line 1 (owned by anna, and group lab may write it)"
    assert said in capsys.readouterr().out
    PROFILE.write_text("max_restarts: 7\nenv: {A: 1}\n")
    with pytest.raises(ConfigError, match="all of group lab may write it") as caught:
        profile_layers({})
    assert "chmod g-w" in caught.value.problems[0].fix
    assert profile_layers({}, profile="./headway.yaml")
    assert main(["config", "validate"]) == 1
    assert main(["config", "validate", "headway.yaml"]) == 0
    PROFILE.chmod(0o644)
    assert main(["config", "validate"]) == 0
    assert profile_layers({})[0]["max_restarts"].origin.reason == ""


@pytest.mark.parametrize(
    ("name", "members", "is_private"),
    [
        ("anna", [], True),
        ("anna", ["anna"], True),
        ("anna", ["ben"], False),
        ("users", [], False),  # the primary group of all, whose members are not listed
    ],
)
def test_a_users_own_group_may_write_env(
    name: str, members: list[str], is_private: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups(monkeypatch, name, members)
    PROFILE.write_text("env: {A: 1}\n")
    PROFILE.chmod(0o664)
    assert (writing_group(str(PROFILE)) == "") is is_private
    if is_private:
        assert profile_layers({})[0]["env"].origin.reason == ""
    else:
        with pytest.raises(ConfigError, match="sets env"):
            profile_layers({})


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to chown")
def test_a_group_that_the_system_does_not_know_is_not_private() -> None:
    os.chown(PROFILE, -1, 54321)
    PROFILE.chmod(0o664)
    assert writing_group(str(PROFILE)) == "54321"
