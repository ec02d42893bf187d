"""Trackers and loggers on several ranks: rank 0 writes, and messages in order are in order."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from headway.trackers.run_file import read_metrics
from tests.distributed.launching import launch, script

pytestmark = pytest.mark.distributed

TRAINS = """
import logging
import sys

from headway import Accelerator
from headway.logging import get_logger
from headway.trackers.tracker import GeneralTracker


class Own(GeneralTracker):
    requires_logging_directory = False
    tracker = "wrapped"

    def __init__(self, name, main_process_only):
        self.name, self.main_process_only = name, main_process_only

    def say(self, what):
        print(f"<{self.name} {what}>")

    def start(self):
        self.say("start")

    def finish(self):
        self.say("finish")

    def finish_after_error(self):
        self.say("finish after error")


logging.basicConfig(format="%(message)s", filename="log.txt")
logger = get_logger(__name__, log_level="INFO")
logger.info("<early>")
trackers = ["jsonl", Own("one", True), Own("all", False)]
accelerator = Accelerator(cpu=True, log_with=trackers, project_dir="runs")
accelerator.init_trackers("project", {"lr": 1})
rank = accelerator.process_index
accelerator.log({"loss": rank}, step=7)
accelerator.get_tracker("jsonl").path.with_suffix(".txt").name
accelerator.get_tracker("one", unwrap=True)
if rank == 2:
    logging.getLogger(__name__).setLevel("ERROR")
logger.info("<main>")
logger.info(f"<turn {rank}>", in_order=True)
logger.error("<each>", main_process_only=False)
accelerator.wait_for_everyone()
if len(sys.argv) > 1:
    raise RuntimeError("a mistake")
"""


@pytest.mark.parametrize("is_mistaken", [False, True])
def test_ranks_track_and_log(is_mistaken: bool) -> None:
    words = ["x"] if is_mistaken else []
    done = launch("-q", "--cpu", "--num-processes", "3", script(TRAINS), *words)
    assert bool(done.returncode) == is_mistaken, done.stdout + done.stderr
    (path,) = Path("runs").rglob("*.*")
    assert read_metrics(path) == {"loss": ([7], [0])}
    assert json.loads(path.read_text().splitlines()[0])["config"] == {"lr": 1}
    logged = Path("log.txt").read_text().splitlines()
    assert logged.count("<early>") == logged.count("<main>") == 1
    turns = [line for line in logged if "turn" in line]
    assert turns == ["[RANK 0] <turn 0>", "[RANK 1] <turn 1>"], "the level of rank 2 is higher"
    each = [f"[RANK {rank}] <each>" for rank in range(3)]
    assert sorted(line for line in logged if "each" in line) == each
    said = re.findall(r"<[^>]*>", done.stdout)
    assert said.count("<one start>") == 1
    assert said.count("<all start>") == 3
    end = "finish after error" if is_mistaken else "finish"
    if not is_mistaken:  # ranks whose turn to end comes second are stopped
        assert said.count("<one finish>") == 1
        assert said.count("<all finish>") == 3
    assert any(f"<all {end}>" == line for line in said)
