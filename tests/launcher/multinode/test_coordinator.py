"""Machine 0 decides for all: who is in, when ranks start, whose failure it was, what follows."""

from __future__ import annotations

import pytest

from headway.ipc.records import CrashSite, Frame, StepStats
from headway.launcher.multinode.coordinator import SETTLE_S, Coordinator, RankCallbacks, loss
from headway.launcher.multinode.messages import (
    Accepted,
    AllDone,
    Done,
    Failed,
    Join,
    Leave,
    MachineFacts,
    MachineHeartbeat,
    MachineReady,
    Message,
    Missing,
    Probe,
    Probed,
    Rejected,
    Restart,
    Signalled,
    StartRound,
    StepTiming,
)
from headway.launcher.multinode.preflight import differences, facts_of
from headway.launcher.plan.program import Program
from headway.launcher.processes.repeats import RepeatDetector
from tests.launcher.plan.planning import plan


def facts(script: str) -> MachineFacts:
    python = "3.11" if script == "a" else "3.12"
    return MachineFacts({"script": script, "torch": "2.13.0"}, {"python": python})


class Run:
    """A coordinator, the machines that talk to it, and a clock."""

    def __init__(self, least: int, most: int, max_restarts: int = 0) -> None:
        self.now = 100.0
        self.lines: list[str] = []
        self.least, self.most = least, most
        self.coordinator = Coordinator(
            least=least,
            most=most,
            max_restarts=max_restarts,
            join_timeout_s=600,
            machine_timeout_s=15,
            facts=facts("a"),
            log=self.lines.append,
            now=self.now,
        )

    def join(self, peer: int, machine: int | None, script: str = "a") -> bool:
        join = Join(machine, self.least, self.most, f"n{peer}", facts(script))
        address = "" if peer == 1 else f"10.0.0.{peer}"
        return self.coordinator.join(peer, join, address, "10.0.0.1", self.now)

    def take(self, peer: int, message: Message) -> None:
        self.coordinator.handle(peer, message, self.now)

    def ready(self, *peers: int) -> None:
        for peer in peers:
            self.take(peer, MachineReady(1000 + peer, 29501 if peer == 1 else None, peer))

    def probed(self, *peers: int, problem: str = "") -> None:
        for peer in peers:
            self.take(peer, Probed(problem))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.coordinator.tick(self.now)

    def sent(self) -> list[tuple[int, Message]]:
        """Return what has been sent since the last call, without what says nothing."""
        sent, self.coordinator.outbox = self.coordinator.outbox, []
        return [row for row in sent if not isinstance(row[1], (Accepted, MachineHeartbeat))]

    def joined(self, count: int) -> Run:
        """Return this run, once so many machines have joined, each with its rank."""
        for peer in range(1, count + 1):
            assert self.join(peer, peer - 1)
        return self

    def begun(self, count: int) -> Run:
        """Return this run, once the ranks of so many machines have started."""
        for peer in range(1, count + 1):
            assert self.join(peer, peer - 1 if self.least == self.most else None if peer > 1 else 0)
        self.ready(*range(1, count + 1))
        self.wait(SETTLE_S + 1)
        self.probed(*range(1, count + 1))
        rounds = [message for _, message in self.sent() if isinstance(message, StartRound)]
        assert [start.machine for start in rounds] == list(range(count))
        return self


def failed(suspicion: int = 0, cause: str = "rank 1 failed", ago_s: float = 0.0) -> Failed:
    return Failed(9, "x", cause, "", "", "", 7, suspicion, ago_s)


def kinds(sent: list[tuple[int, Message]]) -> list[tuple[int, str]]:
    return [(peer, type(message).__name__) for peer, message in sent]


def test_ranks_start_once_all_are_there_and_each_has_been_reached_by_another() -> None:
    run = Run(3, 3)
    run.join(2, 1)
    run.join(1, 0)
    run.ready(1, 2)
    run.wait(2)
    assert [(peer, message) for peer, message in run.sent()] == [
        (2, Missing("machine 2 of 3")),
        (1, Missing("machine 2 of 3")),
    ]
    run.join(3, 2)
    run.ready(3)
    assert run.sent() == [
        (1, Probe("machine 1 (n2)", "10.0.0.2", 1002)),
        (2, Probe("machine 2 (n3)", "10.0.0.3", 1003)),
        (3, Probe("machine 0 (n1)", "10.0.0.1", 1001)),
    ]
    run.probed(1, 2)
    assert not run.sent()
    run.probed(3)
    assert run.sent() == [
        (1, StartRound(0, 0, 3, 0, 6, "10.0.0.1", 29501)),
        (2, StartRound(0, 1, 3, 1, 6, "10.0.0.2", 29501)),
        (3, StartRound(0, 2, 3, 3, 6, "10.0.0.3", 29501)),
    ]


@pytest.mark.parametrize("problem", ["", "cannot reach machine 0"])
def test_a_machine_that_cannot_be_reached_ends_the_run_before_a_rank_starts(problem: str) -> None:
    run = Run(2, 2).joined(2)
    run.ready(1, 2)
    run.probed(1, problem="cannot reach machine 1 (n2) at 10.0.0.2: timed out")
    run.probed(2, problem=problem)
    ends = [message for _, message in run.sent() if isinstance(message, Failed)]
    assert len(ends) == 2
    assert "cannot reach machine 1" in ends[0].details
    assert ("loses packets" in ends[0].fix) == (problem == "")  # some connections succeeded


def test_a_machine_with_another_script_ends_the_run_with_what_differs() -> None:
    run = Run(2, 2).joined(1)
    run.join(2, 1, script="bbbb")
    run.ready(1, 2)
    for _, end in run.sent():
        assert isinstance(end, Failed)
        assert end.exit_code == 4
        assert end.details == "machine 1 (n2): script bbbb, but a on machine 0"
    assert run.lines == ["note: machine 1 (n2): python 3.12, but 3.11 on machine 0"]


def test_a_machine_that_expects_another_number_of_machines_ends_the_wait_of_all() -> None:
    run = Run(2, 2).joined(1)
    run.ready(1)
    run.least = run.most = 3  # on machine 1
    assert not run.join(2, 1)
    (_, refused), (peer, end) = run.sent()
    assert isinstance(refused, Rejected)
    assert isinstance(end, Failed)
    assert peer == 1
    assert "num_machines is 3 here, but 2 on machine 0" in end.cause


def test_a_launcher_that_fails_before_the_ranks_start_ends_the_wait_of_all_also_of_late_ones() -> (
    None
):
    """Machine 0 itself may come last: its hub listens before it joins."""
    run = Run(4, 4)
    run.join(2, 1)
    run.join(3, 2)
    run.take(3, failed(cause="too many open files")._replace(is_final=True))
    assert run.coordinator.num_unnotified == 2
    assert not run.join(1, 0)
    assert not run.join(4, 3)
    assert kinds(run.sent()) == [(peer, "Failed") for peer in (2, 3, 1, 4)]
    assert run.coordinator.num_unnotified == 0


def test_a_stop_signal_to_machine_0_before_the_ranks_start_stops_those_that_wait_for_it() -> None:
    run = Run(3, 3).joined(2)
    run.take(2, Signalled(15, "n2"))
    assert not run.sent()  # that machine may come again
    run.take(1, Signalled(15, "n1"))
    run.coordinator.drop(1, "its launcher exited", run.now)
    assert run.sent() == [(2, Signalled(15, "n1"))]
    assert not run.lines


def test_machine_0_alone_is_told_the_details_of_a_failure() -> None:
    run = Run(3, 3).begun(3)
    run.take(3, failed()._replace(details="Traceback"))
    ends = [message for _, message in run.sent() if isinstance(message, Failed)]
    assert [end.details for end in ends] == ["Traceback", "", ""]


def test_a_machine_that_does_not_come_ends_the_wait_of_all() -> None:
    run = Run(2, 2).joined(1)
    run.ready(1)
    run.wait(601)
    ((_, end),) = run.sent()
    assert isinstance(end, Failed)
    assert "machine 1 of 2 did not join" in end.cause


@pytest.mark.parametrize("machine", [0, 1])
def test_a_second_machine_of_a_rank_is_refused_and_the_first_stays(machine: int) -> None:
    run = Run(2, 2).joined(2)
    assert not run.join(3, machine)
    ((_, refused),) = run.sent()
    assert isinstance(refused, Rejected)
    assert f"machine_rank {machine} is set on two machines" in refused.what
    assert len(run.coordinator.machines) == 2


def test_a_range_is_no_advice_against_the_loss_of_machine_0_which_it_does_not_survive() -> None:
    advice = [loss(f"machine {rank}", rank, "n", "it was killed", "").fix for rank in (0, 1)]
    assert ["--num-machines" in fix for fix in advice] == [False, True]


def test_a_machine_without_a_rank_is_refused_as_a_machine_and_not_as_none() -> None:
    run = Run(2, 2).joined(1)
    run.least = 1
    assert not run.join(2, None)
    (line,) = run.lines
    assert line.startswith("refused a machine (n2, 10.0.0.2): ")
    causes = [message.cause for _, message in run.sent() if isinstance(message, Failed)]
    assert causes
    assert "None" not in causes[0] + line


def test_a_machine_rank_that_the_run_does_not_have_is_refused_before_ranks_are_given() -> None:
    run = Run(2, 2).joined(1)
    assert not run.join(2, 2)
    ((_, refused),) = run.sent()
    assert isinstance(refused, Rejected)
    assert "machine_rank is 2" in refused.what


def test_machines_that_were_started_alike_get_the_ranks_that_nobody_has() -> None:
    run = Run(4, 4)
    for peer, machine in ((1, 0), (2, None), (3, 2)):
        assert run.join(peer, machine)
        run.ready(peer)
    run.wait(2)
    assert (1, Missing("1 more machine")) in run.sent()
    assert run.join(4, None)
    run.ready(4)
    run.probed(1, 2, 3, 4)
    rounds = {peer: message for peer, message in run.sent() if isinstance(message, StartRound)}
    assert {peer: start.machine for peer, start in rounds.items()} == {1: 0, 2: 1, 3: 2, 4: 3}


def test_a_victim_is_blamed_only_if_nobody_else_is_to_blame() -> None:
    run = Run(2, 2).begun(2)
    run.take(1, failed(suspicion=2, cause="victim"))
    run.wait(1)
    assert not run.sent()
    run.take(2, failed(suspicion=1, cause="killed"))
    run.take(1, MachineHeartbeat())
    run.wait(2)
    run.take(1, MachineHeartbeat())
    run.wait(0.1)
    ends = run.sent()
    assert [message.cause for _, message in ends if isinstance(message, Failed)] == ["killed"] * 2


def test_a_rank_that_left_silently_is_blamed_once_a_rank_elsewhere_fails() -> None:
    for suspicion, blamed in ((2, "left"), (0, "its own")):
        run = Run(2, 2).begun(2)
        run.take(2, Done(failed(suspicion=1, cause="left")))
        assert not run.sent()
        run.take(1, failed(suspicion=suspicion, cause="its own"))
        run.wait(3)
        run.take(1, MachineHeartbeat())
        run.take(2, MachineHeartbeat())
        run.wait(0.1)
        ends = [message.cause for _, message in run.sent() if isinstance(message, Failed)]
        assert ends == [blamed] * 2


def test_a_lost_machine_is_blamed_before_the_ranks_that_lost_their_connection_to_it() -> None:
    run = Run(2, 2).begun(2)
    stats = StepStats(7, 2, 0.5, 0.1, 0.1, 0.1, 0.1, 0.0, 8, 100, None, 0, None, None, 0.0)
    run.take(2, StepTiming(1, stats))
    run.wait(1)
    run.take(1, failed(suspicion=2, cause="victim"))
    run.wait(5)  # machine 1 has not answered
    assert not run.sent()
    run.coordinator.drop(2, "it sent nothing", run.now)
    ((_, end),) = run.sent()
    assert isinstance(end, Failed)
    assert "machine 1 (n2) was lost" in end.cause
    assert "step 7" in end.details


def test_restarts_are_counted_once_for_all_machines() -> None:
    run = Run(2, 2, max_restarts=1).begun(2)
    run.take(1, failed(cause="first"))
    run.take(2, failed(cause="second"))
    assert run.sent() == [(1, Restart("first", 1)), (2, Restart("first", 1))]
    run.ready(2)
    assert not run.sent()  # machine 0 still stops its ranks
    run.ready(1)
    assert run.sent() == [
        (1, StartRound(1, 0, 2, 0, 3, "10.0.0.1", 29501)),
        (2, StartRound(1, 1, 2, 1, 3, "10.0.0.2", 29501)),
    ]
    run.take(2, failed(cause="third"))
    assert kinds(run.sent()) == [(1, "Failed"), (2, "Failed")]


def test_a_failure_that_a_restart_does_not_help_ends_the_run() -> None:
    run = Run(2, 2, max_restarts=3).begun(2)
    run.take(1, failed()._replace(is_final=True))
    assert kinds(run.sent()) == [(1, "Failed"), (2, "Failed")]


def test_a_failure_that_is_the_one_before_it_again_ends_the_run_with_restarts_left() -> None:
    run = Run(2, 2, max_restarts=3)
    run.coordinator.callbacks = RankCallbacks(failure=RepeatDetector(str).check)
    run.begun(2)
    site = CrashSite("ValueError", "", Frame("train.py", 7, "f"), 20)
    run.take(2, failed()._replace(site=site))
    assert kinds(run.sent()) == [(1, "Restart"), (2, "Restart")]
    run.ready(1, 2)
    run.sent()
    run.take(2, failed()._replace(site=site))
    said = [message.repeats for _, message in run.sent() if isinstance(message, Failed)]
    assert said[0].startswith("ValueError at train.py:7 in f after step 20, as in the ")
    assert said[0] == said[1]


def test_a_range_starts_with_the_least_a_moment_later_and_takes_more_at_the_next_restart() -> None:
    run = Run(2, 4, max_restarts=1).begun(3)
    assert run.join(4, None)
    run.ready(4)
    run.wait(10)
    assert run.sent() == [(4, Missing("the next restart, because the run has started"))]
    run.take(2, failed())
    run.sent()
    run.ready(1, 2, 3)
    run.probed(1, 2, 3, 4)
    rounds = [message for _, message in run.sent() if isinstance(message, StartRound)]
    assert [(start.machine, start.num_machines) for start in rounds] == [(n, 4) for n in range(4)]


def test_a_range_goes_on_without_a_lost_machine_and_counts_no_restart() -> None:
    run = Run(2, 3).begun(3)
    run.take(1, failed(suspicion=2))
    run.coordinator.drop(2, "its launcher exited", run.now)
    sent = run.sent()
    assert [(peer, message.number) for peer, message in sent if isinstance(message, Restart)] == [
        (1, 0),
        (3, 0),
    ]
    run.ready(1, 3)
    run.wait(SETTLE_S + 1)
    rounds = [message for _, message in run.sent() if isinstance(message, StartRound)]
    assert [(start.machine, start.num_machines) for start in rounds] == [(0, 2), (1, 2)]
    assert run.coordinator.num_restarts == 0


def test_who_is_ready_only_once_others_were_told_what_is_missing_is_told_as_well() -> None:
    run = Run(3, 3).joined(1)
    run.ready(1)
    run.wait(2)
    run.sent()
    run.join(2, 1)
    run.ready(2)
    assert run.sent() == [(2, Missing("machine 2 of 3"))]


def test_machine_0_learns_what_steps_of_other_machines_take_and_which_machine_is_lost() -> None:
    run, seen, lost = Run(3, 3), list[object](), list[int]()
    run.coordinator.callbacks = RankCallbacks(lambda *steps: seen.append(steps), lost.append)
    run.begun(3)
    stats = StepStats(3, 2, 0.5, 0.1, 0.1, 0.1, 0.1, 0.0, 8, 100, None, 0, None, None, 0.0)
    run.take(3, StepTiming(5, stats))
    assert seen == [(5, stats, 2, "n3")]
    run.coordinator.drop(2, "its launcher exited", run.now)
    assert lost == [1]


@pytest.mark.parametrize("stops_for_long", [False, True])
def test_a_range_waits_for_another_machine_when_too_few_are_left(stops_for_long: bool) -> None:
    run = Run(2, 3).begun(2)
    run.coordinator.drop(2, "its launcher exited", run.now)
    if stops_for_long:
        run.wait(SETTLE_S + 1)
    run.ready(1)
    if not stops_for_long:
        run.wait(SETTLE_S + 1)
    assert (1, Missing("1 more machine")) in run.sent()
    run.join(5, None)
    run.ready(5)
    run.wait(SETTLE_S + 1)
    run.probed(1, 5)
    assert kinds(run.sent())[-2:] == [(1, "StartRound"), (5, "StartRound")]


def test_the_run_is_done_once_all_machines_are_and_a_loss_after_that_is_none() -> None:
    run = Run(2, 3).begun(2)
    run.join(3, None)
    run.take(2, Done())
    run.coordinator.drop(2, "its launcher exited", run.now)
    assert not run.sent()
    run.take(1, Done())
    assert run.sent() == [(1, AllDone()), (3, AllDone())]


def test_a_stop_signal_on_one_machine_stops_the_others_and_blames_nobody() -> None:
    run = Run(3, 3).begun(3)
    run.take(2, Signalled(15, "n2"))
    assert run.sent() == [(1, Signalled(15, "n2")), (3, Signalled(15, "n2"))]
    run.take(1, failed())
    run.take(2, Leave())
    run.coordinator.drop(2, "its launcher exited", run.now)
    assert not run.sent()


def test_a_machine_that_is_lost_while_the_run_stops_is_told_to_those_that_wait_for_it() -> None:
    run = Run(3, 3).begun(3)
    run.take(2, Signalled(15, "n2"))
    run.sent()
    run.coordinator.drop(2, "it sent nothing for 15 s", run.now)
    assert kinds(run.sent()) == [(1, "Failed"), (3, "Failed")]


def test_a_second_stop_signal_on_any_machine_ends_the_grace_period_of_all() -> None:
    run = Run(3, 3).begun(3)
    run.take(2, Signalled(2, "n2"))
    run.take(1, Signalled(2, "n1"))
    run.sent()
    now = Signalled(2, "n3", ends_grace=True)
    run.take(3, now)
    assert run.sent() == [(1, now), (2, now)]


def test_a_machine_that_leaves_before_ranks_start_can_come_again() -> None:
    run = Run(2, 2).joined(2)
    run.ready(1)
    run.coordinator.drop(2, "its launcher exited", run.now)
    assert run.join(3, 1)
    run.ready(3)
    assert kinds(run.sent()) == [(1, "Probe"), (3, "Probe")]


def test_machines_that_run_different_modules_are_different_jobs() -> None:
    ours, theirs = (facts_of(plan(program=Program(name, (), "module")), "2.13") for name in "ab")
    (found,) = differences(ours.must_agree, theirs.must_agree, "machine 1")
    assert found == ("module", "machine 1: module b, but a on machine 0")
