"""The conversation, with a scripted prompter, over every path on every machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import pytest

from headway.commands.config.ask import problems_of
from headway.commands.config.check import with_idle_gpus
from headway.config_wizard.interview import Defaults, interview
from headway.config_wizard.questions import (
    FINISH,
    MORE,
    Question,
    WizardFacts,
    next_question,
    profile_after,
)
from headway.errors import ConfigError, Problem
from headway.machine.facts import Machine
from headway.settings.setting import Raw
from headway.settings.table import TABLE
from tests.machines.recorded import RECORDINGS, load

LAPTOP, M2 = load("laptop_cpu"), load("mac_m2")
ONE_GPU, EIGHT_H100 = load("gpu_1"), load("gpu_8_h100")
WITH_T4 = load("gpu_mixed")


class Script:
    """Replies with what is written in it, then by Enter; notes what was asked and said."""

    def __init__(self, replies: Iterable[str]) -> None:
        self.replies = iter(replies)
        self.asked: list[Question] = []
        self.said: list[str] = []

    def show(self, text: str) -> None:
        self.said.append(text)

    def ask(self, question: Question) -> str:
        self.asked.append(question)
        reply = next(self.replies, "")
        if reply == "Ctrl-C":
            raise KeyboardInterrupt
        if reply == "the end":
            raise EOFError
        return reply


def facts_of(
    recorded: Machine,
    user: Mapping[str, Raw] | None = None,
    given: Mapping[str, Raw] | None = None,
    **changes: object,
) -> WizardFacts:
    machine = with_idle_gpus(recorded)

    def problems(values: Mapping[str, Raw]) -> Sequence[Problem]:
        return problems_of(values, machine)

    user = user or {}
    paths = {"user": "~/default.yaml", "project": "~/work/headway.yaml"}
    facts = WizardFacts(machine, {"user": user, "project": {}}, paths, given or {}, problems)
    return facts._replace(**changes)  # type: ignore[arg-type]


def held(
    facts: WizardFacts, *replies: str, script: Script | None = None
) -> tuple[Script, dict[str, Raw]]:
    """Hold one conversation; return the script after it, and the profile."""
    script = script or Script(replies)
    answers = interview(facts, script, lambda answers: f"summary of {len(answers)}")
    return script, profile_after(facts, answers)


CPU = {"device": "cpu", "num_processes": "1", "mixed_precision": "no"}
CUDA = {"device": "cuda", "num_processes": "8", "mixed_precision": "bf16"}

MPS = {**CPU, "device": "mps"}
ONE = {**CUDA, "num_processes": "1"}
TWO = {**CUDA, "num_processes": "2"}
FOUR = {**CUDA, "num_processes": "4"}

ENTER_ONLY = {  # machine: (number of prompts, the profile)
    "laptop_cpu": (4, CPU),
    "container_half_core_2gib": (3, CPU),
    "container_cgroup_v1": (4, CPU),
    "gpu_1": (5, ONE),
    "gpu_2_one_busy": (6, TWO),
    "gpu_4": (6, FOUR),
    "gpu_8_h100": (6, CUDA),
    "gpu_mixed": (6, {**TWO, "mixed_precision": "no"}),
    "gpu_exclusive": (6, TWO),
    "gpu_prohibited": (5, ONE),
    "gpu_mig": (5, ONE),
    "gpu_mig_mixed": (6, TWO),
    "gpu_ecc_errors": (6, TWO),
    "amd_2": (6, TWO),
    "intel_4": (6, {**FOUR, "device": "xpu"}),
    "intel_laptop": (4, CPU),
    "slurm_node": (6, FOUR),
    "mask_uuids": (6, TWO),
    "mask_empty": (4, CPU),
    "mask_minus_one": (4, CPU),
    "mask_duplicates": (4, CPU),
    "cpu_torch_on_gpu_box": (4, CPU),
    "driver_too_old": (4, CPU),
    "mac_m2": (5, MPS),
    "mac_disable_mps": (4, CPU),
    "mac_rosetta": (4, CPU),
    "mac_intel": (4, CPU),
    "mac_13": (4, CPU),
    "mac_virtual": (4, CPU),
}


ASKED_DIFFERENTLY = ("laptop_cpu", "container_half_core_2gib", "gpu_1", "gpu_mixed", "mac_m2")
"""Machines that are asked different questions, or have different answers; one of each kind."""


@pytest.mark.parametrize("name", RECORDINGS)
def test_enter_alone_gives_the_best_profile_in_few_prompts(name: str) -> None:
    prompts, profile = ENTER_ONLY[name]
    script, result = held(facts_of(load(name)))
    assert result == profile
    assert len(script.asked) == prompts
    assert script.said == [f"summary of {prompts - 1}"]


def paths(facts: WizardFacts, answers: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield the answers of every path through the questions: every choice, and both ways that the
    number of machines leads.
    """
    question = next_question(facts, answers)
    typed = {"num_machines": ["1", "2"], "main_address": ["node0"]}
    replies = [choice.value for choice in question.choices]
    for reply in replies or typed.get(question.name, [question.default]):
        if question.name == FINISH:
            yield {**answers, FINISH: reply}
        else:
            yield from paths(facts, {**answers, question.name: reply})


@pytest.mark.parametrize("name", RECORDINGS)
def test_every_path_ends_in_a_profile_that_a_launch_accepts_here(name: str) -> None:
    facts = facts_of(load(name), can_test=True)
    seen = 0
    for answers in paths(facts, {}):
        if answers[FINISH] != "write":
            continue
        if answers.get("device") == "mps" and answers.get("num_machines") == "2":
            continue  # refused in the conversation; see below
        script, profile = held(facts, *answers.values())
        assert [question.name for question in script.asked] == list(answers)
        assert not problems_of(profile, load(name))
        assert {"device", "num_processes", "mixed_precision"} <= profile.keys()
        for name_, answer in answers.items():
            if name_ in TABLE:
                assert str(profile.get(name_, answer)) == answer
        seen += 1
    assert seen >= 8


@pytest.mark.parametrize("name", ASKED_DIFFERENTLY)
def test_back_from_every_question_leads_to_the_one_before_with_its_answer(name: str) -> None:
    facts = facts_of(load(name))
    for answers in paths(facts, {}):
        if answers[FINISH] != "write" or "mps" in answers.values():
            continue
        *replies, last = answers.values()
        # every answer is given, taken back, and confirmed by Enter
        script, profile = held(
            facts, *(word for reply in replies for word in (reply, "<", "")), last
        )
        assert profile == held(facts, *answers.values())[1]
        for before, again in zip(script.asked[:-1:3], script.asked[2:-1:3], strict=True):
            assert before.name == again.name


def test_what_works_here_is_offered_the_best_first_with_its_reason() -> None:
    def offered(machine: Machine, *answers: str) -> list[tuple[str, str]]:
        script, _ = held(facts_of(machine), *answers)
        asked = script.asked[len(answers)]
        return [(choice.value, choice.reason) for choice in asked.choices]

    assert offered(EIGHT_H100) == [
        ("cuda", "8 GPUs (NVIDIA H100 80GB HBM3)"),
        ("cpu", "64 usable cores"),
    ]
    assert offered(M2) == [("mps", "Apple silicon (Apple M2)"), ("cpu", "8 usable cores")]
    precisions = offered(EIGHT_H100, "cuda", "8")
    assert [value for value, _ in precisions] == ["bf16", "no", "fp16"]
    assert "recommended: every GPU supports it" in precisions[0][1]
    assert [value for value, _ in offered(WITH_T4, "cuda", "2")] == ["no", "fp16"]
    assert offered(ONE_GPU, "cuda")[0][0] == "bf16"  # one GPU: no question about processes


@pytest.mark.parametrize(
    ("machine", "replies", "reason"),
    [
        (M2, ["cuda"], "no GPU is visible: a Mac has no CUDA"),
        (M2, ["tpu"], "'tpu' is not one of mps, cpu or a number from 1 to 2"),
        (EIGHT_H100, ["cuda", "9"], "num_processes is 9, but visible on this machine: 8 GPUs"),
        (EIGHT_H100, ["", "-2"], "invalid value '-2' for num_processes: must be 1 or more"),
        (EIGHT_H100, ["", "many"], "not a whole number"),
        (WITH_T4, ["", "", "bf16"], "Tesla T4 (sm_75) does not support bf16"),
        (LAPTOP, ["", "", "yes", "fp16"], "the CPU supports only bf16"),
        (LAPTOP, ["", "", "y", "", "0"], "1 or more"),
        (LAPTOP, ["", "", "y", *[""] * 5, "RANK=1"], "env sets RANK"),
        (LAPTOP, ["", "", "y", *[""] * 6, "2", "-"], "main_address is not set"),
        (LAPTOP, ["", "", "y", *[""] * 6, "2", "node0", "2"], "the ranks are 0 to 1"),
        (M2, ["", "", "", "y", *[""] * 5, "2"], "MPS supports only one process"),
    ],
)
def test_a_wrong_answer_is_refused_at_once_with_the_reason_and_asked_again(
    machine: Machine, replies: list[str], reason: str
) -> None:
    script = Script([*replies, "Ctrl-C"])
    with pytest.raises(KeyboardInterrupt):
        interview(facts_of(machine), script, lambda _: "")
    assert reason in script.said[-1]
    assert script.asked[-1].name == script.asked[-2].name


@pytest.mark.parametrize("reply", ["cpu", "CPU", " 2 ", "2"])
def test_a_choice_is_named_by_value_or_number(reply: str) -> None:
    assert held(facts_of(EIGHT_H100), reply, "3")[1]["device"] == "cpu"


@pytest.mark.parametrize("reply", ["y", "Y", "yes", "YES", "2"])
def test_yes_and_no_are_taken_however_they_are_typed(reply: str) -> None:
    script, _ = held(facts_of(M2), "", "", "", reply)
    assert script.asked[4].name == "gradient_accumulation_steps"


def test_help_explains_the_question_from_the_table_and_asks_it_again() -> None:
    script, _ = held(facts_of(M2), "?", "cpu", "?", "2")
    assert script.said[0].startswith(f"device: {TABLE['device'].help}.")
    assert "--num-processes N, or HEADWAY_NUM_PROCESSES" in script.said[1]
    assert [question.name for question in script.asked[:4]] == ["device"] * 2 + [
        "num_processes"
    ] * 2


def test_back_at_the_first_question_says_that_it_is_the_first() -> None:
    script, profile = held(facts_of(M2), "<", "cpu")
    assert script.said[0] == "This is the first question."
    assert profile == CPU


def test_back_in_the_closing_menu_opens_the_question_before() -> None:
    script, profile = held(facts_of(LAPTOP), "", "", "", "back", "yes", "bf16")
    assert script.asked[4].name == MORE
    assert profile["mixed_precision"] == "bf16"


def test_going_back_to_another_device_forgets_what_belonged_to_the_first() -> None:
    _, profile = held(facts_of(EIGHT_H100), "cuda", "8", "bf16", "<", "<", "<", "cpu", "3")
    assert profile == {"device": "cpu", "num_processes": "3", "mixed_precision": "no"}


def test_what_the_profile_says_is_the_default_if_it_still_fits() -> None:
    user = {"device": "cuda", "num_processes": "4", "mixed_precision": "fp16", "max_restarts": "3"}
    script, profile = held(facts_of(EIGHT_H100, user))
    assert [question.default for question in script.asked[:3]] == ["cuda", "4", "fp16"]
    assert profile == user
    _, profile = held(facts_of(LAPTOP, user))
    assert profile == {**CPU, "num_processes": "4", "max_restarts": "3"}


def test_gpus_chosen_before_count_the_processes_and_go_with_the_last_gpu() -> None:
    user: dict[str, Raw] = {"device": "cuda", "devices": ["1", "3"]}
    script, profile = held(facts_of(EIGHT_H100, user))
    assert profile == {**user, "num_processes": "2", "mixed_precision": "bf16"}
    assert "one process for each of 2 GPUs" in script.asked[1].reason
    assert held(facts_of(EIGHT_H100, user), "cpu")[1] == CPU
    script, profile = held(facts_of(EIGHT_H100, user), "", "1", "", "", "yes", "1,")
    assert profile["devices"] == "1,"
    assert script.asked[5][2:] == ("all", script.asked[5].help, (), "for num_processes: 1")


@pytest.mark.parametrize("name", ["ranks", "debug_rank"])
def test_ranks_chosen_before_go_with_the_last_process_that_had_them(name: str) -> None:
    user: dict[str, Raw] = {**CPU, "num_processes": "4", name: "3"}
    assert held(facts_of(LAPTOP, user))[1] == user
    assert held(facts_of(LAPTOP, user), "2")[1] == {**CPU, "num_processes": "2"}
    with pytest.raises(ConfigError, match=f"{name} contains rank 3"):
        held(facts_of(LAPTOP, given={name: "3"}), "2")
    machines = {"num_machines": "2", "main_address": "node0"}
    many: dict[str, Raw] = {**CPU, "num_processes": "2", **machines, "ranks": "3"}
    assert held(facts_of(LAPTOP, many))[1] == many


def test_more_settings_are_written_only_where_they_differ_from_the_defaults() -> None:
    more = ["4", "auto", "2", "~/logs", "A=1 B='x y'", "2", "node0", "1", "29501"]
    _, profile = held(facts_of(LAPTOP), "", "", "yes", "bf16", *more)
    assert profile == {
        **CPU,
        "mixed_precision": "bf16",
        "gradient_accumulation_steps": "4",
        "max_restarts": "2",
        "log_dir": "~/logs",
        "env": {"A": "1", "B": "x y"},
        "num_machines": "2",
        "main_address": "node0",
        "machine_rank": "1",
        "main_port": "29501",
    }
    script, again = held(facts_of(LAPTOP, profile), "", "", "yes", *[""] * 10)
    assert again == profile
    assert [q.default for q in script.asked if q.name == "env"] == ["A=1 'B=x y'"]
    _, fewer = held(facts_of(LAPTOP, profile), "", "", "yes", *[""] * 4, "-", "-", "1")
    assert not fewer.keys() & {"log_dir", "env", "main_address", "machine_rank", "main_port"}


@pytest.mark.parametrize("replies", [[], ["2"], ["2", "user", "no"]])
def test_input_that_ends_early_writes_nothing(replies: list[str]) -> None:
    with pytest.raises(ConfigError, match="the input ended before the last question"):
        held(facts_of(LAPTOP), *replies, "the end")


def test_input_that_ends_after_a_refused_answer_is_an_error_and_no_default() -> None:
    with pytest.raises(ConfigError, match="no GPU is visible"):
        held(facts_of(M2), "cuda", "the end")


def test_what_was_given_is_not_asked_and_an_impossible_gift_is_refused_before_any_question() -> (
    None
):
    script, profile = held(facts_of(EIGHT_H100, given={"num_processes": "2"}))
    assert "num_processes" not in [question.name for question in script.asked]
    assert profile["num_processes"] == "2"
    script = Script([])
    with pytest.raises(ConfigError, match="no GPU is visible"):
        held(facts_of(LAPTOP, given={"device": "cuda"}), script=script)
    assert not script.asked
    with pytest.raises(ConfigError, match="env sets RANK"):
        held(facts_of(LAPTOP, {"env": {"RANK": "1"}}))


def test_nobody_asked_and_a_default_that_cannot_be_is_an_error() -> None:
    with pytest.raises(ConfigError, match="main_address is not set"):
        interview(facts_of(LAPTOP, given={"num_machines": "2"}), Defaults(), lambda _: "")


@pytest.mark.parametrize("env", [{"A": "1", "B": "x y"}, ["A=1", "B=x y"], "A=1 B='x y'"])
def test_variables_are_offered_as_they_are_however_the_profile_has_them(env: Raw) -> None:
    replies = [*("1", "user", "yes"), *[""] * 20]
    script, profile = held(facts_of(LAPTOP, {"env": env}), *replies)
    assert [q.default for q in script.asked if q.name == "env"] == ["A=1 'B=x y'"]
    assert profile["env"] == {"A": "1", "B": "x y"}


def test_write_and_test_is_offered_for_this_machine_and_for_no_recorded_one() -> None:
    values = []
    for can_test in (False, True):
        script, _ = held(facts_of(LAPTOP, can_test=can_test))
        values.append([choice.value for choice in script.asked[-1].choices])
    assert values == [["write", "back", "cancel"], ["write", "write and test", "back", "cancel"]]


def test_what_belongs_to_sharding_is_asked_once_a_model_is_sharded() -> None:
    first = ["", "8", "", "", "yes", *[""] * 7]  # up to num_machines
    answers = [*first, "hsdp", "", "4", "Block", "yes", "write"]
    script, profile = held(facts_of(EIGHT_H100), *answers)
    asked = [question.name for question in script.asked]
    assert asked[-6:-1] == [
        "strategy",
        "activation_checkpointing",
        "shard_size",
        "wrap",
        "cpu_offload",
    ]
    assert (profile["strategy"], profile["shard_size"], profile["wrap"]) == ("hsdp", "4", "Block")
    plain, _ = held(facts_of(EIGHT_H100), *first, "", "", "write")
    assert "wrap" not in [question.name for question in plain.asked]
