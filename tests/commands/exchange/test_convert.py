"""`headway config import` and `export`: nothing that has a meaning here is lost or invented."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from headway.commands.exchange.torchrun_line import SWITCHES, VALUED
from headway.commands.main import main
from headway.contract.origin import Layer
from headway.settings.layers import environment_layer, profile_layers
from headway.settings.profile import read_profile
from headway.settings.profile_files import choose_profile
from headway.settings.resolve import resolve
from headway.settings.setting import Raw
from headway.settings.table import Settings
from tests.commands.exchange.accelerate_files import FOLDER, KINDS
from tests.machines.recorded import FOLDER as MACHINES
from tests.machines.recorded import load

Capture = pytest.CaptureFixture[str]


def profile() -> dict[str, Raw]:
    entries = read_profile(choose_profile().path, Layer.USER_PROFILE)
    return {name: entry.raw for name, entry in entries.items()}


def in_profile(**values: str) -> Settings:
    main(["config", "set", *(f"{key}={value}" for key, value in values.items())])
    return resolve(profile_layers(), load("gpu_8_h100"), {})


def export(style: str, machine: str = "gpu_8_h100") -> int:
    recorded = str(MACHINES / f"{machine}.json")
    return main(["config", "export", "--format", style, "--machine", recorded])


ALWAYS_LEFT = {
    *("debug", "downcast_bf16", "enable_cpu_affinity", "main_training_function", "rdzv_backend"),
    *("same_network", "tpu_use_cluster", "tpu_use_sudo"),
}
NO = {"mixed_precision": "no"}
GPUS = {"device": "cuda", "num_processes": "8"}
MEANING: dict[str, tuple[dict[str, Raw], set[str]]] = {  # kind: the profile, and the keys left over
    "no_distribution": ({"num_processes": "1", **NO}, set()),
    "cpu_only": ({"device": "cpu", "num_processes": "1", **NO}, set()),
    "one_gpu_by_id": ({"device": "cuda", "devices": ["3"], "num_processes": "1", **NO}, set()),
    "several_cpus": ({"device": "cpu", "num_processes": "4", **NO}, set()),
    "several_gpus": ({**GPUS, "mixed_precision": "bf16"}, set()),
    "gpu_ids": ({**GPUS, "num_processes": "2", "devices": ["1", "3"], **NO}, set()),
    "several_machines": (
        {
            **GPUS,
            **NO,
            "num_machines": "2",
            "machine_rank": "1",
            "main_address": "10.0.0.1",
            "main_port": "29501",
        },
        set(),
    ),
    "fsdp": (
        {
            **GPUS,
            "mixed_precision": "bf16",
            "strategy": "fsdp",
            "wrap": "auto",
            "activation_checkpointing": "no",
            "cpu_offload": "no",
        },
        set(),
    ),
    "deepspeed": (
        {**GPUS, "mixed_precision": "fp16", "gradient_accumulation_steps": "4"},
        {"distributed_type"}
        | {
            f"deepspeed_config.{key}"
            for key in KINDS["deepspeed"]["deepspeed_config"]
            if key != "gradient_accumulation_steps"
        },
    ),
    "fp8": (
        {**GPUS},
        {"mixed_precision", *(f"fp8_config.{key}" for key in KINDS["fp8"]["fp8_config"])},
    ),
    "dynamo": (
        {"num_processes": "1", **NO},
        {"dynamo_config.dynamo_backend", "dynamo_config.dynamo_mode"},
    ),
    "tpu": (
        {**NO},
        {
            "distributed_type",
            "num_processes",
            "num_machines",
            "machine_rank",
            "use_cpu",
            "tpu_name",
        },
    ),
}


def test_every_kind_of_accelerate_file_has_its_meaning_written_down() -> None:
    assert MEANING.keys() == KINDS.keys() == {path.stem for path in FOLDER.glob("*.yaml")}


@pytest.mark.parametrize("file", [*(f"{kind}.yaml" for kind in KINDS), "tpu.json"])
def test_an_accelerate_file_is_taken_over_and_the_rest_is_listed_by_name(
    file: str, capsys: Capture
) -> None:
    assert main(["config", "import", "--lossy", str(FOLDER / file)]) == 0
    values, left = MEANING[Path(file).stem]
    assert profile() == values
    lines = capsys.readouterr().out.splitlines()
    words = [line.split(": ")[1] for line in lines if line.startswith("not imported")]
    assert len(words) == len(set(words))
    assert set(words) == ALWAYS_LEFT | left


@pytest.mark.parametrize("said", ["mixed_precision: fp8\n", ""])
def test_an_older_precision_gives_way_to_none(said: str) -> None:
    main(["config", "set", "device=cuda", "mixed_precision=bf16"])
    Path("theirs.yaml").write_text(f"distributed_type: MULTI_GPU\nnum_processes: 2\n{said}")
    assert main(["config", "import", "--lossy", "theirs.yaml"]) == 0
    assert profile() == {"device": "cuda", "num_processes": "2"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("device: cpu\n", "not an Accelerate configuration"),
        ("compute_environment: AMAZON_SAGEMAKER\n", "SAGEMAKER"),
        (
            "distributed_type: MULTI_GPU\nnum_processes: 5\nnum_machines: 2\n",
            "is not divisible by",
        ),
        ("distributed_type: MULTI_CPU\nmixed_precision: fp16\n", "the CPU supports only bf16"),
        ("distributed_type: [", "not valid YAML or JSON"),
        ('{"distributed_type": }', "not valid YAML or JSON"),
        pytest.param("[" * 100_000, "not valid YAML or JSON", id="deeply nested"),
        ("distributed_type: MULTI_GPU\ngpu_ids: 1,x\n", "not a GPU index"),
        ("distributed_type: MULTI_GPU\nnum_processes: many\n", "a whole number"),
        ("- 1\n", "not an Accelerate configuration"),
        ("distributed_type: multi_gpu\nnum_processes: 4\n", "distributed_type is 'multi_gpu'"),
    ],
)
def test_a_file_that_cannot_be_taken_over_is_refused(
    text: str, reason: str, capsys: Capture
) -> None:
    Path("theirs.yaml").write_text(text)
    assert main(["config", "import", "theirs.yaml"]) == 2
    assert reason in capsys.readouterr().err
    assert not Path(choose_profile().path).exists()


@pytest.mark.parametrize(
    ("line", "values", "left"),
    [
        ("torchrun train.py", {"num_processes": "1"}, []),
        ("torchrun --standalone --nproc-per-node=4 train.py", {"num_processes": "4"}, []),
        ("torchrun --nproc_per_node gpu t.py", {"device": "cuda", "num_processes": "auto"}, []),
        (
            "torchrun --nnodes 2 --node_rank 1 --master_addr a --master_port 29501 "
            "--nproc-per-node 8 t.py",
            {
                "num_machines": "2",
                "machine_rank": "1",
                "main_address": "a",
                "main_port": "29501",
                "num_processes": "8",
            },
            [],
        ),
        (
            "python3 -m torch.distributed.run --nnodes=2:2 --rdzv-backend c10d "
            "--rdzv-endpoint b:29400 --rdzv-id 7 -m pkg.train",
            {
                "num_machines": "2",
                "main_address": "b",
                "main_port": "29400",
                "num_processes": "1",
            },
            [
                "--rdzv-backend c10d (set machine_rank on each machine, or pass --machine-rank)",
                "--rdzv-id 7",
            ],
        ),
        (
            "torchrun --nnodes 1:4 --rdzv-backend etcd --rdzv-endpoint etcd:2379 t.py",
            {"num_processes": "1"},
            [
                "--nnodes 1:4 (without --rdzv-endpoint, machine 0 is not known)",
                "--rdzv-backend etcd",
                "--rdzv-endpoint etcd:2379 (it is a server of etcd, and machine 0 is not known)",
            ],
        ),
        (
            "torchrun --nnodes 1:4 t.py",
            {"num_processes": "1"},
            ["--nnodes 1:4 (without --rdzv-endpoint, machine 0 is not known)"],
        ),
        (
            "torchrun --nnodes 1:4 --rdzv-backend c10d --rdzv-endpoint b t.py",
            {
                "num_machines": "1:4",
                "main_address": "b",
                "main_port": "29400",
                "num_processes": "1",
            },
            [],
        ),
        (
            "CUDA_VISIBLE_DEVICES= torchrun --nproc-per-node 4 --local-ranks-filter 0,3 t.py",
            {"device": "cpu", "num_processes": "4", "ranks": "0,3"},
            [],
        ),
        (
            "CUDA_VISIBLE_DEVICES=GPU-8f6e,GPU-a1b2 torchrun --nproc-per-node 2 --nnodes 2 "
            "--master-addr a --local-ranks-filter 0 t.py",
            {
                "device": "cuda",
                "devices": ["GPU-8f6e", "GPU-a1b2"],
                "num_processes": "2",
                "num_machines": "2",
                "main_address": "a",
            },
            ["--local-ranks-filter 0"],
        ),
        (
            "PYTORCH_ENABLE_MPS_FALLBACK=0 torchrun t.py",
            {"mps_fallback": "strict", "num_processes": "1"},
            [],
        ),
        (
            "OMP_NUM_THREADS=4 CUDA_VISIBLE_DEVICES=1,3 DEBUG=1 /usr/bin/torchrun -t3 "
            "--nproc 2 --max-restarts 3 --log_dir logs --shutdown-timeout 60 t.py",
            {
                "threads_per_process": "4",
                "device": "cuda",
                "devices": ["1", "3"],
                "env": {"DEBUG": "1"},
                "num_processes": "2",
                "max_restarts": "3",
                "log_dir": "logs",
                "grace_period_s": "60",
            },
            [],
        ),
    ],
)
def test_a_torchrun_command_line_is_taken_over(
    line: str, values: dict[str, Raw], left: list[str], capsys: Capture
) -> None:
    assert main(["config", "import", *shlex.split(line)]) == 0
    assert profile() == values
    out = capsys.readouterr().out.splitlines()
    prefix = "not imported: "
    assert [text.removeprefix(prefix) for text in out if prefix in text] == left


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["torchrun", "--nproc-per-nod=2", "t.py"], None),
        (["torchrun", "--nporc-per-node=2", "t.py"], "did you mean --nproc-per-node"),
        (["torchrun", "--nnodes"], "requires a value"),
        (["torchrun", "--nproc-per-node", "0", "t.py"], "1 or more"),
        ([], "a file or a torchrun command line is required"),
        (["a", "b"], "neither one file"),
        (["missing.yaml"], "No such file"),
    ],
)
def test_mistakes_in_what_is_to_be_imported_are_refused(
    words: list[str], reason: str | None, capsys: Capture
) -> None:
    assert main(["config", "import", *words]) == (0 if reason is None else 2)
    assert reason is None or reason in capsys.readouterr().err


def test_torchruns_flags_are_all_known() -> None:
    run = pytest.importorskip("torch.distributed.run")
    actions = run.get_args_parser()._actions
    flags = {a.option_strings[-1].replace("_", "-"): a.nargs for a in actions if a.option_strings}
    del flags["--help"]
    assert {flag for flag, nargs in flags.items() if nargs == 0} == set(SWITCHES)
    assert {flag for flag, nargs in flags.items() if nargs != 0} == set(VALUED)


EVERYTHING: dict[str, str] = {
    "device": "cuda",
    "devices": "1,3",
    "num_processes": "2",
    "mixed_precision": "bf16",
    "gradient_accumulation_steps": "4",
    "threads_per_process": "3",
    "num_machines": "2",
    "machine_rank": "1",
    "main_address": "node0",
    "main_port": "29501",
    "max_restarts": "2",
    "grace_period_s": "60",
    "hang_timeout": "600",
    "log_dir": "/tmp/logs",
    "ranks": "0-1,3",
    "start_method": "exec",
    "env": "A=1 B='two words'",
}


@pytest.mark.parametrize("style", ["env", "sh"])
def test_what_is_exported_to_variables_means_the_same(style: str, capsys: Capture) -> None:
    settings = in_profile(**EVERYTHING)
    capsys.readouterr()
    assert export(style) == 0
    lines = capsys.readouterr().out.splitlines()
    if style == "sh":
        lines = [word for line in lines for word in shlex.split(line)[1:]]
    environ = dict(line.split("=", 1) for line in lines)
    assert len(environ) == len(EVERYTHING)
    again = resolve([environment_layer(environ)], load("gpu_8_h100"), {})
    assert {n: v.value for n, v in again.values.items()} == {
        n: v.value for n, v in settings.values.items()
    }


@pytest.mark.parametrize("style", ["torchrun", "accelerate"])
def test_what_is_exported_to_another_tool_is_imported_as_the_same(
    style: str, capsys: Capture
) -> None:
    in_profile(**EVERYTHING)
    before = profile()
    capsys.readouterr()
    assert export(style) == 0
    streams = capsys.readouterr()
    Path(choose_profile().path).unlink()
    Path("theirs").write_text(streams.out)
    words = shlex.split(streams.out) if style == "torchrun" else ["theirs"]
    assert main(["config", "import", *words]) == 0
    after = profile()
    assert after.pop("devices") == ["1", "3"]
    before.pop("devices")
    missing = {line.split()[2] for line in streams.err.splitlines()}
    assert missing == before.keys() - after.keys()
    assert missing == {"hang_timeout", "ranks", "start_method"} | (
        {"env", "threads_per_process", "max_restarts", "log_dir", "grace_period_s"}
        | {"gradient_accumulation_steps"}
        if style == "accelerate"
        else set()
    )
    assert {key: after[key] for key in before.keys() - missing} == {
        key: raw for key, raw in before.items() if key not in missing
    }


@pytest.mark.parametrize(
    ("machine", "settings", "words", "gpu_ids"),
    [
        ("gpu_8_h100", {"devices": "^0"}, "CUDA_VISIBLE_DEVICES=1,2,3,4,5,6,7 ", "1,2,3,4,5,6,7"),
        ("slurm_node", {"devices": "1,3"}, "CUDA_VISIBLE_DEVICES=5,7 ", "5,7"),
        ("gpu_8_h100", {"num_processes": "8"}, "OMP_NUM_THREADS=8 ", "all"),
        ("mac_m2", {"mps_fallback": "strict"}, "PYTORCH_ENABLE_MPS_FALLBACK=0 ", None),
    ],
)
def test_exported_gpus_and_fallback_are_those_of_a_launch_on_that_machine(
    machine: str, settings: dict[str, str], words: str, gpu_ids: str | None, capsys: Capture
) -> None:
    in_profile(**settings)
    capsys.readouterr()
    assert export("torchrun", machine) == 0
    line = capsys.readouterr().out
    assert line.startswith(words)
    assert export("accelerate", machine) == 0
    assert yaml.safe_load(capsys.readouterr().out).get("gpu_ids") == gpu_ids
    assert main(["config", "import", "--profile", "again", *shlex.split(line)]) == 0
    again = resolve(profile_layers(profile="again"), load(machine), {})
    assert settings.get("mps_fallback", again.mps_fallback) == again.mps_fallback


def test_ranks_of_one_machine_are_shown_by_torchrun_too(capsys: Capture) -> None:
    in_profile(device="cpu", num_processes="4", ranks="0,2-3")
    capsys.readouterr()
    assert export("torchrun", "laptop_cpu") == 0
    streams = capsys.readouterr()
    assert " --local-ranks-filter 0,2,3 your_script.py" in streams.out
    assert not streams.err
    main(["config", "import", *shlex.split(streams.out)])
    assert profile()["ranks"] == "0,2,3"


@pytest.mark.parametrize(
    ("values", "code", "reason"),
    [
        ({"device": "cuda"}, 3, "no GPU is visible"),
        ({"device": "cuda", "devices": "idle:2"}, 2, "idle GPUs are only chosen at a launch"),
    ],
)
def test_what_no_launch_there_would_do_is_not_exported(
    values: dict[str, str], code: int, reason: str, capsys: Capture
) -> None:
    in_profile(**values)
    for style in ("torchrun", "accelerate"):
        assert export(style, "laptop_cpu") == code
        streams = capsys.readouterr()
        assert reason in streams.err
    assert export("env", "laptop_cpu") == 0
    assert "HEADWAY_DEVICE=cuda" in capsys.readouterr().out


def test_accelerate_reads_what_is_exported_for_it(capsys: Capture) -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    in_profile(**EVERYTHING)
    capsys.readouterr()
    export("accelerate")
    Path("theirs.yaml").write_text(capsys.readouterr().out)
    config = config_args.load_config_from_file("theirs.yaml")
    assert (config.num_processes, config.num_machines, config.gpu_ids) == (4, 2, "1,3")
    assert config.distributed_type == "MULTI_GPU"


@pytest.mark.parametrize("words", [[], ["--format", "yaml"], ["--format=sh", "extra"]])
def test_export_needs_a_format_that_it_knows(words: list[str], capsys: Capture) -> None:
    assert main(["config", "export", *words]) == 2


def test_the_files_are_what_accelerates_own_classes_write() -> None:
    for kind, answers in KINDS.items():
        written = yaml.safe_load((FOLDER / f"{kind}.yaml").read_text())
        assert {key: written[key] for key in answers} == answers


IS_ACCELERATE = "compute_environment: LOCAL_MACHINE\n"
BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (BOMB, "line 2 has a YAML anchor"),
        ("num_processes: 1\nnum_processes: 2\n", "duplicate key 'num_processes'"),
        ("use_cpu: maybe\n", "use_cpu is 'maybe', but it must be true or false"),
        ("num_processes: eight\n", "num_processes is 'eight', but it must be a whole number"),
        ("num_machines: two\n", "num_machines is 'two', but it must be a whole number"),
        ("mixed_precision: bf61\n", "mixed_precision is 'bf61', but it must be no, fp16"),
        ("gradient_accumulation_steps: 0\n", "gradient_accumulation_steps is '0'"),
        ("use_cpu: yes\nmixed_precision: fp16\n", "fp16"),
    ],
)
def test_what_is_wrong_in_an_imported_file_is_said_of_that_file(
    text: str, reason: str, capsys: Capture
) -> None:
    Path("its.yaml").write_text(IS_ACCELERATE + text)
    assert main(["config", "import", "its.yaml"]) == 2
    err = capsys.readouterr().err
    assert reason in err
    assert "its.yaml" in err.split("from: ")[1]
    assert not Path(choose_profile().path).exists()


def test_a_key_that_stands_twice_in_json_is_refused(capsys: Capture) -> None:
    Path("its.json").write_text('{"distributed_type": "NO", "use_cpu": true, "use_cpu": false}')
    assert main(["config", "import", "its.json"]) == 2
    assert "duplicate key 'use_cpu'" in capsys.readouterr().err


@pytest.mark.parametrize("true", ["True", "TRUE", "yes", "on"])
def test_every_spelling_of_a_value_is_obeyed_and_nothing_is_none(
    true: str, capsys: Capture
) -> None:
    rest = "num_processes: ~\nmain_process_ip:\nfsdp_config: {}\ngradient_accumulation_steps: 4\n"
    Path("its.yaml").write_text(f"{IS_ACCELERATE}use_cpu: {true}\nmixed_precision: BF16\n{rest}")
    assert main(["config", "import", "its.yaml"]) == 0
    steps = {"gradient_accumulation_steps": "4"}
    assert profile() == {"device": "cpu", "mixed_precision": "bf16", **steps}
    assert "not imported" not in capsys.readouterr().out


def test_a_dry_import_merges_and_checks_as_the_real_one_and_names_no_next_command(
    capsys: Capture,
) -> None:
    main(["config", "set", "max_restarts=3", "device=cpu"])
    Path("its.yaml").write_text(IS_ACCELERATE + "num_processes: 2\n")
    capsys.readouterr()
    assert main(["config", "import", "its.yaml", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "next:" not in printed
    assert main(["config", "import", "its.yaml"]) == 0
    assert Path(choose_profile().path).read_text() == printed
    Path("its.yaml").write_text(IS_ACCELERATE + "gpu_ids: 1\n")
    main(["config", "set", "debug_rank=1"])
    assert main(["config", "import", "--dry-run", "torchrun", "--nproc-per-node", "1", "a.py"]) == 2


def test_export_of_a_profile_for_another_machine_says_how_to_name_that(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("headway.yaml").write_text("device: mps\n")
    gpus = ["--machine", str(MACHINES / "gpu_1.json")]
    assert main(["config", "export", "--format", "torchrun", *gpus]) == 3
    assert "fix:  run `headway env --json` on the machine it is for" in capsys.readouterr().err
