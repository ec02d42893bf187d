"""Real shells complete our command lines with the script of `headway completion`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from headway.commands.main import COMMANDS, main

pytest.importorskip("shtab")

CASES = [  # typed, among the words offered, not among them
    ("headway ", {"launch", "config", "doctor"}, {"train.py"}),
    ("headway config u", {"use", "unset"}, {"show"}),
    ("headway launch --num-", {"--num-processes", "--num-machines"}, {"--devices"}),
    ("headway launch --mixed-precision ", {"no", "bf16", "fp16"}, {"auto"}),
    ("headway launch --cpu ", {"train.py"}, {"data.csv"}),
    ("headway launch --wait tra", {"train.py"}, set()),
    ("headway completion ", {"bash", "zsh", "fish"}, set()),
]

BASH = """\
source ./completion
for line in "$@"; do
  COMP_LINE="$line" COMP_POINT=${#line}
  read -ra COMP_WORDS <<< "$line"
  [[ "$line" == *" " ]] && COMP_WORDS+=("")
  COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
  COMPREPLY=()
  _shtab_headway 2> /dev/null
  echo "${COMPREPLY[*]}"
done
"""

FISH = """\
source ./completion
for line in $argv
  echo (complete -C $line | string replace -r '\\t.*' '')
end
"""


@pytest.fixture
def here() -> Path:
    """A folder with two files."""
    Path("train.py").touch()
    Path("data.csv").touch()
    return Path.cwd()


def write_completion(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    Path("completion").write_text(capsys.readouterr().out)


@pytest.mark.processes
@pytest.mark.parametrize(("shell", "program"), [("bash", BASH), ("fish", FISH)])
def test_a_shell_offers_commands_flags_choices_and_scripts(
    shell: str, program: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    write_completion(shell, capsys)
    Path("ask").write_text(program)
    typed = [line for line, _, _ in CASES]
    done = subprocess.run([shell, "ask", *typed], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for (line, wanted, unwanted), offered in zip(CASES, done.stdout.splitlines(), strict=True):
        words = set(offered.split())
        assert wanted <= words, f"{line!r}: {offered}"
        assert not unwanted & words, f"{line!r}: {offered}"


@pytest.mark.processes
def test_zsh_completes_what_is_typed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pexpect = pytest.importorskip("pexpect")
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    write_completion("zsh", capsys)
    shell = pexpect.spawn("zsh", ["-f", "-i"], encoding="utf-8", timeout=60, dimensions=(24, 200))
    shell.sendline("autoload -U compinit; compinit -u -D")
    shell.sendline('eval "$(<completion)"; headway() { print -r -- "GOT=$*=" }; echo LOADED=')
    shell.expect("LOADED=\r")
    for typed, completed in (
        ("headway laun\t", "launch"),
        ("headway config unse\t", "config unset"),
        ("headway launch --num-pro\t", "launch --num-processes"),
        ("headway launch --mixed-precision bf\t", "launch --mixed-precision bf16"),
        ("headway launch --cpu tra\t", "launch --cpu train.py"),
    ):
        shell.sendline(typed)
        shell.expect(r"GOT=([^=]*)=\r")
        assert shell.match[1].strip() == completed
    shell.sendline("exit")
    shell.expect(pexpect.EOF)
    shell.close()


def test_every_command_is_in_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    for name in COMMANDS:
        assert f"_shtab_headway_{name}_option_strings" in script


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "csh"]) == 2
    assert "error:" in capsys.readouterr().err
