"""`headway test`: train for a few seconds with the plan of a launch on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence

from headway.commands.flags import Parser
from headway.commands.program_args import require_torch
from headway.commands.tables import print_table
from headway.errors import Code, MachineError
from headway.ipc.stderr import waiting_for
from headway.launcher.plan.program import interpreter


def main(argv: Sequence[str]) -> int:
    """Run `headway test`; return 1 if a check fails."""
    parser = Parser(
        "test",
        "Train for a few seconds with the plan of `headway launch`. Check that all ranks start, "
        "that all-reduce, the precision and sharded data loaders work, and that a training step "
        "has the same result as in a single process.",
    )
    parser.flag("--json", help="print one JSON object: {checks}")
    parser.flag("--cpu", help="alias for --device cpu")
    parser.shared_flags("--profile")
    parser.setting_flags(("device", "ranks on this machine", "several machines"))
    own, rest = parser.split(argv)
    if rest:
        parser.error(f"unexpected argument {rest[0]!r}")
    parsed = parser.parse_args(own)
    words = [word for word in own if word != "--json"]
    with _temporary_folder() as folder:
        require_torch()  # a launch of one process does not check it
        results = os.path.join(folder, "results.json")
        launch = [*interpreter(), "-m", "headway", "launch", "-q", "--set", "record=off", *words]
        began = time.perf_counter()
        with waiting_for("the ranks to start, import torch and run the checks"):
            code = subprocess.call([*launch, "-m", "headway.smoke", results])
        seconds = time.perf_counter() - began
        if not os.path.exists(results):  # the launch has printed why, or machine 0 has the results
            return code
        with open(results, encoding="utf-8") as file:
            checks = json.load(file)
    total = "from the command until the last rank has exited"
    checks.append(
        {"check": "total", "status": "error" if code else "ok", "what": total, "seconds": seconds}
    )
    if parsed.json:
        print(json.dumps({"checks": checks}, indent=2))
    else:
        rows = [
            (row["status"], row["check"], f"{row['seconds']:6.2f} s", row["what"]) for row in checks
        ]
        print_table(("", "check", "time", "finding"), rows)
    return code or int(any(check["status"] == "error" for check in checks))


def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="headway-test-")
    except OSError as error:
        raise MachineError(
            f"cannot create a temporary folder for the checks: {error.strerror}",
            where="environment variable TMPDIR, /tmp and other default folders",
            fix="set TMPDIR to a writable folder: `export TMPDIR=FOLDER`",
            code=Code.UNWRITABLE,
        ) from None
