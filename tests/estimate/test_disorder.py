"""Scripts that leave their process in disorder end in an estimate or one error, and no folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.contract.lines import encode
from headway.estimate.attempt import CATEGORIES, FAKE, Outcome, decode_outcome
from tests.estimate.following import Server
from tests.estimate.test_confinement import TRAINING

pytestmark = pytest.mark.processes

UNTIDY = {
    "closed descriptors": "import os; os.closerange(3, 256)",
    "all descriptors closed": "import os; os.closerange(0, 256)",
    "an output without flush": """
import sys
class Tee:
    def __init__(self, out): self.out = out
    def write(self, text): self.out.write(text)
sys.stdout = Tee(sys.stdout)
""",
    "no output": "import sys; sys.stdout = sys.stderr = None",
    "an output that fails": """
import sys
class Broken:
    def write(self, text): pass
    def flush(self): raise SystemExit(1)
sys.stdout = Broken()
""",
    "text written to all descriptors": """
import os
for fd in range(3, 64):
    try: os.write(fd, b"{}\\n")
    except OSError: pass
""",
    "folders nested deeply": """
import ctypes, os
os.chdir(os.environ["TMPDIR"])
libc = ctypes.CDLL(None)
for _ in range(1500): libc.mkdir(b"d", 0o777); libc.chdir(b"d")
os.chdir("/")
""",
}

HOSTILE = {
    "a FIFO in place of its output": "os.remove(s + '/output'); os.mkfifo(s + '/output')",
    "a FIFO in place of its outcome": "os.mkfifo(s + '/outcome')",
    "a link in place of its output": (
        "os.remove(s + '/output'); os.symlink('/dev/zero', s + '/output')"
    ),
    "a folder in place of its outcome": "os.mkdir(s + '/outcome')",
    "an outcome that is none": "open(s + '/outcome', 'w').write('{}')",
    "an outcome of other types": "open(s + '/outcome', 'w').write('[' * 100000)",
}


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch")


@pytest.fixture(scope="module")
def server(scratch: Path) -> Iterator[Server]:
    pytest.importorskip("torch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(scratch))
        with Server() as server:
            yield server


@pytest.mark.parametrize("text", UNTIDY.values(), ids=[*UNTIDY])
def test_a_script_that_leaves_its_process_in_disorder_is_followed(
    server: Server, scratch: Path, text: str
) -> None:
    script = Path("script.py")
    script.write_text(f"{text}\n{TRAINING}")
    outcome = server.follow(script)
    assert (outcome.rung, outcome.steps) == (FAKE, 2), outcome
    assert not [*scratch.iterdir()]


@pytest.mark.parametrize("text", HOSTILE.values(), ids=[*HOSTILE])
def test_a_script_that_tampers_with_its_outcome_has_none(
    server: Server, scratch: Path, text: str
) -> None:
    script = Path("script.py")
    script.write_text(
        f"import os; s = os.path.dirname(os.environ['TMPDIR'])\n{text}\nos._exit(3)\n"
    )
    outcome = server.follow(script)
    assert (outcome.rung, outcome.failed_at) == ("", "the process ended with exit code 3")
    assert not [*scratch.iterdir()]


def test_a_script_that_replaces_its_outcome_before_it_is_written_is_answered(
    server: Server,
) -> None:
    script = Path("script.py")
    text = "import os; os.mkfifo(os.path.dirname(os.environ['TMPDIR']) + '/outcome')"
    script.write_text(f"{text}\n{TRAINING}")
    outcome = server.follow(script)
    assert outcome.rung == ""
    assert outcome.failed_at.endswith("script.py, line 8: the process ended with exit code 1")


@pytest.mark.parametrize(
    "change",
    [
        {"peak_bytes": "1"},
        {"peak_bytes": -1},
        {"rung": "high"},
        {"notes": [1]},
        {"categories": {}},
        {"categories": {"parameters": "1"}},
        {"modules": [{"module": 1, "bytes": {}}]},
        {"modules": 3},
    ],
)
def test_an_outcome_with_values_of_other_types_is_none(change: dict[str, Any]) -> None:
    outcome = Outcome(FAKE, 3, dict.fromkeys(CATEGORIES, 1))
    assert decode_outcome(encode(outcome).decode()) == outcome
    with pytest.raises(ValueError, match="no outcome"):
        decode_outcome(encode(outcome._replace(**change)).decode())
