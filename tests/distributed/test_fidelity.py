"""A script cannot tell how it was started, but for a written list of differences."""

from __future__ import annotations

import inspect
import json
import os
import runpy
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launching import HEADWAY, environment, execute, launch, on_linux, script
from tests.waiting import IS_LONG

pytestmark = on_linux

WAYS = {
    "python": [sys.executable],
    "one process": [*HEADWAY, "-q", "--cpu"],
    "forked": [*HEADWAY, "-q", "--cpu", "--num-processes", "2", "--set", "start_method=fork"],
    "fresh": [*HEADWAY, "-q", "--cpu", "--num-processes", "2", "--set", "start_method=exec"],
}

ALLOWED = {  # what may differ from plain python, and why
    "one process": {"environ"},
    "forked": {
        "environ",
        "faulthandler",  # on, for the report of a crash
        "sys.meta_path",  # what joins a library once the script imports it
        "warnings.filters",  # those of torch and numpy are there before the script imports them
        "torch and numpy",  # numpy is; torch is not
        "streams",  # pipes to the launcher, unbuffered; compared by themselves below
    },
    "fresh": {"environ", "streams", "faulthandler", "sys.meta_path"},
}

VARIABLES = {  # what the launcher may add to the environment
    "HEADWAY_RUN",
    "HEADWAY_OWN_RECORD",  # of one process
    "ACCELERATE_USE_CPU",
    "ACCELERATE_MIXED_PRECISION",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "OMP_NUM_THREADS",
    "PYTHONUNBUFFERED",
    "GLOO_SOCKET_IFNAME",
    "TORCH_FR_BUFFER_SIZE",
    "CUDA_VISIBLE_DEVICES",  # which a launch on the CPU sets where there is a GPU
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"),
    "TORCHELASTIC_USE_AGENT_STORE",
}


def probe(way: str, *methods: str) -> dict[str, Any]:
    usual = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    environ = environment(**usual, START_METHODS=" ".join(methods))
    done = execute([*WAYS[way], "probe.py", "--flag", "$HOME", ""], environ, typed="typed")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("atexit ran") == (1 if way in ("python", "one process") else 2)
    told: dict[str, Any] = json.loads(Path("probe_0.json").read_text())
    return told


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=() if way == "forked" else pytest.mark.long) for way in ALLOWED]
)
def test_a_script_sees_the_same_however_it_was_started(way: str) -> None:
    shutil.copy(Path(__file__).with_name("probe.py"), "probe.py")
    Path("csv.py").write_text("own = 1\n")  # the fork server has imported another one
    methods = ("spawn",) if way == "forked" else ("fork", "spawn", "forkserver")
    plain, told = probe("python", "fork"), probe(way, *methods)
    assert told.keys() == plain.keys()
    differing = {key for key in plain if told[key] != plain[key]}
    shown = {key: (plain[key], told[key]) for key in differing - ALLOWED[way]}
    assert not shown
    assert plain["own module"] == 1
    assert not [name for name in told["torch and numpy"] if name.startswith("torch")]
    added = {name for name, text in told["environ"].items() if plain["environ"].get(name) != text}
    assert added <= VARIABLES
    assert plain["environ"].keys() <= told["environ"].keys()
    for name, stream in told["streams"].items():
        ours = {k: v for k, v in stream.items() if k != "buffer"}
        assert ours == {k: v for k, v in plain["streams"][name].items() if k != "buffer"}


@pytest.mark.parametrize(
    "way", [[], ["--supervise", "--set", "start_method=fork"], *[["--supervise"]] * IS_LONG]
)
def test_pythons_own_flags_reach_the_script(way: list[str]) -> None:
    told = "sys.flags, sys.warnoptions, sys._xoptions, sys.path[0], __debug__, sys.stdout.buffer"
    name = script(f"import sys; print({told})")
    flags = ["-BuP" if sys.version_info >= (3, 11) else "-Bu", "-Werror::FutureWarning"]
    flags += [] if way and not IS_LONG else ["-O"]  # compiles all of torch where it is imported
    flags += ["-W", "ignore:mine", "-Xutf8", "--check-hash-based-pycs", "never"]
    flags += [] if way else ["-X", "dev"]  # imports torch slowly
    python, *headway = HEADWAY
    plain = execute([python, *flags, name])
    done = execute([python, *flags, *headway, "-q", "--cpu", *way, name])
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain.stdout


ENDS = {
    "exit 0": ("sys.exit()", 0),
    "exit 7": ("sys.exit(7)", 7),
    "exit with a text": ("sys.exit('a reason')", 1),
    "an exception": ("raise ValueError('boom')", 1),
    "an interrupt": ("raise KeyboardInterrupt", -signal.SIGINT),
    "os._exit": ("os._exit(9)", 9),
    "a signal": ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    "a segmentation fault": ("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
    "a daemon thread": ("threading.Thread(target=time.sleep, args=(60,), daemon=True).start()", 0),
    "a closed pipe": ("r, w = os.pipe(); os.close(r); os.write(w, b'x')", 1),
    "a syntax error": ("def (", 1),
}
LIKEWISE = [end for end in ENDS if end not in ("an exception", "a signal")]


@pytest.mark.parametrize(
    ("end", "way"),
    [
        *((end, "fork") for end in ENDS),
        ("an exception", "exec"),
        ("a signal", "exec"),
        *(pytest.param(end, "exec", marks=pytest.mark.long) for end in LIKEWISE),
    ],
)
def test_a_script_ends_as_under_plain_python(end: str, way: str) -> None:
    text, code = ENDS[end]
    name = script(
        "import atexit, os, signal, sys, threading, time\n"
        "atexit.register(print, 'atexit')\n"
        f"print('begun')\n{text}\n"
    )
    plain = execute([sys.executable, "-u", name])
    assert plain.returncode == code
    done = launch("-q", "--cpu", "--supervise", "--set", f"start_method={way}", name)
    assert done.returncode == (code if code >= 0 else 128 - code)
    assert done.stdout == plain.stdout
    if end != "an interrupt":  # whoever pressed Ctrl-C knows
        assert plain.stderr in done.stderr


TITLE_AND_NUMBERS = """
import random, numpy, torch
title = open("/proc/self/cmdline").read().rstrip("\\0")
print(title, random.random(), numpy.random.rand(), torch.rand(1).item(), sep="|")
"""


def test_the_title_of_a_rank_names_script_and_rank_and_ranks_draw_different_numbers() -> None:
    words = ["--num-processes", "3", "--set", "start_method=fork"]
    done = launch("-q", "--cpu", *words, script(TITLE_AND_NUMBERS, "train.py"))
    rows = zip(*(line.split("|") for line in sorted(done.stdout.splitlines())), strict=True)
    titles, *numbers = rows
    assert titles == tuple(f"[{rank}] train.py rank {rank}" for rank in range(3))
    assert [len(set(drawn)) for drawn in numbers] == [3, 3, 3]


FORKED = """
import os
server = os.getppid()
threads, maps = os.listdir(f"/proc/{server}/task"), open(f"/proc/{server}/maps").read()
print(len(threads), "/dev/nvidia" in maps, os.getpgid(server) == server)
import torch
print("fine", torch.ones(1).item())
"""


def test_the_server_imports_no_file_of_the_folder_and_has_one_thread_and_no_cuda_context() -> None:
    for taken in ("headway", "launcher", "json", "selectors", "torch"):
        Path(f"{taken}.py").write_text("raise SystemExit('shadowed')")
    Path("sub").mkdir()
    text = "import sys; del sys.path[0]; import headway.commands.main as m; sys.exit(m.main())"
    words = ["launch", "-q", "--cpu", "--supervise", script(FORKED, "sub/script.py")]
    done = execute([sys.executable, "-c", text, *words], environment(OMP_NUM_THREADS="1"))
    assert done.stdout == "1 False True\nfine 1.0\n", done.stderr
    assert os.environ.get("OPENBLAS_NUM_THREADS") is None


def test_the_private_function_of_runpy_is_there() -> None:
    function = vars(runpy)["_run_module_as_main"]
    assert list(inspect.signature(function).parameters) == ["mod_name", "alter_argv"]


CHANGES = """
import os
from importlib.util import find_spec
package = os.path.dirname(find_spec("torch").origin)
assert find_spec("torch").submodule_search_locations == [package]
os.environ["OMP_NUM_THREADS"] = "7"
os.environ["TORCH_LOGS"] = "recompiles"
os.environ["MY_OWN"] = "1"
{first}
import torch
assert torch.__spec__.name == "torch" and torch.nn.Linear(1, 1)(torch.ones(1)).shape == (1,)
os.environ["OMP_NUM_THREADS"] = "8"
import torch.nn.functional
"""


@pytest.mark.parametrize(
    "first", [pytest.param("", marks=pytest.mark.long), "from torch.nn import Linear"]
)
def test_a_variable_that_torch_has_read_already_is_told_once(first: str) -> None:
    name = script(CHANGES.format(first=first))
    forked = launch("--cpu", "--num-processes", "2", name)
    assert forked.returncode == 0, forked.stderr
    notes = [line for line in forked.stderr.splitlines() if "the script sets" in line]
    assert len(notes) == 1
    assert "OMP_NUM_THREADS, TORCH_LOGS," in notes[0]
    assert "--env NAME=VALUE" in notes[0]
    assert "--set start_method=exec" in notes[0]
    fresh = launch("--cpu", "--supervise", "--set", "start_method=exec", name)
    assert fresh.returncode == 0, fresh.stderr
    assert "the script sets" not in fresh.stderr
