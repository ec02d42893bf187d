"""`headway adopt` says what becomes of a script, and changes its imports and nothing else."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.commands.running import run

pytest.importorskip("torch")

WHOLE = """\
import accelerate  # the version
from accelerate import Accelerator
accelerator = Accelerator()
model, scheduler = accelerator.prepare(model, scheduler)
"""
REFUSED = "from accelerate import Accelerator, DeepSpeedPlugin\n"


@pytest.fixture
def script() -> Path:
    path = Path("train.py")
    path.write_text(WHOLE)
    return path


def test_each_name_has_its_lines_and_all_its_differences(script: Path) -> None:
    script.write_text(WHOLE + "accelerator.reduce(1)\n" * 7 + "OneCycleLR(o, 1, len(loader))\n")
    code, printed = run("adopt", str(script))
    assert code == 0
    rows = [line.split()[:3] for line in printed.splitlines()]
    assert rows.count(["4", "differs", "Accelerator.prepare"]) == 4
    assert "4, 12  " in printed  # the lines that may set the length of a schedule
    assert "no name is missing; check the 6 rows marked `differs`" in printed
    assert ["2", "same", "accelerate.Accelerator"] in rows
    assert "5, 6, 7, 8, 9 and 2 more  " in printed


@pytest.mark.parametrize(
    ("text", "guide"),
    [
        ("import torch.distributed\n", "Coming from another library"),
        ("import torch\nimport lightning.pytorch as pl\n", "run it unchanged"),
        ("import torch\nfrom transformers import Trainer\n", "--replace-accelerate"),
        ("import torch\nfrom headway import Accelerator\n", "already imports headway"),
        ("import os\n", "neither accelerate nor torch"),
    ],
)
def test_a_script_without_accelerate_is_shown_its_guide(text: str, guide: str) -> None:
    Path("train.py").write_text(text)
    code, printed = run("adopt", "train.py")
    assert (code, guide in printed) == (0, True)
    assert "nothing to change; scripts read: train.py\n" in printed


def test_what_is_missing_makes_the_exit_code_1() -> None:
    Path("train.py").write_text(REFUSED)
    code, said = run("adopt", "train.py")
    assert code == 1
    assert "DistributedDataParallel" in said
    assert "\n-from accelerate import" in said
    assert "\n+from headway import" in said
    assert Path("train.py").read_text() == REFUSED


def test_write_changes_the_imports_and_keeps_link_and_permissions(script: Path) -> None:
    script.chmod(0o750)
    link = Path("link.py")
    link.symlink_to(script)
    assert run("adopt", "--write", str(link))[0] == 0
    assert script.read_text() == WHOLE.replace(
        "import accelerate  #", "import headway.compat as accelerate  #"
    ).replace("from accelerate", "from headway")
    assert stat.S_IMODE(script.stat().st_mode) == 0o750
    assert link.is_symlink()
    assert sorted(os.listdir()) == ["link.py", "train.py"]
    code, said = run("adopt", str(script))
    assert (code, "does not import accelerate" in said) == (0, True)


def test_a_folder_is_searched_for_scripts_that_import_accelerate() -> None:
    texts = {
        "project/train.py": WHOLE,
        "project/sub/evaluate.py": "import accelerate.utils\n",
        "project/plain.py": "import torch\n",
        "project/.git/hook.py": WHOLE,
        "project/venv/pyvenv.cfg": "",
        "project/venv/lib/x.py": WHOLE,
    }
    for name, text in texts.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    code, said = run("adopt", "project")
    assert code == 0
    found = [line for line in said.splitlines() if line.startswith("project/")]
    assert found == ["project/train.py", "project/sub/evaluate.py"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("notes.ipynb", b"{}"),
        ("old.py", b"print 'Python 2'\n"),
        ("binary.py", b"\x00\x01"),
        ("bytes.py", b"\xff = 1\n"),
    ],
)
def test_what_cannot_be_read_as_a_script_is_an_error(name: str, content: bytes) -> None:
    Path(name).write_bytes(content)
    code, error = run("adopt", "--write", name)
    assert (code, name in error) == (2, True)
    assert Path(name).read_bytes() == content


@pytest.mark.usefixtures("ordinary_user")
def test_a_script_that_cannot_be_written_stays_as_it_is(script: Path) -> None:
    script.chmod(0o444)
    code, error = run("adopt", "--write", str(script))
    assert (code, "cannot write" in error) == (2, True)
    assert script.read_text() == WHOLE
