"""Draw docs/footer.svg, docs/top.svg and docs/page.png from a real run with a slow rank.

    make pictures      from the root of the repository, on Linux; needs unshare, ip and chromium

Four ranks train `examples/char_gpt.py` as if on the recorded laptop of tests/machines, and one rank
loads its samples slowly. The make target runs them in separate namespaces, so the pictures show no
other runs and no folders or names of this machine.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path

from docs.conversation import draw, lines_of
from tests.terminal import Terminal

ROOT = Path(__file__).resolve().parent.parent
LAUNCH = "launch --num-processes 4 --threads-per-process 1 char_gpt.py --batch-size 16"
SLOW = """
class SlowOnRank2(TensorDataset):
    def __getitem__(self, index):
        time.sleep(0.003 * (os.environ["RANK"] == "2"))
        return super().__getitem__(index)

"""
PAGE_SIZE = "560,1165"  # width and height of the screenshot


def make_stage(folder: Path) -> None:
    """Change to `folder` and write the example there; rank 2 needs 3 ms per sample."""
    folder.mkdir()
    text = (ROOT / "examples" / "char_gpt.py").read_text()
    text = text.replace("import argparse\n", "import argparse\nimport os\n")
    text = text.replace("= TensorDataset(", "= SlowOnRank2(")
    text = text.replace("\ndef main", f"{SLOW}\ndef main")
    (folder / "char_gpt.py").write_text(text)
    os.environ |= {"HOME": str(folder), "XDG_CONFIG_HOME": "", "XDG_STATE_HOME": ""}
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # no warning about a missing name server
    os.chdir(folder)


def start(command: str, *more: str, rows: int, columns: int) -> Terminal:
    """Start a command in a new terminal."""
    return Terminal("laptop_cpu", *command.split(), *more, rows=rows, columns=columns)


def read(seconds: float, *terminals: Terminal) -> None:
    """Read the output of the terminals for `seconds`, or until one of them is closed."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and all(map(Terminal.read, terminals)):
        pass


def write(name: str, command: str, terminal: Terminal) -> None:
    """Write a picture of a terminal to docs/NAME."""
    title = f"headway {command}"
    lines = [f"$ {title}", *lines_of(terminal)]
    (ROOT / "docs" / name).write_text(draw(title, terminal.screen.columns, lines), encoding="utf-8")


def main() -> None:
    folder = Path(tempfile.gettempdir(), "project")  # pictured; /tmp is a new one
    make_stage(folder)
    with start(LAUNCH, "--steps", "400", rows=14, columns=100) as launch:
        read(20, launch)
        write("footer.svg", LAUNCH, launch)
        with start("top", rows=24, columns=120) as top:
            read(5, launch, top)
            write("top.svg", "top", top)
        read(300, launch)
    with start("why --html run.html", rows=24, columns=100) as why:
        assert why.exit_code() == 0, why.text
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    options += [f"--user-data-dir={folder}/chromium", f"--window-size={PAGE_SIZE}"]
    picture, page = ROOT / "docs" / "page.png", Path("run.html").resolve()
    command = ["chromium", *options, f"--screenshot={picture}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)


if __name__ == "__main__":
    main()
