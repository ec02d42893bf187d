"""Trains as a seed says, whole and cut by SIGKILL at random steps; compares the two bit for bit.

python -m tests.checkpoint.trainings --first SEED --trials NUMBER

Every rank is forked from this process, so that each attempt imports nothing. In each attempt but
the last, one of them kills itself at a random place of a random step, or at a random event of a
save; this process then kills the others, and ends what they have left, as a launcher does. Then the
same runs again, from other seeds wherever the checkpoint has to know better. What each rank takes,
computes and draws in each step must be what a run without a kill took, computed and drawn.

The product does not promise these (docs/reference/checkpoints.md): random augmentation in workers
without a seed, and of streams without `state_dict()`; and a save in an evaluation.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from hashlib import sha1
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.tensor
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

import headway.checkpoint.loading
import headway.checkpoint.saving
import headway.strategies.fsdp  # noqa: F401 - imported here once, not in every rank
from headway import Accelerator
from headway.checkpoint.folders import checkpoints_in
from headway.distributed.rng import generator_states
from headway.ipc.forking import adopt_orphans
from headway.launcher.processes.shutdown import terminate_descendants
from headway.precision.precision import Fp16, PrecisionSettings
from headway.utils import DataLoaderConfiguration, GradScalerKwargs, ProjectConfiguration, set_seed

CPU = torch.device("cpu")
EPOCHS, LIMIT_S = 2, 60
Spec = dict[str, Any]

OPTIMIZERS: dict[str, list[Spec]] = {
    "SGD": [{}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.5, "weight_decay": 0.1}],
    "Adam": [{}, {"amsgrad": True}, {"fused": True}],
    "AdamW": [{}, {"foreach": True}, {"capturable": False, "maximize": True}],
    "RMSprop": [{}, {"centered": True, "momentum": 0.9}],
    **{name: [{}] for name in ("RAdam", "NAdam", "Adamax", "Adagrad", "Adadelta", "Rprop", "ASGD")},
    "Adafactor": [{}],
}
NOT_SHARDED = ("Adafactor", "Rprop")  # torch's do not work on DTensors
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda opt: schedules.StepLR(opt, 2, 0.9),
    "MultiStepLR": lambda opt: schedules.MultiStepLR(opt, [2, 5], 0.5),
    "ConstantLR": lambda opt: schedules.ConstantLR(opt, 0.3, 4),
    "LinearLR": lambda opt: schedules.LinearLR(opt, 0.1, 1.0, 6),
    "ExponentialLR": lambda opt: schedules.ExponentialLR(opt, 0.9),
    "CosineAnnealingLR": lambda opt: schedules.CosineAnnealingLR(opt, 7),
    "CosineAnnealingWarmRestarts": lambda opt: schedules.CosineAnnealingWarmRestarts(opt, 3, 2),
    "PolynomialLR": lambda opt: schedules.PolynomialLR(opt, 9),
    "LambdaLR": lambda opt: schedules.LambdaLR(opt, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda opt: schedules.MultiplicativeLR(opt, lambda step: 0.9),
    "CyclicLR": lambda opt: schedules.CyclicLR(opt, 0.001, 0.1, 3, cycle_momentum=False),
    "OneCycleLR": lambda opt: schedules.OneCycleLR(
        opt, 0.1, 900, cycle_momentum=bool({"momentum", "betas"} & {*opt.defaults})
    ),
    "ReduceLROnPlateau": lambda opt: schedules.ReduceLROnPlateau(opt, factor=0.5, patience=1),
    "SequentialLR": lambda opt: schedules.SequentialLR(
        opt, [schedules.LinearLR(opt, 0.1, 1.0, 3), schedules.CosineAnnealingLR(opt, 9)], [3]
    ),
    "ChainedScheduler": lambda opt: schedules.ChainedScheduler(
        [schedules.ConstantLR(opt, 0.5, 3), schedules.ExponentialLR(opt, 0.95)], opt
    ),
}
SAMPLERS = (
    *("in order", "shuffled", "shuffled", "own generator", "weighted", "weighted, own generator"),
    *("replacement", "own sampler", "own batches of torch", "own batches of python"),
)
PLACES = ("in a save", "in a save", "before", "after backward", "after", "saved")


def described(seed: int) -> Spec:
    """Return the training of a seed."""
    chance = random.Random(seed)
    pick = chance.choice

    def maybe(part: float) -> bool:
        return chance.random() < part

    ranks = pick([1, 1, 2, 2, 3])
    strategy = pick(["ddp", "fsdp"]) if ranks == 2 else "ddp"
    seeds_samples = maybe(0.4)

    def loader(streams: list[str]) -> Spec:
        kind = pick(["map", "map", "map", *streams])
        workers = pick([0, 0, 1, 2])
        draws = seeds_samples or (workers == 0 and kind != "stream")
        return {
            "kind": kind,
            "sampler": pick(SAMPLERS) if kind == "map" else None,
            "size": pick([12, 13, 17, 18, 24]),
            "batch": pick([1, 2, 3]),
            "workers": workers,
            "lasting": workers > 0 and maybe(0.6),
            "drop_last": maybe(0.3),
            "augmentation": pick(["none", "torch", "numpy", "python", "all"]) if draws else "none",
        }

    spec: Spec = {
        "ranks": ranks,
        "strategy": strategy,
        "precision": pick(["no", "no", "bf16", "fp16"]),
        "seed": chance.randrange(100) if seeds_samples else None,
        "device_specific": maybe(0.5),
        "deterministic": ranks > 2 or maybe(0.3),
        "train": loader(["stream", "stream with state"]),
        "second": loader(["stream", "stream with state"]) if maybe(0.3) else None,
        "evaluation": loader([]) if maybe(0.3) else None,
        "evaluated_every": pick([2, 3, 5, "epoch"]),
        "split_batches": maybe(0.2),
        "even_batches": maybe(0.75),
        "dispatch_batches": pick([None, None, None, False, True]),
        "seedable": maybe(0.15),
        "accumulation": pick([1, 1, 2, 3]),
        "optimizer": pick(
            [opt for opt in OPTIMIZERS if strategy != "fsdp" or opt not in NOT_SHARDED]
        ),
        "schedule": pick([None, *SCHEDULES]),
        "groups": maybe(0.3),
        "dropout": pick([0.0, 0.3]),
        "clip": maybe(0.3),
        "draws_in_the_loop": maybe(0.3),
        "ema": maybe(0.4),
        "save": pick(["checkpoint", "checkpoint", "checkpoint at once", "save_state"]),
        "every": pick([1, 2, 3, 5]),
        "wait": maybe(0.6),
        "total_limit": pick([None, 1, 3]),
        "cuts": [
            {
                "part": chance.random(),
                "place": pick(PLACES),
                "event": chance.randrange(60),
                "rank": chance.randrange(ranks),
            }
            for _ in range(pick([1, 1, 2]))
        ],
    }
    spec["options"] = pick(OPTIMIZERS[spec["optimizer"]])
    loaders = [each for each in (spec["train"], spec["second"], spec["evaluation"]) if each]
    if spec["dispatch_batches"] is False and any(each["kind"] != "map" for each in loaders):
        spec["dispatch_batches"] = None  # refused: ranks would read the same stream
    for each in loaders:
        if spec["split_batches"]:
            each["batch"] *= ranks
            if str(each["sampler"]).startswith("own batches"):
                each["sampler"] = "shuffled"
        if not spec["even_batches"] or each["kind"] != "map":
            each["size"] = 12 * ranks  # no rank may be without a batch in the last round
        draws_alike = each["kind"] != "map" and each["augmentation"] != "none"
        if ranks > 1 and (
            draws_alike or each["sampler"] in ("own sampler", "own batches of python")
        ):
            spec["device_specific"] = False  # what each rank draws for itself must be the same
    return spec


class Numbered(Dataset[torch.Tensor]):
    """Each sample is its index and random numbers of the generators that `augmentation` names."""

    def __init__(self, size: int, augmentation: str) -> None:
        self.size, self.augmentation = size, augmentation

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        noise, drawn_by = 0.0, self.augmentation
        if drawn_by in ("torch", "all"):
            noise += torch.rand(()).item()
        if drawn_by in ("numpy", "all"):
            noise += np.random.rand()
        if drawn_by in ("python", "all"):
            noise += random.random()
        return torch.tensor([float(index), index % 3 - 1, noise])


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, samples: Numbered) -> None:
        self.samples, self.at = samples, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        step, first = (1, 0) if worker is None else (worker.num_workers, worker.id)
        while self.at * step + first < len(self.samples):
            self.at += 1
            yield self.samples[(self.at - 1) * step + first]
        self.at = 0


class StreamWithState(Stream):
    def state_dict(self) -> Spec:
        return {"at": self.at}

    def load_state_dict(self, state: Spec) -> None:
        self.at = state["at"]


class Order:
    """A sampler that draws when a pass begins; with a batch size, a batch sampler."""

    def __init__(self, size: int, of_python: bool, batch: int | None, drop_last: bool) -> None:
        self.size, self.of_python, self.batch_size, self.drop_last = (
            *(size, of_python, batch),
            drop_last,
        )

    def __len__(self) -> int:
        batch = self.batch_size or 1
        return self.size // batch if self.drop_last else -(-self.size // batch)

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(self.size).tolist()
        if self.of_python:
            order = random.sample(range(self.size), self.size)
        if self.batch_size is None:
            return iter(order)
        return (order[i * self.batch_size :][: self.batch_size] for i in range(len(self)))


def loader_of(spec: Spec, seed: int) -> Any:
    """Return a loader; its own generator begins with a seed."""
    size, batch, sampler, workers = (spec[key] for key in ("size", "batch", "sampler", "workers"))
    samples = Numbered(size, spec["augmentation"])
    options: Spec = {"num_workers": workers, "persistent_workers": spec["lasting"]}
    if str(sampler).startswith("own batches"):
        order = Order(size, "python" in sampler, batch, spec["drop_last"])
        return DataLoader(samples, batch_sampler=order, **options)
    options |= {"batch_size": batch, "drop_last": spec["drop_last"]}
    if spec["kind"] != "map":
        return DataLoader(
            (Stream if spec["kind"] == "stream" else StreamWithState)(samples), **options
        )
    own = torch.Generator().manual_seed(seed)
    if sampler in ("shuffled", "own generator"):
        return DataLoader(
            samples, shuffle=True, generator=own if "own" in sampler else None, **options
        )
    if sampler == "in order":
        return DataLoader(samples, **options)
    choices: dict[str, Callable[[], Any]] = {
        "weighted": lambda: WeightedRandomSampler([1.0] * size, size),
        "weighted, own generator": lambda: WeightedRandomSampler([1.0] * size, size, generator=own),
        "replacement": lambda: RandomSampler(samples, True, size, own),
        "own sampler": lambda: Order(size, True, None, False),
    }
    return DataLoader(samples, sampler=choices[sampler](), **options)


class Running(nn.Module):
    """A buffer that follows the inputs."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(inputs.detach().mean(0), 0.1)
        return inputs / 12 - self.mean / 24


class Steps:
    """Counts micro-batches, and keeps an average of the weights; kills this process."""

    def __init__(self, doom: Spec | None) -> None:
        self.done, self.doom, self.left, self.pid = 0, doom, 0, os.getpid()
        self.means: list[torch.Tensor] = []

    def state_dict(self) -> Spec:
        return {"done": self.done, "means": self.means}

    def load_state_dict(self, state: Spec) -> None:
        self.done = state["done"]
        for mean, saved in zip(self.means, state["means"], strict=True):
            mean.copy_(saved)

    def at(self, place: str) -> None:
        if self.doom is None or self.done < self.doom["step"]:
            return
        if place in (self.doom["place"], "at the end"):
            if place != "in a save":
                self.kill()
            if not self.left:
                self.left = self.doom["event"] + 1
                sys.addaudithook(self.count)

    def count(self, event: str, _: object) -> None:
        is_here = os.getpid() == self.pid  # and not in a loader worker
        if is_here and event in (
            "open",
            "os.rename",
            "os.mkdir",
            "os.remove",
            "os.link",
            "os.listdir",
        ):
            self.left -= 1
            if self.left == 0:
                self.kill()

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def train(spec: Spec, folder: Path, steps: Steps) -> None:
    """Train from the newest checkpoint to the end; write what each step saw when it is done."""
    seed = 7 if not checkpoints_in(folder / "checkpoints") else 99
    torch.use_deterministic_algorithms(spec["deterministic"])
    config = ("split_batches", "even_batches", "dispatch_batches")
    limit = spec["total_limit"]
    accelerator = Accelerator(
        cpu=True,
        seed=spec["seed"],
        strategy=spec["strategy"],
        mixed_precision="bf16" if spec["precision"] == "bf16" else "no",
        gradient_accumulation_steps=spec["accumulation"],
        dataloader_config=DataLoaderConfiguration(
            use_seedable_sampler=spec["seedable"], **{key: spec[key] for key in config}
        ),
        project_config=ProjectConfiguration(
            folder, automatic_checkpoint_naming=True, total_limit=limit
        ),
    )
    if spec["precision"] == "fp16":  # which the constructor refuses on CPUs
        scale = GradScalerKwargs(init_scale=2.0**20, growth_interval=3)
        accelerator.parts.training.precision = Fp16().set_up(CPU, PrecisionSettings(scaler=scale))
    if spec["seed"] is None:
        set_seed(seed, device_specific=spec["device_specific"])
    blocks = [
        nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(spec["dropout"])) for _ in range(2)
    ]
    model: Any = nn.Sequential(Running(), nn.Linear(3, 8), *blocks, nn.Linear(8, 1))
    of_class = getattr(torch.optim, spec["optimizer"])
    groups: Any = list(model.parameters())
    if spec["groups"]:
        groups = [{"params": groups[::2]}, {"params": groups[1::2], "lr": 0.02}]
    optimizer: Any = of_class(groups, lr=0.01, **spec["options"])
    schedule: Any = SCHEDULES[spec["schedule"]](optimizer) if spec["schedule"] else None
    made = [
        each and loader_of(each, seed)
        for each in (spec["train"], spec["second"], spec["evaluation"])
    ]
    loaders: list[Any] = [None if x is None else accelerator.prepare(x) for x in made]
    loader, second, evaluation = loaders
    model, optimizer = accelerator.prepare(model, optimizer)
    schedule = schedule and accelerator.prepare(schedule)
    if spec["ema"]:
        steps.means = [p.detach().clone() for p in model.parameters()]
    accelerator.register_for_checkpointing(steps)
    run = accelerator.resume()
    rank = accelerator.process_index
    log = os.open(folder / f"steps-{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    others: Any = iter([] if second is None else second)
    for epoch in range(run.epoch, EPOCHS):
        for batch in loader:
            steps.at("before")
            seen = [epoch, batch[:, 0].tolist(), batch[:, 2].tolist()]
            if second is not None:
                other = next(others, None)
                if other is None:
                    others = iter(second)
                    other = next(others)
                seen += [other[:, 0].tolist(), other[:, 2].tolist()]
                batch = torch.cat([batch, other])
            with accelerator.accumulate(model):
                noise = torch.randn(()) * random.random() if spec["draws_in_the_loop"] else 0.0
                loss = (model(batch + noise) - batch[:, 1:2]).square().mean()
                accelerator.backward(loss)
                steps.at("after backward")
                if spec["clip"] and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                if schedule and "Plateau" in spec["schedule"]:
                    schedule.step(accelerator.reduce(loss.detach(), "mean"))
                elif schedule:
                    schedule.step()
                optimizer.zero_grad()
            if steps.means:
                torch._foreach_lerp_(steps.means, [p.detach() for p in model.parameters()], 0.1)
            steps.done += 1
            interval = spec["evaluated_every"]
            is_evaluated = loader.end_of_dataloader
            if interval != "epoch":
                is_evaluated = steps.done % interval == 0
            if evaluation is not None and is_evaluated:
                model.eval()
                for inputs in evaluation:
                    with torch.no_grad():
                        seen.append(model(inputs).sum().item().hex())
                    seen.append(accelerator.gather_for_metrics(inputs[:, 0]).tolist())
                model.train()
            rates = [group["lr"] for group in optimizer.param_groups]
            seen += [loss.item().hex(), [float(rate).hex() for rate in rates], drawn()]
            os.write(log, (json.dumps([steps.done, *seen]) + "\n").encode())
            steps.at("after")
            steps.at("in a save")
            if spec["save"] == "checkpoint":
                accelerator.checkpoint(every=spec["every"], wait=spec["wait"])
            elif steps.done % spec["every"] == 0:
                at_once = spec["save"] == "checkpoint at once"
                (accelerator.checkpoint if at_once else accelerator.save_state)(wait=spec["wait"])
            steps.at("saved")
    steps.at("at the end")
    end = {
        "model": plain(model.state_dict()),
        "optimizer": plain(optimizer.state_dict()),
        "schedule": plain(schedule and schedule.state_dict()),
        "precision": plain(accelerator.parts.training.precision.state_dict()),
        "average": plain(steps.means),
        "generators": drawn(),
    }
    os.write(log, (json.dumps([steps.done + 1, end]) + "\n").encode())
    accelerator.end_training()


def drawn() -> dict[str, str]:
    """Return what stands for the states of the global generators."""
    states = generator_states(CPU).items()
    return {name: sha1(repr(plain(state)).encode()).hexdigest()[:8] for name, state in states}


def plain(value: Any) -> Any:
    """Return JSON in which all bits of a value are."""
    if isinstance(value, torch.distributed.tensor.DTensor):
        value = value.to_local()
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), repr(value.tolist())]
    if isinstance(value, dict):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return value if value is None or isinstance(value, int | str) else repr(value)


def attempt(spec: Spec, folder: Path, doom: Spec | None) -> None:
    """Fork the ranks, and wait for their end: by a kill of one of them, or of their own accord."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    pids = {}
    for rank in range(spec["ranks"]):
        is_doomed = doom is not None and rank == doom["rank"]
        pid = os.fork()
        if pid == 0:
            run_and_exit(spec, folder, rank, port, Steps(doom if is_doomed else None))
        pids[pid] = rank
    codes: list[int] = []
    while pids:  # those that a killed rank was talking to may end before it, with an error
        pid, status = os.wait()
        if pids.pop(pid, None) is not None:  # no worker, adopted
            codes.append(os.waitstatus_to_exitcode(status))
            if codes[-1] == -signal.SIGKILL or (codes[-1] and doom is None):
                for other in pids:
                    os.kill(other, signal.SIGKILL)
    terminate_descendants(0)
    if (-signal.SIGKILL not in codes) if doom else any(codes):
        raise RuntimeError(f"exit codes {codes}\n{(folder / 'output').read_text()[-4000:]}")


def run_and_exit(spec: Spec, folder: Path, rank: int, port: int, steps: Steps) -> None:
    output = os.open(folder / "output", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    if spec["ranks"] > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
        os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(spec["ranks"]))
        os.environ["MASTER_PORT"] = str(port)
    code = 1
    try:
        train(spec, folder, steps)
        code = 0
    except BaseException:  # noqa: BLE001 - a forked rank must not go on as this process
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def seen_in(spec: Spec, folder: Path) -> list[dict[int, list[str]]]:
    """Return for each rank what all attempts have seen, by step."""
    ranks: list[dict[int, list[str]]] = []
    for rank in range(spec["ranks"]):
        steps: dict[int, list[str]] = {}
        for line in (folder / f"steps-{rank}").read_text().splitlines():
            known = steps.setdefault(json.loads(line)[0], [])
            known += [] if line in known else [line]
        ranks.append(steps)
    return ranks


def difference(spec: Spec, folder: Path) -> str | None:
    """Train whole and cut; return what differs first."""
    whole, cut = folder / "whole", folder / "cut"
    for loop in (whole, cut):
        loop.mkdir()
    attempt(spec, whole, None)
    expected = seen_in(spec, whole)
    num_steps = len(expected[0]) - 1
    least = 0.0
    for doom in spec["cuts"]:  # each later than the one before it
        least += (1 - least) * doom["part"]
        attempt(spec, cut, doom | {"step": int(least * num_steps)})
    attempt(spec, cut, None)
    for rank, (steps, others) in enumerate(zip(expected, seen_in(spec, cut), strict=True)):
        for step in sorted({*steps, *others}):
            if steps.get(step) != others.get(step):
                lines = [*(steps.get(step) or ()), "but cut:", *(others.get(step) or ())]
                return "\n".join([f"rank {rank}, step {step} of {num_steps}:", *lines])[:20000]
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description="Train as seeds say, whole and cut.")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--trials", type=int, default=1)
    parsed = parser.parse_args()
    seeds = range(parsed.first, parsed.first + parsed.trials)
    torch.set_num_threads(1)
    torch.optim.AdamW([torch.zeros(1)])  # imports what every rank would import for its own
    adopt_orphans()
    begun, failed = time.monotonic(), 0
    for seed in seeds:
        spec = described(seed)
        tempfile.tempdir = None
        with tempfile.TemporaryDirectory(prefix="headway-training-") as folder:
            tempfile.tempdir = folder  # for what killed ranks leave
            try:
                problem = difference(spec, Path(folder))
            except Exception as error:  # noqa: BLE001 - any is the trial's
                problem = f"{type(error).__name__}: {error}"
        if problem is not None:
            failed += 1
            print(f"seed {seed}: {json.dumps(spec)}\n{problem}")
            print(f"alone: python -m tests.checkpoint.trainings --first {seed}", flush=True)
    print(f"{len(seeds)} trials, {failed} differed, {time.monotonic() - begun:.0f} s")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
