"""Exit codes: 2 for a wrong command line or name, 1 for a failed check or a missing checkpoint."""

from __future__ import annotations

import pytest

from headway.commands.main import main


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("config validate", 2),
        ("config validate none.yaml", 1),
        ("config show --profile none", 2),
        ("config get none", 2),
        ("config import none", 2),
        ("checkpoint", 2),
        ("checkpoint ls", 0),
        ("checkpoint ls none", 1),
        ("checkpoint verify none", 1),
        ("checkpoint prune none --keep 1", 1),
        ("why", 2),
        ("logs none", 2),
        ("explain HW999", 2),
        ("doctor --machine none.json", 2),
        ("launch none.py", 2),
    ],
)
def test_a_command_that_cannot_do_its_work_exits_with_the_code_of_the_rule(
    command: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command.split()) == code
    if code:
        fix = capsys.readouterr().err.rpartition("fix:")[2]
        assert f"`headway {' '.join(command.split()[:2])}`" not in fix  # it would fail again
