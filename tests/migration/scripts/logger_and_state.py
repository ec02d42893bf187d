"""A script that logs its state on all ranks, with PartialState for what runs once."""

import io
import json
import logging

from accelerate import Accelerator, PartialState
from accelerate.logging import get_logger
from accelerate.state import AcceleratorState

state = PartialState()
logger = get_logger(__name__, log_level="INFO")
stream = io.StringIO()
logger.logger.addHandler(logging.StreamHandler(stream))
logger.logger.propagate = False
accelerator = Accelerator(mixed_precision="bf16")
logger.info("***** Running training *****")
logger.info("on rank %d", state.process_index, main_process_only=False, in_order=True)
logger.warning_once("once")
logger.warning_once("once")
found = {
    "lines": len(stream.getvalue().splitlines()),
    "precision": AcceleratorState().mixed_precision,
    "same": [state.num_processes == accelerator.num_processes, state.device == accelerator.device],
    "deepspeed": accelerator.state.deepspeed_plugin,
    "text": repr(accelerator.state).splitlines()[1:],
}
if state.is_main_process:
    print(json.dumps(found))
