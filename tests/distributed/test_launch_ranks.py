"""`headway launch` with several ranks: one group, true ranks, a true exit code, no traces."""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.distributed.launching import (
    HEADWAY,
    begin,
    environment,
    finished,
    free_port,
    launch,
    popen,
    run,
    script,
    start,
    start_in_terminal,
    wait_for_end,
    wait_for_pids,
)
from tests.waiting import wait_for_lines

pytestmark = pytest.mark.distributed

GROUP = """
import json, os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
seen = {name: os.environ.get(name) for name in (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "EXTRA")}
seen |= {"sum": total.item(), "size": dist.get_world_size(), "argv": sys.argv[1:],
         "threads": torch.get_num_threads(), "stdin": sys.stdin.read()}
open(f"seen_{seen['RANK']}.json", "w").write(json.dumps(seen))
print("done")
dist.destroy_process_group()
"""


def two_machines(port: int | None = None) -> list[str]:
    """Return the flags of a launch on one of two machines, with machine 0 here."""
    main = ["--main-address", "127.0.0.1", "--main-port", str(port or free_port())]
    return ["--cpu", "--num-machines", "2", *main]


def told(count: int) -> list[dict[str, object]]:
    assert sorted(Path.cwd().glob("seen_*.json")) == [
        Path.cwd() / f"seen_{rank}.json" for rank in range(count)
    ]
    return [json.loads(Path(f"seen_{rank}.json").read_text()) for rank in range(count)]


def test_three_cpu_ranks_form_one_group_of_three() -> None:
    words = ["--cpu", "--num-processes", "3", "--env", "EXTRA=a b"]
    words += [script(GROUP), "$HOME", "${local_rank}", "$$", "", "--", "--help"]
    done = launch(*words, typed="typed", OMP_NUM_THREADS="1", code=0)
    ranks = told(3)
    for rank, seen in enumerate(ranks):
        assert (seen["RANK"], seen["LOCAL_RANK"]) == (str(rank), str(rank))
        assert (seen["WORLD_SIZE"], seen["LOCAL_WORLD_SIZE"], seen["size"]) == ("3", "3", 3)
        assert seen["sum"] == 6
        assert seen["MASTER_ADDR"] == "127.0.0.1"
        assert seen["GLOO_SOCKET_IFNAME"] == ("lo0" if sys.platform == "darwin" else "lo")
        assert seen["OMP_NUM_THREADS"] == "1"
        assert seen["EXTRA"] == "a b"
        assert seen["argv"] == ["$HOME", "${local_rank}", "$$", "", "--", "--help"]
        assert seen["stdin"] == ("typed" if rank == 0 else "")
    assert sorted(done.stdout.splitlines()) == ["[0] done", "[1] done", "[2] done"]


def test_one_supervised_process_is_one_rank_of_a_group_of_one() -> None:
    done = launch("--cpu", "--supervise", script(GROUP), code=0)
    (seen,) = told(1)
    assert (seen["RANK"], seen["WORLD_SIZE"], seen["size"]) == ("0", "1", 1)
    assert done.stdout == "done\n"


FAILS_FIRST = """
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
    os._exit(9)
"""


def test_two_agents_form_one_group_with_the_ranks_they_were_given_also_after_a_restart() -> None:
    words = [*two_machines(), "--max-restarts", "1", "--set", "restart_delay=0"]
    name = script(GROUP.replace("total = ", f"{FAILS_FIRST}total = "))
    second = start(*words, "--machine-rank", "1", "--num-processes", "2", name)
    time.sleep(0.5)  # it comes first, and waits
    first = start(*words, "--machine-rank", "0", "--num-processes", "1", name)
    for process in (first, second):
        _, errors = finished(process, 0)
        assert "; restart 1 of 1 on all machines" in errors
    ranks = told(3)
    assert [seen["LOCAL_RANK"] for seen in ranks] == ["0", "0", "1"]
    assert [seen["LOCAL_WORLD_SIZE"] for seen in ranks] == ["1", "2", "2"]
    assert all(seen["WORLD_SIZE"] == "3" and seen["sum"] == 6 for seen in ranks)


def test_only_the_ranks_that_were_chosen_are_shown() -> None:
    name = script("import os; print('rank', os.environ['RANK'])")
    done = launch("-q", "--cpu", "--num-processes", "3", "--ranks", "0,2", name, "--help")
    assert (done.returncode, "joined a process group" in done.stderr) == (0, False)  # only help
    assert sorted(done.stdout.splitlines()) == ["[0] rank 0", "[2] rank 2"]


def test_a_rank_to_show_that_no_machine_has_is_refused_once_they_have_met() -> None:
    words, name = two_machines(), script("import time; time.sleep(60)")
    machines = [
        start(*words, "--machine-rank", "0", "--ranks", "1-2", name),
        start(*words, "--machine-rank", "1", name),
    ]
    outputs = [machine.communicate(timeout=120)[1] for machine in machines]
    assert [machine.returncode for machine in machines] == [2, 2]
    assert all("ranks contains rank 2, but ranks are 0 to 1" in errors for errors in outputs)


def test_a_port_in_use_is_refused_with_the_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = launch(*two_machines(port), "--machine-rank", "0", script("pass"))
    assert done.returncode == 4
    assert f"port {port} is in use" in done.stderr
    assert "--main-port" in done.stderr


def test_stopped_and_saved_is_no_failure_and_no_restart() -> None:
    text = "import os, sys; print('run'); sys.exit(75 if os.environ['RANK'] == '0' else 0)"
    done = launch("--cpu", "--num-processes", "2", "--max-restarts", "2", script(text), code=75)
    assert done.stdout.count("run") == 2


def test_ranks_are_restarted_together_in_one_line_and_each_has_a_log_for_each_attempt() -> None:
    text = (
        "import os, sys, time\n"
        "attempt = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "print('attempt', attempt)\n"
        "print('err', file=sys.stderr)\n"
        "if attempt == '0' and os.environ['RANK'] == '1': sys.exit(3)\n"
        "if attempt == '0': time.sleep(60)\n"
    )
    words = ["--num-processes", "2", "--max-restarts", "2", "--set", "restart_delay=0"]
    done = launch("--cpu", *words, "--log-dir", "logs", script(text), code=0)
    assert sorted(done.stdout.splitlines())[-1] == "[1] attempt 1"
    assert done.stdout.count("attempt 1") == 2
    files = {path.name: path.read_text() for path in Path("logs").glob("*/*")}
    assert files.keys() == {f"rank_{r}_attempt_{a}.log" for r in (0, 1) for a in (0, 1)}
    assert sorted(files["rank_1_attempt_1.log"].splitlines()) == ["attempt 1", "err"]
    assert [line for line in done.stderr.splitlines() if "restart" in line] == [
        "headway: rank 1 of 2 exited with code 3; restart 1 of 2"
    ]


WAITING = """
import os, signal, subprocess, sys, time
def stop(number, frame):
    print("saving", flush=True)
    sys.exit(STOPPED)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
time.sleep(0.2)  # until the launcher knows that this rank has started
open(f"pid_{os.environ['RANK']}", "w").write(f"{os.getpid()} {child.pid}")
while True:
    time.sleep(0.1)
"""


@pytest.mark.parametrize(
    ("number", "code", "expected"),
    [
        (signal.SIGTERM, 75, 75),
        (signal.SIGHUP, 5, 5),
        (signal.SIGXCPU, 75, 75),
        (signal.SIGUSR1, 0, 0),  # no stop, but the user's: no grace period begins
    ],
)
def test_a_signal_reaches_the_ranks_and_nothing_survives_it(
    number: signal.Signals, code: int, expected: int
) -> None:
    text = WAITING.replace("SIGTERM", number.name).replace("STOPPED", str(code))
    grace = ["--grace-period-s", "0"] if number == signal.SIGUSR1 else []
    process = start("--cpu", "--num-processes", "2", *grace, script(text))
    pids = wait_for_pids("pid_*", 2)
    process.send_signal(number)
    out, errors = finished(process, expected)
    assert out.count("saving") == 2
    assert "Traceback" not in errors
    wait_for_end(*pids)


@pytest.mark.parametrize(("first", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_first_stop_says_what_it_waits_for_and_ctrl_c_ends_ranks_that_do_not_listen(
    first: int, code: int
) -> None:
    text = WAITING.replace("sys.exit(STOPPED)", "pass")
    words = ["--num-processes", "2", "--grace-period-s", "1000"]
    process = start("--cpu", *words, script(text))
    pids = wait_for_pids("pid_*", 2)
    process.send_signal(first)
    line = wait_for_lines(process, "waiting for ranks 0-1 to stop, up to 1000 s")
    assert ("Ctrl-C again" in line) == (first == signal.SIGINT)
    process.send_signal(signal.SIGINT)
    finished(process, code)
    wait_for_end(*pids)


def test_an_ignored_hangup_stays_ignored() -> None:
    text = WAITING.replace("STOPPED", "0")
    nohup = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    process = start("--cpu", "--num-processes", "2", script(text), first=nohup)
    wait_for_pids("pid_*", 2)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert process.poll() is None
    process.terminate()
    finished(process, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_run_on_one_machine_listens_on_loopback_only() -> None:
    text = GROUP.replace('print("done")', "import time; time.sleep(3)")
    process = start("--cpu", "--num-processes", "2", script(text), stdin=subprocess.DEVNULL)
    heard: set[str] = set()
    while process.poll() is None:
        family = [psutil.Process(process.pid)]
        try:
            family += family[0].children(recursive=True)
            for member in family:
                heard |= {
                    str(connection.laddr.ip)
                    for connection in member.net_connections("inet")
                    if connection.status == psutil.CONN_LISTEN
                }
        except psutil.Error:
            pass
        time.sleep(0.1)
    process.communicate()
    assert process.returncode == 0
    assert heard == {"127.0.0.1"}


def test_the_first_to_fail_gives_its_own_code_though_it_is_stopped_on_its_way_out() -> None:
    text = """
import atexit, os, sys, time
from headway.errors import UsageError
if os.environ["RANK"] == "0":
    atexit.register(time.sleep, 60)
    atexit.register(lambda: open("leaving", "x").close())  # it has told of its failure by then
    raise UsageError("not so", where="here", fix="otherwise", code="HW501")
while not os.path.exists("leaving"):
    time.sleep(0.01)
sys.exit(7)
"""
    done = launch("-q", "--cpu", "--num-processes", "2", script(text), code=2)
    assert "rank 0 of 2 failed with UsageError" in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_cannot_be_written_stops_no_rank_and_is_no_success() -> None:
    name = script("for i in range(3000): print('x' * 100)\nopen('done', 'w')")
    command = [*HEADWAY, "-q", "--cpu", "--num-processes", "2", name]
    with open("/dev/full", "w") as full:
        process = popen(command, env=environment(), stdout=full, stderr=subprocess.PIPE, text=True)
    _, errors = finished(process, 1)
    assert errors.count("and is lost: No space left on device") == 1
    assert Path("done").exists()


def test_a_users_signal_that_no_rank_gets_is_reported_and_ctrl_c_ends_the_wait() -> None:
    process = start(*two_machines(), script("pass"))
    waits = wait_for_lines(process, "waiting for machine 1")
    assert "at main_address 127.0.0.1, which no other host can reach" in waits
    process.send_signal(signal.SIGUSR1)
    wait_for_lines(process, "SIGUSR1")
    process.send_signal(signal.SIGINT)
    finished(process, 130)


@pytest.mark.skipif(sys.platform != "linux", reason="ulimit")
@pytest.mark.parametrize(
    ("before", "fix"),
    [
        ("ulimit -n 10", "ulimit -n 4096"),
        ("ulimit -n 24", "ulimit -n 4096"),  # torch's store hangs
        ("ulimit -v 500000", "ulimit -v`"),
        ("mkdir gone; cd gone; rmdir ../gone", "cd` to a folder"),  # MKL ends the process
    ],
)
def test_what_the_system_refuses_is_a_launch_error(before: str, fix: str) -> None:
    path = os.path.abspath(script("pass"))
    launching = f"{sys.executable} -m headway launch --cpu -q --supervise {path}"
    done = run(["bash", "-c", f"{before}; {launching}"], code=4)
    assert f"`{fix}" in done.stderr.partition("fix: ")[2]
    assert "ulimit" not in before or f"; `{before[:9]}` is {before[10:]}\n" in done.stderr
    assert "Traceback" not in done.stderr


IN_TERMINAL = r"""
import os, signal, sys, time
print(sys.stdin.isatty(), sys.stdout.isatty(), sys.stderr.isatty())
for i in range(3):
    print(f"\r{i}/3 bar", end="", flush=True)
    time.sleep(0.3)
print()
if sys.stdout.isatty():
    sizes = []
    signal.signal(signal.SIGWINCH, lambda *_: sizes.append(os.get_terminal_size()))
    print(os.get_terminal_size().columns, "columns", flush=True)
    while not sizes:
        time.sleep(0.01)
    print("now", sizes[0].columns, os.get_terminal_size(2).columns, "columns")
while not os.path.exists("end"):
    time.sleep(0.01)
"""


def test_on_a_terminal_rank_0_has_one_too_bars_keep_their_prefix_and_a_line_says_when_all_run() -> (
    None
):
    words = ["--cpu", "--num-processes", "2", script(IN_TERMINAL)]
    process, leader = start_in_terminal(*words, columns=80, TERM="xterm")
    shown = b""

    def show_until(*words: bytes) -> None:
        nonlocal shown
        while not all(word in shown for word in words):
            shown += os.read(leader, 4096)

    show_until(b"76 columns")  # beside the prefix
    termios.tcsetwinsize(leader, (24, 60))
    show_until(b"now 56 56 columns", b"headway: 2 ranks ready in ")
    Path("end").touch()
    with suppress(OSError):  # the terminal's other end is closed
        while data := os.read(leader, 4096):
            shown += data
    os.close(leader)
    assert process.wait(timeout=120) == 0
    plain = re.sub(rb"\x1b\[\d+m(\[\d\])\x1b\[0m", rb"\1", shown)
    assert plain != shown
    assert b"[0] True True True\r\n" in plain
    assert b"[1] False False False\r\n" in plain
    bars = [piece for piece in re.split(rb"[\r\n]+", plain) if b"/3 bar" in piece]
    assert bars
    assert all(piece[:4] in (b"[0] ", b"[1] ") for piece in bars)


def test_torchs_private_names_that_the_agent_relies_on_are_there() -> None:
    import inspect

    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

    source = inspect.getsource(SimpleElasticAgent)
    assert "self._remaining_restarts > 0" in source
    replaced = ("start_workers", "monitor_workers", "stop_workers", "assign_worker_ranks")
    for method in (*replaced, "shutdown", "exit_barrier"):
        assert f"self._{method}(" in source


TOGETHER = """
import atexit, glob, os, sys, time
def wait_for_all(word):
    open(f"{word}_{os.environ['RANK']}", "w").close()
    while len(glob.glob(f"{word}_?")) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
atexit.register(wait_for_all, "left")  # no process ends before all have told their ends
"""


def test_a_backend_that_torch_lacks_is_shown_without_our_frames() -> None:
    text = TOGETHER + 'import torch.distributed as dist\ndist.init_process_group("mpi")\n'
    done = launch("--cpu", "--num-processes", "2", script(text))
    assert "failed with RuntimeError; so did rank" in done.stderr
    assert "in _new_process_group_helper" in done.stderr
    assert not [
        name
        for name in ("rank_monitor.py", "process_groups.py", "worker.py")
        if name in done.stderr
    ]


PLAIN = """
import torch, torch.distributed as dist
for _ in range(6):
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 2
    dist.destroy_process_group()
"""
WITH_ACCELERATOR = """
import torch
from headway import Accelerator
for _ in range(6):
    accelerator = Accelerator(cpu=True)
    assert accelerator.reduce(torch.ones(1)) == 2
    accelerator.end_training()
"""


def test_groups_in_a_row_under_headway() -> None:
    launch("--cpu", "--num-processes", "2", script(PLAIN + WITH_ACCELERATOR), code=0)


def test_groups_in_a_row_under_torchrun(tmp_path: Path) -> None:
    words = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, "-m", *words, script(WITH_ACCELERATOR)]
    running = begin(command, env=environment(TMPDIR=str(tmp_path)))  # it leaves a folder behind
    try:
        _, errors = running.communicate(timeout=120)
    finally:
        running.terminate()  # and not killed: its ranks would go on for good
        running.communicate()
    assert running.returncode == 0, errors


def test_torch_asks_for_the_store_and_forms_the_group_by_these_names() -> None:
    import torch.distributed.distributed_c10d as c10d

    source = inspect.getsource(c10d.init_process_group)
    asks = source.index("rendezvous_iterator = rendezvous(")
    assert asks < source.index("default_pg, _ = _new_process_group_helper(", asks)


BF16 = ("-q", "--cpu", "--mixed-precision", "bf16")
MAKES_ACCELERATOR = "from headway import Accelerator; Accelerator()"


def test_two_ranks_of_a_plain_script_are_told_what_they_left_unused() -> None:
    sharded = ("--strategy", "fsdp", "--activation-checkpointing")
    plain = script("import torch; print('done')")
    done = launch(*BF16[1:], *sharded, "--num-processes", "2", plain)
    assert (done.returncode, done.stdout.count("done")) == (0, 2)
    (note,) = [line for line in done.stderr.splitlines() if "note:" in line]
    for name in ("bf16", "fsdp", "activation_checkpointing"):
        assert name in note
    assert "no rank joined a process group" in note
    assert "2 ranks ready in" not in done.stderr  # only on a terminal


def test_a_script_with_an_accelerator_or_a_library_that_has_one_is_told_nothing() -> None:
    Path("accelerate.py").touch()
    for text in (MAKES_ACCELERATOR, "import accelerate"):
        done = launch(*BF16, "--supervise", script(text))
        assert (done.returncode, done.stderr) == (0, ""), text


@pytest.mark.long
def test_only_a_success_ends_with_the_note() -> None:
    for end in ("raise ValueError", "sys.exit(75)", "os._exit(0)"):
        done = launch(*BF16, "--supervise", script(f"import os, sys; {end}"))
        assert "was not used" not in done.stderr, end
