"""One report of a failed run: the right rank, its own reason, what it took with it."""

from __future__ import annotations

import errno
import os
import signal
from typing import Any

import pytest

from headway.ipc.records import Crash
from headway.launcher.diagnosis.failures import Failure, RankExit, find_failure
from headway.launcher.diagnosis.reasons import is_communication_error
from headway.launcher.diagnosis.torch_messages import ONE_SAMPLE, UNUSED_PARAMETERS

BOOM = Crash(2.0, "ValueError", "boom", "Traceback ...\nValueError: boom\n")
LOST = "Connection closed by peer"
PEER = Crash(2.1, "RuntimeError", LOST, f"Traceback ...\nRuntimeError: {LOST}\n", True)


NO_NCCL = "Distributed package doesn't have NCCL built in"


def ended(rank: int, code: int, time: float, **more: object) -> RankExit:
    facts = {"was_stopping": False, "exited_silently": code <= 0, **more}
    return RankExit(rank, 100 + rank, code, time, **facts)  # type: ignore[arg-type]


def failure(*exits: RankExit, **more: object) -> Failure:
    found = find_failure(exits, ranks=range(4), world_size=4, **more)  # type: ignore[arg-type]
    assert found is not None
    return found


def test_the_first_exception_is_the_cause_whoever_ends_first() -> None:
    victim = ended(0, 1, PEER.time, crash=PEER)
    found = failure(victim, ended(1, 1, BOOM.time, crash=BOOM), ended(2, -15, 3, was_stopping=True))
    assert found.cause == "rank 1 of 4 failed with ValueError"
    assert found.aftermath == "; ranks 0, 2-3 stopped after rank 1 failed"
    assert found.details.endswith("ValueError: boom")
    assert found.exit_code == 1


def test_control_characters_of_a_script_are_shown_as_text_in_one_line() -> None:
    odd = Crash(2.0, "Bad\n\x1b[31m\x85" + "x" * 500, "boom", "")
    other = Crash(2.1, "Worse\r\x07", "bang", "")
    found = failure(ended(1, 1, 2.0, crash=odd), ended(2, 1, 2.1, crash=other))
    assert found.cause.startswith("rank 1 of 4 failed with Bad\\n\\x1b[31m\\x85xxx")
    assert len(found.cause) < 250
    assert "rank 2 failed with Worse\\r\\x07" in found.aftermath
    left = failure(ended(1, 3, 2.0, message="no\ndata\x1b[2J"))
    assert left.cause == "rank 1 of 4 exited with code 3: no\\ndata\\x1b[2J"


def test_the_text_of_an_exit_is_told_once() -> None:
    printed = {1: ["loading", "no data", "for me"]}
    found = failure(ended(1, 1, 2.0, message="no data\nfor me"), last_lines=printed)
    assert found.cause.endswith("no data\\nfor me")
    assert found.details == "last output of rank 1:\nloading"
    assert failure(ended(1, 1, 2.0), last_lines=printed).details.endswith("for me")


def test_a_rank_that_left_with_a_code_of_its_own_is_blamed_before_one_that_left_with_0() -> None:
    found = failure(ended(0, 0, 1.5), ended(1, 7, 1.6, exited_silently=True))  # exec'ed programs
    assert found.cause.startswith("rank 1 of 4 exited with code 7")
    assert found.exit_code == 7


def test_an_error_of_headway_in_the_script_says_the_fix_itself() -> None:
    usage = Crash(2.0, "UsageError", "", "UsageError: batch is -1\n  from: a\n", fix="pass 1")
    assert failure(ended(1, 2, 2.0, crash=usage)).fix == "pass 1"


def test_the_script_s_line_is_named_if_a_library_raised_the_exception() -> None:
    frame = '  File "/a/{}.py", line 7, in f\n    f()\n'
    for last, line in (("site-packages/b", "at /a/train.py:7, which calls"), ("c", "the line the")):
        trace = "".join(map(frame.format, ("train", last)))
        crash = Crash(2.0, "ValueError", "", f"{trace}ValueError: boom\n")
        assert line in failure(ended(1, 1, 2.0, crash=crash)).fix


NO_SPACE = "[Errno 28] No space left on device"
NO_SHM = os.strerror(errno.ENOENT)
SHM_OBJECT = "unable to open shared memory object </torch_1> in read-write mode"


@pytest.mark.parametrize(
    ("kind", "message", "fix"),
    [
        ("RuntimeError", "unable to allocate shared memory(shm) for file </torch_1>", "--shm-size"),
        (
            "RuntimeError",
            "It is possible that dataloader's workers are out of shared memory",
            "shm",
        ),
        ("OSError", f"_multiprocessing.SemLock(\n{NO_SPACE}", "--shm-size"),
        ("FileNotFoundError", f"_multiprocessing.SemLock(\n{NO_SHM}", "missing or read-only"),
        ("RuntimeError", f"{SHM_OBJECT}: {NO_SHM}", "num_workers=0"),
        ("RuntimeError", f"{SHM_OBJECT}: {os.strerror(errno.EROFS)} (30)", "missing or read-only"),
        ("RuntimeError", f"{SHM_OBJECT}: {os.strerror(errno.EMFILE)} (24)", "fix the script"),
        ("OSError", NO_SPACE, "free space"),
        (
            "AttributeError",
            "'DistributedDataParallel' object has no attribute 'w'",
            "forward_methods",
        ),
        ("AttributeError", "'Net' object has no attribute 'w'", "fix the script at the line"),
        ("EOFError", "EOF when reading a line", "as an argument"),
        ("EOFError", "Ran out of input", "fix the script at the line"),
        ("FileNotFoundError", "data/x.txt", "from the working directory"),
        ("FileNotFoundError", f"{os.strerror(2)}: '/data/x'", "fix the script at the line"),
        ("ModuleNotFoundError", "No module named 'a.b'", "-m pip install a`"),
        ("ModuleNotFoundError", "No module named 'yaml.reader'", "-m pip install pyyaml`"),
        ("RuntimeError", "can't start new thread", "pids.max"),
        ("BlockingIOError", f"[Errno 11] {os.strerror(errno.EAGAIN)}", "ulimit -u"),
        ("MemoryError", "", "is out of memory"),
        ("RuntimeError", "DefaultCPUAllocator: can't allocate memory", "is out of memory"),
        ("OutOfMemoryError", "CUDA out of memory", "reduce the batch size"),
        ("AssertionError", "Torch not compiled with CUDA enabled", "accelerator.device"),
        ("AttributeError", "module 'a' has no attribute '_cuda_setDevice'", "accelerator.device"),
        (
            "FileNotFoundError",
            "[Errno 2] No usable temporary directory found in ['/tmp']",
            "TMPDIR",
        ),
        ("AcceleratorError", "CUDA error: no kernel image is available for", "headway doctor"),
        ("RuntimeError", NO_NCCL, "pass backend='gloo'"),
        ("RuntimeError", "aten.mul: got mixed torch.Tensor and DTensor", "full_tensor()"),
        ("RuntimeError", "Invalid scalar type", "to int32"),
        ("RuntimeError", "cannot compute the infinity norm on an empty tensor", "norm_type=2"),
        ("RuntimeError", "operator torchvision::nms does not exist", "pip install"),
        ("RuntimeError", f"{UNUSED_PARAMETERS[0]} before", "find_unused_parameters=True"),
        ("RuntimeError", "Expected to mark a variable ready only once. This", "add the losses"),
        ("ValueError", f"{ONE_SAMPLE[0]}, got input size", "drop_last=True"),
        ("RuntimeError", "Unable to find address for: eth7", "GLOO_SOCKET_IFNAME"),
        ("ValueError", "GPU modules or CPU modules, but got device_ids [0]", "omit device_ids"),
    ],
)
def test_a_known_exception_has_a_fix_of_its_own(kind: str, message: str, fix: str) -> None:
    crash = Crash(2.0, kind, message, f"Traceback ...\n{kind}: {message}\n")
    found = failure(ended(1, 1, 2.0, crash=crash))
    assert (found.cause, fix in found.fix) == (f"rank 1 of 4 failed with {kind}", True)


def test_a_rank_that_left_silently_is_blamed_before_those_it_left_alone() -> None:
    found = failure(ended(2, 0, 1.5), ended(0, 1, PEER.time, crash=PEER))
    assert found.cause.startswith(
        "rank 2 of 4 exited with code 0, by os._exit() or os.exec*(), while"
    )
    assert found.exit_code == 1
    other = failure(ended(2, 0, 1.5), ended(1, 0, 1.0, exited_silently=False), silent_fails=True)
    assert (other.cause, other.suspicion) == (found.cause, 1)


@pytest.mark.parametrize("code", [0, 75])
def test_an_exception_is_a_failure_even_if_its_hook_exits_with(code: int) -> None:
    own = Crash(1.4, "ValueError", "boom", "ValueError: boom\n")
    found = failure(ended(0, 1, PEER.time, crash=PEER), ended(2, code, 1.5, crash=own))
    assert (found.first.rank, found.exit_code) == (2, 1)
    assert found.cause == "rank 2 of 4 failed with ValueError"


@pytest.mark.parametrize("code", [0, -6, -9, -11])
def test_a_silent_death_that_is_found_a_moment_later_still_came_first(code: int) -> None:
    victim = ended(0, 1, PEER.time, crash=PEER)
    assert failure(victim, ended(2, code, PEER.time + 0.3)).first.rank == 2
    assert failure(victim, ended(2, code, PEER.time + 30)).first.rank == 0
    assert failure(victim, ended(2, code, PEER.time + 0.3, was_stopping=True)).first.rank == 0


def test_an_exception_of_the_rank_s_own_is_no_victim_s() -> None:
    found = failure(ended(2, 0, 1.0), ended(0, 1, BOOM.time, crash=BOOM))
    assert found.cause == "rank 0 of 4 failed with ValueError"
    other = BOOM._replace(time=2.2, kind="KeyError", message="gloo_options", traceback="KeyError")
    found = failure(ended(0, 1, BOOM.time, crash=BOOM), ended(1, 1, 2.2, crash=other))
    assert "; rank 1 failed with KeyError; ranks 2-3 stopped" in found.aftermath


def test_only_torchs_own_errors_are_of_communication() -> None:
    assert is_communication_error(PEER)
    assert is_communication_error(PEER._replace(kind="DistBackendError", message="NCCL error"))
    assert not is_communication_error(PEER._replace(is_from_torch=False))
    assert not is_communication_error(PEER._replace(kind="FileNotFoundError"))
    assert not is_communication_error(PEER._replace(message="cannot parse gloo_options"))
    assert not is_communication_error(PEER._replace(message=NO_NCCL))


def test_an_aborting_victim_is_not_blamed_for_the_exception_before_it() -> None:
    found = failure(ended(1, 1, BOOM.time, crash=BOOM), ended(0, -6, BOOM.time + 0.2))
    assert found.first.rank == 1
    said = {0: ("terminate called after throwing an instance of", "[.../gloo/pair.cc] closed")}
    for code in (0, -9):  # found dead after the victims
        ends = ended(0, -6, PEER.time + 0.1), ended(2, code, PEER.time + 0.3)
        assert failure(ended(1, 1, PEER.time, crash=PEER), *ends, last_lines=said).first.rank == 2


def test_a_rank_that_came_to_its_end_is_not_blamed() -> None:
    fine = ended(2, 0, 1.5, exited_silently=False)
    found = failure(fine, ended(0, 1, BOOM.time, crash=BOOM))
    assert found.first.rank == 0
    assert 2 not in found.victims


def crashed(kind: str, message: str, *more: str, **facts: Any) -> RankExit:
    """Return the end of rank 1 by an exception, which may have been raised from others."""
    trace = "".join(f"{line}\n" for line in (*more, f"{kind}: {message}"))
    return ended(1, 1, 1, crash=Crash(2.0, kind, message, trace, **facts))


EXITED, KILLED, STUCK = ended(1, 3, 1), ended(1, -9, 1), ended(1, -9, 1, killed_after_s=600.0)
SILENT = ended(1, 3, 1, exited_silently=True)
BY_EXIT = "exited with code 3, by os._exit(), by os.exec*() or in native code"
OURS = crashed("ValueError", "boom", is_from_headway=True)
IN_HEADWAY = "failed with ValueError, raised inside Headway"
WORKER_KILLED = "DataLoader worker (pid 7) is killed by signal: Killed. "
WORKER_ENDED = "DataLoader worker (pid(s) 7) exited unexpectedly"
CAUSE, ENDED = (crashed("RuntimeError", text) for text in (WORKER_KILLED, WORKER_ENDED))
WITH_CAUSE = crashed("RuntimeError", WORKER_ENDED, WORKER_KILLED)  # as torch raises it mostly
KILLS = " (OOM kills by the kernel during the run: 2)"
FAILED = "failed with RuntimeError"
LOST_WORKER = f"{FAILED}: one of its loader workers was killed"


@pytest.mark.parametrize(
    ("end", "memory_kills", "name", "words", "fix"),
    [
        (EXITED, 2, "exit_code", "exited with code 3", "its output"),
        (SILENT, 0, "left_by_exit", BY_EXIT, "raise an exception"),
        (ended(1, 1, 1, message="x"), 0, "exit_message", "exited with code 1: x", "its output"),
        (ended(1, -11, 1), 0, "segmentation_fault", "was killed by SIGSEGV", "native code"),
        (ended(1, -24, 1), 0, "cpu_time", "was killed by SIGXCPU", "ulimit -t"),
        (ended(1, -10, 1), 0, "signal_passed_on", "was killed by SIGUSR1", "end_training(), SIG"),
        (ended(1, -12, 1), 0, "signal", "was killed by SIGUSR2", "another process sent the signal"),
        (KILLED, None, "killed", "was killed by SIGKILL", "OOM killer (`dmesg`"),
        (KILLED, 0, "killed", "was killed by SIGKILL", "no OOM kill in this control"),
        (KILLED, 2, "killed", f"was killed by SIGKILL{KILLS}", "processes"),
        (STUCK, 0, "did_not_stop", "did not stop when requested", "headway stack"),
        (OURS, 0, "error_in_headway", IN_HEADWAY, "report it"),
        (crashed("ValueError", "boom"), 1, "exception", "failed with ValueError", "the traceback"),
        # a loader worker that is killed for memory is no fault of the script
        (CAUSE, 2, "loader_worker_killed", LOST_WORKER + KILLS, "processes"),
        (WITH_CAUSE, 2, "loader_worker_killed", LOST_WORKER + KILLS, "processes"),
        (ENDED, 2, "loader_worker_killed", LOST_WORKER + KILLS, "processes"),
        (CAUSE, None, "loader_worker_killed", LOST_WORKER, "OOM killer (`dmesg`"),
        (WITH_CAUSE, 0, "loader_worker_killed", LOST_WORKER, "no OOM kill in this control"),
        (ENDED, 0, "exception", FAILED, "the traceback"),
    ],
)
def test_each_kind_of_end_has_its_reason_its_words_its_fix_and_its_code(
    end: RankExit, memory_kills: int | None, name: str, words: str, fix: str
) -> None:
    found = failure(end, memory_kills=memory_kills, signals_received={signal.SIGUSR1})
    assert (found.reason.name, found.cause) == (name, f"rank 1 of 4 {words}")
    assert fix in found.fix
    assert found.is_final == (name == "signal_passed_on")
    assert ("OOM" in found.fix) == ("killed" in name)
    assert found.exit_code == (end.code if end.code > 0 else 128 - end.code)


def test_without_a_traceback_the_last_lines_stand_in() -> None:
    lines = {1: [f"line {number}" for number in range(40)]}
    found = failure(ended(1, -11, 1), last_lines=lines)
    assert found.details.splitlines() == ["last output of rank 1:", *lines[1][-12:]]


def test_an_abort_of_gloo_in_different_collectives_is_no_work_of_another_process() -> None:
    said = {1: ("what(): [gloo/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 40 vs 18.",)}
    found = failure(ended(1, -6, 1), last_lines=said)
    assert "killed by SIGABRT, because the ranks called different collectives" in found.cause
    assert "a sharded model's forward or backward pass" in found.fix
    assert failure(ended(1, -6, 1)).reason.name == "signal"


def test_a_stopped_rank_is_the_cause_only_if_nothing_else_failed() -> None:
    found = failure(ended(0, -15, 1, was_stopping=True), ended(3, 2, 5))
    assert found.first.rank == 3
    assert find_failure([ended(0, 75, 1)], ranks=[0], world_size=1) is None


def test_ranks_that_failed_alike_are_no_victims() -> None:
    found = failure(*(ended(rank, 2, 9 - rank) for rank in (3, 0, 1)))  # the last comes first
    assert found.aftermath == "; so did ranks 1, 3; rank 2 stopped after rank 0 failed"
    on_its_way_out = ended(1, -signal.SIGTERM, 2.1, crash=BOOM._replace(time=2.1, message="of 1"))
    found = failure(ended(0, 1, BOOM.time, crash=BOOM._replace(message="of 0")), on_its_way_out)
    assert found.aftermath.startswith("; so did rank 1")


def test_ranks_that_the_launcher_killed_are_named() -> None:
    ends = [ended(rank, -9, rank, killed_after_s=600.0) for rank in (1, 0)]
    assert "killed because they had not stopped after 600 s" in failure(*ends).aftermath


def test_an_abort_that_nothing_explains_is_no_other_machines_fault() -> None:
    assert failure(ended(0, -6, 1.0)).suspicion == 1
    said = {0: ("terminate called after throwing an instance of", "[.../gloo/pair.cc] closed")}
    assert failure(ended(0, -6, 1.0), last_lines=said).suspicion == 2
