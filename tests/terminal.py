"""A terminal for tests: a real pty, and a screen that is drawn as a person would see it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import pexpect
import pyte

from tests.machines.recorded import FOLDER

PATIENCE_S = 120

ON_MACHINE = """
import shutil, sys
from headway.commands import flags, main
from headway.machine.facts import load_machine
flags.detect_machine = lambda *_, **__: load_machine(sys.argv[1])
shutil.which = lambda *_, **__: None
sys.exit(main.main(sys.argv[2:]))
"""
"""Runs a command line as if on the recorded machine that the file in the first argument holds, from
which no cluster is seen."""

KEYS = {"up": "\x1b[A", "down": "\x1b[B", "esc": "\x1b", "ctrl-c": "\x03", "ctrl-d": "\x04"}


class Terminal:
    """Runs `headway` on one of the recorded machines, or here, on a screen of this size."""

    def __init__(
        self,
        machine: str | None,
        *words: str,
        rows: int = 30,
        columns: int = 100,
        term: str = "xterm-256color",
        under: tuple[str, ...] = (),
    ) -> None:
        self.screen = pyte.Screen(columns, rows)
        self.stream = pyte.ByteStream(self.screen)
        there = ("-c", ON_MACHINE, str(FOLDER / f"{machine}.json"))
        command = [*under, sys.executable, *(there if machine else ("-m", "headway")), *words]
        self.child: Any = pexpect.spawn(
            command[0],
            command[1:],
            env=_environ(term) | ({"PYTHONWARNINGS": "error"} if machine else {}),
            dimensions=(rows, columns),
        )
        # answers when the program asks where the cursor is
        self.screen.write_process_input = self.child.send  # type: ignore[method-assign]

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if not self.child.terminate():  # it is given a tenth of a second for each signal
            self.child.kill(signal.SIGKILL)
            self.child.wait()
        self.child.close()

    @property
    def text(self) -> str:
        """What stands on the screen, without the spaces at the ends of lines."""
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip()

    def read(self, seconds: float = 0.05) -> bool:
        """Draw what has been printed; False when the program has ended."""
        try:
            data = self.child.read_nonblocking(65536, timeout=seconds)
        except pexpect.TIMEOUT:
            return True
        except pexpect.EOF:
            return False
        self.stream.feed(data)
        return True

    def wait_for(self, text: str) -> None:
        """Wait until `text` stands on the screen."""
        self.wait_until(lambda: text in self.text)

    def answer(self, *answers: tuple[str, str]) -> None:
        """Press keys each time that a text stands on the screen."""
        for text, keys in answers:
            self.wait_for(text)
            self.press(keys)

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Wait until something is so on the screen."""
        end = time.monotonic() + PATIENCE_S
        while not is_so():
            assert self.read() or is_so(), f"ended before it was so:\n{self.text}"
            assert time.monotonic() < end, f"it is not so:\n{self.text}"

    def press(self, *keys: str) -> None:
        """Type keys by name, or else letter by letter."""
        for key in keys:
            self.child.send(KEYS.get(key, key))

    def resize(self, rows: int, columns: int) -> None:
        """Change the size of the window."""
        self.screen.resize(rows, columns)
        self.child.setwinsize(rows, columns)

    def exit_code(self) -> int:
        """Wait for the end, and return how the program ended."""
        end = time.monotonic() + PATIENCE_S
        while self.read():
            assert time.monotonic() < end, f"it does not end:\n{self.text}"
        self.child.wait()
        code = self.child.exitstatus
        assert isinstance(code, int)
        return code


def _environ(term: str) -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "TERM": term}
