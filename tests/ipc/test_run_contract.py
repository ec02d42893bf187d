"""What the launcher says is what the worker hears."""

from __future__ import annotations

import json

import pytest

from headway.errors import LaunchError, UsageError
from headway.ipc.origin import DEFAULT, Layer, Origin
from headway.ipc.run_contract import Ranks, RunContract, decode, encode, read_ranks, read_run

ORIGINS = {
    "device": Origin(Layer.FLAG, flag="--cpu"),
    "mixed_precision": Origin(Layer.USER_PROFILE, "~/default.yaml", 3),
}
RUN = RunContract("cpu", "bf16", 4, ORIGINS, resume="a", began_at=1.5, time_limit=60)


def test_without_a_launcher_there_is_no_contract_and_there_are_no_ranks() -> None:
    assert read_run({}) is None
    assert read_ranks({}) is None


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", "7", '{"version":3}', '{"version":99}', "[" * 100_000],
    ids=lambda text: text[:14],
)
def test_a_contract_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="HEADWAY_RUN"):
        decode(text)


@pytest.mark.parametrize(
    "changes",
    [
        *({name: {"x": True}} for name in RunContract._fields),  # of another type
        {"gradient_accumulation_steps": True},
        {"origins": {"device": {"layer": "USER_PROFILE", "line": "3"}}},
    ],
    ids=str,
)
def test_a_contract_with_a_value_of_the_wrong_kind_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(LaunchError, match="HEADWAY_RUN"):
        decode(json.dumps({**json.loads(encode(RUN)), **changes}))


def test_accelerate_s_variables_are_read_where_ours_is_missing() -> None:
    environ = {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
        "ACCELERATE_USE_CPU": "True",
    }
    run = read_run(environ)
    assert run is not None
    assert run[:3] == ("cpu", "bf16", 4)
    assert run.origins["mixed_precision"] == Origin(
        Layer.ENVIRONMENT, variable="ACCELERATE_MIXED_PRECISION"
    )
    assert read_run({**environ, "HEADWAY_RUN": encode(RUN)}) == RUN
    some = read_run({"ACCELERATE_USE_CPU": "false"})
    assert some is not None
    assert some[:3] == ("auto", "no", 1)
    assert some.origins["mixed_precision"] == DEFAULT


@pytest.mark.parametrize(
    ("name", "value"), [("MIXED_PRECISION", "fp8"), ("GRADIENT_ACCUMULATION_STEPS", "auto")]
)
def test_values_of_accelerate_s_that_headway_has_not_are_refused(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"ACCELERATE_{name}"):
        read_run({f"ACCELERATE_{name}": value})


def test_a_world_without_a_rank_is_no_world_of_one() -> None:
    assert read_ranks({"WORLD_SIZE": "1"}) is None
    with pytest.raises(UsageError, match="WORLD_SIZE is 2, but RANK is not set") as caught:
        read_ranks({"WORLD_SIZE": "2"})
    assert "`unset WORLD_SIZE`, or set RANK too" in str(caught.value)
    with pytest.raises(UsageError, match="RANK is 1, but WORLD_SIZE is not set"):
        read_ranks({"RANK": "1"})


def test_ranks_are_read_under_torchs_names() -> None:
    environ = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    assert read_ranks(environ) == Ranks(5, 1, 8, 4)
    del environ["LOCAL_RANK"]
    assert read_ranks(environ) == Ranks(5, 1, 8, 4)
    del environ["LOCAL_WORLD_SIZE"]
    assert read_ranks(environ) == Ranks(5, 5, 8, 8)


@pytest.mark.parametrize(("rank", "world_size"), [("x", "2"), ("2", "2"), ("-1", "2"), ("0", "")])
def test_ranks_that_cannot_be_are_refused(rank: str, world_size: str) -> None:
    with pytest.raises(UsageError, match=r"RANK|WORLD_SIZE"):
        read_ranks({"RANK": rank, "WORLD_SIZE": world_size})
