"""The wheel holds all of the code and works; `make release` needs a section of the changelog."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.architecture.tree import LINKS, ROOT, tracked_files

pytestmark = pytest.mark.processes


PACKAGED = ("headway/", *(f"{link}/" for link in LINKS))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the tracked files, through an sdist, as a release would be."""
    copy = tmp_path_factory.mktemp("tree")
    names = tracked_files()
    subprocess.run(["tar", "cf", copy / "t.tar", *names], cwd=ROOT, check=True)
    subprocess.run(["tar", "xf", "t.tar"], cwd=copy, check=True)
    out = copy / "dist"
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_holds_exactly_the_tracked_code(wheel: Path) -> None:
    expected = {
        f"headway/{name.removeprefix('headway/')}"
        for name in tracked_files()
        if name.startswith(PACKAGED) and name.endswith((".py", "/py.typed", "/errors.md"))
    }
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert packed == expected


SCRIPT = """
import commands.mine, launcher, os, sys
import headway.launcher.plan.plan
assert launcher.MINE and commands.mine.MINE
print("rank", os.environ.get("RANK"), headway.__file__)
"""


@pytest.fixture(autouse=True)
def without_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep pip from finding Headway installed already, and Python from importing it, from here."""
    monkeypatch.delenv("PYTHONPATH", raising=False)


def test_an_installed_wheel_runs_a_script_beside_a_launcher_py_and_a_commands_package(
    wheel: Path, tmp_path: Path
) -> None:
    environment = tmp_path / "environment"
    venv.create(environment)
    install = [sys.executable, "-m", "pip", "--python", str(environment), "install", "--quiet"]
    subprocess.run([*install, "--no-deps", str(wheel)], check=True, capture_output=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    # torch and the rest come from here; a folder named in a .pth brings no editable installs along
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    work = Path("project")
    (work / "commands").mkdir(parents=True)
    (work / "commands" / "__init__.py").touch()
    (work / "commands" / "mine.py").write_text("MINE = True")
    (work / "launcher.py").write_text("MINE = True")
    (work / "train.py").write_text(SCRIPT)
    headway = [str(environment / "bin" / "headway"), "launch", "--cpu", "--num-processes"]
    for ranks in (1, 2):
        command = [*headway, str(ranks), "train.py"]
        done = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("rank ") == done.stdout.count(str(site)) == ranks


def test_a_release_without_a_section_in_the_changelog_is_refused() -> None:
    for name in (".ci/release", "headway/__init__.py", "headway/_version.py"):
        Path(name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, name)
    Path("CHANGELOG.md").write_text("# Changelog\n\n## 9.9.9 (unreleased)\n")
    command = [".ci/release", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "error:" in done.stderr
    assert not Path("dist").exists()
