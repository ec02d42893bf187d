"""Inference without an Accelerator: PartialState shares the prompts out."""

import json

import torch
from accelerate import PartialState
from accelerate.utils import gather, gather_object

state = PartialState()
prompts = ["a", "bb", "ccc", "dddd", "eeeee"]
with state.split_between_processes(prompts) as mine:
    lengths = [len(one) for one in mine]
with state.split_between_processes(prompts, apply_padding=True) as mine:
    padded = gather(torch.tensor([len(one) for one in mine], device=state.device))
with state.split_between_processes({"x": torch.arange(4), "y": prompts[:4]}) as mine:
    pairs = list(zip(mine["x"].tolist(), mine["y"], strict=True))
found = {"lengths": gather_object(lengths), "pairs": gather_object(pairs)}
found["padded"] = padded.tolist()[: len(prompts)]
state.wait_for_everyone()
if state.is_main_process:
    print(json.dumps(found))
