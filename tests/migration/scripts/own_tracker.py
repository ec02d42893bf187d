"""A tracker of the script's own, beside an unknown number of others."""

import json

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process


class Memory(GeneralTracker):
    name = "memory"
    requires_logging_directory = False

    def __init__(self):
        super().__init__()
        self.kept = []

    @property
    def tracker(self):
        return self.kept

    @on_main_process
    def store_init_configuration(self, values):
        self.kept.append(["config", values])

    @on_main_process
    def log(self, values, step=None, **kwargs):
        self.kept.append([step, values])


accelerator = Accelerator(log_with=Memory())
accelerator.init_trackers("run", config={"lr": 0.1})
for step in range(3):
    total = accelerator.reduce(torch.tensor(float(step)), "sum").item()
    accelerator.log({"loss": total / accelerator.num_processes}, step=step)
kept = accelerator.get_tracker("memory", unwrap=True)
if accelerator.is_main_process:
    print(json.dumps({"kept": kept}))
accelerator.end_training()
