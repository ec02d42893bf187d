"""Exit codes: 2 for a wrong command line or name, 1 for a failed check or a missing checkpoint."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from headway.commands.main import main

CODES = {
    0: ["checkpoint ls"],
    1: [
        "config validate none.yaml",
        "checkpoint ls none",
        "checkpoint verify none",
        "checkpoint prune none --keep 1",
    ],
    2: [
        "config validate",
        "config show --profile none",
        "config get none",
        "config import none",
        "checkpoint",
        "checkpoint list",
        "checkpoint prune .",
        "checkpoint prune --keep 1",
        "checkpoint prune . --keep 0",
        "checkpoint prune . --keep many",
        "checkpoint ls a b",
        "checkpoint verify . --keep 1",
        "why",
        "logs none",
        "explain HW999",
        "explain HW001 HW002",
        "doctor --machine none.json",
        "adopt",
        "adopt none.py",
        "estimate --devices H100-80GB",
        "estimate --devices H100-80GB none.py",
        "estimate --devices H100-80GB --strategy ddpp script.py",
        "estimate --devices H100-80GB --strategy fsdp script.py",
        "estimate --devices H100-80GB --cpu script.py",
        "estimate --devices H100-80GB --time-limit soon script.py",
        "estimate --devices H100-80GB --time-limit 0 script.py",
        "launch none.py",
        "launch --hosts a,a --dry-run script.py",
        "launch --hosts a,b --num-machines 3 --dry-run script.py",
        "launch --hosts a,b --machine-rank 1 --dry-run script.py",
        "launch --hosts a,b --in-process --dry-run script.py",
        "launch --hosts a,b --mixed-precision fp16 --cpu --dry-run script.py",
        "launch --hostfile hosts.txt --dry-run script.py",
        "launch --submit pbs script.py",
        "launch --submit slurm --sbatch time=0h script.py",
        "launch --submit slurm --sbatch p=x script.py",
        "launch --submit slurm --sbatch nodes=1 --num-machines 2 script.py",
        "launch --submit slurm --sbatch qos=a --sbatch qos=b script.py",
        "launch --submit slurm --sbatch 'comment=a\nb' script.py",
        "launch --submit slurm --sbatch export=NONE --env A_KEY=secret script.py",
        "launch --submit slurm --num-machines 0 script.py",
        "launch --submit slurm --machine-rank 1 script.py",
        "launch --submit slurm --main-address a script.py",
        "launch --submit slurm --hosts a,b script.py",
        "launch --submit slurm --in-process script.py",
        "launch --submit slurm --mixed-precision fp16 --cpu script.py",
    ],
}


@pytest.mark.parametrize(
    ("command", "code"),
    [(command, code) for code, commands in CODES.items() for command in commands],
)
def test_a_command_that_cannot_do_its_work_exits_with_the_code_of_the_rule(
    command: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("script.py").write_text("open('started', 'w')")
    words = shlex.split(command)
    assert main(words) == code
    assert not Path("started").exists()
    if code:
        error, _, fix = capsys.readouterr().err.rpartition("fix:")
        assert error.startswith("error: ")
        assert f"`headway {' '.join(words[:2])}`" not in fix  # it would fail again
