"""Batches of every kind arrive as they were collated, on the device."""

from __future__ import annotations

import time
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from headway import Accelerator
from headway.data.batch_sources import samples_in
from headway.data.loader import PreparedDataLoader
from headway.distributed.nested import for_each_tensor

META = torch.device("meta")
Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Example:
    x: torch.Tensor
    name: str


def first_batch(collate: Any, **options: Any) -> Any:
    loader: Any = DataLoader(range(4), batch_size=2, collate_fn=collate, **options)  # type: ignore[arg-type]
    return next(iter(PreparedDataLoader(loader, 1, 2, device=META)))


def test_tuples_and_mappings_keep_their_kind_and_their_text() -> None:
    batch = first_batch(lambda rows: Pair(torch.tensor(rows), {"text": [str(row) for row in rows]}))
    assert type(batch) is Pair
    assert (batch.x.device, batch.y) == (META, {"text": ["2", "3"]})


def test_dataclasses_are_moved_field_by_field_and_the_collated_one_is_left_alone() -> None:
    collated: list[Example] = []

    def collate(rows: list[int]) -> Example:
        collated.append(Example(torch.tensor(rows), "rows"))
        return collated[-1]

    batch = first_batch(collate)
    assert (type(batch), batch.x.device, batch.name) == (Example, META, "rows")
    assert collated[0].x.device.type == "cpu"


def test_batches_of_transformers_keep_their_kind() -> None:
    pytest.importorskip("transformers")
    from transformers import BatchEncoding
    from transformers.modeling_outputs import SequenceClassifierOutput

    batch = first_batch(lambda rows: BatchEncoding({"input_ids": torch.tensor(rows)}))
    assert (type(batch), batch.input_ids.device) == (BatchEncoding, META)
    batch = first_batch(lambda rows: SequenceClassifierOutput(logits=torch.tensor(rows)))
    assert (type(batch), batch.logits.device, batch.loss) == (SequenceClassifierOutput, META, None)
    doubled = for_each_tensor(lambda one: one * 2, SequenceClassifierOutput(logits=torch.ones(2)))
    assert type(doubled) is SequenceClassifierOutput
    assert torch.equal(doubled["logits"], torch.full((2,), 2.0))


def test_dataclasses_are_gathered() -> None:
    accelerator = Accelerator(cpu=True)
    found = accelerator.gather(Pair(torch.ones(2), torch.zeros(())))
    assert found.y.shape == (1,)

    @dataclass
    class Result:
        loss: torch.Tensor

    assert accelerator.gather_for_metrics(Result(torch.ones(2))).loss.tolist() == [1, 1]


def test_samples_of_dataclasses_are_counted_so_that_repeats_can_be_left_out() -> None:
    assert samples_in({"texts": ["a", "b"], "example": Example(torch.ones(2, 5), "name")}) == 2


def test_loaders_side_by_side_and_inside_each_other_all_come_to_their_ends() -> None:
    data: Any = torch.arange(6)
    a, b = (PreparedDataLoader(DataLoader(data, batch_size=size)) for size in (2, 3))
    pairs = [(ours.tolist(), other.tolist()) for ours, other in zip(a, b, strict=False)]
    assert pairs == [([0, 1], [0, 1, 2]), ([2, 3], [3, 4, 5])]
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=10)
    ends = []
    for _ in a:
        for _ in b:
            with accelerator.accumulate():
                ends.append(accelerator.sync_gradients)
    assert ends == [False, True] * 3


def test_torchs_label_of_a_batch_is_there_while_a_profiler_is_active() -> None:
    """Relies on torch's private `_next_data` of loaders' iterators, and on `_profiler_enabled`."""
    loader: Any = DataLoader(range(8), batch_size=2)  # type: ignore[arg-type]
    batches = iter(PreparedDataLoader(loader))
    seen = [next(batches).tolist()]
    with torch.profiler.profile() as profiler:
        seen.append(next(batches).tolist())
    seen += [batch.tolist() for batch in batches]
    assert seen == [[0, 1], [2, 3], [4, 5], [6, 7]]
    labels = [(row.key, row.count) for row in profiler.key_averages() if "Loader" in row.key]
    assert labels == [("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 1)]


class SlowStart(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        time.sleep(0.5 * (index == 0))
        return index


@pytest.mark.processes
def test_batches_stay_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    loader = DataLoader(SlowStart(), batch_size=2, num_workers=2, in_order=False)
    assert [batch.tolist() for batch in PreparedDataLoader(loader)] == [[0, 1], [2, 3]]
    assert "in_order=False of a DataLoader has no effect" in capsys.readouterr().err
