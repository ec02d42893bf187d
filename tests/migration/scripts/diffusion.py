"""An image model trained as diffusers' examples do: noise, EMA, accumulation, trackers."""

import copy
import json
import logging
import math
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset
from tqdm.auto import tqdm

logger = get_logger(__name__, log_level="INFO")


class Denoiser(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.down = torch.nn.Conv2d(1, 8, 3, padding=1)
        self.time = torch.nn.Embedding(10, 8)
        self.up = torch.nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, noisy, steps):
        hidden = self.down(noisy) + self.time(steps)[:, :, None, None]
        return self.up(torch.nn.functional.silu(hidden))


def main():
    logging.basicConfig(level=logging.WARNING)
    folder = tempfile.mkdtemp()
    accelerator = Accelerator(
        gradient_accumulation_steps=2, log_with="tensorboard", project_dir=folder
    )
    logger.info(accelerator.state, main_process_only=False)
    set_seed(3)
    images = torch.rand(32, 1, 8, 8)
    model = Denoiser()
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(images), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    average.to(accelerator.device)
    if accelerator.is_main_process:
        accelerator.init_trackers("denoise", config={"lr": 1e-2})
    num_steps = math.ceil(len(loader) / accelerator.gradient_accumulation_steps) * 2
    progress = tqdm(range(num_steps), disable=True)
    global_step, train_loss, losses = 0, 0.0, []
    for _epoch in range(2):
        model.train()
        for (clean,) in loader:
            with accelerator.accumulate(model):
                noise = clean.flip(0) - 0.5
                steps = (clean.sum(dim=(1, 2, 3)) * 10).long() % 10
                loss = torch.nn.functional.mse_loss(model(clean + noise, steps), noise)
                train_loss += accelerator.gather(loss.repeat(4)).mean().item() / 2
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                inner = accelerator.unwrap_model(model)
                for kept, new in zip(average.parameters(), inner.parameters(), strict=True):
                    kept.lerp_(new.detach(), 0.1)
                progress.update(1)
                global_step += 1
                accelerator.log({"train_loss": train_loss}, step=global_step)
                losses.append(train_loss)
                train_loss = 0.0
    accelerator.wait_for_everyone()
    for tracker in accelerator.trackers:
        if tracker.name == "tensorboard":
            tracker.writer.add_images("clean", images[:2].numpy(), global_step)
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), Path(folder) / "model.pt")
        weights = [one.sum().item() for one in average.parameters()]
        print(json.dumps({"losses": losses, "ema": weights, "steps": global_step}))
    accelerator.end_training()


if __name__ == "__main__":
    main()
