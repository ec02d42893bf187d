"""`headway runs`, `why` and `logs`: what they say of records, and the page."""

from __future__ import annotations

import contextlib
import html
import io
import json
import os
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest

from headway.commands.main import main
from headway.history import store
from headway.history.attempts import Attempt, Attempts
from headway.history.store import runs_folder
from headway.ipc.records import METRICS, OutputPath
from tests.commands.running import python, run
from tests.distributed import launching
from tests.history.runs import COMMIT, EDIT, START, stats, write_run
from tests.waiting import wait_until

REPORT = "rank 1 of 2 failed with ValueError\n  <script>alert(1)</script> & \x1b[31mred"


def rows_listed() -> list[list[str]]:
    code, text = run("runs")
    assert code == 0
    return [line.split() for line in text.splitlines() if line.startswith("2024")]


def test_runs_are_listed_the_newest_last() -> None:
    write_run(rows=[(0, stats(10)), (0, stats(20))])
    write_run(75)
    write_run(None, script="/work/" + 99 * "a" + "/train.py", program="train.py")
    head, *rows, _ = run("runs")[1].splitlines()  # and the command line
    assert max(map(len, rows)) <= 120
    assert ("restarts" in head, "samples/s" in head) == (False, True)
    assert [row[5] for row in rows_listed()] == ["ok", "saved", "code"]
    listed = json.loads(run("runs", "--json")[1])
    assert [entry["exit_code"] for entry in listed] == [0, 75, None]
    first = listed[0]
    assert (first["script"], first["ranks"]) == ("/work/train.py", 1)
    assert (first["steps"], first["samples_per_s"], first["duration_s"]) == (20, 320.0, 30.0)


def test_records_that_cannot_be_read_are_one_line() -> None:
    for _ in range(3):
        Path(runs_folder(), write_run().name, "run.json").write_text("{")
    text = run("runs")[1]
    assert "is damaged: it is not JSON; 2 more cannot be read" in text
    assert text.count("damaged") == 1


def test_scripts_of_one_name_are_told_apart_by_their_paths() -> None:
    for script in ("/work/a/main.py", "/work/b/main.py", "/work/train.py"):
        write_run(script=script, program=os.path.basename(script))
    assert [row[3] for row in rows_listed()] == ["/work/a/main.py", "/work/b/main.py", "train.py"]


def test_without_a_record_there_is_said_how_to_get_one() -> None:
    code, text = run("why")
    assert code == 2
    assert "no readable run records" in text
    assert run("runs", "--json")[1].strip() == "[]"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_name_of_a_run_is_not_wrapped_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = write_run(rows=[(0, stats(20))], script="/work/a_rather_long_folder/train.py")
    for columns in (60, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        with contextlib.redirect_stdout(Terminal()) as printed:
            assert main(["runs"]) == 0
        assert record.name in printed.getvalue()
        assert ("samples/s" in printed.getvalue()) == (columns == 200)
        note = "narrow terminal: began, steps, samples/s; `headway runs --json` has all\n"
        assert (note in capsys.readouterr().err) == (columns == 60)


def test_why_prints_the_report_and_what_has_changed() -> None:
    good = write_run()
    changed = (*START.arguments[:1], "0.3", *START.arguments[2:])
    write_run(1, report=REPORT, arguments=changed)
    code, text = run("why")
    assert code == 0
    for part in ("exit code 1", "failed with ValueError", good.name):
        assert part in text
    assert "argument --lr: 0.1 -> 0.3" in text
    assert "\x1b" not in text
    told = json.loads(run("why", "--json")[1])
    assert (told["compared_with"], told["changes"][0]["after"]) == (good.name, "0.3")
    assert "no recorded changes" in run("why", write_run(1).name)[1]


def test_why_names_the_rank_that_all_others_waited_for(tmp_path: Path) -> None:
    times = {0: {"sync_s": 0.45}, 1: {"data_s": 0.6}, 2: {"sync_s": 0.45}}
    rows = [(rank, stats(step, **times[rank])) for rank in times for step in (10, 20)]
    write_run(rows=rows, num_processes=3)
    said = "rank 1 delays all ranks by 40 ms per 100 ms step: its data loader (3.0 times the"
    assert said in run("why")[1]
    run("why", "--html", str(tmp_path / "run.html"))
    assert said in (tmp_path / "run.html").read_text()
    write_run(rows=[row for row in rows if row[1].step == 10], num_processes=3)
    assert "delays all ranks" not in run("why")[1]  # too few steps to tell


def test_where_the_wall_time_went_is_told_everywhere(tmp_path: Path) -> None:
    began_at = write_run().start.began_at + 60  # of the next one, which takes 30 s
    spent = {"training": 21.0, "saving": 1.5, "waiting for data": 4.5}
    attempts = [Attempt(began_at, 1, began_at + 3, 9, began_at + 29, spent, "", 0, 0)]
    write_run(attempts=attempts)
    said = "70.0 % training (21.0 s), 10.0 % start (3.0 s), 5.0 % saving (1.5 s), 15.0 % waiting"
    assert f"time: {said}" in run("why")[1]
    run("why", "--html", str(tmp_path / "run.html"))
    assert said in (tmp_path / "run.html").read_text()
    assert [row[-4:-2] for row in rows_listed()] == [["ok", "-"], ["70", "%"]]
    known = json.loads(run("why", "--json")[1])["time"]
    assert (known["training"], known["other"]) == (0.7, 0)
    assert [row["time"] for row in json.loads(run("runs", "--json")[1])] == [None, known]


def test_each_restart_and_its_cause_are_told_everywhere(tmp_path: Path) -> None:
    began_at = write_run().start.began_at + 60
    attempts = [
        (first := Attempts(began_at).rows[0]),
        first._replace(cause="rank 1 failed with KeyError", failed_at_step=40, num_restarts=1),
        first._replace(cause="rank 0 was killed by SIGKILL", num_restarts=2),
    ]
    write_run(76, attempts=attempts, settings={**START.settings, "max_restarts": "2"})
    said = ["rank 1 failed with KeyError at step 40", "rank 0 was killed by SIGKILL"]
    assert "\n  ".join(["2 of 2 restarts used", *said]) in run("why")[1]
    assert "ended: repeated failure" in run("why")[1]
    run("why", "--html", str(tmp_path / "run.html"))
    assert "; ".join(["2 of 2 restarts used", *said]) in (tmp_path / "run.html").read_text()
    assert "repeated failure  2 of 2" in " ".join(run("runs")[1].splitlines())
    known = json.loads(run("runs", "--json")[1])[1]
    assert known["restarts_used"] == "2 of 2"
    causes = [f"{restart['cause']} at step {restart['step']}" for restart in known["restarts"]]
    assert causes == [said[0], f"{said[1]} at step 0"]
    assert known == {name: json.loads(run("why", "--json")[1])[name] for name in known}


@pytest.mark.processes
def test_logs_are_the_files_of_log_dir_or_else_the_last_lines(tmp_path: Path) -> None:
    tails = {rank: (f"hello of {rank}", "bye") for rank in (0, 1)} | {2: ("",)}
    record = write_run(tails=tails, supervised="--supervise", num_processes=2)
    assert run("logs")[1].splitlines() == ["[0] hello of 0", "[0] bye", "[1] hello of 1", "[1] bye"]
    assert run("logs", "--rank", "1", record.name)[1].splitlines() == ["hello of 1", "bye"]
    assert "takes one run, but got 2 words" in run("logs", "a", "b")[1]
    code, text = run("logs", "--rank", "7")
    assert code == 2
    assert "has ranks 0 to" in text
    code, text = run("logs", "--follow")
    assert code == 2
    assert "--log-dir" in text
    for attempt in (0, 1):
        for rank in (0, 1):
            name = f"rank_{rank}_attempt_{attempt}.log"
            (tmp_path / name).write_text(f"rank {rank} attempt {attempt}\n")
    origins = {"log_dir": "flag --log-dir"}
    write_run(7, kept=[OutputPath("logs", str(tmp_path))], origins=origins, num_processes=2)
    done = python("-m", "headway", "logs", "--rank", "1", "-f")
    lines = [line for line in done.stdout.splitlines() if not line.startswith("==>")]
    assert lines == ["rank 1 attempt 0", "rank 1 attempt 1"]
    assert done.returncode == 7


def test_logs_of_ranks_that_printed_nothing_say_so_where_that_is_known() -> None:
    quiet = write_run(tails={0: ("",), 1: ("",)}, num_processes=2).name
    assert run("logs") == (0, f"headway: ranks 0-1 of run {quiet} printed nothing\n")
    write_run(tails={0: ("",)}, origins={"debug_rank": "flag --debug-rank"})
    assert run("logs")[0] == 2
    early = write_run(130, supervised="--supervise").name
    assert run("logs") == (0, f"headway: run {early} ended before its ranks started\n")
    write_run()  # plain Python, without a launcher
    assert run("logs")[0] == 2


def test_the_command_line_of_a_run_is_printed_with_the_variables_of_settings() -> None:
    of_the_job = {"HEADWAY_ALLOCATION": "7:1"}
    variables = {"HEADWAY_MIXED_PRECISION": "bf16", "OMP_NUM_THREADS": "4", **of_the_job}
    write_run(variables=variables, command=("--cpu", "train.py", "--api-key", "***"))
    words = "headway launch --cpu train.py --api-key '***'"
    command = f"cd /work && HEADWAY_MIXED_PRECISION=bf16 {words}"
    assert run("why")[1].endswith(f"\nto repeat it:\n  {command}\n")
    assert run("runs")[1].endswith(f"headway: to repeat the newest: {command}\n")
    assert json.loads(run("runs", "--json")[1])[0]["command"] == command


@pytest.mark.parametrize("odd", ["a\nb", "\x1b[2J", os.fsdecode(b"\xff")])
def test_a_command_line_that_a_terminal_cannot_print_is_not_printed(odd: str) -> None:
    write_run(command=("train.py", "it's"))
    assert run("why")[1].endswith("headway launch train.py 'it'\"'\"'s'\n")
    write_run(command=("train.py", odd))
    assert "again" not in run("why")[1] + run("runs")[1]


def write_page(path: Path) -> str:
    write_run()
    rows = [
        (rank, stats(step, sync_s=0.3 * rank, loss=2.0 / step + rank))
        for rank in range(4)
        for step in range(10, 400, 10)
    ]
    arguments = ("--lr", "<b>0.3</b>", *START.arguments[2:])
    write_run(
        1,
        commit=COMMIT._replace(diff=EDIT.replace("16", "32")),
        report=REPORT,
        rows=rows,
        arguments=arguments,
        num_processes=4,
        program="train<i>.py",
    )
    code, text = run("why", "--html", str(path))
    assert code == 0, text
    return path.read_text()


def test_the_page_of_a_run_shows_it_escaped_and_loads_nothing(tmp_path: Path) -> None:
    text = write_page(tmp_path / "run.html")
    tags = re.findall(r"<(\w+)", text)
    assert not {"script", "b", "img", "link", "iframe", "object"} & {*tags}
    assert not re.search(r"\b(src|href|data)=", text)
    assert "://" not in text
    shown = html.unescape(re.sub(r"<[^>]*>", "", text))
    for part in ("<script>alert(1)</script>", "--lr", "<b>0.3</b>", "train<i>.py", "+width = 32"):
        assert part in shown
    assert "\x1b" not in text
    headings = re.findall(r"<h2>([^<]*)</h2>", text)
    for heading in ("Report", "Loss", "Time of each rank", "Memory of each rank, MiB", "Machine"):
        assert heading in headings
    assert tags.count("polyline") == 1 + 4 + 4
    assert 'name="viewport"' in text


def test_the_page_names_no_phase_that_nobody_measured(tmp_path: Path) -> None:
    measured = {"data_s": 0.0, "forward_s": 0.0, "backward_s": 0.0, "save_s": 0.0, "sync_s": 1.0}
    write_run(rows=[(rank, stats(10, **measured)) for rank in range(2)])
    assert run("why", "--html", str(tmp_path / "run.html"))[0] == 0
    text = (tmp_path / "run.html").read_text()
    assert "rank 0, data" not in text
    assert "rank 0, sync" in text


def test_a_page_of_odd_stats_is_made(tmp_path: Path) -> None:
    rows = [(0, stats(10, seconds=0.0, loss=None, samples=0)), (1, stats(2**60, data_s=-9))]
    write_run(rows=rows)
    assert run("why", "--html", str(tmp_path / "run.html"))[0] == 0
    code, text = run("why", "--html", str(tmp_path / "no" / "run.html"))
    assert code == 2
    assert "cannot be written" in text


def test_the_page_draws_the_metrics_of_the_jsonl_tracker(tmp_path: Path) -> None:
    jsonl = pytest.importorskip("headway.trackers.jsonl", exc_type=ImportError)  # needs torch
    tracker = jsonl.JsonlTracker("digits", tmp_path)
    tracker.start()
    for step in range(2000):
        peak = 9.0 if step == 777 else 0.0
        tracker.log({"train/<loss>": peak, "odd": [1e308, float("nan"), 5e-324][step % 3]}, step)
    tracker.finish()
    write_run(kept=[OutputPath(METRICS, str(tracker.path))])
    page = tmp_path / "run.html"
    assert run("why", "--html", str(page))[0] == 0
    text = page.read_text()
    assert "<h2>train/&lt;loss&gt;</h2>" in text
    assert ",8.0 " in text, "the peak is drawn"
    assert text.count("<polyline") == 2
    tracker.path.write_text("no run")
    assert run("why", "--html", str(page))[0] == 0
    assert "is not a jsonl tracker file" in page.read_text()


@pytest.mark.processes
def test_a_browser_shows_the_page_as_wide_as_a_phone(tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no headless browser is installed")
    page, picture = tmp_path / "run.html", tmp_path / "run.png"
    write_page(page)
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/chrome"]
    words = [browser, *options, "--window-size=400,2400", "--hide-scrollbars"]
    subprocess.run(
        [*words, f"--screenshot={picture}", page.as_uri()],
        check=True,
        capture_output=True,
        timeout=120,
    )
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert picture.stat().st_size > 20_000  # not blank
    dom = subprocess.run(
        [*words, "--dump-dom", page.as_uri()], check=True, capture_output=True, timeout=120
    )
    assert dom.stdout.count(b"<polyline") == 9


TRAINED = """
import sys
from headway import Accelerator
accelerator = Accelerator(log_with="jsonl")
accelerator.init_trackers("digits")
print("trained with", sys.argv[1:])
accelerator.save_state("saved/first")
accelerator.end_training()
if "bad" in sys.argv: raise ValueError("bad data")
"""


@pytest.mark.processes
@pytest.mark.usefixtures("warm_pythons")
def test_a_launch_leaves_a_record_that_says_why_it_failed(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    Path("train.py").write_text(TRAINED)
    launch = partial(launching.launch, "-q", "--cpu")
    secret = ("--key", "0123456789")
    assert launch("train.py", "good").returncode == 0
    assert launch("--num-processes", "2", "train.py", "bad", *secret).returncode == 1
    assert launch("--record", "off", "train.py", "good").returncode == 0
    wait_until(lambda: len(store.names_in(runs_folder())) == 2)
    code, text = run("why")
    assert code == 0
    for part in ("ValueError: bad data", "ended: exit code 1", "setting num_processes: 1 -> 2"):
        assert part in text
    assert "argument at 1: good -> bad" in text
    assert "OMP_NUM_THREADS" not in text, "it follows from the number of ranks"
    assert f"checkpoints: {os.path.abspath('saved')}" in text
    assert f"metrics: {os.path.abspath('runs/digits')}{os.sep}" in text
    _, good, *_ = run("runs", "--json")[1].split('"run": "')
    assert f"checkpoints: {os.path.abspath('saved')}" in run("why", good.partition('"')[0])[1]
    assert "[1] trained with ['bad', '--key', '***']" in run("logs")[1]
