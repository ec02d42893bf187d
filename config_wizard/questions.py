"""The questions as data: their order, the possible answers, and the resulting profile.

Types, choices and help come from the settings table. Values are checked against this machine as in
a launch. This module has no side effects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from headway.devices.table import CPU, KINDS, kind_of
from headway.errors import Problem
from headway.ipc.choices import HSDP, PRECISIONS, SHARDED
from headway.ipc.origin import Layer, Origin
from headway.ipc.secrets import masked_value
from headway.machine.facts import Machine
from headway.settings.profile import Entry
from headway.settings.resolve import resolve
from headway.settings.setting import AUTO, Raw, as_words
from headway.settings.table import NO, OF_MACHINES, TABLE, YES, Settings

PLACE, MORE, FINISH = "place", "more", "finish"
"""Questions that are not settings: the profile to write, more settings, and the last step."""

USER, PROJECT = "user", "project"
LAYER_OF = {USER: Layer.USER_PROFILE, PROJECT: Layer.PROJECT_PROFILE}
WRITE, TEST, BACK, CANCEL = "write", "write and test", "back", "cancel"

NONE = "-"
"""The answer that removes an optional setting from the profile."""

_ALWAYS = ("device", "num_processes", "mixed_precision")
"""Settings that the wizard always writes, even without asking."""

_REQUIRED: Mapping[str, Raw] = {"main_address": "to-be-asked"}
"""Optional settings whose question must be answered if it is asked, with their placeholders until
then, because a missing value is an error."""

_PROCESSES = ("device", "num_processes", "num_machines")
_DEPEND_ON_PROCESSES = ("devices", "ranks", "debug_rank")
"""Settings whose values must be compatible with the number of processes."""

_HELP = {
    PLACE: "A project's headway.yaml applies to all folders below it, and overrides your profile.",
    MORE: "Asks about GPUs, accumulation, threads, restarts, log files, variables, machines and "
    "sharding; all of them can also be set later.",
    FINISH: "Nothing has been written yet.",
}


class Option(NamedTuple):
    value: str
    reason: str = ""


class Question(NamedTuple):
    """A question for a prompter; the answer is a choice or a typed line."""

    name: str
    text: str
    default: str
    help: str
    choices: tuple[Option, ...] = ()  # empty: a line is typed
    reason: str = ""  # reason for the default of a typed line

    @property
    def offer(self) -> str:
        """The default answer in brackets; empty if the user must enter an answer."""
        if self.name in _REQUIRED and self.default == NONE:
            return ""
        return f"[{self.shown(self.default)}]"

    def shown(self, answer: str) -> str:
        """Return an answer with its secrets masked."""
        return str(masked_value(self.name, answer))


class WizardFacts(NamedTuple):
    machine: Machine
    profiles: Mapping[str, Mapping[str, Raw]]  # the current settings, by place
    paths: Mapping[str, str]  # displayed paths of the profiles to write, by place
    given: Mapping[str, Raw]  # answers from the command line or a file; not asked for
    problems: Callable[[Mapping[str, Raw]], Sequence[Problem]]  # checks a launch
    redetect: bool = False  # ignore the profiles' device, processes and precision
    can_test: bool = False  # with `headway test`; not possible for a recorded machine
    removed: Mapping[str, Raw] = MappingProxyType({})  # undone answers, now defaults


Answers = Mapping[str, str]


class WizardState(NamedTuple):
    facts: WizardFacts
    answers: Answers

    @property
    def known(self) -> dict[str, Raw]:
        return {**self.facts.given, **self.answers}

    @property
    def place(self) -> str:
        """The profile to write: USER or PROJECT."""
        return self.answers.get(PLACE) or next(iter(self.facts.paths))

    def wants_more(self) -> bool:
        """Return whether to also ask for less common settings."""
        return self.answers.get(MORE) == YES

    @property
    def device(self) -> str:
        """The device that was chosen or passed as a flag; otherwise the best usable device."""
        device = self.resolved({"device": self.known.get("device", AUTO)}).device
        is_usable = "device" in self.known or not self.facts.problems({"device": device})
        return device if is_usable else CPU.name

    @property
    def has_gpus(self) -> bool:
        """Whether the device is a GPU that can be selected by its index."""
        return kind_of(self.device).is_numbered

    @property
    def has_machines(self) -> bool:
        machines = self.known.get("num_machines", AUTO)
        return TABLE["num_machines"].parse(machines) not in (1, AUTO)

    @property
    def gpus(self) -> dict[str, Raw]:
        """The chosen `devices`; empty if the device is not a GPU."""
        chosen = {**self.facts.profiles[self.place], **self.known}.get("devices")
        return {"devices": chosen} if self.has_gpus and chosen is not None else {}

    @property
    def most_processes(self) -> int:
        """The maximum number of processes: one per GPU, or one per core of a CPU."""
        if self.device == "cpu":
            return self.facts.machine.cores
        return self.resolved({"device": self.device}).num_processes

    def resolved(self, values: Mapping[str, Raw]) -> Settings:
        layer = {name: Entry(raw, Origin(Layer.ANSWERS)) for name, raw in values.items()}
        return resolve([layer], self.facts.machine, {})


class Ask(NamedTuple):
    name: str
    text: str
    when: Callable[[WizardState], object] = lambda _: True
    choices: Callable[[WizardState], tuple[Option, ...]] = lambda _: ()  # empty: a line is typed


def next_question(facts: WizardFacts, answers: Answers) -> Question:
    """Return the first unanswered question, then FINISH; skip questions with only one choice."""
    state = WizardState(facts, answers)
    for ask in QUESTIONS:
        name = ask.name
        if name not in state.known and ask.when(state) and len(offered := ask.choices(state)) != 1:
            default, reason = _default(name, state, offered)
            return Question(name, ask.text, default, _help(name), offered, reason)
    raise AssertionError("FINISH has been answered already")


def _help(name: str) -> str:
    if name not in TABLE:
        return _HELP[name]
    row = TABLE[name]
    optional = f" `{NONE}` for none." if is_optional(name) and name not in _REQUIRED else ""
    return (
        f"{name}: {row.help}.{optional}\n"
        f"For one launch: {row.as_flag(row.metavar)}, or {row.variable}."
    )


def is_optional(name: str) -> bool:
    if name not in TABLE:
        return False
    return name in _REQUIRED or TABLE[name].default is None or TABLE[name].shape == "map"


def _sharded(state: WizardState) -> bool:
    return state.wants_more() and state.known.get("strategy") in SHARDED


def _devices(state: WizardState) -> tuple[Option, ...]:
    """Return the devices that this machine can use, best first."""
    machine = state.facts.machine
    best, why = machine.best_device()
    gpus = {name: kind for name, kind in KINDS.items() if kind.maker}
    works = [name for name in gpus if not state.facts.problems({"device": name})]
    cores = machine.cores_reason if works else f"{machine.cores_reason}; {why}"
    choices = [
        Option(name, machine.describe_gpus() if gpus[name].is_numbered else machine.mps_reason)
        for name in works
    ]
    choices.append(Option("cpu", cores))
    return tuple(sorted(choices, key=lambda choice: choice.value != best))


def _precisions(state: WizardState) -> tuple[Option, ...]:
    """Return the precisions that the device supports, the recommended precision first."""
    device = state.device
    fits = [
        name
        for name in TABLE["mixed_precision"].choices
        if not state.facts.problems({"device": device, "mixed_precision": name})
    ]
    recommended = kind_of(device).recommended
    best = recommended if recommended in fits else "no"
    why = "every GPU supports it" if best == "bf16" else "no loss of precision"
    return tuple(
        Option(name, PRECISIONS[name].help + (f" (recommended: {why})" if name == best else ""))
        for name in sorted(fits, key=lambda name: name != best)
    )


def _places(state: WizardState) -> tuple[Option, ...]:
    reasons = {USER: "for all your runs", PROJECT: "for runs from this folder"}
    return tuple(
        Option(place, f"{path}, {reasons[place]}") for place, path in state.facts.paths.items()
    )


def _endings(state: WizardState) -> tuple[Option, ...]:
    test = [Option(TEST, "and run `headway test` with it")] if state.facts.can_test else []
    return (Option(WRITE), *test, Option(BACK, "one question"), Option(CANCEL))


QUESTIONS = (
    Ask("device", "Where should scripts run?", choices=_devices),
    Ask("num_processes", "How many processes on this machine?", lambda of: of.most_processes > 1),
    Ask("mixed_precision", "Which precision?", lambda of: of.device != "cpu", _precisions),
    Ask(PLACE, "Where to save the profile?", choices=_places),
    Ask(MORE, "More settings?", choices=lambda _: (Option(NO), Option(YES))),
    Ask("devices", "Which GPUs?", lambda of: of.wants_more() and of.has_gpus),
    Ask("mixed_precision", "Which precision?", WizardState.wants_more, _precisions),
    Ask(
        "gradient_accumulation_steps",
        "How many micro-batches per optimizer step?",
        WizardState.wants_more,
    ),
    Ask("threads_per_process", "How many CPU threads per process?", WizardState.wants_more),
    Ask("max_restarts", "How many restarts after a failure?", WizardState.wants_more),
    Ask("log_dir", "A folder for log files?", WizardState.wants_more),
    Ask("env", "Extra environment variables? (A=1 B=2)", WizardState.wants_more),
    Ask("num_machines", "How many machines in a run?", WizardState.wants_more),
    Ask("main_address", "The name or IP address of machine 0?", lambda of: of.has_machines),
    Ask("machine_rank", "What is the rank of this machine, from 0?", lambda of: of.has_machines),
    Ask("main_port", "Which port on machine 0?", lambda of: of.has_machines),
    Ask("strategy", "How should the model be parallelized?", WizardState.wants_more),
    Ask(
        "activation_checkpointing",
        "Recompute activations in the backward pass?",
        WizardState.wants_more,
    ),
    Ask(
        "shard_size",
        "How many ranks per copy of the model?",
        lambda of: of.wants_more() and of.known.get("strategy") == HSDP,
    ),
    Ask("wrap", "Which modules should be sharded as units?", _sharded),
    Ask("cpu_offload", "Keep parameters on the CPU?", lambda of: _sharded(of) and of.has_gpus),
    Ask(FINISH, "What now?", choices=_endings),
)
"""All questions in order; each may depend on earlier answers."""


def _default(name: str, state: WizardState, choices: tuple[Option, ...]) -> tuple[str, str]:
    """Return the default, which is the previous answer if it is valid, and a reason to show."""
    facts, earlier = state.facts, _previous(name, state)
    if choices:
        values = [choice.value for choice in choices]
        if earlier is not None and name in TABLE:
            parsed = TABLE[name].parse(earlier)  # BF16 is bf16
            earlier = state.resolved({name: earlier}).device if parsed == "gpu" else str(parsed)
        return (str(earlier) if earlier in values else values[0]), ""
    if name == "num_processes":
        asked = {**state.gpus, "device": state.device}
        best = state.resolved(asked)
        why = best.origin(name).reason
        if state.device == "cpu":
            why = "one process uses all cores; several share them"
        is_kept = earlier is not None and not facts.problems({**asked, name: earlier})
        return str(earlier if is_kept else best.num_processes), why
    if earlier is None:
        earlier = NONE if is_optional(name) else str(TABLE[name].default)
    elif name == "env" and earlier != NONE:
        earlier = Settings.env.parser(earlier)
    reason = ""
    if name == "devices":
        profile = profile_after(facts, state.answers)
        reason = f"for num_processes: {profile['num_processes']}"
        if _conflicts(name, facts, {**profile, name: earlier}):
            earlier = str(TABLE[name].default)
    return as_words(earlier), reason


def _previous(name: str, state: WizardState) -> Raw | None:
    """Return the answer that the user went back to, or the value in the profile."""
    facts = state.facts
    if name in facts.removed:
        return facts.removed[name]
    if facts.redetect and name in _ALWAYS:
        return None
    is_user = state.place == USER and (PLACE in state.answers or len(facts.paths) == 1)
    project = {} if is_user else facts.profiles.get(PROJECT, {})
    values = {**facts.profiles.get(USER, {}), **project}
    given = {key: raw for key, raw in facts.given.items() if key.startswith(f"{name}.")}
    if not given:
        return values.get(name)
    variables = {key.partition(".")[2]: str(raw) for key, raw in given.items()}
    return {**Settings.env.parser(values.get(name) or {}), **variables}


def profile_after(facts: WizardFacts, answers: Answers) -> dict[str, Raw]:
    """Return the profile to write: the current profile, changed by the answers so far.

    Values that contradict the answers are removed: GPUs and ranks chosen earlier, and the address
    of machine 0 for a single machine. A default value is written only if the profile already sets
    the key, or the user profile sets another value.
    """
    state = WizardState(facts, answers)
    known = state.known
    values = dict(facts.profiles[state.place])
    weaker = facts.profiles.get(USER, {}) if state.place == PROJECT else {}
    own = {*values, *_ALWAYS}
    for name, raw in known.items():
        setting, _, variable = name.partition(".")
        if variable:  # env.NAME
            values[setting] = {**Settings.env.parser(values.get(setting, {})), variable: str(raw)}
        if name not in TABLE:
            continue
        if raw == NONE and is_optional(name):
            values.pop(name, None)
        elif TABLE[name].shape == "map":
            values[name] = TABLE[name].parser(raw)
        elif (
            name in weaker
            and name not in own
            and TABLE[name].parse(raw) == TABLE[name].parse(weaker[name])
        ):
            continue  # it is in the user's profile already
        elif name in {*own, *weaker} or TABLE[name].parse(raw) != TABLE[name].default:
            values[name] = raw
    _drop_inherited(weaker, values)
    for name in _ALWAYS:
        if name not in known:
            values[name] = _value_if_not_asked(name, state)
    for name in _DEPEND_ON_PROCESSES:
        if name not in known and _conflicts(name, facts, values):
            del values[name]
    if "num_machines" in known and not state.has_machines:
        for name in OF_MACHINES:
            if name not in known:
                values.pop(name, None)
    return values


def _drop_inherited(weaker: Mapping[str, Raw], values: dict[str, Raw]) -> None:
    """Remove variables that the weaker profile sets to the same value; they may be secrets."""
    theirs = Settings.env.parser(weaker.get("env", {}))
    if "env" in values and theirs:
        ours = Settings.env.parser(values["env"])
        values["env"] = {name: text for name, text in ours.items() if theirs.get(name) != text}
        if not values["env"]:
            del values["env"]


def _conflicts(name: str, facts: WizardFacts, values: Mapping[str, Raw]) -> bool:
    if name not in values:
        return False
    chosen = {**_REQUIRED, **{key: values[key] for key in _PROCESSES if key in values}}
    return bool(facts.problems({**chosen, name: values[name]}))


def _value_if_not_asked(name: str, state: WizardState) -> str:
    if name == "device":
        return state.device
    if name == "num_processes" and state.most_processes == 1:
        return "1"
    offered = _precisions(state) if name == "mixed_precision" else ()
    return _default(name, state, offered)[0]


def problems_so_far(facts: WizardFacts, answers: Answers) -> Sequence[Problem]:
    values = profile_after(facts, answers)
    if FINISH not in answers and "main_address" not in answers:
        values = {**_REQUIRED, **values}
    if values.get("strategy") == HSDP and "shard_size" not in answers:  # it is asked next
        values = {name: raw for name, raw in values.items() if name != "strategy"}
    return facts.problems(values)
