"""What scripts and tests of others rely on in Accelerate: classes of errors, warnings, state."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from headway import compat
from headway.compat import Accelerator
from headway.compat.data_loader import DataLoaderDispatcher, DataLoaderShard, SkipDataLoader
from headway.compat.utils import gather, pad_across_processes, save, send_to_device
from headway.data.loader import PreparedDataLoader
from headway.data.script_loaders import as_plain
from headway.errors import CheckpointError, UsageError
from headway.tracking import (
    LOGGER_TYPE_TO_CLASS,
    GeneralTracker,
    TensorBoardTracker,
    register_tracker_class,
)
from headway.utils import find_batch_size, reduce

pytestmark = [  # of torch
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]


class Recorder(GeneralTracker):
    name = "recorder"
    requires_logging_directory = True
    tracker = None

    def __init__(self, run: str, folder: str) -> None:
        super().__init__()
        self.run, self.folder = run, folder


@pytest.fixture
def trackers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "recorder", Recorder)
    del LOGGER_TYPE_TO_CLASS["recorder"]  # removed again after the test


def test_the_classes_of_trackers_are_found_by_name_also_registered_ones(trackers: None) -> None:
    assert LOGGER_TYPE_TO_CLASS["tensorboard"] is TensorBoardTracker
    assert compat.accelerator.LOGGER_TYPE_TO_CLASS is LOGGER_TYPE_TO_CLASS
    register_tracker_class(Recorder)
    assert LOGGER_TYPE_TO_CLASS["recorder"] is Recorder
    with pytest.warns(UserWarning, match="'recorder' was Recorder"):
        register_tracker_class(type("Other", (Recorder,), {}))


def test_a_tracker_that_needs_a_folder_gets_one_or_says_so(trackers: None, tmp_path: Path) -> None:
    register_tracker_class(Recorder)
    with pytest.raises(ValueError, match="'recorder' needs a folder"):
        Accelerator(cpu=True, log_with="recorder")
    accelerator = Accelerator(cpu=True, log_with="recorder", project_dir=str(tmp_path))
    accelerator.init_trackers("run")
    tracker: Any = accelerator.get_tracker("recorder")
    assert (tracker.run, tracker.folder) == ("run", str(tmp_path))
    accelerator.end_training()


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        (ValueError, lambda accelerator: accelerator.register_for_checkpointing(torch.ones(1))),
        (ValueError, lambda _: Accelerator(mixed_precision="fp7")),
        (ValueError, lambda accelerator: accelerator.load_state("no such folder")),
        (ValueError, lambda _: register_tracker_class(cast(Any, dict))),
        (TypeError, lambda _: gather(["a text"])),
        (TypeError, lambda _: find_batch_size({"x": "a text"})),
        (ValueError, lambda _: reduce(torch.ones(1), cast(Any, "product"))),
        (AttributeError, lambda accelerator: accelerator.state.nothing),
    ],
)
def test_errors_are_also_of_the_class_that_accelerate_raises(
    kind: type[Exception], call: Callable[[Any], Any]
) -> None:
    with pytest.raises(kind):
        call(Accelerator(cpu=True))


def test_all_objects_that_cannot_be_registered_are_named_by_their_number() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ValueError, match=r"index 0 \(Tensor\), Item at index 2 \(int\): missing"):
        accelerator.register_for_checkpointing(torch.ones(1), torch.nn.Linear(1, 1), 1)


def test_a_script_may_say_itself_when_gradients_are_due() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    for owner in (accelerator, accelerator.gradient_state):
        owner.sync_gradients = False
        assert not accelerator.sync_gradients
        owner.sync_gradients = True
        assert accelerator.gradient_state.sync_gradients
    accelerator.rng_types = ["torch"]
    assert accelerator.rng_types == ["torch"]


def test_a_schedule_is_saved_and_restored(tmp_path: Path) -> None:
    accelerator, weight = Accelerator(cpu=True), torch.nn.Parameter(torch.ones(1))
    own = torch.optim.SGD([weight], lr=8.0)
    schedule: Any = torch.optim.lr_scheduler.ExponentialLR(own, 0.5)
    optimizer, schedule = accelerator.prepare(own, schedule)
    accelerator.save_state(tmp_path / "saved")
    optimizer.step()
    schedule.step()
    accelerator.load_state(tmp_path / "saved")
    assert schedule.get_last_lr() == [8.0]


def test_a_loader_that_nobody_has_any_more_is_no_active_one() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(4))))
    batches = iter(loader)
    next(batches)
    assert accelerator.gradient_state.active_dataloader is loader
    accelerator.free_memory()
    del loader, batches
    gc.collect()
    assert accelerator.gradient_state.active_dataloader is None


def test_names_of_a_shared_tensor_that_are_not_written_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weight = torch.ones(2)
    with caplog.at_level(logging.WARNING):
        save({"a": weight, "b": weight}, tmp_path / "model.safetensors", safe_serialization=True)
    assert "['b']" in caplog.text


@pytest.mark.parametrize("function", [send_to_device, gather, reduce, pad_across_processes])
def test_operations_compile_without_a_break_in_the_graph(function: Callable[..., Any]) -> None:
    Accelerator(cpu=True)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    data: dict[str, Any] = {"a": torch.ones(2, 3), "b": [torch.zeros(1)]}
    arguments = ("cpu",) if function is send_to_device else ()
    assert torch.equal(compiled(data, *arguments)["a"], data["a"])
    assert torch.equal(compiled(data["a"], *arguments), data["a"])


def test_a_sharded_model_that_was_saved_whole_is_refused_with_the_reason(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    with pytest.raises(CheckpointError, match="from a run without sharding"):
        compat.utils.load_fsdp_model(None, accelerator, model, tmp_path)


# ---------------------------------------------------------------------- where a run resumes


def begun(seed: int, folder: Path) -> tuple[Accelerator, Any]:
    torch.manual_seed(seed)
    config = compat.utils.DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, project_dir=str(folder), dataloader_config=config)
    numbers: Any = range(12)
    return accelerator, accelerator.prepare(DataLoader(numbers, batch_size=2, shuffle=True))


def test_the_script_skips_in_the_order_of_the_epoch_that_a_checkpoint_is_in(tmp_path: Path) -> None:
    accelerator, loader = begun(1, tmp_path)
    orders: list[list[list[int]]] = []
    for epoch in range(2):
        orders.append([])
        for batch in loader:
            orders[-1].append(batch.tolist())
            if (epoch, len(orders[-1])) == (1, 2):
                folder = accelerator.checkpoint()
                assert folder is not None
                assert Path(folder).is_dir(), "saved at once"
    assert orders[0] != orders[1]
    accelerator.end_training()
    accelerator, loader = begun(2, tmp_path)
    accelerator.load_state(folder)
    assert [batch.tolist() for batch in accelerator.skip_first_batches(loader, 2)] == orders[1][2:]
    assert [batch.tolist() for batch in loader] == orders[1], "without skipping the epoch restarts"
    accelerator.checkpoint()
    accelerator.end_training()


def test_resume_is_refused_as_the_position_is_left_to_the_script(tmp_path: Path) -> None:
    accelerator, loader = begun(1, tmp_path)
    with pytest.raises(UsageError, match="from headway import Accelerator"):
        accelerator.resume()
    native = compat.accelerator.native.Accelerator(cpu=True, project_dir=str(tmp_path / "native"))
    assert native.prepare(loader) is loader
    with pytest.raises(UsageError, match="skip_first_batches"):
        native.resume()


# ---------------------------------------------------------------------- torchdata


@pytest.fixture
def stateful() -> Any:
    return pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader


def left_after(loader: Any, count: int) -> tuple[dict[str, Any], list[Any]]:
    """Return the state after so many batches, and the batches that follow."""
    batches = iter(loader)
    for _ in range(count):
        next(batches)
    return loader.state_dict(), [batch.tolist() for batch in batches]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.processes)])
@pytest.mark.parametrize("kind", [DataLoaderShard, DataLoaderDispatcher, SkipDataLoader])
def test_a_loader_with_torchdatas_state_goes_on_by_it(
    kind: Any, workers: int, stateful: Any
) -> None:
    def options() -> dict[str, Any]:
        seed = torch.Generator().manual_seed(1)
        return {"batch_size": 4, "num_workers": workers, "generator": seed}

    def make() -> Any:
        return kind(range(16), use_stateful_dataloader=True, **options())

    loader = make()
    assert isinstance(loader, stateful)
    assert isinstance(loader, kind)
    state, rest = left_after(loader, 2)
    assert rest == [[8, 9, 10, 11], [12, 13, 14, 15]]
    reference = stateful(range(16), **options())
    assert state == left_after(reference, 2)[0]
    other = make()
    other.load_state_dict(state)
    assert [batch.tolist() for batch in other] == rest
    assert other.end_of_dataloader
    assert [batch.tolist() for batch in other] == left_after(make(), 0)[1], "a whole pass again"


@pytest.mark.parametrize("is_set_later", [False, True])
@pytest.mark.parametrize("make", [Accelerator, compat.accelerator.native.Accelerator])
def test_torchdatas_loader_is_prepared_and_its_place_saved(
    make: Any, is_set_later: bool, stateful: Any, tmp_path: Path
) -> None:
    config = compat.utils.DataLoaderConfiguration(use_stateful_dataloader=True)

    def begun() -> tuple[Any, Any, Iterator[Any]]:
        torch.manual_seed(1)
        accelerator = make(cpu=True, dataloader_config=None if is_set_later else config)
        if is_set_later:
            accelerator.dataloader_config = config
        loader = accelerator.prepare(stateful(range(24), batch_size=4, shuffle=True))
        assert isinstance(loader, stateful) == (make is Accelerator), "as scripts ask it"
        return accelerator, loader, iter(loader)

    accelerator, loader, batches = begun()
    given = [next(batches).tolist() for _ in range(3)]
    accelerator.save_state(tmp_path / "saved")
    rest = [batch.tolist() for batch in batches]
    assert sorted(chain(*given, *rest)) == [*range(24)]
    accelerator, loader, _ = begun()
    accelerator.load_state(tmp_path / "saved")
    assert [batch.tolist() for batch in loader] == rest


@pytest.mark.parametrize("rank", [0, 1])
def test_torchdatas_loader_is_shared_out_like_any_other(rank: int, stateful: Any) -> None:
    shared = PreparedDataLoader(as_plain(stateful(range(10), batch_size=2)), rank, 2)
    usual = PreparedDataLoader(DataLoader(range(10), batch_size=2), rank, 2)  # type: ignore[arg-type]
    assert [batch.tolist() for batch in shared] == [batch.tolist() for batch in usual]


def test_states_are_for_the_loaders_and_ranks_that_have_them(
    stateful: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not hasattr(DataLoaderShard(range(4)), "load_state_dict")
    config = compat.utils.DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    for _ in accelerator.prepare(DataLoader(TensorDataset(torch.arange(4)))):
        pass
    accelerator.save_state(tmp_path / "saved")
    monkeypatch.setattr("headway.checkpoint.training_state.rank_and_size", lambda: (0, 2))
    with pytest.raises(CheckpointError, match="ranks, with use_stateful_dataloader: 1 in"):
        accelerator.load_state(tmp_path / "saved")
    monkeypatch.setitem(sys.modules, "torchdata.stateful_dataloader", None)
    with pytest.raises(UsageError, match="torchdata, which is not installed"):
        DataLoaderShard(range(4), use_stateful_dataloader=True)


def test_a_state_that_a_loader_had_before_it_is_prepared_is_not_lost(stateful: Any) -> None:
    loader = stateful(range(8))
    loader.load_state_dict(left_after(stateful(range(8)), 3)[0])
    with pytest.raises(ValueError, match="before it was prepared"):
        Accelerator(cpu=True).prepare(loader)
