"""Samplers of the script's own: weights, and batches of equal lengths."""

import json

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Sampler, WeightedRandomSampler


class ByLength(Sampler):
    def __init__(self, lengths, batch_size):
        self.order = sorted(range(len(lengths)), key=lengths.__getitem__)
        self.batch_size = batch_size
        self.drop_last = False

    def __len__(self):
        return -(-len(self.order) // self.batch_size)

    def __iter__(self):
        for start in range(0, len(self.order), self.batch_size):
            yield self.order[start : start + self.batch_size]


accelerator = Accelerator()
set_seed(9)
weights = torch.arange(1.0, 25.0)
sampler = WeightedRandomSampler(weights, 24, generator=torch.Generator().manual_seed(3))
weighted = DataLoader(range(24), batch_size=3, sampler=sampler)
by_length = DataLoader(range(16), batch_sampler=ByLength([7 * one % 16 for one in range(16)], 4))
weighted, by_length = accelerator.prepare(weighted, by_length)
seen = {}
for name, loader in {"weighted": weighted, "by length": by_length}.items():
    seen[name] = [accelerator.gather(batch).tolist() for batch in loader]
accelerator.print(json.dumps(seen))
