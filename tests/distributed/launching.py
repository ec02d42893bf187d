"""Starts real launches for tests, and looks at what they leave."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

HEADWAY = [sys.executable, "-m", "headway", "launch"]


def environment(**variables: str) -> dict[str, str]:
    """Return this process's environment, in which `headway` is found, and `variables`."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}


def launch(
    *words: str, timeout_s: float = 300, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `headway launch` with these words to its end."""
    return subprocess.run(
        [*HEADWAY, *words],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def start(*words: str, **options: Any) -> subprocess.Popen[str]:
    """Begin `headway launch` with these words."""
    process: subprocess.Popen[str] = subprocess.Popen(
        [*HEADWAY, *words],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
    return process


def free_port() -> int:
    """Return a port that nobody listens on at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def is_alive(pid: int) -> bool:
    """Return whether the process runs; a zombie that nobody has waited for yet does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def script(text: str, name: str = "script.py") -> str:
    """Write a script into the working directory and return its name."""
    Path(name).write_text(text)
    return name
