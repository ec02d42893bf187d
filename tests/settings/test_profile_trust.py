"""A profile is trusted by its owner and its mode, unless a path names it."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from headway.errors import ConfigError
from headway.ipc.paths import user_folder
from headway.settings.profile import find_project_profile
from headway.settings.resolve import profile_layers
from tests.commands.running import run

pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="modes of POSIX")

PROJECT = Path("headway.yaml")
STRANGER, OWNER_OF_HOME = 12345, 1000


@pytest.fixture(autouse=True)
def written(own_surroundings: None) -> None:
    PROJECT.write_text("max_restarts: 7\n")
    PROJECT.chmod(0o644)
    Path.cwd().chmod(0o755)


def user_profile() -> Path:
    path = Path(user_folder("config"), "default.yaml")
    path.parent.mkdir(parents=True)
    PROJECT.rename(path)
    return path


@pytest.mark.parametrize("kind", ["user", "project"])
@pytest.mark.parametrize(
    ("owner", "owner_of_home", "mode", "unavailable_reason"),
    [
        (0, 0, 0o644, None),
        (0, 0, 0o600, None),
        (0, 0, 0o664, None),  # a group may write it
        (0, 0, 0o646, "is writable by all users"),
        (0, 0, 0o666, "is writable by all users"),
        (STRANGER, 0, 0o644, f"is owned by user {STRANGER}"),
        (STRANGER, OWNER_OF_HOME, 0o644, f"is owned by user {STRANGER}"),
        (OWNER_OF_HOME, OWNER_OF_HOME, 0o644, None),  # root in a container, with a user's HOME
        (OWNER_OF_HOME, OWNER_OF_HOME, 0o666, "is writable by all users"),
        (0, OWNER_OF_HOME, 0o644, None),
    ],
)
def test_who_owns_and_may_write_a_profile_decides(
    kind: str, owner: int, owner_of_home: int, mode: int, unavailable_reason: str | None
) -> None:
    path = user_profile() if kind == "user" else PROJECT
    path.chmod(mode)
    if owner or owner_of_home:
        if os.getuid() != 0:
            pytest.skip("needs root to chown")
        os.chown(path, owner, owner)
        os.chown(Path.home(), owner_of_home, owner_of_home)
    if unavailable_reason is None:
        assert profile_layers({})
        return
    with pytest.raises(ConfigError, match=unavailable_reason) as caught:
        profile_layers({})
    assert f"`--profile {path.resolve()}`" in caught.value.problems[0].fix
    assert profile_layers({}, profile=str(path))  # a path names it
    assert profile_layers({"HEADWAY_PROFILE": str(path.absolute())})


def test_a_pipe_that_is_found_is_no_profile() -> None:
    PROJECT.unlink()
    os.mkfifo(PROJECT)
    with pytest.raises(ConfigError, match="is not a file"):
        profile_layers({})
    with pytest.raises(ConfigError, match="is a named pipe"):  # to open it would wait for a writer
        profile_layers({}, profile=f"./{PROJECT}")


def test_no_command_reads_or_changes_a_profile_that_is_not_trusted() -> None:
    path = user_profile()
    path.chmod(0o666)
    fix = f"fix:  `chmod o-w {path}`; if you trust it, select it"
    for words in ("show", "--yes", "validate", "set device=cpu", "unset max_restarts"):
        code, error = run("config", *words.split())
        assert (code, fix in error) == (2, True), words
    assert path.read_text() == "max_restarts: 7\n"
    assert run("config", "path")[0] == run("config", "list")[0] == 0


def test_the_commands_of_a_fix_name_the_file_as_a_shell_reads_it() -> None:
    folder = Path("a b; touch c")
    folder.mkdir()
    (folder / PROJECT).write_text("max_restarts: 7\n")
    (folder / PROJECT).chmod(0o646)
    os.chdir(folder)
    with pytest.raises(ConfigError) as caught:
        profile_layers({})
    _, by_mode, _, by_flag, _, by_variable, _ = caught.value.problems[0].fix.split("`")
    path = str(PROJECT.resolve())
    assert shlex.split(by_mode) == ["chmod", "o-w", path]
    assert shlex.split(by_flag) == ["--profile", path]
    assert shlex.split(by_variable) == ["export", f"HEADWAY_PROFILE={path}"]


def test_a_link_is_as_open_as_the_file_that_it_points_to(tmp_path: Path) -> None:
    PROJECT.rename(tmp_path / "real.yaml")
    PROJECT.symlink_to(tmp_path / "real.yaml")
    assert find_project_profile()
    (tmp_path / "real.yaml").chmod(0o666)
    with pytest.raises(ConfigError, match="is writable by all users"):
        find_project_profile()
