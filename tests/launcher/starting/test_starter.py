"""The launcher's side of the process that starts the ranks."""

from __future__ import annotations

import os
import sys

import pytest

from headway.contract import records
from headway.contract.records import Serving, encode_record
from headway.errors import LaunchError
from headway.launcher.inside import worker
from headway.launcher.planning.plan import build_plan
from headway.launcher.planning.program import Program
from headway.launcher.starting import starter as starting
from headway.settings.resolve import resolve
from tests.machines.recorded import load

pytestmark = pytest.mark.processes


def test_a_server_of_another_version_is_an_error_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(records, "VERSION", records.VERSION + 1)
        line = encode_record(Serving(1))
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
        with pytest.raises(LaunchError, match=f"version {records.VERSION}"):
            starter.start({}, ())
    finally:
        starter.close()
