"""Hugging Face Accelerate, with its own import."""
# mypy: ignore-errors

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for (batch,) in loader:
        with accelerator.accumulate(model):
            loss = model(batch).pow(2).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.wait_for_everyone()
    print(
        f"trained: rank {accelerator.process_index} of {accelerator.num_processes} "
        f"in {accelerator.mixed_precision}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
