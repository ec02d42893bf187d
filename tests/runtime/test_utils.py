"""The functions of headway.utils return what those of Accelerate return."""

from __future__ import annotations

import os
import pickle
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZipFile

import pytest
import safetensors.torch
import torch

from headway import utils
from headway.errors import HeadwayError, UsageError
from headway.ipc.choices import PRECISIONS
from headway.ipc.origin import Layer
from headway.settings.profile import parse_profile


class Pair(NamedTuple):
    """A batch with names."""

    x: Any
    y: Any


BATCH = {
    "a": torch.arange(6.0).reshape(3, 2),
    "b": [torch.ones(3, dtype=torch.int64), (torch.zeros(3, 1), "text")],
    "c": Pair(torch.full((3, 2), 7, dtype=torch.bfloat16), torch.ones(3, dtype=torch.float16)),
}
TENSORS = {"a": BATCH["a"], "c": BATCH["c"]}
KINDS: list[Any] = [[], (), Pair(0, 0)]
CALLS: dict[str, Callable[[Any], Any]] = {
    "find_batch_size": lambda u: u.find_batch_size(BATCH),
    "listify": lambda u: u.listify(BATCH),
    "slice_tensors": lambda u: u.slice_tensors(BATCH, slice(1, 3)),
    "concatenate": lambda u: [
        u.concatenate([TENSORS, TENSORS, TENSORS]),
        u.concatenate([[BATCH["a"]], [BATCH["a"]]], dim=1),
        u.concatenate(["alone"]),
    ],
    "honor_type": lambda u: [u.honor_type(kind, iter((1, 2))) for kind in KINDS],
    "convert_to_fp32": lambda u: u.convert_to_fp32(BATCH),
    "convert_outputs_to_fp32": lambda u: u.convert_outputs_to_fp32(lambda x: {"x": x.half()})(
        BATCH["a"]
    ),
    "release_memory": lambda u: u.release_memory(object(), object()),
    "versions": lambda u: [
        u.compare_versions("numpy", ">=", "1.0"),
        u.compare_versions("safetensors", "<", "0.1.0"),
        u.is_torch_version(">=", "2.8"),
        u.is_torch_version("<", "2.8.0"),
    ],
    "precisions": lambda u: [str(u.PrecisionType("bf16")), u.PrecisionType.NO == "no"],
    "installed": lambda u: {
        name: bool(getattr(u, f"is_{name}_available")())
        for name in (
            *("bf16", "clearml", "comet_ml", "cuda", "datasets", "deepspeed", "mlflow", "mps"),
            *("npu", "peft", "rocm", "schedulefree", "tensorboard", "torch_xla", "trackio"),
            *("transformers", "wandb", "xpu"),
        )
    },
}


def same(one: Any, other: Any) -> bool:
    """Return whether two nested results are equal, in values, types and dtypes."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.equal(other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("name", CALLS)
def test_a_function_returns_what_that_of_accelerate_returns(name: str) -> None:
    theirs = pytest.importorskip("accelerate.utils")
    assert same(CALLS[name](utils), CALLS[name](theirs))


REFUSED: dict[str, tuple[type[Exception], Callable[[Any], Any]]] = {
    "an object without batch size": (TypeError, lambda u: u.find_batch_size({"x": "text"})),
    "an empty batch": (ValueError, lambda u: u.find_batch_size([])),
    "two texts joined": (TypeError, lambda u: u.concatenate(["a", "b"])),
    "an unknown operation": (ValueError, lambda u: u.compare_versions("numpy", "~", "1")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_accelerate_refuses_is_refused_as_the_same_kind_with_a_fix(name: str) -> None:
    theirs = pytest.importorskip("accelerate.utils")
    kind, call = REFUSED[name]
    with pytest.raises(kind):
        call(theirs)
    with pytest.raises(kind) as refusal:
        call(utils)
    assert isinstance(refusal.value, HeadwayError)


def test_mappings_with_arguments_of_their_own_can_be_listed() -> None:
    data: dict[str, Any] = defaultdict(list, {"x": torch.ones(2)})
    assert utils.listify(data) == {"x": [1, 1]}


def test_converted_outputs_can_be_pickled_and_taken_back() -> None:
    model = torch.nn.Linear(2, 2)
    model.forward = utils.convert_outputs_to_fp32(model.forward)  # type: ignore[method-assign]
    assert isinstance(pickle.loads(pickle.dumps(model)).forward, utils.ConvertOutputsToFp32)
    kept = utils.extract_model_from_parallel(model)
    assert isinstance(kept.forward, utils.ConvertOutputsToFp32)
    restored = utils.extract_model_from_parallel(model, keep_fp32_wrapper=False)
    assert not isinstance(restored.forward, utils.ConvertOutputsToFp32)


def test_a_model_is_taken_out_of_its_wrappers() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    wrapped = torch.nn.DataParallel(model)
    assert not utils.is_compiled_module(model)
    assert utils.extract_model_from_parallel(wrapped) is model
    compiled: Any = torch.compile(wrapped, backend="eager")
    assert utils.is_compiled_module(compiled)
    assert utils.has_compiled_regions(torch.nn.Sequential(compiled))
    assert not utils.has_compiled_regions(model)
    inside: Any = utils.extract_model_from_parallel(compiled)
    assert utils.is_compiled_module(inside)
    assert inside._orig_mod is model
    assert utils.extract_model_from_parallel(compiled, keep_torch_compile=False) is model
    nested = torch.nn.Sequential(torch.nn.DataParallel(torch.nn.DataParallel(model[0])))
    assert utils.extract_model_from_parallel(nested, recursive=True)[0] is model[0]  # type: ignore[index]
    assert not utils.is_peft_model(model)


def test_the_environment_is_patched_and_cleared_for_a_while() -> None:
    os.environ["HEADWAY_TEST_KEPT"] = "before"
    with suppress(KeyError), utils.patch_environment(headway_test_kept=1, headway_test_new=2):
        assert os.environ["HEADWAY_TEST_KEPT"] == "1"
        assert os.environ["HEADWAY_TEST_NEW"] == "2"
        raise KeyError
    assert os.environ.pop("HEADWAY_TEST_KEPT") == "before"
    assert "HEADWAY_TEST_NEW" not in os.environ
    before = dict(os.environ)
    with utils.clear_environment():
        assert not os.environ
        os.environ["HEADWAY_TEST_NEW"] = "1"
    assert os.environ == before


def test_a_bar_shows_on_the_first_rank_of_a_machine_only(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # a thread of tqdm's own
    monkeypatch.setattr(pytest.importorskip("tqdm.auto").tqdm, "monitor_interval", 0)
    assert list(utils.tqdm(range(3), desc="first")) == [0, 1, 2]
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    list(utils.tqdm(range(3), desc="second"))
    list(utils.tqdm(range(3), desc="every", main_process_only=False))
    shown = capfd.readouterr().err
    assert "first" in shown
    assert "second" not in shown
    assert "every" in shown


def test_generators_of_one_rank_stay_as_they_are() -> None:
    before = torch.get_rng_state()
    utils.synchronize_rng_states(["torch", utils.RNGType.GENERATOR], torch.Generator())
    assert torch.get_rng_state().equal(before)
    with pytest.raises(UsageError):
        utils.synchronize_rng_states(["generator"])


def test_tied_and_overlapping_tensors_are_saved_once_and_whole(tmp_path: Path) -> None:
    weight, base = torch.randn(3, 2), torch.arange(10.0)
    state = OrderedDict(a=weight, tied=weight, first=base[:5], all=base, turned=weight.t())
    utils.save(state, tmp_path / "model.safetensors", safe_serialization=True)
    read = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert read.keys() == {"a", "first", "all", "turned"}
    assert all(read[name].equal(state[name]) for name in read)
    utils.save({"seed": random.randrange(9)}, tmp_path / "any.pt")
    assert utils.load(tmp_path / "any.pt").keys() == {"seed"}
    assert ZipFile(tmp_path / "any.pt").namelist()[0] == "any/data.pkl"  # in every run


def test_the_type_of_precisions_has_all_precisions() -> None:
    assert utils.PrecisionType.list() == list(PRECISIONS)


def test_a_first_profile_is_written_once(tmp_path: Path) -> None:
    assert utils.write_basic_config() is not False
    path = tmp_path / "new" / "profile.yaml"
    assert utils.write_basic_config("BF16", path) == path
    assert utils.write_basic_config("no", path) is False
    assert parse_profile(path.read_text(), str(path), Layer.USER_PROFILE)[
        "mixed_precision"
    ].raw == ("bf16")
    with pytest.raises(ValueError, match="fp7"):
        utils.write_basic_config("fp7")
