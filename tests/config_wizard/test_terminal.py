"""The conversation on a real terminal: keys, short and changing windows, back, Ctrl-C."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headway.commands.main import main
from tests.commands.running import profile

pexpect = pytest.importorskip("pexpect")
pytest.importorskip("pyte")

from tests.terminal import Terminal  # noqa: E402  needs the two above

pytestmark = pytest.mark.processes


CUDA = {"device": "cuda", "num_processes": "8", "mixed_precision": "bf16"}
QUESTIONS = [
    "Where should",
    "How many",
    "Which prec",
    "Where to save",
    "More settings?",
    "What now?",
]


def test_enter_alone_writes_the_best_profile_and_prints_the_next_command() -> None:
    with Terminal("gpu_8_h100", "config") as terminal:
        for question in QUESTIONS:
            terminal.answer((question, "\r"))
        assert terminal.exit_code() == 0
        assert profile() == CUDA
        screen = terminal.text
    assert screen.startswith("Detected: 8 GPUs (NVIDIA H100 80GB HBM3), 64 usable cores.\n")
    assert "A launch: your_script.py: 8 processes on cuda, precision bf16, 8 threads" in screen
    assert screen.endswith("next: headway launch your_script.py")


def test_arrows_and_numbers_move_through_a_menu() -> None:
    with Terminal("gpu_8_h100", "config") as terminal:
        terminal.answer(
            ("❯ cuda", "down"),
            ("❯ cpu", "up"),
            ("❯ cuda", "\r"),
            ("How many", "\r"),
            ("❯ bf16", "3"),
            ("❯ fp16", "2"),
            ("❯ no", "\r"),
            ("❯ user", "\r"),
            ("❯ no", "2"),
            ("❯ yes", "\r"),
            ("Which GPUs? (for num_processes: 8) [all]", "ctrl-c"),
        )
        assert terminal.exit_code() == 130


def test_ctrl_z_suspends_and_the_question_is_there_again() -> None:
    shell = ("bash", "-mc", '"$@"; echo suspended; sleep 0.3; fg >/dev/null; sleep 0.1', "-")
    with Terminal("gpu_8_h100", "config", under=shell) as terminal:
        terminal.answer(("❯ cuda", "\x1a"))
        terminal.wait_for("suspended")
        terminal.answer(("❯ cuda", "\r"), ("[8]", "\x03"))
        terminal.wait_for("nothing was written")


def test_help_and_back_work_at_once_and_a_wrong_answer_is_asked_again() -> None:
    with Terminal("gpu_8_h100", "config") as terminal:
        terminal.answer(("❯ cuda", "?"))
        terminal.wait_for("device: device to run on; gpu is cuda")
        terminal.answer(("❯ cuda", "\r"), ("[8]", "9\r"))
        terminal.wait_for("visible on this machine: 8 GPUs")
        terminal.answer(
            ("[8]", "4\r"),
            ("Which precision?", "<"),
            ("[4]", "?"),  # the answer taken back is the default now
            ("--num-processes N, or HEADWAY_NUM_PROCESSES", "esc"),
        )
        terminal.wait_for("❯ cuda")
        for question in QUESTIONS[1:]:
            terminal.press("\r")
            terminal.wait_for(question)
        terminal.press("\r")
        assert terminal.exit_code() == 0
    assert profile() == {**CUDA, "num_processes": "4"}


@pytest.mark.parametrize("key", ["ctrl-c", "ctrl-d"])
def test_ctrl_c_and_ctrl_d_leave_the_profile_as_it_was(key: str) -> None:
    main(["config", "set", "num_processes=5"])
    with Terminal("gpu_8_h100", "config") as terminal:
        terminal.answer(("❯ cuda", "\r"), ("[5]", "3\r"), ("Which precision?", key))
        assert terminal.exit_code() == 130
        assert terminal.text.endswith("\nnothing was written")
    assert profile() == {"num_processes": "5"}


def test_a_window_of_four_lines_still_shows_where_one_is() -> None:
    with Terminal("gpu_8_h100", "config", rows=4, columns=60) as terminal:
        terminal.answer(("❯ cuda", "\r"), ("[8]", "\r"))
        for precision in ("bf16", "no", "fp16"):
            terminal.answer((f"❯ {precision}", "down"))
        terminal.wait_for("❯ bf16")
        for question in QUESTIONS[3:]:
            terminal.press("\r")
            terminal.wait_for(question)
        terminal.answer(("❯ write", "\r"))
        assert terminal.exit_code() == 0
    assert profile() == CUDA


def test_a_question_or_reason_longer_than_the_window_is_read_to_its_end() -> None:
    with Terminal("gpu_8_h100", "config", rows=24, columns=40) as terminal:
        for question in QUESTIONS[:2]:
            terminal.answer((question, "\r"))
        terminal.wait_for("supports it)")
        lines = terminal.text.splitlines()
        said = " ".join(map(str.strip, lines))  # no word is cut
        assert "? explains, < goes back." in said
        assert "Which precision? (Enter accepts, ? explains, < goes back)" in said
        first = next(line for line in lines if "❯ bf16" in line)
        rest = lines[lines.index(first) + 1]
        assert rest.index(rest.strip()) == first.index("half the memory")
        terminal.press("ctrl-c")
        assert terminal.exit_code() == 130


def test_a_dumb_terminal_gets_numbered_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    with Terminal("mac_m2", "config", term="dumb") as terminal:
        terminal.answer(("1) mps  Apple silicon (Apple M2)", "2\r"), ("[1]", "ctrl-c"))
        assert terminal.exit_code() == 130
        assert "\x1b" not in terminal.text


def test_the_picture_in_the_readme_is_what_the_program_shows() -> None:
    root = Path(__file__).resolve().parents[2]
    code = "from docs import conversation as c; print(c.picture(), end='')"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert done.stdout == (root / "docs" / "conversation.svg").read_text(), done.stderr
