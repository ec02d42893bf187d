"""Where ranks are, and who is behind, told from what they say: no process."""

from __future__ import annotations

from typing import Any

import pytest

from headway.ipc.records import (
    Collective,
    Crash,
    Frame,
    Group,
    ProgressSnapshot,
    ScriptEnd,
    StatusReply,
)
from headway.launcher.diagnosis.hang import (
    Exit,
    Hang,
    NoStack,
    RankFacts,
    RankStatus,
    describe,
    describe_stacks,
    explain,
    explain_divergence,
    last_collective_at,
    rank_status,
)
from headway.launcher.diagnosis.stacks import (
    ProcessState,
    describe_crash,
    parse_traceback,
    user_frame,
)

ALL = (0, 1, 2, 3)
TRAIN = (Frame("/w/train.py", 3, "<module>"), Frame("/w/train.py", 14, "main"))
SLEEP = (Frame("/w/train.py", 3, "<module>"), Frame("/w/train.py", 12, "main"))


def group(*operations: str, open: int = 0, name: str = "0", ranks: tuple[int, ...] = ALL) -> Group:
    """Return a group whose last `open` collectives are not done."""
    done = len(operations) - open
    return Group(
        name,
        ranks,
        tuple(
            Collective(number + 1, *operation.partition("/")[::2], number < done, 0.0)
            for number, operation in enumerate(operations)
        ),
    )


def ranks(*groups: Group | None, place: tuple[Frame, ...] = TRAIN) -> list[RankStatus]:
    return [
        RankStatus(rank, stacks=(place,), groups=None if entry is None else (entry,))
        for rank, entry in enumerate(groups)
    ]


def test_a_call_that_only_some_ranks_make_is_named_with_its_fix() -> None:
    one, other = ranks(group("all_gather", open=1, ranks=(0, 1)), group("broadcast", ranks=(0, 1)))
    told = (
        one._replace(progress=ProgressSnapshot(3, "checkpoint")),
        other._replace(progress=ProgressSnapshot(3, "script")),
    )
    assert "accelerator.checkpoint" in Hang(told, 60).fix
    assert "in step 4 (checkpoint)" in Hang(told, 60).cause + Hang(told, 60).details
    both = tuple(status._replace(progress=ProgressSnapshot(3, "checkpoint")) for status in told)
    assert "accelerator" not in Hang(both, 60).fix


REDUCE, GATHER = group("all_reduce/[4]", open=1), group("all_gather/[4]", open=1)
OPEN_1 = group("all_reduce", open=1)
OPEN_2, BEFORE_2 = group("broadcast", "all_reduce", open=1), group("broadcast")
AHEAD = group("all_reduce", "all_gather", "all_reduce", open=2)
PAIR = group("all_gather", open=1, name="1", ranks=(0, 1))
FORMING = (*TRAIN, Frame("/lib/torch/distributed_c10d.py", 1, "init_process_group"))
AT = "at /w/train.py:14 in main"


def but(rank: int, told: list[RankStatus], **changes: Any) -> list[RankStatus]:
    """Return the statuses with one that differs."""
    return [row._replace(**changes) if row.rank == rank else row for row in told]


NOBODY = ["no rank is known to be behind its peers"]
DIVERGENCES: dict[str, tuple[list[RankStatus], list[str]]] = {
    "a rank is behind": (
        but(1, ranks(OPEN_2, BEFORE_2, OPEN_2, OPEN_2), stacks=(SLEEP,)),
        [
            "rank 1 has not entered all_reduce #2, at /w/train.py:12 in main",
            f"ranks 0, 2-3 wait in all_reduce #2, {AT}",
        ],
    ),
    "ranks that ran ahead wait for the first open collective": (
        ranks(AHEAD, AHEAD, group("all_reduce"), AHEAD),
        [f"rank 2 has not entered all_gather #2, {AT}"],
    ),
    "a rank has left": (
        but(1, ranks(OPEN_2, BEFORE_2, OPEN_2), stacks=(), exit=Exit(0, True)),
        ["rank 1 exited (exit code 0, at the end of the script) before all_reduce #2"],
    ),
    "a rank has left without a word": (
        but(1, ranks(OPEN_1, None), stacks=(), exit=Exit(0)),
        ["rank 1 exited (exit code 0) before all_reduce #1"],
    ),
    "different names": (
        ranks(REDUCE, REDUCE, GATHER, REDUCE),
        [
            f"the ranks entered different collectives: rank 2 all_gather #1, {AT}",
            f"ranks 0-1, 3 entered all_reduce #1 of [4], {AT}",
        ],
    ),
    "different sizes": (
        ranks(REDUCE, group("all_reduce/[8]", open=1), REDUCE, REDUCE),
        [f"the ranks entered different collectives: rank 1 all_reduce #1 of [8], {AT}"],
    ),
    "sizes that may differ": (
        ranks(group("gather/[4]", open=1), group("gather/[8]", open=1)),
        NOBODY,
    ),
    "all in the same collective": (ranks(OPEN_1, OPEN_1), NOBODY),
    "a process is stopped in the collective": (
        but(1, ranks(OPEN_1, OPEN_1), stacks=(), no_stack=NoStack.STOPPED),
        ["rank 1: its process is stopped"],
    ),
    "the rank that waits for nobody comes first": (
        [
            RankStatus(0, groups=(group(), PAIR)),
            RankStatus(1, groups=(group(), group(name="1", ranks=(0, 1)))),
            RankStatus(2, groups=(OPEN_1,)),
        ],
        [
            "rank 1 has not entered all_gather #1 of group 1 (ranks 0-1)",
            "ranks 0-1 have not entered all_reduce #1",
            "rank 0 waits in all_gather #1 of group 1 (ranks 0-1)",
            "rank 2 waits in all_reduce #1",
        ],
    ),
    "a rank never formed the group": (
        [RankStatus(0, stacks=(FORMING,)), RankStatus(1, stacks=(SLEEP,))],
        ["rank 1 has not entered init_process_group, at /w/train.py:12 in main"],
    ),
    "a rank left before the group was formed": (
        [RankStatus(0, stacks=(FORMING,)), RankStatus(1, Exit(0, True, Frame("x.py", 3, "f")))],
        ["rank 1 exited (exit code 0, by sys.exit at x.py:3 in f) before init_process_group"],
    ),
    "a rank is on its way out": (
        [RankStatus(0, stacks=(FORMING,)), RankStatus(1, stacks=((),))],
        NOBODY,
    ),
}


@pytest.mark.parametrize(("told", "lines"), DIVERGENCES.values(), ids=DIVERGENCES.keys())
def test_who_keeps_whom_waiting_follows_from_what_the_ranks_tell(
    told: list[RankStatus], lines: list[str]
) -> None:
    assert explain(told)[: len(lines)] == lines
    is_unknown = lines == NOBODY or lines[0].startswith("rank 1: its process")
    assert (explain_divergence(told) == []) == is_unknown


def test_the_network_is_suspected_where_only_ranks_of_other_machines_can_be_behind() -> None:
    inside = group("all_reduce", open=1, ranks=(0, 1, 2))
    waiting = Hang(tuple(ranks(inside, inside)), 60)
    assert "network" not in waiting._replace(world_size=2).fix
    assert "network" in waiting._replace(world_size=3).fix
    behind = Hang(tuple(ranks(inside, group())), 60)
    assert behind._replace(world_size=3).fix == behind.fix


def test_equal_stacks_and_threads_are_shown_once_and_why_there_is_none() -> None:
    told = but(2, ranks(*[None] * 4), stacks=(SLEEP,))
    text = describe_stacks(told)
    assert text.count("ranks 0-1, 3, most recent call last:") == 1
    assert text.count('File "/w/train.py", line 12, in main') == 1
    threads = describe_stacks([RankStatus(0, stacks=(TRAIN, SLEEP, SLEEP, SLEEP))])
    assert threads.count("3 other threads:") == threads.count("line 12") == 1
    none = [RankStatus(0), RankStatus(1, no_stack=NoStack.STOPPED), RankStatus(2, Exit(0))]
    assert "no stack: it is not in the script" in describe_stacks(none)
    assert "no stack: its process is stopped" in describe_stacks(none)
    assert "rank 2" not in describe_stacks(none)


def test_stacks_are_read_as_python_prints_them() -> None:
    calls = [
        '  File "/w/train.py", line 14 in main',
        '  File "/w/train.py", line 3 in <module>',
        '  File "<string>", line 4 in <module>',
        "",
        "Extension modules: a",
    ]
    error, header = "Fatal Python error: Segmentation fault", "(most recent call first):"
    other = [f"Thread 0x01 {header}", '  File "/lib/threading.py", line 9 in wait', ""]
    for crash in ([f"Stack {header}"], [*other, f"Current thread 0x02 {header}"]):
        assert describe_crash(["loading", error, "", *crash, *calls]) == [
            "Segmentation fault, most recent call last:",
            '  File "/w/train.py", line 3, in <module>',
            '  File "/w/train.py", line 14, in main',
        ]
    assert describe_crash(["loading"]) == []
    text = 'Traceback:\n  File "/w/train.py", line 3, in <module>\n    main()\nValueError: x\n'
    assert parse_traceback(text) == TRAIN[:1]


def test_a_rank_that_does_not_answer_is_named_with_what_the_kernel_says_of_it() -> None:
    inside = group("all_reduce", "all_reduce", open=1)
    told = ranks(inside, group("all_reduce"), inside)
    told[1] = told[1]._replace(
        stacks=(), no_stack=NoStack.SILENT, process=ProcessState("S", "futex_wait")
    )
    assert explain(told)[0] == (
        "rank 1 does not answer, and had not entered all_reduce #2 before, "
        "its main thread is sleeping, in the kernel's futex_wait"
    )
    assert "sleeping, in the kernel's futex_wait" in describe_stacks(told)
    told[1] = told[1]._replace(groups=None)  # it never answered
    assert explain(told)[0].startswith("rank 1 does not answer, and had not entered all_reduce #2")
    told[2] = told[2]._replace(groups=(group("all_reduce"),))  # answered, and is behind
    assert explain(told)[0].startswith("rank 2 has not entered all_reduce #2")


def test_the_users_frame_is_in_no_library() -> None:
    library = Frame(user_frame.__code__.co_filename, 1, "f")
    assert user_frame((*TRAIN, library)) == TRAIN[-1]
    assert user_frame((library,)) == library
    of_user = Frame("/home/u/.local/lib/python3/site-packages/torch/x.py", 1, "f")
    assert user_frame((*TRAIN, of_user)) == TRAIN[-1]
    assert user_frame(()) is None


def test_a_hang_is_a_failure_of_its_own_code() -> None:
    inside = group("all_reduce", open=1)
    hang = Hang(tuple(ranks(inside, group())), 30)
    assert hang.cause.startswith("no progress for 30 s: rank 1 has not entered")
    assert hang.exit_code == 124


def test_stack_states_how_long_nothing_moved_and_who_has_not_entered_what() -> None:
    inside = group("broadcast", "all_reduce", open=1)
    told = ranks(inside, group("broadcast"), inside)
    lines = describe(told, 12.4).splitlines()
    assert lines[:3] == [
        "ranks 0-2: last progress 12 s ago",
        "  rank 1 has not entered all_reduce #2, at /w/train.py:14 in main",
        "  ranks 0, 2 wait in all_reduce #2, at /w/train.py:14 in main",
    ]
    assert '  File "/w/train.py", line 14, in main' in lines
    alike = describe(ranks(inside, inside), 0.0).splitlines()
    assert alike[1] == "  no rank is known to be behind its peers"
    assert alike[2] == "  ranks 0-1 wait in all_reduce #2, at /w/train.py:14 in main"
    assert describe([], 0) == "no rank has started yet"


def test_the_newest_collective_of_all_ranks_counts() -> None:
    calls = [[Collective(1, "all_reduce", "", True, at) for at in some] for some in ((1, 5), (2,))]
    statuses = [RankStatus(0, groups=(Group("0", ALL, tuple(some)),)) for some in calls]
    assert last_collective_at(statuses) == 5.0
    assert last_collective_at([RankStatus(0)]) == 0


CLOSED = Group("0", ALL, (Collective(1, "all_reduce", "", True, 0.0),))
OPEN = Group("0", ALL, (Collective(1, "all_reduce", "", False, 0.0),))
PLACE = Frame("/w/train.py", 3, "main")
CRASH = Crash(1.0, "E", "", '  File "/w/train.py", line 3, in main\n')
JOINING = (*TRAIN, Frame("/usr/lib/threading.py", 1, "_shutdown"))
ANSWER = StatusReply((CLOSED,), ProgressSnapshot(), 7, (TRAIN,))
RUNS, STOPPED = ProcessState("S"), ProcessState("T")
END = ScriptEnd(2.0, 3, "", PLACE)


@pytest.mark.parametrize(
    ("facts", "exit", "no_stack", "stack"),
    [
        (RankFacts(0), None, NoStack.UNCONNECTED, None),
        (RankFacts(0, answer=ANSWER), None, None, TRAIN),
        (RankFacts(0, answer=ANSWER, process=RUNS), None, NoStack.SILENT, None),
        (RankFacts(0, answer=ANSWER, process=STOPPED), None, NoStack.STOPPED, None),
        (RankFacts(0, code=9), Exit(9), None, None),
        (RankFacts(0, answer=ANSWER, ends=[END]), Exit(3, True, PLACE), None, None),
        (RankFacts(0, code=-9, ends=[END]), Exit(-9, True, PLACE), None, None),
        (RankFacts(0, answer=ANSWER, ends=[END], groups=(OPEN,)), None, None, TRAIN),
        (
            RankFacts(0, answer=ANSWER._replace(stacks=(JOINING,)), ends=[END]),
            *(None, None, JOINING),
        ),
        (RankFacts(0, code=1, ends=[CRASH]), None, None, (PLACE,)),
    ],
)
def test_what_is_known_of_a_rank_follows_from_what_it_sent(
    facts: RankFacts, exit: Exit | None, no_stack: NoStack | None, stack: Any
) -> None:
    status = rank_status(facts)
    assert (status.exit, status.no_stack) == (exit, no_stack)
    assert status.stacks == (() if stack is None else (stack,))
    assert status.process == facts.process


def test_a_failed_collective_was_waited_in() -> None:
    (before,) = rank_status(RankFacts(0, code=1, ends=[CRASH], groups=(CLOSED,))).groups or ()
    assert before.first_pending == 1
