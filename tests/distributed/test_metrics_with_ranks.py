"""Metrics of random evaluations on one to four real ranks: each sample counts once, in order."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from headway import Accelerator
from headway.data.configuration import DataLoaderConfiguration
from tests.data.streams import SizedStream
from tests.distributed.in_ranks import RANK, WORLD, marks, of_all_ranks, with_ranks
from tests.waiting import IS_LONG

pytestmark = marks(__name__)

Numbers: Any = range  # a data set that gives each index
UNEVEN = {"even_batches": False}
MODES: list[dict[str, Any]] = [
    *({}, {}, {"split_batches": True}, {"dispatch_batches": True}, {"already_sharded": True}),
    *(UNEVEN, {"split_batches": True, **UNEVEN}, {"dispatch_batches": True, **UNEVEN}),
    {"dispatch_batches": True, "split_batches": True},
]


class Loops(DataLoader[Any]):
    def __iter__(self) -> Any:
        yield from super().__iter__()


@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


class Evaluation:
    """One pass over a test set, whose results are gathered in one form after each batch."""

    def __init__(self, seed: int) -> None:
        drawn = random.Random(seed)
        self.config = drawn.choice(MODES)
        self.num_samples, self.size = drawn.randint(1, 40), drawn.randint(1, 8)
        if "already_sharded" in self.config:
            self.num_samples += 2  # each rank has some
        self.form = drawn.choice([*FORMS])
        if self.form in ("twice", "tokens", "losses") and self.num_samples < self.size * WORLD:
            self.num_samples += self.size * WORLD  # full batches tell how many there are for each
        self.is_stream, self.is_inside = drawn.random() < 0.3, drawn.random() < 0.3
        self.has_own_iter = drawn.random() < 0.2 and self.config in ({}, UNEVEN)
        may_drop = not self.has_own_iter and not {*UNEVEN, "already_sharded"} & {*self.config}
        self.drops_last = drawn.random() < 0.2 and may_drop
        self.every = drawn.choice([1, 2, 3, 10])  # batches for a loss for the log
        self.gather: Any = None

    @property
    def is_uneven(self) -> bool:
        return "even_batches" in self.config

    def loader(self) -> Any:
        data: Any = Numbers(self.num_samples)
        if "already_sharded" in self.config:
            data = data[RANK::WORLD]
        size = self.size * (WORLD if "split_batches" in self.config else 1)
        kind = Loops if self.has_own_iter else DataLoader
        data = SizedStream(data) if self.is_stream else data
        return kind(data, batch_size=size, drop_last=self.drops_last)

    def expected(self) -> list[int]:
        dropped = self.num_samples % (self.size * WORLD) if self.drops_last else 0
        return [*range(self.num_samples - dropped)]

    def run(self) -> list[Any]:
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**self.config))
        self.gather = accelerator.gather_for_metrics
        if not self.is_inside or self.is_uneven:
            return self.results(accelerator)
        for batch in Accelerator().prepare(DataLoader(Numbers(80 * WORLD), batch_size=40)):
            results = self.results(accelerator)
            losses = self.gather(batch.float())
            assert len(losses) == 40 * WORLD
            break
        return results

    def results(self, accelerator: Accelerator) -> list[Any]:
        given, found, ends = [], [], []
        loader = accelerator.prepare(self.loader())
        for step, batch in enumerate(loader):
            ends.append(loader.end_of_dataloader)
            if step % self.every == 0 and not self.is_uneven:
                assert len(self.gather(batch.float().mean())) == WORLD
            if self.form == "after":
                given += batch.tolist()
            else:
                found += FORMS[self.form](self, batch)
        assert len(ends) == len(loader) or "already_sharded" in self.config  # with others' repeats
        if not self.is_uneven:  # where a rank may have no part of the last round
            assert ends == [False] * (len(ends) - 1) + [True] * bool(ends)
        if self.form == "after":
            tensors, texts = self.gather(
                (torch.tensor(given, dtype=torch.int64), ([*map(str, given)],))
            )
            assert [*map(str, tensors.tolist())] == texts[0]
            found = tensors.tolist()
        return found


def as_output(evaluation: Evaluation, batch: torch.Tensor) -> list[int]:
    output = evaluation.gather(Output(torch.stack([batch, -batch], 1)))
    assert output.loss is None
    return output.logits[:, 0].tolist()  # type: ignore[no-any-return]


def as_lists(evaluation: Evaluation, batch: torch.Tensor) -> list[int]:
    texts = [f"text {x}" for x in batch.tolist()]
    predictions, references = evaluation.gather((texts, tuple(texts)))
    assert predictions == references
    return [int(prediction.split()[1]) for prediction in predictions]


def as_tokens(evaluation: Evaluation, batch: torch.Tensor) -> list[int]:
    """As many rows for a sample as the rank's batch needs, in one dimension."""
    length = 2 + int(batch.max()) % 3
    tokens = evaluation.gather((4 * batch[:, None] + torch.arange(length)).flatten()).tolist()
    assert len({*tokens}) == len(tokens)
    assert {token - 1 for token in tokens if token % 4} <= {*tokens}
    return [token // 4 for token in tokens if token % 4 == 0]


def as_two_rows(evaluation: Evaluation, batch: torch.Tensor) -> list[int]:
    rows = evaluation.gather(torch.stack([batch, batch + 0.5], 1).flatten()).tolist()
    assert rows[1::2] == [row + 0.5 for row in rows[::2]]
    return rows[::2]  # type: ignore[no-any-return]


def as_losses(evaluation: Evaluation, batch: torch.Tensor) -> list[int]:
    """In the idiom of transformers' run_clm, beside predictions."""
    losses = evaluation.gather(torch.tensor(0.5).repeat(evaluation.size))
    found = evaluation.gather({"x": [batch]})["x"][0].tolist()
    assert len(losses) == len(found)
    return found  # type: ignore[no-any-return]


FORMS: dict[str, Any] = {
    "tensor": lambda evaluation, batch: evaluation.gather(batch).tolist(),
    "twice": as_two_rows,
    "objects": lambda evaluation, batch: evaluation.gather([*batch], use_gather_object=True),
    "output": as_output,
    "lists": as_lists,
    "tokens": as_tokens,
    "losses": as_losses,
    "after": None,
}


def differing(evaluation: Evaluation) -> str:
    """Return what is wrong with the results of an evaluation; empty if nothing is."""
    found, expected = [*map(int, evaluation.run())], evaluation.expected()
    if evaluation.form == "after" or "already_sharded" in evaluation.config:
        found.sort()  # those of each rank come together
    is_short = evaluation.is_uneven and RANK and evaluation.form != "after"  # has left the loop
    if found == (expected[: len(found)] if is_short else expected):
        return ""
    return f"{vars(evaluation)}: {found}"


@with_ranks(1, 3, long=(2, 4))
def test_random_evaluations_give_what_one_process_gives() -> None:
    Accelerator()  # has the ranks form their group
    new = of_all_ranks(random.SystemRandom().randrange(10**6))[0]
    seeds = [*range(40), *range(new, new + (7000 if IS_LONG else 33))]
    wrong = [text for seed in seeds if (text := differing(Evaluation(seed)))]
    assert not wrong, f"{len(wrong)} of {len(seeds)} evaluations are wrong:\n" + "\n".join(wrong)
