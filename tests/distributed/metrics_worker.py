"""One rank of the tests of gather_for_metrics: writes which cases were wrong to FOLDER.

python tests/distributed/metrics_worker.py FOLDER all|tenth SEED
"""

from __future__ import annotations

import json
import random
import sys
from itertools import product
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from headway import Accelerator
from headway.data.configuration import DataLoaderConfiguration
from tests.distributed.loader_checks import Numbers, Stream
from tests.distributed.this_rank import FOLDER, RANK, WORLD

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "drop_last": {},
    "own __iter__": {},
    "uneven": {"even_batches": False},
    "split": {"split_batches": True},
    "split, uneven": {"split_batches": True, "even_batches": False},
    "dispatched": {"dispatch_batches": True},
    "dispatched, uneven": {"dispatch_batches": True, "even_batches": False},
    "dispatched, split": {"dispatch_batches": True, "split_batches": True},
    "own __iter__, split": {"split_batches": True},
    "own __iter__, uneven": {"even_batches": False},
}


class Case(NamedTuple):
    mode: str
    data: type[Any]
    n: int
    batch_size: int
    form: str


class Loops(DataLoader[Any]):
    def __iter__(self) -> Any:
        yield from super().__iter__()


def cases(choice: str, seed: int) -> list[Case]:
    """Return all cases, or a random tenth, each in a random mode; the same on every rank."""
    drawn = random.Random(seed)
    forms = ("tensor", "nested", "objects")
    every = list(product((Numbers, Stream), range(1, 41), range(1, 9)))
    if choice == "all":
        return [Case(mode, *one, drawn.choice(forms)) for mode in MODES for one in every]
    tenth = drawn.sample(every, len(every) // 10)
    return [Case(drawn.choice(list(MODES)), *one, drawn.choice(forms)) for one in tenth]


def gathered(accelerator: Accelerator, batch: torch.Tensor, form: str) -> list[int]:
    if form == "objects":
        return list(accelerator.gather_for_metrics(batch.tolist()))
    if form == "nested":
        return list(accelerator.gather_for_metrics({"x": [batch]})["x"][0].tolist())
    return list(accelerator.gather_for_metrics(batch).tolist())


def problem(accelerator: Accelerator, case: Case) -> str | None:
    """Return what is wrong with one epoch; None if nothing is."""
    config = MODES[case.mode]
    size = case.batch_size * (WORLD if "split_batches" in config else 1)
    kind = Loops if "__iter__" in case.mode else DataLoader
    drop_last = case.mode == "drop_last"
    loader = kind(case.data(case.n), batch_size=size, drop_last=drop_last)
    loader = accelerator.prepare(loader)
    mine: list[list[int]] = []
    seen: list[int] = []
    for batch in loader:
        mine.append(batch.tolist())
        seen += gathered(accelerator, batch, case.form)
    full = loader.total_batch_size
    wanted = case.n - case.n % full if drop_last else case.n
    is_uneven = config.get("even_batches") is False
    if seen != list(range(len(seen) if is_uneven and RANK else wanted)):
        return f"{case}: {seen}"
    if len(mine) != len(loader):
        return f"{case}: {len(mine)} batches, but the length is {len(loader)}"
    total = int(accelerator.reduce(torch.tensor(sum(map(len, mine)))))
    if is_uneven and total != case.n:
        return f"{case}: {total} samples on all ranks together"
    return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    accelerators = {
        mode: Accelerator(dataloader_config=DataLoaderConfiguration(**config))
        for mode, config in MODES.items()
    }
    wrong = []
    for case in cases(sys.argv[2], int(sys.argv[3])):
        if found := problem(accelerators[case.mode], case):
            wrong.append(found)
    (FOLDER / f"{WORLD}-{RANK}.json").write_text(json.dumps({"wrong": wrong}))
    accelerators["plain"].end_training()
