"""What `--reworded` changes is really changed, also in a Python that a test starts."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.reworded.plugin import SITE

SPEAK = """
from headway.contract.origin import Layer, Origin
from headway.errors import ConfigError
from headway.machine.detection import detect_machine

print(ConfigError("device is 'x'", where="here", fix="set another"))
print(Origin(Layer.FLAG, flag="--cpu"))
print(detect_machine()._replace(mps_reason="not a Mac").mps_reason)
"""


def test_every_part_of_a_message_reads_differently_in_a_child_process() -> None:
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(SITE), *([before] if before else [])])
    done = subprocess.run(
        [sys.executable, "-c", SPEAK],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "(now) device is 'x' (reworded)",
        "  from: (now) here (reworded)",
        "  fix:  (now) set another (reworded)",
        "(now) flag --cpu (reworded)",
        "(now) not a Mac (reworded)",
    ]
