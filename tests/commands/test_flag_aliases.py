"""Flags of other launchers are answered with what they are here, with the value that was typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.commands.flag_aliases import torchrun_note
from headway.commands.launch import make_parser
from headway.errors import ConfigError

OF_SCRIPT = "put the script's flags after its name"


def refused(*words: str) -> tuple[str, str]:
    """Return what is wrong with these words, and the fix."""
    with pytest.raises(ConfigError) as error:
        make_parser().split([*words, "train.py"])
    (problem,) = error.value.problems
    return problem.what, problem.fix


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        ("--nproc_per_node=4", "pass --num-processes 4"),
        ("--nproc-per-node gpu", "pass --num-processes N"),
        ("--node-rank 1", "pass --machine-rank 1"),
        ("--main_process_ip 10.0.0.1", "pass --main-address 10.0.0.1"),
        ("--main_process_port 29501", "pass --main-port 29501"),
        ("--gpu_ids 0", "pass --devices 0,"),
        ("--gpus 2", "pass --devices 2"),
        ("--np 2", "pass --num-processes 2"),
        ("--tee 3", "pass --log-dir DIR"),
        ("-r 3", "pass --log-dir DIR"),
        ("--standalone", "remove it"),
        ("--rdzv_backend=c10d", "remove it"),
        ("--dynamo_backend no", "pass Accelerator(dynamo_backend=NAME) in the script"),
        ("--dynamo 2", OF_SCRIPT),
        ("--multi-cpu", "pass --cpu"),
        ("--use_fsdp", "pass --strategy fsdp"),
        ("--config_file a.yaml", "pass --profile NAME, after `headway config import FILE`"),
        ("--nodes 2", "pass --num-machines 2"),
        ("--partition gpu", "pass --submit slurm --sbatch KEY=VALUE"),
        ("--restart-delay 3", "pass --set restart_delay=3"),
        ("--num-proces 2", f"pass --num-processes 2, or {OF_SCRIPT}"),
        ("--supervice", f"pass --supervise, or {OF_SCRIPT}"),
        ("--devices --cpu --lr 3", f"{OF_SCRIPT}; '--cpu' was read as the value of --devices"),
        ("-dash.py", "write ./-dash.py for a script whose name starts with a dash"),
    ],
)
def test_the_fix_is_the_flag_to_type(typed: str, fix: str) -> None:
    Path("-dash.py").touch()
    assert refused(*typed.split())[1] == fix


def test_each_flag_of_torchrun_and_accelerate_launch_has_an_answer() -> None:
    accelerate = pytest.importorskip("accelerate.commands.launch")
    torchrun = pytest.importorskip("torch.distributed.run")
    parsers = [accelerate.launch_command_parser(), torchrun.get_args_parser()]
    flags = [flag for parser in parsers for flag in parser._actions]
    names = {name.replace("_", "-") for flag in flags for name in flag.option_strings}
    assert len(names) > 100
    for name in names - make_parser().known.keys():
        assert OF_SCRIPT not in refused(f"{name}=1")[1], name


def test_the_variables_of_torchrun_that_a_launch_does_not_read_are_named_with_our_flag() -> None:
    usual = {"NNODES": "2", "STANDALONE": "1", "RDZV_BACKEND": "c10d", "REDIRECTS": "0"}
    named = {"LOG_DIR": "a", "LOCAL_RANKS_FILTER": "0,1", "RDZV_CONF": "a=b"}
    environ = {f"PET_{name}": text for name, text in {**usual, **named}.items()}
    (note,) = torchrun_note(environ)
    said = "PET_LOG_DIR (pass --log-dir), PET_LOCAL_RANKS_FILTER (pass --ranks 0,1), PET_RDZV_CONF"
    assert note.endswith(f": {said} (remove it)")
    assert torchrun_note({"PET_NNODES": "2"}) == []
