"""Flags of other launchers are answered with what they are here, with the value that was typed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from headway.commands.launch import make_parser
from headway.errors import ConfigError

THEIRS = {
    "torchrun": "from torch.distributed.run import get_args_parser as make",
    "accelerate": "from accelerate.commands.launch import launch_command_parser as make",
}
OF_SCRIPT = "put flags of the script after the script"
LIST = "import json; print(json.dumps([a.option_strings for a in make()._actions]))"


def refused(*words: str) -> tuple[str, str]:
    """Return what is wrong with these words, and the fix."""
    with pytest.raises(ConfigError) as error:
        make_parser().split([*words, "train.py"])
    (problem,) = error.value.problems
    return problem.what, problem.fix


@pytest.mark.processes
@pytest.mark.parametrize("tool", THEIRS)
def test_every_flag_of_another_launcher_is_one_of_ours_or_is_explained(tool: str) -> None:
    pytest.importorskip("accelerate" if tool == "accelerate" else "torch")
    command = [sys.executable, "-W", "ignore", "-c", f"{THEIRS[tool]}\n{LIST}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    for spellings in json.loads(done.stdout.splitlines()[-1]):
        for name in {one.replace("_", "-") for one in spellings} - make_parser().known.keys():
            assert "unknown" not in refused(name, "2")[0]


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
        ("--role trainer", "remove it"),
        ("--ipex", "remove it"),
        ("--multi-cpu", "pass --cpu --num-processes N"),
        ("--config_file a.yaml", "take it over with `headway config import a.yaml`"),
        ("--version", "`headway --version`"),
        ("--nodes 2", "pass --num-machines 2"),
        ("--partition gpu", "with --submit slurm, pass --sbatch KEY=VALUE"),
        ("--restart-delay 3", "pass --set restart_delay=3"),
        ("--num-proces 2", f"pass --num-processes 2, or {OF_SCRIPT}"),
        ("--supervice", f"pass --supervise, or {OF_SCRIPT}"),
        ("--lr 2", OF_SCRIPT),
        ("--epochs 3", OF_SCRIPT),
    ],
)
def test_the_fix_is_the_flag_to_type(typed: str, fix: str) -> None:
    assert refused(*typed.split())[1] == fix
