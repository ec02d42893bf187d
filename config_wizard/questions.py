"""The questions as data: which comes next, the possible answers, and the profile that they make.

Types, choices and help come from the settings table, and what this machine can run from the same
checks as a launch. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from headway.contract.origin import Layer, Origin
from headway.contract.precisions import PRECISIONS
from headway.contract.secrets import masked_value
from headway.contract.strategies import HSDP, SHARDED
from headway.devices.table import KINDS, kind_of
from headway.errors import Problem
from headway.machine.facts import Machine
from headway.settings.profile import Entry
from headway.settings.resolve import resolve
from headway.settings.setting import AUTO, Raw, Shape, as_words
from headway.settings.table import NO, TABLE, YES, Settings

PLACE, MORE, FINISH = "place", "more", "finish"
"""The questions that are not settings: which profile to write, ask more?, what to do with it."""

TEXTS = {
    "device": "Where should scripts run?",
    "num_processes": "How many processes on this machine?",
    "mixed_precision": "Which precision?",
    "partition": "Which partition for jobs of --submit slurm?",
    "time": "How long may a job take? (2h, 1d12h)",
    "hostfile": "Run on the machines of a hostfile, over ssh?",
    PLACE: "Where to keep the profile?",
    MORE: "More settings?",
    "devices": "Which GPUs?",
    "gradient_accumulation_steps": "How many micro-batches for each optimizer step?",
    "threads_per_process": "How many CPU threads for each process?",
    "max_restarts": "How many restarts after a failure?",
    "log_dir": "A folder for log files?",
    "env": "Extra environment variables? (A=1 B=2)",
    "num_machines": "How many machines in a run?",
    "strategy": "How should ranks share a model?",
    "shard_size": "How many ranks for one copy of the model?",
    "activation_checkpointing": "Compute activations again in the backward pass?",
    "wrap": "Which modules are gathered at a time?",
    "cpu_offload": "Keep parameters on the CPU?",
    "main_address": "The name or IP address of machine 0?",
    "machine_rank": "Which of them is this one, from 0?",
    "main_port": "Which port on machine 0?",
    FINISH: "What now?",
}

USER, PROJECT = "user", "project"
LAYER_OF = {USER: Layer.USER_PROFILE, PROJECT: Layer.PROJECT_PROFILE}
WRITE, TEST, BACK, CANCEL = "write", "write and test", "back", "cancel"
UNCONFIRMED = "unconfirmed"
"""What FINISH is when the input ends before it is answered; nobody can choose it."""

NONE = "-"
"""The answer that removes an optional setting from the profile."""

_ALWAYS = ("device", "num_processes", "mixed_precision")
"""Settings that every profile written here contains, asked or not."""

_MORE = (
    *("gradient_accumulation_steps", "threads_per_process", "max_restarts", "log_dir", "env"),
    "num_machines",
)
_SHARING = ("strategy", "activation_checkpointing")
_MULTI_MACHINE = ("main_address", "machine_rank", "main_port")

_REQUIRED = ("main_address",)
"""Optional settings that must be answered if they are asked."""

_PLACEHOLDER: Mapping[str, Raw] = {"main_address": "to-be-asked"}
"""The address of machine 0 until it is asked for, so that its absence is not a problem yet."""

_PROCESSES = ("device", "num_processes", "num_machines")
_DEPEND_ON_PROCESSES = ("devices", "ranks", "debug_rank")
"""Settings that are valid only for some numbers of processes."""

_HELP = {
    PLACE: "A project's headway.yaml is read in every folder below it, and overrules yours.",
    MORE: f"Asks for {', '.join((*_MORE, *_SHARING))}; all of them can also be set later.",
    FINISH: "Nothing has been written yet.",
}


class Choice(NamedTuple):
    """One possible answer, and a reason to choose it."""

    value: str
    reason: str = ""


class Question(NamedTuple):
    """What a prompter shows; the answer is one of the choices, or a typed line."""

    name: str
    text: str
    default: str
    help: str
    choices: tuple[Choice, ...] = ()  # empty: a line is typed
    reason: str = ""  # for a typed line: of the default

    @property
    def offer(self) -> str:
        """The answer on Enter, in brackets; empty if only the user can know it."""
        if self.name in _REQUIRED and self.default == NONE:
            return ""
        return f"[{self.shown(self.default)}]"

    def shown(self, answer: str) -> str:
        """Return an answer with the secrets in it masked."""
        return str(masked_value(self.name, answer))


class Facts(NamedTuple):
    """All that the questions depend on, apart from the answers."""

    machine: Machine
    profiles: Mapping[str, Mapping[str, Raw]]  # the current settings, by place
    paths: Mapping[str, str]  # of profiles that may be written, to be shown, by place
    given: Mapping[str, Raw]  # answers from the command line or a file; not asked for
    problems: Callable[[Mapping[str, Raw]], Sequence[Problem]]  # of a launch with these settings
    redetect: bool = False  # do not take device, processes and precision from the profiles
    can_test: bool = False  # with `headway test`; not possible for a recorded machine
    partitions: tuple[Choice, ...] = ()  # of the SLURM cluster that this machine submits jobs to
    hostfiles: tuple[Choice, ...] = ()  # lists of hosts that lie here
    removed: Mapping[str, Raw] = MappingProxyType({})  # answers before going back; offered again


Answers = Mapping[str, str]


def next_question(facts: Facts, answers: Answers) -> Question:
    """Return the first question that has no answer yet; FINISH is the last."""
    for name in _names(facts, answers):
        if name not in answers and name not in facts.given:
            choices = _choices(name, facts, answers)
            default, reason = _default(name, facts, answers, choices)
            about = _HELP.get(name) or _help(name)
            return Question(name, TEXTS[name], default, about, choices, reason)
    raise AssertionError("FINISH has been answered already")


def _names(facts: Facts, answers: Answers) -> Iterator[str]:
    """Yield the names in order; each may depend on the answers before it."""
    yield "device"
    device = _device(facts, answers)
    if _max_processes(facts, device) > 1:
        yield "num_processes"
    if device != "cpu":
        yield "mixed_precision"
    if facts.partitions:
        yield from ("partition", "time")
    elif facts.hostfiles and not any("hosts" in values for values in facts.profiles.values()):
        yield "hostfile"
    if len(facts.paths) > 1:
        yield PLACE
    yield MORE
    asks_more = answers.get(MORE) == YES
    if asks_more:
        if kind_of(device).is_numbered:
            yield "devices"
        if device == "cpu":
            yield "mixed_precision"
        yield from _MORE
    machines = profile_after(facts, answers).get("num_machines", AUTO)
    if "num_machines" in {**facts.given, **answers} and _is_more_than_one(machines):
        yield from _MULTI_MACHINE
    if asks_more:
        yield from _names_of_sharing(facts, answers, device)
    yield FINISH


def _names_of_sharing(facts: Facts, answers: Answers, device: str) -> Iterator[str]:
    yield from _SHARING
    strategy = {**facts.given, **answers}.get("strategy")
    if strategy == HSDP:
        yield "shard_size"
    if strategy in SHARDED:
        yield "wrap"
        if kind_of(device).is_numbered:
            yield "cpu_offload"


def _is_more_than_one(machines: Raw) -> bool:
    return TABLE["num_machines"].parse(machines) not in (1, AUTO)


def _help(name: str) -> str:
    row = TABLE[name]
    optional = f" `{NONE}` for none." if is_optional(name) and name not in _REQUIRED else ""
    return (
        f"{name}: {row.help}.{optional}\n"
        f"For one launch: {row.flag} {row.metavar}, or {row.variable}."
    )


def is_optional(name: str) -> bool:
    """True for a setting that may be absent."""
    if name in _REQUIRED:
        return True
    return name in TABLE and (TABLE[name].default is None or TABLE[name].shape is Shape.MAP)


def _choices(name: str, facts: Facts, answers: Answers) -> tuple[Choice, ...]:
    if name == "device":
        return _devices_here(facts)
    if name == "mixed_precision":
        return _precisions_here(facts, answers)
    if name == "partition":
        return (*facts.partitions, Choice(NONE, "let SLURM choose"))
    if name == "hostfile":
        earlier = _previous(name, facts, answers)
        seen = {NONE, *(choice.value for choice in facts.hostfiles)}
        kept = [] if earlier in (None, *seen) else [Choice(str(earlier), "as before")]
        return (Choice(NONE, "this machine alone"), *kept, *facts.hostfiles)
    if name == PLACE:
        reasons = {USER: "for all that you run", PROJECT: "for what is run from here"}
        return tuple(
            Choice(place, f"{path}, {reasons[place]}") for place, path in facts.paths.items()
        )
    if name == MORE:
        return Choice(NO), Choice(YES)
    if name == FINISH:
        test = [Choice(TEST, "and run `headway test` with it")] if facts.can_test else []
        return (Choice(WRITE), *test, Choice(BACK, "one question"), Choice(CANCEL))
    return ()


def _devices_here(facts: Facts) -> tuple[Choice, ...]:
    """Return the devices that this machine can use, the best first."""
    machine = facts.machine
    best, why = machine.best_device()
    gpus = {name: kind for name, kind in KINDS.items() if kind.maker}
    works = [name for name in gpus if not facts.problems({"device": name})]
    cores = machine.cores_reason if works else f"{machine.cores_reason}; {why}"
    choices = [
        Choice(name, machine.describe_gpus() if gpus[name].is_numbered else machine.mps_reason)
        for name in works
    ]
    choices.append(Choice("cpu", cores))
    return tuple(sorted(choices, key=lambda choice: choice.value != best))


def _precisions_here(facts: Facts, answers: Answers) -> tuple[Choice, ...]:
    """Return the precisions that the device supports, the recommended one first."""
    device = _device(facts, answers)
    fits = [
        name
        for name in TABLE["mixed_precision"].choices
        if not facts.problems({"device": device, "mixed_precision": name})
    ]
    recommended = kind_of(device).recommended
    best = recommended if recommended in fits else "no"
    why = "every GPU supports it" if best == "bf16" else "no loss of precision"
    return tuple(
        Choice(name, PRECISIONS[name].help + (f" (recommended: {why})" if name == best else ""))
        for name in sorted(fits, key=lambda name: name != best)
    )


def _default(
    name: str, facts: Facts, answers: Answers, choices: tuple[Choice, ...]
) -> tuple[str, str]:
    """Return the answer on Enter, a previous one if valid, and for a typed line its reason."""
    earlier = _previous(name, facts, answers)
    if choices:
        values = [choice.value for choice in choices]
        if earlier is not None and name in TABLE:
            parsed = TABLE[name].parse(earlier)  # BF16 is bf16
            earlier = _resolved({name: earlier}, facts).device if parsed == "gpu" else str(parsed)
        return (str(earlier) if earlier in values else values[0]), ""
    if name == "num_processes":
        best, why = _best_processes(facts, answers)
        asked = {**_gpus(facts, answers), "device": _device(facts, answers)}
        if earlier is not None and not facts.problems({**asked, name: earlier}):
            return str(earlier), why
        return best, why
    if earlier is None:
        earlier = NONE if is_optional(name) else str(TABLE[name].default)
    elif name == "env" and earlier != NONE:
        earlier = Settings.env.kind(earlier)
    reason = ""
    if name == "devices":
        profile = profile_after(facts, answers)
        reason = f"for num_processes: {profile['num_processes']}"
        if _conflicts(name, facts, {**profile, name: earlier}):
            earlier = str(TABLE[name].default)
    return as_words(earlier), reason


def _previous(name: str, facts: Facts, answers: Answers) -> Raw | None:
    """Return the answer before going back, or the value in the profile to be changed."""
    if name in facts.removed:
        return facts.removed[name]
    if facts.redetect and name in _ALWAYS:
        return None
    places = [place_of(facts, answers)] if PLACE in answers or len(facts.paths) == 1 else []
    project = {} if USER in places else facts.profiles.get(PROJECT, {})
    earlier = {**facts.profiles.get(USER, {}), **project}.get(name)
    given = {key: raw for key, raw in facts.given.items() if key.startswith(f"{name}.")}
    if not given:
        return earlier
    variables = {key.partition(".")[2]: str(raw) for key, raw in given.items()}
    return {**Settings.env.kind(earlier or {}), **variables}


def _device(facts: Facts, answers: Answers) -> str:
    """Return the device that was answered or given, otherwise the best one."""
    given = answers.get("device") or facts.given.get("device") or AUTO
    return _resolved({"device": given}, facts).device


def _max_processes(facts: Facts, device: str) -> int:
    """Return the most processes to offer: one per GPU, or one per core of a CPU."""
    if device == "cpu":
        return facts.machine.cores
    return _resolved({"device": device}, facts).num_processes


def _best_processes(facts: Facts, answers: Answers) -> tuple[str, str]:
    device = _device(facts, answers)
    if device == "cpu":
        return "1", "one process uses all cores; several divide them"
    settings = _resolved({"device": device, **_gpus(facts, answers)}, facts)
    reason = settings.origin("num_processes").reason
    return str(settings.num_processes), reason


def _resolved(values: Mapping[str, Raw], facts: Facts) -> Settings:
    origin = Origin(Layer.ANSWERS)
    layer = {name: Entry(raw, origin) for name, raw in values.items()}
    return resolve([layer], facts.machine, {})


def _gpus(facts: Facts, answers: Answers) -> dict[str, Raw]:
    """Return the `devices` that were chosen; empty without CUDA."""
    known = {**_current_profile(facts, answers), **facts.given, **answers}
    if not kind_of(_device(facts, answers)).is_numbered or "devices" not in known:
        return {}
    return {"devices": known["devices"]}


def _current_profile(facts: Facts, answers: Answers) -> Mapping[str, Raw]:
    return facts.profiles[place_of(facts, answers)]


def place_of(facts: Facts, answers: Answers) -> str:
    """Return which profile is to be written: USER or PROJECT."""
    return answers.get(PLACE) or next(iter(facts.paths))


def profile_after(facts: Facts, answers: Answers) -> dict[str, Raw]:
    """Return the profile to be written: the current one, changed by the answers so far.

    What contradicts the answers is removed: GPUs and ranks chosen before, the address of machine 0
    of a single machine. A default is only written if the profile contains it, or a weaker profile
    sets another value.
    """
    values = dict(_current_profile(facts, answers))
    weaker = facts.profiles.get(USER, {}) if place_of(facts, answers) == PROJECT else {}
    own = {*values, *_ALWAYS}
    keys = {*own, *weaker}
    for name, raw in {**facts.given, **answers}.items():
        setting, _, variable = name.partition(".")
        if variable:  # env.NAME
            values[setting] = {**Settings.env.kind(values.get(setting, {})), variable: str(raw)}
        if name not in TABLE:
            continue
        if raw == NONE and is_optional(name):
            values.pop(name, None)
        elif name == "env":
            values[name] = Settings.env.kind(raw)
        elif name in weaker and name not in own and TABLE[name].are_equal(raw, weaker[name]):
            continue  # it is in the user's profile already
        elif name in keys or TABLE[name].parse(raw) != TABLE[name].default:
            values[name] = raw
    _drop_inherited(weaker, values)
    for name in _ALWAYS:
        if name not in answers and name not in facts.given:
            values[name] = _value_if_not_asked(name, facts, answers)
    for name in _DEPEND_ON_PROCESSES:
        if name not in answers and name not in facts.given and _conflicts(name, facts, values):
            del values[name]
    machines = {**facts.given, **answers}.get("num_machines")
    if machines is not None and not _is_more_than_one(machines):
        for name in _MULTI_MACHINE:
            if name not in facts.given:
                values.pop(name, None)
    return values


def _drop_inherited(weaker: Mapping[str, Raw], values: dict[str, Raw]) -> None:
    """Remove variables from `env` that the weaker profile sets equally: they may be secrets."""
    theirs = Settings.env.kind(weaker.get("env", {}))
    if "env" in values and theirs:
        ours = Settings.env.kind(values["env"])
        values["env"] = {name: text for name, text in ours.items() if theirs.get(name) != text}
        if not values["env"]:
            del values["env"]


def _conflicts(name: str, facts: Facts, values: Mapping[str, Raw]) -> bool:
    """True when a setting contradicts the device or the number of processes."""
    if name not in values:
        return False
    chosen = {**_PLACEHOLDER, **{key: values[key] for key in _PROCESSES if key in values}}
    return bool(facts.problems({**chosen, name: values[name]}))


def _value_if_not_asked(name: str, facts: Facts, answers: Answers) -> str:
    """Return the value of a setting of _ALWAYS that was not asked."""
    if name == "device":
        return _device(facts, answers)
    if name == "num_processes" and _max_processes(facts, _device(facts, answers)) == 1:
        return "1"
    return _default(name, facts, answers, _choices(name, facts, answers))[0]


def problems_so_far(facts: Facts, answers: Answers) -> Sequence[Problem]:
    """Return the problems of a launch with the profile so far, apart from missing answers."""
    values = profile_after(facts, answers)
    if FINISH not in answers and "main_address" not in answers:
        values = {**_PLACEHOLDER, **values}
    if values.get("strategy") == HSDP and "shard_size" not in answers:  # it is asked next
        values = {name: raw for name, raw in values.items() if name != "strategy"}
    return facts.problems(values)
