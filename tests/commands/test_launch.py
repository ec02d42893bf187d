"""`headway launch` as a user types it: what it refuses, and that one process is the script."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from headway.commands.main import main
from tests.commands.running import python, run
from tests.distributed import launching
from tests.distributed.launching import HEADWAY, environment, script
from tests.machines.recorded import FOLDER

pytestmark = pytest.mark.processes


def headway(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "headway", *words, **variables)


@pytest.fixture
def starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """End each launch of this process where it would start the script."""
    monkeypatch.setattr("headway.launcher.run.run", lambda *_, **__: 0)


TELL = """
import json, os, sys
print(json.dumps({
    "argv": sys.argv, "pid": os.getpid(), "file": __file__, "path0": sys.path[0],
    "environ": dict(os.environ), "stdin": sys.stdin.read(), "torch": "torch" in sys.modules,
}))
"""


def test_every_argument_after_the_script_reaches_it_byte_for_byte() -> None:
    words = ["--help", "--", "$HOME", "~", "", "a b", "'q'", '"', "--cpu", "-m", "${rank}", "*"]
    done = headway("launch", "-q", script(TELL), *words)
    assert json.loads(done.stdout)["argv"] == ["script.py", *words]
    raw = b"\xff\xfe"  # no valid UTF-8
    name = script("import os, sys; print(sys.argv[0], os.fsencode(sys.argv[1]))", "-dash.py")
    command: list[str | bytes] = [*HEADWAY, "-q", "--", name, raw]
    answer = subprocess.run(command, env=environment(), capture_output=True)
    assert answer.stdout == f"-dash.py {raw!r}\n".encode()


def test_one_process_is_the_script_itself() -> None:
    process = subprocess.Popen(
        [*HEADWAY, "-q", script(TELL)],
        env=environment(RANK="3"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    told = json.loads(process.communicate("typed\n", timeout=60)[0])
    assert told["pid"] == process.pid
    assert told["stdin"] == "typed\n"
    assert told["file"] == str(Path("script.py").absolute())
    assert told["path0"] == str(Path.cwd())
    assert "RANK" not in told["environ"]
    assert told["environ"]["ACCELERATE_USE_CPU"] == "true"
    assert "OMP_NUM_THREADS" in told["environ"]
    assert not told["torch"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_one_process_inherits_no_ignored_sigpipe() -> None:
    reader, writer = os.pipe()
    os.close(reader)  # a shell's `| head` that is done
    text = "import os, signal; signal.signal(signal.SIGPIPE, signal.SIG_DFL); os.write(1, b'x')"
    for command in ([sys.executable], [*HEADWAY, "-q"]):
        done = subprocess.run(
            [*command, script(text)], env=environment(), stdout=writer, timeout=60
        )
        assert done.returncode == -signal.SIGPIPE
    os.close(writer)
    name = script("print([one for one in open('/proc/self/status') if 'SigIgn' in one])", "s.py")
    launched, plain = headway("launch", "-q", name).stdout, python(name).stdout
    assert launched == plain
    assert "SigIgn" in plain


def test_a_module_runs_as_under_python_m() -> None:
    Path("package").mkdir()
    Path("package/__init__.py").touch()
    Path("package/other.py").write_text("NAME = 'other'")
    Path("package/tool.py").write_text(
        "import sys\nfrom .other import NAME\nprint(NAME, __spec__.name, sys.argv[1:])"
    )
    done = headway("launch", "-q", "-m", "package.tool", "--flag", "-m")
    assert done.stdout.strip() == "other package.tool ['--flag', '-m']"


@pytest.mark.parametrize("end", ["pass", "exit(7)", "exit('text')", "1 / 0", "os.kill(0, 0)"])
def test_in_process_a_script_is_the_launchers_own_python_and_ends_as_its_own(end: str) -> None:
    name = script(
        "import atexit, os, sys; atexit.register(print, 'last')\n"
        "print(__name__, __file__, sys.argv, sys.path, os.environ['A'], 'RANK' in os.environ,\n"
        "      sys.modules['__main__'].__dict__ is globals(), 'torch' in sys.modules)\n"
        f"if 'headway' in sys.modules: print('same process')\n{end}\n"
    )
    words = ["--env", "A=1", name, "--x"]
    here = headway("launch", "-q", "--in-process", *words, RANK="3")
    alone = headway("launch", "-q", *words, RANK="3")
    assert here.stdout.replace("same process\n", "") == alone.stdout
    assert "same process" in here.stdout
    assert (here.returncode, here.stderr) == (alone.returncode, alone.stderr)


def test_one_process_that_the_flag_asks_for_finds_a_rank_and_is_still_the_script_itself() -> None:
    words = ["launch", "-q", "--num-processes", "1", script(TELL)]
    told = json.loads(headway(*words, RANK="3", TORCHELASTIC_USE_AGENT_STORE="True").stdout)
    assert not told["torch"]
    seen = told["environ"]
    assert (seen["RANK"], seen["WORLD_SIZE"], seen["MASTER_ADDR"]) == ("0", "1", "127.0.0.1")
    assert int(seen["MASTER_PORT"]) > 0
    assert "TORCHELASTIC_USE_AGENT_STORE" not in seen


def test_in_process_a_module_finds_what_is_beside_it_and_ctrl_c_ends_it_as_python() -> None:
    Path("package").mkdir()
    Path("package/tool.py").write_text("import package.other")
    # Python runs a signal's handler after the call that it came just before, so that call is short
    Path("package/other.py").write_text(
        "print('found', flush=True)\nimport time\nwhile True: time.sleep(0.01)"
    )
    process = subprocess.Popen(
        [*HEADWAY, "-q", "--in-process", "-m", "package.tool"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"found\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == -signal.SIGINT
    process.stdout.close()


NO_TORCH = """
import contextlib, sys
from headway.commands.main import main
for words in ("--help", "config show", "estimate --help", "launch --dry-run script.py"):
    with contextlib.suppress(SystemExit):  # after the help of a command
        assert main(words.split()) == 0
    assert not {"torch", "rich"} & sys.modules.keys(), words
"""


def test_help_settings_and_a_plan_are_shown_without_an_import_of_torch() -> None:
    script("pass")
    done = python("-c", NO_TORCH)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--cpu", "no script given"),
        ("--no-python ./script.py", "exists and is executable"),
        ("scirpt.py", "did you mean 'script.py'"),
        ("'--cpu --num-processes 2' script.py", "remove the quotes"),
        ("--num-procesess 2 script.py", "did you mean --num-processes"),
        ("--replace-acelerate yes script.py", "pass --replace-accelerate,"),
        ("--num-proc 2 script.py", "unknown flag"),
        ("--device=tpu script.py", "one of auto, cpu, cuda, gpu, mps"),
        ("--mixed-precision fp61 script.py", "fix:  pass `--mixed-precision fp16` (or no, bf16)"),
        ("--devices 0 script.py", "fix:  pass `--devices 0,` (or all)"),
        ("--num-processes", "requires a value"),
        ("--cpu=yes script.py", "takes no value"),
        ("--cpu --device cuda script.py", "cannot be used together"),
        ("--machine x.json script.py", "add --dry-run"),
        ("--use_mps_device script.py", "is --device mps here"),
        ("--cpu --wait script.py", "--wait waits for idle GPUs"),
        ("--device cuda --devices idle:1 --wait=soon script.py", "number of seconds"),
        # before any waiting
        ("--device=cuda --devices=idle:1 --num-processes=2 --wait script.py", "selects 1 GPU"),
        ("--log-dir script.py/logs script.py", "Not a directory"),
        ("--dry-run --log-dir script.py script.py", "log_dir 'script.py' cannot be written to"),
        ("--restart-delay 3 script.py", "--set restart_delay=3"),
        ("--set restart_dely=3 script.py", "restart_delay"),
        ("--set record script.py", "not NAME=VALUE"),
        ("--device cpu --set device=cpu script.py", "set twice"),
        ("--sbatch time=2h script.py", "--submit"),  # for a launch that is no job
        ("--set sbatch=qos=b script.py", "--submit"),
    ],
)
@pytest.mark.usefixtures("torch_asked_once", "starts_nothing")
def test_a_mistake_is_two_to_four_lines_and_exit_2_before_anything_starts(
    words: str, reason: str
) -> None:
    script("open('started', 'w')")
    code, text = run("launch", *shlex.split(words))
    assert code == 2
    assert reason in text
    assert 2 <= len(text.splitlines()) <= 4
    assert not Path("started").exists()


def test_every_word_after_the_script_is_the_scripts_also_a_flag_of_ours() -> None:
    words = ["--num_processes", "2", "--device", "x", "--nproc-per-node=2", "--", "--log-dir", "y"]
    # it reads its arguments in a module that it imports: nothing in its own text shows that
    Path("options.py").write_text("import sys\nprint(sys.argv[1:])\n")
    done = headway("launch", "-q", script("import options"), *words)
    assert (done.stdout.strip(), done.stderr, done.returncode) == (str(words), "", 0)


PARSES = "import argparse; p = argparse.ArgumentParser(); p.add_argument('--lr'); p.parse_args()"
SUPERVISED = ("-q", "--cpu", "--supervise")


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (["--num_processes=2"], "--num_processes comes after script.py and was passed to it"),
        (["--num", "2", "--epochs", "--help-me"], ""),
    ],
)
@pytest.mark.skipif(find_spec("torch") is None, reason="starts ranks, which needs torch")
@pytest.mark.usefixtures("warm_pythons")
def test_a_usage_error_of_a_script_that_was_given_a_flag_of_ours_ends_with_a_note(
    words: list[str], note: str
) -> None:
    done = launching.launch(*SUPERVISED, script(PARSES), *words)
    assert done.returncode == 2
    assert "unrecognized arguments" in done.stderr
    assert "fix:" not in done.stderr  # the script's own message names it
    last = done.stderr.splitlines()[-1]
    expected = f"note: {note}; put flags of headway launch before the script"
    assert last == expected if note else "note:" not in done.stderr


@pytest.mark.usefixtures("starts_nothing")
@pytest.mark.parametrize("text", ["import os; os.getenv('RANK')", "print('LOCAL_RANK')"])
def test_one_process_that_may_read_rank_is_noted_before_it_starts(text: str) -> None:
    mentions = "'RANK'" in text
    for words, args in (([], ()), (["--num-processes", "1"], ()), ([], ("--help",))):
        said = run("launch", "--cpu", *words, script(text), *args)[1]
        note = "note: script.py mentions RANK, which is not set for one process; pass --num-proc"
        assert (note in said) == (mentions and not words and not args)


def run_help(*words: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit):
        main(words)
    return printed.getvalue()


def test_the_brief_help_has_fifteen_flags_and_help_is_a_command() -> None:
    brief, whole = run_help("launch", "-h"), run_help("launch", "--help")
    assert len(re.findall("^  --", brief, re.MULTILINE)) == 15
    assert {*re.findall("^  (--[a-z-]+)", brief, re.MULTILINE)} < {*re.findall("--[a-z-]+", whole)}
    assert run_help("help", "launch") == whole


@pytest.mark.skipif(find_spec("torch") is None, reason="starts ranks, which needs torch")
def test_no_other_failure_ends_with_a_note_about_flags() -> None:
    done = launching.launch(*SUPERVISED, script("raise SystemExit(1)"), "--num-processes", "2")
    assert done.returncode == 1
    assert "note:" not in done.stderr


@pytest.mark.usefixtures("starts_nothing")
@pytest.mark.parametrize(
    ("text", "flags", "noted"),
    [
        ("pass", ["--num-processes=2", "--cpu"], "--num-processes, --cpu come"),
        ("pass", ["--mixed-precision", "bf16"], "--mixed-precision comes"),
        ("'--device'", ["--device=2", "--cpu"], "--cpu comes"),
        ("'--device'", ["--device=2", "--lr=1", "--", "--cpu"], ""),
    ],
)
def test_one_process_is_told_of_flags_of_ours_that_its_script_was_given_but_does_not_mention(
    text: str, flags: list[str], noted: str
) -> None:
    code, said = run("launch", script(text), *flags)
    assert (f"headway: note: {noted} after script.py and w" in said) == bool(noted)
    assert ("note:" in said, code) == (bool(noted), 0)


@pytest.mark.usefixtures("starts_nothing")
def test_quiet_hides_the_plan_and_no_warning() -> None:
    note = "headway: note: main_port has no effect on one machine (flag --main-port)\n"
    assert run("launch", "-q", "--main-port", "1234", script("pass")) == (0, note)


def in_shell(command: str) -> subprocess.CompletedProcess[str]:
    line = command.replace("HEADWAY", f"{sys.executable} -m headway")
    return subprocess.run(
        ["bash", "-c", line], env=environment(), capture_output=True, text=True, timeout=120
    )


def test_closed_streams_are_no_reason_for_a_traceback() -> None:
    script("open('ran', 'a').write('x')")
    for redirections in (">&-", "2>&-", "<&-", ">&- 2>&- <&-"):
        done = in_shell(f"HEADWAY launch --cpu script.py {redirections}")
        assert (done.returncode, done.stdout) == (0, "")
        assert "Traceback" not in done.stderr
    assert Path("ran").read_text() == "xxxx"
    assert "'nosuch.py' not found" in in_shell("HEADWAY launch nosuch.py 2>&-").stdout


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("words", ["config show", "--help", "launch --dry-run script.py"])
def test_a_full_disk_under_the_output_is_one_line(words: str) -> None:
    script("pass")
    done = in_shell(f"HEADWAY {words} >/dev/full")
    assert done.returncode == 1
    assert done.stderr == "error: the output cannot be written: No space left on device [HW010]\n"


def test_a_removed_working_directory_is_no_reason_for_a_traceback() -> None:
    path = Path(script("print('ran')")).absolute()
    Path("gone").mkdir()
    done = in_shell(f"cd gone; rmdir ../gone; HEADWAY launch -q {path}; HEADWAY launch x.py")
    assert done.stdout == "ran\n"
    assert "script 'x.py' not found" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_real_start_says_the_plan_in_one_quiet_line() -> None:
    done = headway("launch", "--cpu", "--device", "CPU", script("print('out')"))
    assert done.stdout == "out\n"
    assert len(done.stderr.splitlines()) == 1
    assert "script.py: 1 process on cpu, precision fp32" in done.stderr


def test_a_plan_for_another_machine_uses_its_gpus_and_its_variables_and_none_of_this_shell() -> (
    None
):
    recorded = str(FOLDER / "slurm_node.json")
    words = ["launch", "--device", "cuda", "--machine", recorded, "--dry-run", script("pass")]
    assert "note" not in run(*words)[1]
    text = run(*words, CUDA_VISIBLE_DEVICES="0", HEADWAY_NUM_PROCESSES="7")[1]
    assert "4 processes on cuda" in text
    assert "16 threads each" in text
    variables = "HEADWAY_NUM_PROCESSES, CUDA_VISIBLE_DEVICES"
    assert f"note: {variables} in this shell do not apply with --machine" in text


@pytest.mark.usefixtures("torch_asked_once")
def test_a_profile_of_another_machine_is_refused_with_its_place() -> None:
    Path("headway.yaml").write_text("device: cuda\nnum_processes: 8\n")
    code, text = run("launch", script("print('ran')"))
    assert code == 3
    assert "device is 'cuda' for 8 processes, but no GPU is visible" in text
    assert "device: project profile" in text


def test_idle_gpus_of_another_machine_are_shown_without_claiming_them() -> None:
    recorded = str(FOLDER / "gpu_2_one_busy.json")
    words = ["--devices", "idle:1", "--machine", recorded, "--dry-run", script("pass")]
    assert "note: skipped GPU 0: used by process 31337" in run("launch", *words)[1]


def test_a_dry_run_that_would_wait_is_not_told_to_ask_for_idle_gpus() -> None:
    recorded = str(FOLDER / "gpu_2_one_busy.json")
    words = ["--devices", "idle:2", "--wait", "--machine", recorded, "--dry-run", script("pass")]
    _, text = run("launch", *words)
    assert "only 1 of 2 GPUs is idle" in text
    assert "--wait waits for idle GPUs" not in text


def test_ctrl_c_before_the_start_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headway.commands.launch.machine_from_flags", interrupt)
    assert run("launch", script("pass")) == (130, "headway: interrupted\n")


def test_a_launch_of_one_process_imports_nothing_that_only_errors_help_or_ranks_need() -> None:
    text = (  # for -S: site imports what editable installs need
        "import os, sys, typing; heavy = {'argparse', 'dataclasses', 'logging', 'pathlib',\n"
        "'shutil', 'select', 'yaml', 'psutil', 'shlex', 'difflib', 'rich', 'torch', 'inspect',\n"
        "'subprocess', 'socket', 'threading', *(f'headway.{name}' for name in (\n"
        "'commands.remote_job', 'commands.tables', 'ipc.records', 'ipc.numbering',\n"
        "'launcher.plan.describe', 'launcher.processes'))}\n"
        "ours = lambda: sum(name.startswith('headway') for name in sys.modules)\n"
        "os.execve = lambda *words: sys.exit(\n"
        "    f'imported: {sorted(heavy & sys.modules.keys())}, many: {ours() > 47}')\n"
        "typing.ForwardRef.__init__ = lambda _, text, **more: sys.exit(f'compiled: {text}')\n"
        "from headway.commands.main import main; main(['launch', '--cpu', sys.argv[1]])\n"
    )
    assert python("-S", "-c", text, script("pass")).stderr.endswith("imported: [], many: False\n")
