"""One rank of the tests of sharded training; see test_fsdp.py.

    python fsdp_worker.py FOLDER PARITY...

trains the named cases beside plain torch, and writes what it saw to FOLDER/WORLD-RANK.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.distributed import fsdp_checks, fsdp_memory, fsdp_parity


def main() -> None:
    folder, cases = Path(sys.argv[1]), sys.argv[2:]
    rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
    seen = {
        "parity": fsdp_parity.differences(cases),
        "memory": fsdp_memory.measured(),
        "checks": fsdp_checks.checked(folder),
    }
    (folder / f"{world}-{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
