"""Plain DDP, as written for torchrun: a trainer that reads LOCAL_RANK, and saves snapshots."""
# mypy: ignore-errors

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, model, loader, optimizer, snapshot_path):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.model = DDP(model)
        self.loader = loader
        self.optimizer = optimizer
        self.snapshot_path = snapshot_path

    def train(self, max_epochs):
        for epoch in range(max_epochs):
            self.loader.sampler.set_epoch(epoch)
            for source, targets in self.loader:
                self.optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(self.model(source), targets)
                loss.backward()
                self.optimizer.step()
        if self.local_rank == 0:
            torch.save(self.model.module.state_dict(), self.snapshot_path)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 20), torch.randn(64, 1))
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    model = torch.nn.Linear(20, 1)
    Trainer(model, loader, torch.optim.SGD(model.parameters(), lr=1e-3), "snapshot.pt").train(2)
    print(f"trained: rank {dist.get_rank()} of {dist.get_world_size()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
