"""A message is taken only as the other end sent it, and the run's key is never shown."""

from __future__ import annotations

import json
from typing import Any, get_args
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import ConfigError
from headway.ipc import typed
from headway.ipc.records import StepStats
from headway.launcher.multinode.messages import (
    MAX_DETAILS,
    MAX_LINE,
    Done,
    Failed,
    InvalidPeer,
    MachineFacts,
    MachineHeartbeat,
    Message,
    Missing,
    Session,
    new_greeting,
    read_greeting,
)
from headway.launcher.multinode.preflight import describe_run_key, run_key
from tests.commands.running import run

KEY = b"0123456789abcdef"


def sessions(key: bytes = KEY, other_key: bytes = KEY) -> tuple[Session, Session]:
    """Return the two ends of a connection: machine 0's, and that of another machine."""
    hub, member = new_greeting(key), new_greeting(other_key)
    return (Session(key, hub, member, is_hub=True), Session(other_key, member, hub, is_hub=False))


def sealed(session: Session, *texts: str) -> list[bytes]:
    return [session.seal(Missing(text)).rstrip(b"\n") for text in texts]


FAILED = Failed(1, "n2", "cause\n\u2028", "where", "lines\nof details", "fix", 9, 2, 0.5)
VALUES: dict[str, object] = {
    "int": 1,
    "float": 0.5,
    "str": "x",
    "bool": True,
    "int | None": None,
    "Failed | None": FAILED,
    "CrashSite | None": None,
    "StepStats": StepStats(1, 1, 1, 1, 1, 1, 1, 1, 1, 1, None, 0, None, None, 1),
    "MachineFacts": MachineFacts({"torch": "2.13"}, {}),
}
"""Of a message's fields, by their types; a tuple is empty."""


def test_messages_of_all_kinds_arrive_as_they_were_sent_in_both_directions() -> None:
    hub, member = sessions()
    messages: list[Any] = [FAILED, Done()]
    for kind in get_args(Message):
        types = [
            getattr(type_, "__forward_arg__", str(type_)) for type_ in kind.__annotations__.values()
        ]
        messages.append(kind(*(VALUES.get(name, ()) for name in types)))
    for message in messages:
        assert member.open(hub.seal(message).rstrip(b"\n")) == message
        assert hub.open(member.seal(message).rstrip(b"\n")) == message


def test_the_longest_report_of_a_failure_arrives_whatever_its_characters() -> None:
    for character in ("\N{GRINNING FACE}", "\udc80", '"', "\0"):
        hub, member = sessions()
        failed = Failed(1, "n2", "", "", character * MAX_DETAILS, "", 9)
        line = member.seal(failed).rstrip(b"\n")
        assert len(line) < MAX_LINE
        assert hub.open(line) == failed


def test_a_message_made_with_another_key_is_refused() -> None:
    hub, stranger = sessions(other_key=b"another key, as long")
    with pytest.raises(InvalidPeer) as error:
        hub.open(*sealed(stranger, "hello"))
    assert error.value.reason == "key"


def test_a_message_that_is_repeated_left_out_or_reordered_is_refused() -> None:
    for *before, last in ([0, 0], [1], [0, 2], [0, 1, 0]):
        hub, member = sessions()
        lines = sealed(member, "a", "b", "c")
        for index in before:
            hub.open(lines[index])
        with pytest.raises(InvalidPeer):
            hub.open(lines[last])


def test_a_message_of_this_end_or_of_another_connection_is_refused() -> None:
    hub, _ = sessions()
    with pytest.raises(InvalidPeer):
        hub.open(*sealed(sessions()[1], "of another connection"))
    with pytest.raises(InvalidPeer):
        hub.open(*sealed(hub, "reflected"))


@given(st.binary(max_size=300), st.integers(0, 200), st.integers(0, 7))
def test_no_bytes_and_no_changed_bit_are_taken_for_a_message(
    data: bytes, place: int, bit: int
) -> None:
    hub, member = sessions()
    with pytest.raises(InvalidPeer):
        hub.open(data)
    line = bytearray(sealed(member, "x" * 200)[0])
    line[place] ^= 1 << bit
    with pytest.raises(InvalidPeer):
        hub.open(bytes(line))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
KINDS = st.sampled_from(
    ["Join", "MachineReady", "Failed", "StartRound", "MachineHeartbeat", "Restart", "exec", ""]
)


@given(st.one_of(JSON, st.builds(lambda kind, rest: [kind, *rest], KINDS, st.lists(JSON))))
def test_whatever_one_with_the_key_sends_is_a_message_of_the_declared_types_or_refused(
    content: object,
) -> None:
    hub, member = sessions()
    text = json.dumps(content)
    with patch.object(typed, "_dumps", lambda *_, **__: text):
        line = member.seal(MachineHeartbeat()).rstrip(b"\n")
    try:
        message = hub.open(line)
    except InvalidPeer:
        return
    assert json.loads(json.dumps([type(message).__name__, *message])) == json.loads(text)


@given(st.binary(max_size=100))
def test_no_bytes_are_taken_for_a_greeting(data: bytes) -> None:
    with pytest.raises(InvalidPeer):
        read_greeting(data)


def test_a_greeting_of_another_version_says_so() -> None:
    line = new_greeting(KEY).line().rstrip(b"\n")
    assert read_greeting(line).has_key
    with pytest.raises(InvalidPeer) as error:
        read_greeting(line.replace(b"channel/2", b"channel/3"))
    assert error.value.reason == "version"


def test_without_a_key_there_is_none_and_the_way_to_one_is_printed() -> None:
    assert run_key({}) == b""
    assert "openssl rand" in describe_run_key({})


def test_the_environment_has_the_key_and_a_short_one_is_refused() -> None:
    assert run_key({"HEADWAY_RUN_KEY": "0123456789abcdef"}) == b"0123456789abcdef"
    for short in ("", "secret"):
        with pytest.raises(ConfigError) as error:
            run_key({"HEADWAY_RUN_KEY": short})
        assert not short or short not in str(error.value)


def test_a_plan_hides_the_key_from_the_script_and_from_the_reader() -> None:
    place = ["--num-machines", "2", "--machine-rank", "1", "--main-address", "n1"]
    words = ["launch", "--dry-run", "--cpu", *place, "-m", "this"]
    code, plan = run(*words, HEADWAY_RUN_KEY="not to be shown to anybody")
    assert code == 0
    assert "- HEADWAY_RUN_KEY" in plan
    assert "not to be shown" not in plan
    assert "machines authenticate each other with HEADWAY_RUN_KEY" in plan
