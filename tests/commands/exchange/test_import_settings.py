"""`headway config import` of torchrun commands: what they mean replaces what the profile said."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from headway.commands.exchange.torchrun_line import from_torchrun
from headway.commands.main import main
from headway.errors import ConfigError
from headway.settings.profile_files import choose_profile
from headway.settings.setting import Raw
from tests.commands.exchange.test_convert import Capture, profile
from tests.machines.recorded import load

NOT_IMPORTED = "not imported: "


def imported(capsys: Capture, *words: str) -> tuple[list[str], str]:
    """Import, and return what is not imported and the next command."""
    assert main(["config", "import", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    left = [line.removeprefix(NOT_IMPORTED) for line in lines if NOT_IMPORTED in line]
    (following,) = [line.removeprefix("next: ") for line in lines if line.startswith("next: ")]
    return left, following


def refusal(capsys: Capture, *words: str) -> str:
    """Import what is refused, and return the error."""
    assert main(["config", "import", *words]) == 2
    return capsys.readouterr().err


SEVERAL = ("num_machines=2", "machine_rank=1", "main_address=a", "main_port=29501")


@pytest.mark.parametrize(
    ("before", "line", "after"),
    [
        (SEVERAL, "torchrun --standalone --nproc_per_node=4 t.py", {"num_processes": "4"}),
        (SEVERAL, "torchrun --nnodes 1 --nproc_per_node=4 t.py", {"num_processes": "4"}),
        (
            SEVERAL,
            "torchrun --nnodes 3 --master_addr b t.py",
            {"num_machines": "3", "main_address": "b", "num_processes": "1"},
        ),
        (
            SEVERAL,
            "torchrun --nnodes 3 --rdzv-backend c10d --rdzv-endpoint b t.py",
            {  # each machine keeps its own rank; 29400 is torch's usual port there
                "num_machines": "3",
                "machine_rank": "1",
                "main_address": "b",
                "main_port": "29400",
                "num_processes": "1",
            },
        ),
        (
            SEVERAL,
            "torchrun --nnodes 1:4 --rdzv-backend c10d --rdzv-endpoint b:1 t.py",
            {
                "num_machines": "1:4",
                "main_address": "b",
                "main_port": "1",
                "num_processes": "1",
            },
        ),
        (
            ("devices=0,1",),
            "CUDA_VISIBLE_DEVICES= torchrun t.py",
            {"device": "cpu", "num_processes": "1"},
        ),
    ],
)
def test_what_is_imported_replaces_what_contradicts_it(
    before: tuple[str, ...], line: str, after: dict[str, Raw], capsys: Capture
) -> None:
    main(["config", "set", *before, "hang_timeout=600"])
    capsys.readouterr()
    assert main(["config", "import", *line.split()]) == 0
    out = capsys.readouterr().out
    assert profile() == {**after, "hang_timeout": "600"}
    for key in {word.partition("=")[0] for word in before} - after.keys():
        assert f"  {key}: removed  (was " in out


def test_what_torchrun_decides_by_a_flag_of_its_own_is_torchruns_default_without_it(
    capsys: Capture,
) -> None:
    main(["config", "set", "max_restarts=3", "grace_period_s=9", "log_dir=logs", "ranks=0"])
    capsys.readouterr()
    assert main(["config", "import", "torchrun", "--max-restarts=1", "t.py"]) == 0
    assert profile() == {"num_processes": "1", "max_restarts": "1"}
    assert "grace_period_s: removed  (was 9)" in capsys.readouterr().out


@pytest.mark.processes
def test_words_that_a_shell_has_read_already_are_quoted_again(capsys: Capture) -> None:
    words = ("--nproc-per-node=2", "train.py", "--out", "$OUT", "two words")
    _, following = imported(capsys, "torchrun", *words)
    printed = following.replace("headway launch", "printf '%s|'")
    shown = subprocess.run(["sh", "-c", printed], capture_output=True, text=True, check=True)
    assert shown.stdout == "train.py|--out|$OUT|two words|"


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        ([], ["--num-processes", "1"]),
        (["--standalone", "--nproc-per-node=1"], ["--num-processes", "1"]),
        (["--nproc-per-node=2"], []),
        (["--nnodes=2", "--master-addr=a", "--node-rank=0"], []),
    ],
)
def test_the_next_command_gives_one_process_its_rank_as_torchrun_does(
    flags: list[str], flag: list[str], capsys: Capture
) -> None:
    _, following = imported(capsys, "torchrun", *flags, "t.py")
    assert following.split() == ["headway", "launch", *flag, "t.py"]


@pytest.mark.parametrize(
    ("line", "left"),
    [
        ("exec torchrun", []),
        ("env A=1 /usr/bin/torchrun", []),
        ("time python -u -m torch.distributed.run", []),
        ("nohup torchrun", ["nohup (put it in front of `headway launch`)"]),
        ("srun -N 1 --mem=0 torchrun", ["srun -N 1 --mem=0 (put it"]),
        ("uv run torchrun", ["uv run (put it"]),
        ("poetry run torchrun", ["poetry run (put it"]),
        ("timeout 60 torchrun", ["timeout 60 (put it"]),
        ("sudo -E env torchrun", ["sudo -E (put it"]),
        ("conda run -n env torchrun", ["conda run -n env (put it"]),
        ("docker run --gpus all img torchrun", ["docker run --gpus all img (put it"]),
        ("docker run -e A=1 img torchrun", ["docker run -e A=1 img (put it"]),
        ("python3 -X dev -m torch.distributed.run", ["python -X dev"]),
        ("python -m torch.distributed.launch --use_env", []),
        ("python -m torch.distributed.launch", ["--local-rank for the script"]),
    ],
)
def test_common_ways_to_run_torchrun_are_recognised(
    line: str, left: list[str], capsys: Capture
) -> None:
    listed, following = imported(capsys, *line.split(), "--nproc_per_node=2", "t.py")
    assert profile()["num_processes"] == "2"
    assert [text.startswith(start) for text, start in zip(listed, left, strict=True)] == [
        True for _ in left
    ]
    assert following == "headway launch t.py"


@pytest.mark.parametrize(
    "line",
    [
        *("echo torchrun t.py", "sudo echo torchrun t.py", "timeout 60 echo torchrun t.py"),
        *("docker rm -f torchrun", "conda install -y torchrun", "bash -c torchrun"),
    ],
)
def test_a_command_that_only_names_torchrun_is_refused(line: str, capsys: Capture) -> None:
    assert refusal(capsys, *line.split()).startswith("error: ")
    assert not Path(choose_profile().path).exists()


@pytest.mark.wording
@pytest.mark.parametrize(
    "text",
    [
        "#!/bin/bash\necho hello\n",
        "cd src && torchrun --nproc-per-node 2 t.py\n",
        "OMP_NUM_THREADS=2 python -m torch.distributed.run t.py\n",
    ],
)
def test_a_shell_script_is_refused_with_the_way_to_pass_its_command(
    text: str, capsys: Capture
) -> None:
    Path("run.sh").write_text(text)
    err = refusal(capsys, "run.sh")
    assert "this is a shell script" in err
    assert "\n  from: run.sh\n" in err
    assert "fix:  pass the torchrun command itself: `headway config import torchrun ...`" in err
    assert not Path(choose_profile().path).exists()


def test_a_torchrun_line_in_quotes_is_refused_with_the_line_to_type(capsys: Capture) -> None:
    err = refusal(capsys, "torchrun --nproc-per-node 2 t.py")
    command = shlex.split(err.split("remove the quotes: `")[1].split("`")[0])
    assert main(command[1:]) == 0
    assert profile() == {"num_processes": "2"}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("laptop_cpu", {"device": "cpu", "num_processes": str(load("laptop_cpu").cores)}),
        ("gpu_8_h100", {"num_processes": "auto"}),
    ],
)
def test_torchruns_auto_is_one_process_for_each_core_where_there_is_no_gpu(
    name: str, values: dict[str, Raw]
) -> None:
    words = ("torchrun", "--nproc-per-node=auto", "t.py")
    assert from_torchrun(words, load(name)).values == values


def test_a_file_of_accelerate_may_speak_of_torchrun(capsys: Capture) -> None:
    text = "# not for torchrun\ncompute_environment: LOCAL_MACHINE\nnum_processes: 2\n"
    Path("a.yaml").write_text(text)
    imported(capsys, "a.yaml")
    assert profile()["num_processes"] == "2"


def test_use_env_is_a_flag_of_the_old_launcher_alone(capsys: Capture) -> None:
    assert "unknown torchrun flag --use-env" in refusal(capsys, "torchrun", "--use_env", "t.py")


@pytest.mark.parametrize(
    ("endpoint", "address", "port"),
    [
        ("[2001:db8::1]:29401", "2001:db8::1", "29401"),
        ("[2001:db8::1]", "2001:db8::1", "29400"),
        ("h:29401", "h", "29401"),
    ],
)
def test_an_endpoint_may_be_an_ipv6_address(
    endpoint: str, address: str, port: str, capsys: Capture
) -> None:
    flags = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
    left, _ = imported(capsys, "torchrun", *flags, "t.py")
    assert (profile()["main_address"], profile()["main_port"]) == (address, port)
    assert "set machine_rank on each machine, or pass --machine-rank" in left[0]
    left, _ = imported(capsys, "torchrun", *flags, "--node-rank=1", "t.py")
    assert left == ["--rdzv-backend c10d"]


@pytest.mark.parametrize(
    ("line", "left"),
    [
        (
            "torchrun --master-addr a --master-port 29501 t.py",
            [
                "--master-addr a (not needed",
                "--master-port 29501 (on one machine a free port",
            ],
        ),
        (
            "torchrun --rdzv-endpoint localhost:0 t.py",
            ["--rdzv-endpoint localhost:0 (not needed"],
        ),
    ],
)
def test_where_one_machine_would_meet_others_is_listed_with_the_reason(
    line: str, left: list[str], capsys: Capture
) -> None:
    listed, _ = imported(capsys, *line.split())
    assert profile() == {"num_processes": "1"}
    assert len(listed) == len(left)
    assert all(text.startswith(start) for text, start in zip(listed, left, strict=True))


@pytest.mark.wording
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("torchrun --nproc_per_node two t.py", "--nproc-per-node is 'two', which is"),
        ("torchrun --nnodes 2 --rdzv-endpoint a:b t.py", "--rdzv-endpoint is 'b', which is"),
        ("OMP_NUM_THREADS=x torchrun t.py", "OMP_NUM_THREADS is 'x', which is"),
    ],
)
def test_an_impossible_value_is_said_in_the_other_tools_words(
    line: str, said: str, capsys: Capture
) -> None:
    err = refusal(capsys, *line.split())
    assert said in err
    assert f"\n  fix:  correct {said.split()[0]} there\n" in err


def test_of_nested_thread_counts_the_first_one_is_taken_over(capsys: Capture) -> None:
    imported(capsys, "OMP_NUM_THREADS=4,2", "torchrun", "t.py")
    assert profile() == {"threads_per_process": "4", "num_processes": "1"}


@pytest.mark.wording
@pytest.mark.parametrize(
    ("before", "line", "key"),
    [
        (["device=cuda", "devices=0,1"], "torchrun --nproc_per_node=4 t.py", "devices"),
        (["env.OMP_NUM_THREADS=2", "env.A=1"], "OMP_NUM_THREADS=4 torchrun t.py", "OMP"),
    ],
)
def test_an_older_value_in_the_way_is_removed_by_the_printed_command(
    before: list[str], line: str, key: str, capsys: Capture
) -> None:
    words = ["--profile", "two"]
    main(["config", "set", *words, *before])
    err = refusal(capsys, *words, *line.split())
    command = shlex.split(err.split("fix:  remove the old value with `")[1].split("`")[0])
    assert command[:5] == ["headway", "config", "unset", *words]
    assert key in command[5]
    assert main(command[1:]) == 0
    assert main(["config", "import", *words, *line.split()]) == 0


@pytest.mark.wording
def test_a_file_that_cannot_be_read_is_not_called_a_profile(capsys: Capture) -> None:
    Path("large").write_bytes(bytes(2**20 + 1))
    Path("latin").write_bytes(b"\xff")
    Path("a folder").mkdir()
    for file in ("/dev/null", "a folder", "large", "latin"):
        err = refusal(capsys, file)
        assert "profile" not in err
        assert f"\n  from: {file}" in err


def test_variables_that_torchrun_reads_as_flags_are_flags(capsys: Capture) -> None:
    variables = "PET_NPROC_PER_NODE=2 PET_MAX_RESTARTS=3 PET_STANDALONE=1 PET_OTHER=1"
    assert imported(capsys, *f"{variables} torchrun --max-restarts 4 t.py".split())[0] == []
    expected = {"num_processes": "2", "max_restarts": "4", "env": {"PET_OTHER": "1"}}
    assert profile() == expected


@pytest.mark.wording
def test_a_short_flag_that_torchrun_does_not_have_is_named_as_it_stands(capsys: Capture) -> None:
    assert "error: unknown torchrun flag -h" in refusal(capsys, "torchrun", "-h")


def test_a_dry_run_prints_the_profile_alone(capsys: Capture) -> None:
    assert main(["config", "import", "--dry-run", "torchrun", "--tee", "3", "t.py"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "num_processes: 1"
    assert err == "not imported: --tee 3\n"


@pytest.mark.parametrize("words", [["torchrun"], ["OMP_NUM_THREADS=1", "torchrun"]])
def test_torchrun_alone_changes_nothing(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="nothing follows 'torchrun'"):
        from_torchrun(words, load("laptop_cpu"))
