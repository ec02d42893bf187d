"""The batch sizes of loaders follow from the number of samples in an optimizer step."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler  # noqa: E402

from headway import Accelerator, DataLoaderConfiguration  # noqa: E402
from headway.compat import Accelerator as CompatAccelerator  # noqa: E402
from headway.data.configuration import micro_batch_of  # noqa: E402
from headway.errors import CheckpointError, UsageError  # noqa: E402
from headway.ipc.progress import process_progress  # noqa: E402
from tests.data.streams import Stream  # noqa: E402


class Uneven:
    """A batch sampler with batches of its own."""

    def __iter__(self) -> Any:
        return iter([[0, 1, 2], [3]])

    def __len__(self) -> int:
        return 2


def loaders() -> list[Any]:
    numbers: Any = range(12)
    of_two = BatchSampler(SequentialSampler(numbers), 2, drop_last=False)
    return [
        DataLoader(numbers, batch_size=5),
        DataLoader(numbers, batch_sampler=of_two),
        DataLoader(Stream(numbers), batch_size=2),
        DataLoader(numbers, batch_size=4),
    ]


def test_loaders_get_the_samples_of_a_micro_batch() -> None:
    accelerator = Accelerator(cpu=True, global_batch_size=12, gradient_accumulation_steps=3)
    for loader in loaders():
        prepared = accelerator.prepare(loader)
        assert [len(batch) for batch in prepared] == [4, 4, 4]
        assert prepared.total_batch_size == 4
        if not isinstance(loader.dataset, Stream):
            assert len(prepared) == 3
    ten: Any = range(10)
    assert accelerator.prepare(DataLoader(ten, batch_size=4)).remainder == 2


def test_a_micro_batch_of_all_ranks_can_be_divided_among_them() -> None:
    assert micro_batch_of(24, num_ranks=4, steps=1) == 24
    assert micro_batch_of(24, num_ranks=2, steps=3) == 8
    with pytest.raises(UsageError, match=r"(?s)=10 is not divisible by 12, .*=12,"):
        micro_batch_of(10, num_ranks=4, steps=3)


@pytest.mark.parametrize("maker", [Accelerator, CompatAccelerator])
def test_samples_are_counted_though_batches_have_sizes_of_their_own(
    maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = process_progress()
    monkeypatch.setattr(progress, "is_watched", True)
    loader = maker(cpu=True).prepare(DataLoader(torch.arange(4), batch_sampler=Uneven()))
    assert [progress.clock.batch_samples for _ in loader] == [3, 1]


def test_batches_of_their_own_are_refused() -> None:
    accelerator = Accelerator(cpu=True, global_batch_size=4)
    for options in ({"batch_sampler": Uneven()}, {"batch_size": None}):
        with pytest.raises(UsageError, match="batches of 4 samples"):
            accelerator.prepare(DataLoader(range(12), **options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"global_batch_size": True},
        {"global_batch_size": 5, "gradient_accumulation_steps": 2},
        {"global_batch_size": 4, "dataloader_config": DataLoaderConfiguration(split_batches=True)},
    ],
    ids=str,
)
def test_what_cannot_be_obeyed_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="global_batch_size"):
        Accelerator(cpu=True, **options)


def test_the_accumulation_cannot_change_under_a_global_batch() -> None:
    accelerator = Accelerator(cpu=True, global_batch_size=12)
    accelerator.gradient_accumulation_steps = 1
    with pytest.raises(UsageError, match="set to 2"):
        accelerator.gradient_accumulation_steps = 2


@pytest.mark.parametrize("options", [{"seed": 1}, {"global_batch_size": 4}])
def test_loaders_of_accelerates_kind_refuse_both(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        CompatAccelerator(cpu=True, **options)


def save_in_an_epoch(folder: Any, **options: Any) -> None:
    accelerator = Accelerator(cpu=True, **options)
    for _ in accelerator.prepare(DataLoader(range(12), batch_size=3)):  # type: ignore[arg-type]
        with accelerator.accumulate():
            accelerator.save_state(folder)
        break


def load(folder: Any, **options: Any) -> list[Any]:
    accelerator = Accelerator(cpu=True, **options)
    loader = accelerator.prepare(DataLoader(range(12), batch_size=3))  # type: ignore[arg-type]
    accelerator.load_state(folder)
    return [batch.tolist() for batch in loader]


def test_an_epoch_goes_on_with_as_many_samples_in_a_step_or_not_at_all(tmp_path: Any) -> None:
    save_in_an_epoch(tmp_path / "a", global_batch_size=6)
    assert load(tmp_path / "a", global_batch_size=6) == [[6, 7, 8, 9, 10, 11]]
    split = load(tmp_path / "a", global_batch_size=6, gradient_accumulation_steps=2)
    assert split == [[6, 7, 8], [9, 10, 11]]
    for options in ({"global_batch_size": 4}, {}):
        with pytest.raises(
            CheckpointError, match=r"^the checkpoint does not match.* 6 in the .* [43] in this run"
        ):
            load(tmp_path / "a", **options)
    save_in_an_epoch(tmp_path / "b")
    with pytest.raises(
        CheckpointError, match=r"^the checkpoint does not match.* 3 in the .* 4 in this run"
    ):
        load(tmp_path / "b", global_batch_size=4)
    assert load(tmp_path / "b", gradient_accumulation_steps=2)[0] == [3, 4, 5]


def test_an_open_optimizer_step_goes_on_with_as_many_micro_batches_only(tmp_path: Any) -> None:
    save_in_an_epoch(tmp_path / "open", gradient_accumulation_steps=3)
    with pytest.raises(
        CheckpointError, match=r"^the checkpoint does not match.*: 3 in the .* 2 in this run"
    ):
        load(tmp_path / "open", gradient_accumulation_steps=2)
    assert load(tmp_path / "open", gradient_accumulation_steps=3)[0] == [3, 4, 5]
