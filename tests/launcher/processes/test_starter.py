"""The launcher's side of the process that starts the ranks."""

from __future__ import annotations

import os
import sys

import pytest

from headway.errors import LaunchError
from headway.launcher.plan.plan import build_plan
from headway.launcher.plan.program import Program
from headway.launcher.processes import starter as starting
from headway.launcher.rank import worker
from headway.settings.resolve import resolve
from tests.machines.recorded import load

pytestmark = pytest.mark.processes


def test_a_server_of_another_version_is_an_error_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = b'["Serving", 1, "of a later version"]\n'
    code = f"""
import socket, sys
launcher = socket.socket(fileno=int(sys.argv[1]))
launcher.sendall({line!r})
launcher.recv(9)
"""
    monkeypatch.setattr(worker, "bootstrap_code", lambda _: code)
    machine = load("laptop_cpu")
    settings = resolve([], machine, {})
    plan = build_plan(settings, machine, Program("a.py"), python=[sys.executable], environ={})
    starter = starting.Starter(plan, os.environ)
    try:
        with pytest.raises(LaunchError, match="has 2 values, not 1"):
            starter.start({}, ())
    finally:
        starter.close()
