"""Who this rank of the runtime's tests is; see runtime_worker.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
FOLDER = Path(sys.argv[1])
