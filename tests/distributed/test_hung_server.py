"""A fork server that hangs in its import of torch, as on a network file system that is gone."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.distributed.families import survivors
from tests.distributed.launching import script, start

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.usefixtures("executed_starts"),
    pytest.mark.skipif(sys.platform != "linux", reason="the fork server is for Linux"),
]

HANGS = """
import sys, time
class Hangs:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            time.sleep(300)
if any("processes.server" in word for word in sys.orig_argv):
    sys.meta_path.insert(0, Hangs())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_ends_a_launcher_whose_fork_server_hangs(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("site").mkdir()
    Path("site/sitecustomize.py").write_text(HANGS)
    monkeypatch.syspath_prepend(str(Path("site").resolve()))
    flags = ["--cpu", "--num-processes", "2", "--grace-period-s", "300"]
    process = start(*flags, script("print('ran')"))
    assert process.stderr is not None
    for line in process.stderr:
        if "waiting for the process that starts the ranks" in line:
            break
    process.send_signal(number)
    process.communicate(timeout=120)
    assert process.returncode == 128 + number
    assert not survivors(5)
