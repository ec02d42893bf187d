"""`headway config import` of torchrun commands: what they mean replaces what the profile said."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from headway.commands.exchange.shell_lines import Word
from headway.commands.exchange.torchrun_line import from_torchrun
from headway.commands.main import main
from headway.settings.profile_files import choose_profile
from headway.settings.table import Raw
from tests.commands.exchange.test_convert import Capture, profile
from tests.machines.recorded import load

NO_COUNTERPART = "no counterpart here: "


def imported(capsys: Capture, *words: str) -> tuple[list[str], list[str]]:
    """Import, and return what is left over and the next commands."""
    assert main(["config", "import", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    left = [line.removeprefix(NO_COUNTERPART) for line in lines if NO_COUNTERPART in line]
    return left, [line.removeprefix("next: ") for line in lines if line.startswith("next: ")]


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
            ("devices=0,1",),
            "CUDA_VISIBLE_DEVICES= torchrun t.py",
            {"device": "cpu", "num_processes": "1"},
        ),
    ],
)
def test_what_is_imported_replaces_what_contradicts_it(
    before: tuple[str, ...], line: str, after: dict[str, Raw], capsys: Capture
) -> None:
    main(["config", "set", *before, "max_restarts=2"])
    capsys.readouterr()
    assert main(["config", "import", line]) == 0
    out = capsys.readouterr().out
    assert profile() == {**after, "max_restarts": "2"}
    for key in {word.partition("=")[0] for word in before} - after.keys():
        assert f"  {key}: removed  (was " in out


def test_literal_exports_before_torchrun_are_taken_over_and_all_others_are_listed(
    capsys: Capture,
) -> None:
    Path("run.sh").write_text(
        "export OMP_NUM_THREADS=4 CUDA_VISIBLE_DEVICES=0,1\n"
        "GPUS=2\n"
        "NAME='a b'; export NAME\n"
        "DEBUG=1\n"
        "export PATH=$HOME/bin:$PATH\n"
        "export MASTER_PORT=1234\n"
        "export TWICE=1 GONE=1\nunset GONE\nexport TWICE=2\n"
        'if test -n "$1"; then export MAYBE=1; fi\n'
        "export LATER=$GPUS\n"
        "A=1 echo done\n"
        "torchrun --nproc_per_node=$GPUS --max-restarts ${GPUS} train.py\n"
        "export AFTER=1\n"
    )
    left, _ = imported(capsys, "run.sh")
    assert profile() == {
        "threads_per_process": "4",
        "device": "cuda",
        "devices": ["0", "1"],
        "env": {"NAME": "a b", "LATER": "2"},
        "num_processes": "2",
        "max_restarts": "2",
    }
    assert left == [
        "DEBUG=1 (it is not exported: torchrun does not see it)",
        "PATH=$HOME/bin:$PATH (only a shell knows its value)",
        "TWICE=1, TWICE=2 (it is set several times)",
        "MAYBE=1 (it is set under a condition or in brackets)",
        "MASTER_PORT=1234 (the launcher sets it for each process)",
    ]


def test_what_any_of_several_torchrun_commands_leaves_is_listed_and_each_has_its_next_command(
    capsys: Capture,
) -> None:
    Path("run.sh").write_text(
        "torchrun --nproc_per_node=2 --rdzv-id 1 a.py\n"
        "torchrun --nproc_per_node=2 --rdzv-id 1 --role r b.py\n"
    )
    left, following = imported(capsys, "run.sh")
    assert left == ["--rdzv-id 1", "--role r"]
    assert following == ["headway launch a.py", "headway launch b.py"]
    Path("run.sh").write_text(
        "torchrun --nproc_per_node=2 a.py\ntorchrun --nproc_per_node=2 --nnodes=1:4 b.py\n"
    )
    assert "which say different things" in refusal(capsys, "run.sh")


@pytest.mark.parametrize(
    ("line", "following"),
    [
        ("torchrun train.py --out $OUT", "headway launch train.py --out $OUT"),
        ('torchrun "$SCRIPT" "a b" \'$X\'', 'headway launch "$SCRIPT" "a b" \'$X\''),
        ("cd src && torchrun train.py", "cd src && headway launch train.py"),
        ("cd a\ncd 'b c'; torchrun t.py &", "cd a && cd 'b c' && headway launch t.py"),
        ("export D=/x\ntorchrun t.py --data=$D/y", "headway launch t.py --data=/x/y"),
        ("torchrun t.py --a\\ b 2> log -x", "headway launch t.py --a\\ b -x"),
    ],
)
def test_the_next_command_is_what_a_shell_would_read_there(
    line: str, following: str, capsys: Capture
) -> None:
    Path("run.sh").write_text(line)
    assert imported(capsys, "run.sh")[1] == [following]


def test_what_is_done_in_brackets_does_not_hold_behind_them(capsys: Capture) -> None:
    Path("run.sh").write_text("(cd src && (cd in; torchrun a.py); torchrun b.py); torchrun c.py\n")
    assert imported(capsys, "run.sh")[1] == [
        "cd src && cd in && headway launch a.py",
        "cd src && headway launch b.py",
        "headway launch c.py",
    ]
    assert "--nproc-per-node=$N is" in refusal(capsys, "(N=3); torchrun --nproc-per-node $N a.py")


@pytest.mark.parametrize(
    "change",
    [
        *("N+=1", "(( N++ ))", "((N++))", "read N", "let N=N+1", "M=$((N++))", ": ${N:=4}"),
        *("declare N=4", "N=4", "printf -v N 4", "for N in 1 2; do", "while read -r N; do"),
        "torchrun b.py $((N++))",
    ],
)
def test_a_variable_that_may_have_changed_is_not_known(change: str, capsys: Capture) -> None:
    text = f"export N=3 M=$N; echo $N ${{N}}\n{change}\ntorchrun"
    Path("run.sh").write_text(f"{text} --nproc-per-node $N a.py\n")
    assert "--nproc-per-node=$N is what a shell would replace" in refusal(capsys, "run.sh")
    Path("run.sh").write_text(f"{text.replace('torchrun b.py', ':')} a.py\n")
    assert any(line.startswith("N=3") for line in imported(capsys, "run.sh")[0])


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--x $(a $(b $(c $(d 1)))) --y 3", ""),
        ('"$(a "b; c")" --y 3', ""),
        ("--x $(a $(b $(c $(d $(e $(f $(g))))))) --y 3", "no closing quotation or bracket"),
        ('$(grep "(" file) --y 3', "no closing quotation or bracket"),
    ],
)
def test_a_command_is_read_whole_or_refused(word: str, said: str, capsys: Capture) -> None:
    Path("run.sh").write_text(f"torchrun --nproc-per-node 2 a.py {word}\n")
    if said:
        assert said in refusal(capsys, "run.sh")
    else:
        assert imported(capsys, "run.sh")[1] == [f"headway launch a.py {word}"]


def test_a_refused_value_is_shown_whole(capsys: Capture) -> None:
    value = "$(( $(nvidia-smi -L | wc -l) / 2 ))"
    err = refusal(capsys, f"torchrun --nproc-per-node {value} a.py")
    assert f"--nproc-per-node={value} is what a shell would replace" in err


def test_a_value_that_cannot_be_read_whole_is_not_known(capsys: Capture) -> None:
    Path("run.sh").write_text('N=2$(grep "(" file)\ntorchrun --nproc-per-node $N a.py\n')
    assert "--nproc-per-node=$N is what a shell would replace" in refusal(capsys, "run.sh")


@pytest.mark.parametrize(
    ("begin", "end"), [("<<EOF", "EOF"), ("<<-'EOF' >to", "\tEOF"), ("<<A <<B", "A\nB")]
)
def test_a_here_document_is_no_command(begin: str, end: str, capsys: Capture) -> None:
    text = f"cat {begin}\nIt's\n torchrun --nproc-per-node 9 a.py\n{end}\ntorchrun b.py\n"
    Path("run.sh").write_text(f"(( N = 1<<2 ))\n{text}")
    assert imported(capsys, "run.sh")[1] == ["headway launch b.py"]


def test_words_that_a_shell_has_read_already_are_quoted_again(capsys: Capture) -> None:
    _, (following,) = imported(capsys, "torchrun", "train.py", "--out", "$OUT", "two words")
    printed = following.replace("headway launch", "printf '%s|'")
    shown = subprocess.run(["sh", "-c", printed], capture_output=True, text=True, check=True)
    assert shown.stdout == "train.py|--out|$OUT|two words|"


@pytest.mark.parametrize("word", ["$ARGS", "${ARGS}", '"${ARGS[@]}"', '"$@"', "$(args)", "`args`"])
def test_words_before_the_script_that_may_be_flags_are_refused(word: str, capsys: Capture) -> None:
    assert "is what a shell would replace" in refusal(capsys, f"torchrun {word} train.py")
    assert not Path(choose_profile().path).exists()


@pytest.mark.parametrize(
    ("line", "left"),
    [
        ("torchrun \\\r\n  --nproc_per_node=2 \\\r\n  t.py\r\n", []),
        ("exec torchrun --nproc_per_node=2 t.py", []),
        ("if true; then torchrun --nproc_per_node=2 t.py; fi", []),
        ("(cd /x; torchrun --nproc_per_node=2 t.py)", []),
        ("nohup torchrun --nproc_per_node=2 t.py &", ["nohup"]),
        ("srun -N 1 --mem=0 torchrun --nproc_per_node=2 t.py", ["srun -N 1 --mem=0"]),
        ("uv run torchrun --nproc_per_node=2 t.py", ["uv run"]),
        ("poetry run torchrun --nproc_per_node=2 t.py", ["poetry run"]),
        ("timeout 60 torchrun --nproc_per_node=2 t.py", ["timeout 60"]),
        ("sudo -E env torchrun --nproc_per_node=2 t.py", ["sudo -E"]),
        ("time python -u -m torch.distributed.run --nproc_per_node=2 t.py", []),
        ("python3 -X dev -m torch.distributed.run --nproc_per_node=2 t.py", ["python -X dev"]),
        ("$PYTHON -m torch.distributed.run --nproc_per_node=2 t.py", []),
        ("python -m torch.distributed.launch --use_env --nproc_per_node=2 t.py", []),
        ("python -m torch.distributed.launch --nproc_per_node=2 t.py", ["--local-rank"]),
    ],
)
def test_common_ways_to_run_torchrun_are_recognised(
    line: str, left: list[str], capsys: Capture
) -> None:
    Path("run.sh").write_bytes(line.encode())
    listed, (following,) = imported(capsys, "run.sh")
    assert profile() == {"num_processes": "2"}
    assert [text.startswith(start) for text, start in zip(listed, left, strict=True)] == [
        True for _ in left
    ]
    assert following.endswith("headway launch t.py")


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
    words = [Word.of(word) for word in ("torchrun", "--nproc-per-node=auto", "t.py")]
    assert from_torchrun(words, load(name), "").values == values


@pytest.mark.wording
@pytest.mark.parametrize(
    "line",
    [
        *("echo torchrun t.py", "sudo echo torchrun t.py", "timeout 60 echo torchrun t.py"),
        *("xargs torchrun t.py", "$TORCHRUN t.py", "bash <<E\ntorchrun t.py\nE\n"),
        "| tool | processes |\n|---|---|\n| torchrun | 3 |\n",  # a table
    ],
)
def test_a_torchrun_that_cannot_be_read_is_said_to_be_one(line: str, capsys: Capture) -> None:
    Path("run.sh").write_text(line)
    err = refusal(capsys, "run.sh")
    assert "there is a torchrun in it that cannot be read there\n  from: run.sh" in err
    assert "fix:  give that command itself: `headway config import torchrun ...`" in err


@pytest.mark.parametrize(
    ("words", "front"),
    [
        ("bash -c 'torchrun --nproc-per-node 3 t.py'", "bash -c"),
        ("srun bash -lc 'torchrun --nproc-per-node 3 t.py'", "srun bash -lc"),
        ("conda run -n env torchrun --nproc-per-node 3 t.py", "conda run -n env"),
        ("docker run --gpus all img torchrun --nproc-per-node 3 t.py", "docker run --gpus all img"),
    ],
)
@pytest.mark.parametrize("as_words", [True, False])
def test_what_runs_torchrun_elsewhere_is_left_in_front(
    words: str, front: str, as_words: bool, capsys: Capture
) -> None:
    left, following = imported(capsys, *(shlex.split(words) if as_words else [words]))
    assert left[0].startswith((f"{front} (put it in front of", f"{front} (give it the whole"))
    assert following == ["headway launch t.py"]
    assert profile()["num_processes"] == "3"


@pytest.mark.parametrize(
    "line",
    [
        *("docker rm -f torchrun", "docker build -t me/torchrun .", "conda install -y torchrun"),
        "| a | torchrun t.py |",
    ],
)
def test_a_word_that_is_no_command_is_no_torchrun(line: str, capsys: Capture) -> None:
    Path("run.sh").write_text(f"{line}\ntorchrun --nproc-per-node 3 t.py\n")
    imported(capsys, "run.sh")
    assert profile()["num_processes"] == "3"


def test_what_surrounds_a_shell_within_a_script_is_not_lost(capsys: Capture) -> None:
    inner = "'torchrun --nproc-per-node 3 t.py \"$@\"'"
    Path("run.sh").write_text(f"if x; then OMP_NUM_THREADS=2 bash -c {inner} _ --lr 1; fi\n")
    left, following = imported(capsys, "run.sh")
    assert left == [
        "bash -c (give it the whole `headway launch` line, or leave it out)",
        "_ --lr 1 (only that shell knows their places)",
    ]
    assert following == ['headway launch t.py "$@"']
    assert (profile()["num_processes"], profile()["threads_per_process"]) == ("3", "2")


def test_flags_of_what_surrounds_torchrun_are_shown_whole(capsys: Capture) -> None:
    line = "docker run -e A=1 img torchrun --nproc-per-node 3 t.py"
    left, _ = imported(capsys, *shlex.split(line))
    assert left[0].startswith("docker run -e A=1 img (put it in front of")


def test_a_shell_within_a_script_has_the_scripts_variables_and_folders(capsys: Capture) -> None:
    inner = "cd b && torchrun --nproc-per-node $N t.py"
    Path("run.sh").write_text(f'export OMP_NUM_THREADS=4\nN=3\ncd a\nbash -c "{inner}"\n')
    _, following = imported(capsys, "run.sh")
    assert following == ["cd a && cd b && headway launch t.py"]
    assert (profile()["num_processes"], profile()["threads_per_process"]) == ("3", "4")


def test_what_is_set_out_of_sight_is_said(capsys: Capture) -> None:
    Path("run.sh").write_text('source env.sh\n. ./more.sh\neval "$(tool init)"\ntorchrun t.py\n')
    left, _ = imported(capsys, "run.sh")
    assert left == [
        "source env.sh (what it sets, a shell knows)",
        ". ./more.sh (what it sets, a shell knows)",
        'eval "$(tool init)" (what it sets, a shell knows)',
    ]


def test_a_profile_beside_the_script_is_named_from_anywhere(capsys: Capture) -> None:
    Path("run.sh").write_text("cd src\ntorchrun t.py\n")
    _, following = imported(capsys, "--profile", "./d.yaml", "run.sh")
    assert following == [f"cd src && headway launch --profile {Path('d.yaml').absolute()} t.py"]


def test_a_file_of_accelerate_may_speak_of_torchrun(capsys: Capture) -> None:
    text = "# not for torchrun\ncompute_environment: LOCAL_MACHINE\nnum_processes: 2\n"
    Path("a.yaml").write_text(text)
    imported(capsys, "a.yaml")
    assert profile()["num_processes"] == "2"


def test_use_env_is_a_flag_of_the_old_launcher_alone(capsys: Capture) -> None:
    assert "--use-env is no flag of torchrun" in refusal(capsys, "torchrun", "--use_env", "t.py")


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
    assert "set machine_rank on each, or pass --machine-rank" in left[0]
    left, _ = imported(capsys, "torchrun", *flags, "--node-rank=1", "t.py")
    assert left == ["--rdzv-backend c10d"]


@pytest.mark.parametrize(
    ("line", "left"),
    [
        (
            "torchrun --master-addr a --master-port 29501 t.py",
            ["--master-addr a (one machine", "--master-port 29501 (on one machine the system"],
        ),
        ("torchrun --rdzv-endpoint localhost:0 t.py", ["--rdzv-endpoint localhost:0 (one machine"]),
    ],
)
def test_where_one_machine_would_meet_others_is_listed_with_the_reason(
    line: str, left: list[str], capsys: Capture
) -> None:
    listed, _ = imported(capsys, line)
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
    err = refusal(capsys, line)
    assert said in err
    assert f"\n  fix:  correct {said.split()[0]} there\n" in err


def test_of_nested_thread_counts_the_first_one_is_taken_over(capsys: Capture) -> None:
    imported(capsys, "OMP_NUM_THREADS=4,2 torchrun t.py")
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
    err = refusal(capsys, *words, line)
    command = shlex.split(err.split("fix:  `")[1].split("`")[0])
    assert command[:5] == ["headway", "config", "unset", *words]
    assert key in command[5]
    assert main(command[1:]) == 0
    assert main(["config", "import", *words, line]) == 0


@pytest.mark.wording
def test_a_file_that_cannot_be_read_is_not_called_a_profile(capsys: Capture) -> None:
    Path("large").write_bytes(bytes(2**20 + 1))
    Path("latin").write_bytes(b"\xff")
    Path("a folder").mkdir()
    for file in ("/dev/null", "a folder", "large", "latin"):
        err = refusal(capsys, file)
        assert "profile" not in err
        assert f"\n  from: {file}" in err


def test_a_tilde_is_the_home_folder_where_a_shell_says_so(capsys: Capture) -> None:
    text = "export A=~/hf B='~/hf' C=x~ D=~nobody/x\ntorchrun --log-dir ~/logs t.py\n"
    Path("run.sh").write_text(text)
    left, _ = imported(capsys, "run.sh")
    assert profile()["env"] == {"A": f"{Path.home()}/hf", "B": "~/hf", "C": "x~"}
    assert profile()["log_dir"] == f"{Path.home()}/logs"
    assert left == ["D=~nobody/x (only a shell knows its value)"]


@pytest.mark.parametrize(
    "lines",
    [
        "declare -x A=1",
        "typeset -x A=1",
        "set -a\nA=1\nset +a",
        "set -eax -o pipefail\nA=1\nset +a",
        "readonly A=1\nexport A",
    ],
)
def test_every_way_to_export_is_known(lines: str, capsys: Capture) -> None:
    Path("run.sh").write_text(f"{lines}\nB=2\ntorchrun t.py\n")
    left, _ = imported(capsys, "run.sh")
    assert profile()["env"] == {"A": "1"}
    assert left == ["B=2 (it is not exported: torchrun does not see it)"]


def test_what_is_added_to_a_variable_is_listed(capsys: Capture) -> None:
    Path("run.sh").write_text("A+=1\nexport A\ntorchrun t.py\n")
    assert imported(capsys, "run.sh")[0] == ["A+=1 (only a shell knows its value)"]
    assert "env" not in profile()


def test_variables_that_torchrun_reads_as_flags_are_flags(capsys: Capture) -> None:
    variables = "PET_NPROC_PER_NODE=2 PET_MAX_RESTARTS=3 PET_STANDALONE=1 PET_OTHER=1"
    assert imported(capsys, f"{variables} torchrun --max-restarts 4 t.py")[0] == []
    expected = {"num_processes": "2", "max_restarts": "4", "env": {"PET_OTHER": "1"}}
    assert profile() == expected


def test_a_flag_without_a_meaning_here_may_be_a_shells_expression(capsys: Capture) -> None:
    left, _ = imported(capsys, "torchrun --nproc-per-node 2 --master-port $((29500 + N)) t.py")
    assert left == ["--master-port $((29500 + N)) (on one machine the system chooses it)"]


@pytest.mark.wording
def test_a_short_flag_that_torchrun_does_not_have_is_named_as_it_stands(capsys: Capture) -> None:
    assert "error: -h is no flag of torchrun" in refusal(capsys, "torchrun -h")


def test_a_dry_run_prints_the_profile_alone(capsys: Capture) -> None:
    assert main(["config", "import", "--dry-run", "torchrun --tee 3 t.py"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "num_processes: 1"
    assert err == "no counterpart here: --tee 3\n"
