"""`headway config import` of Accelerate's files: what they mean replaces what the profile said."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from headway.commands.main import main
from headway.settings.profile_files import choose_profile
from headway.settings.setting import Raw
from tests.commands.exchange.test_convert import IS_ACCELERATE, Capture, profile
from tests.commands.exchange.test_import_settings import SEVERAL, imported, refusal


def refused(capsys: Capture, *words: str) -> tuple[str, str]:
    """Import what is refused, and return what is printed on both streams."""
    assert main(["config", "import", *words]) == 2
    streams = capsys.readouterr()
    return streams.out, streams.err


@pytest.mark.parametrize(
    ("before", "text", "after"),
    [
        (
            (*SEVERAL, "device=cuda"),
            "distributed_type: MULTI_GPU\nnum_processes: 4\nnum_machines: 1\nmachine_rank: 0\n",
            {"device": "cuda", "num_processes": "4"},
        ),
        (
            ("device=cuda", "devices=[0]"),
            "distributed_type: MULTI_GPU\nnum_processes: 4\ngpu_ids: all\n",
            {"device": "cuda", "num_processes": "4"},
        ),
        (("num_processes=3",), "distributed_type: MULTI_GPU\n", {"device": "cuda"}),
        (("device=cpu",), "distributed_type: NO\n", {"num_processes": "1"}),
        (("devices=0,1",), "use_cpu: true\n", {"device": "cpu"}),
        (("device=cpu",), "distributed_type: XLA\n", {"device": "cpu"}),
    ],
)
def test_what_a_file_says_replaces_what_contradicts_it(
    before: tuple[str, ...], text: str, after: dict[str, Raw], capsys: Capture
) -> None:
    main(["config", "set", *before, "max_restarts=2"])
    capsys.readouterr()
    Path("its.yaml").write_text(IS_ACCELERATE + text)
    assert main(["config", "import", "--lossy", "its.yaml"]) == 0
    out = capsys.readouterr().out
    assert profile() == {**after, "max_restarts": "2"}
    for key in {word.partition("=")[0] for word in before} - after.keys():
        assert f"  {key}: removed  (was " in out


def test_where_one_machine_would_meet_others_is_listed_as_of_torchrun(capsys: Capture) -> None:
    text = f"{IS_ACCELERATE}main_process_ip: a\nmain_process_port: 29501\n"
    Path("its.yaml").write_text(text)
    left, _ = imported(capsys, "its.yaml")
    assert profile() == {"num_processes": "1"}
    assert left == [
        "main_process_ip: a (not needed on one machine)",
        "main_process_port: 29501 (on one machine a free port is chosen)",
    ]


@pytest.mark.wording
@pytest.mark.parametrize(
    "line",
    ["machine_rank: x", "main_process_port: x", "gpu_ids: 1,x", "gradient_accumulation_steps: x"],
)
def test_an_impossible_value_is_said_of_the_files_own_key(line: str, capsys: Capture) -> None:
    Path("its.yaml").write_text(f"{IS_ACCELERATE}num_machines: 2\nmain_process_ip: a\n{line}\n")
    key, _, value = line.partition(": ")
    err = refusal(capsys, "its.yaml")
    assert f"{key} is {value!r}, " in err
    assert f"from: its.yaml\n  fix:  correct {key} there\n" in err


def test_keys_of_accelerate_that_have_a_counterpart_are_not_listed(capsys: Capture) -> None:
    text = f"{IS_ACCELERATE}distributed_type: MULTI_GPU\ngpu_ids: [0, 1]\nfp16: true\n"
    Path("its.yaml").write_text(text)
    assert imported(capsys, "its.yaml")[0] == []
    assert profile() == {"device": "cuda", "devices": ["0", "1"], "mixed_precision": "fp16"}
    Path("its.yaml").write_text(text.replace("true", "maybe"))
    assert "fp16 is 'maybe', but it must be true or false" in refusal(capsys, "its.yaml")


@pytest.mark.wording
@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("compute_environment", ["LOCAL_MACHINE"], "a list"),
        ("distributed_type", {"a": 1}, "a map"),
        ("num_processes", [2], "a list"),
        ("num_machines", [], "a list"),
        ("main_process_port", {}, "a map"),
        ("use_cpu", [True], "a list"),
        ("fp16", [True], "a list"),
        ("gpu_ids", {"0": 1}, "a map"),
        ("gpu_ids", [[0]], "a list"),
        ("deepspeed_config", "x.json", "a single value"),
    ],
)
def test_a_known_key_of_the_wrong_kind_is_refused(
    key: str, value: object, kind: str, capsys: Capture
) -> None:
    Path("its.json").write_text(json.dumps({"distributed_type": "MULTI_GPU", key: value}))
    err = refusal(capsys, "its.json")
    assert f"{key} is {kind}, but it must be " in err
    assert f"from: its.json\n  fix:  correct {key} in that file\n" in err


def test_a_yaml_tag_is_refused(capsys: Capture) -> None:
    Path("its.yaml").write_text("distributed_type: !!python/object:x.Y MULTI_GPU\n")
    assert "line 1 has a YAML tag" in refusal(capsys, "its.yaml")


def test_a_file_may_have_a_space_in_its_name(capsys: Capture) -> None:
    Path("two words.yaml").write_text(f"{IS_ACCELERATE}use_cpu: true\n")
    imported(capsys, "two words.yaml")
    assert profile() == {"device": "cpu"}


def test_several_machines_without_an_address_are_refused_in_the_files_words(
    capsys: Capture,
) -> None:
    Path("a.yaml").write_text("distributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 4\n")
    assert "add `main_process_ip: HOST` to that file" in refusal(capsys, "a.yaml")


@pytest.mark.wording
@pytest.mark.parametrize("words", [[], ["--dry-run"], ["--profile", "mine"]])
@pytest.mark.parametrize(
    ("text", "lost"),
    [
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_reshard_after_forward: SHARD_GRAD_OP}\n",
            ["fsdp_config.fsdp_reshard_after_forward: SHARD_GRAD_OP"],
        ),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3}\n",
            ["distributed_type: DEEPSPEED", "deepspeed_config.zero_stage: 3"],
        ),
        ("distributed_type: MEGATRON_LM\n", ["distributed_type: MEGATRON_LM"]),
        ("distributed_type: XLA\n", ["distributed_type: XLA"]),
        (
            "distributed_type: MULTI_GPU\nmixed_precision: fp8\nfp8_config: {backend: TE}\n",
            ["mixed_precision: fp8", "fp8_config.backend: TE"],
        ),
    ],
)
def test_a_file_whose_training_would_be_another_is_refused_unless_lossy(
    text: str, lost: list[str], words: list[str], capsys: Capture
) -> None:
    Path("its.yaml").write_text(f"{IS_ACCELERATE}{text}num_processes: 2\nrdzv_backend: static\n")
    out, err = refused(capsys, *words, "its.yaml")
    assert not out
    assert [line.strip() for line in err.splitlines()[1:-2]] == lost
    assert "--lossy" in err.splitlines()[-1]
    assert not Path(choose_profile().path).parent.exists()
    assert main(["config", "import", "--lossy", *words, "its.yaml"]) == 0
    streams = capsys.readouterr()
    for line in lost:
        assert f"not imported: {line}\n" in streams.out + streams.err


def test_the_command_that_imports_the_rest_can_be_typed(capsys: Capture) -> None:
    Path("two words.yaml").write_text(f"{IS_ACCELERATE}distributed_type: DEEPSPEED\n")
    _, err = refused(capsys, "--profile", "mine", "two words.yaml")
    command = shlex.split(err.split("`")[1])
    assert main(command[1:]) == 0
    assert Path(choose_profile("mine").path).exists()
