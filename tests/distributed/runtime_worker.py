"""One rank of the runtime's tests: runs every check, writes what it saw to FOLDER/WORLD-RANK.json.

python tests/distributed/runtime_worker.py FOLDER

A check is a function of one of the modules below; all ranks run them in the same order.
"""

from __future__ import annotations

import gc
import json
from inspect import isfunction
from types import ModuleType
from typing import Any

import torch

from headway import Accelerator
from headway.state import AcceleratorState
from tests.distributed import (
    batch_size_checks,
    handler_checks,
    loader_checks,
    meeting_checks,
    micro_batch_checks,
    process_checks,
    token_checks,
    training_checks,
)
from tests.distributed.this_rank import FOLDER, RANK, WORLD

MODULES = (
    loader_checks,
    training_checks,
    process_checks,
    handler_checks,
    batch_size_checks,
    token_checks,
    micro_batch_checks,
    meeting_checks,
)


def run_checks(module: ModuleType) -> dict[str, Any]:
    """Run the public functions that `module` defines, each without the state of those before."""
    found = {}
    for name, function in vars(module).items():
        if isfunction(function) and function.__module__ == module.__name__ and name[0] != "_":
            AcceleratorState._reset_state(reset_partial_state=True)
            found[name] = function()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()  # some checks collect garbage often, and imports are none
    seen = [run_checks(module) for module in MODULES]
    everything = {name: result for results in seen for name, result in results.items()}
    (FOLDER / f"{WORLD}-{RANK}.json").write_text(json.dumps(everything))
    Accelerator().end_training()
    assert not torch.distributed.is_initialized()
