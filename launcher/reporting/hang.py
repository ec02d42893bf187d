"""What ranks say about themselves -> which of them is behind, where, and all their stacks. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from headway.contract.records import Progress
from headway.launcher.reporting.failures import named, ranges
from headway.launcher.reporting.stacks import Frame, Stack, lines_of, users_frame

EXIT_CODE = 124
"""The launcher's exit code after `hang_timeout`; the same as that of timeout(1)."""

_SAME_SIZE = ("all_reduce", "broadcast", "reduce", "allreduce")  # on all ranks of the group


class Group(NamedTuple):
    """A process group as one rank sees it."""

    name: str
    ranks: tuple[int, ...] | None  # global ranks of its members
    operations: tuple[tuple[int, str, str, bool], ...]  # number, name, input sizes, is it done

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> Group:
        """Return a group as a rank tells it (`witness.collectives`)."""
        ranks, operations = told["ranks"], told["operations"]
        return cls(
            told["name"],
            None if ranks is None else tuple(ranks),
            tuple(
                (number, name, ", ".join(map(str, sizes)), done)
                for number, name, sizes, done in operations
            ),
        )

    @property
    def last(self) -> int:
        """The sequence number of the last collective that the rank has entered; 0 for none."""
        return max((number for number, *_ in self.operations), default=0)

    @property
    def waits_for(self) -> int | None:
        """The sequence number of the first collective that is not done; None: nothing is open."""
        return min((one[0] for one in self.operations if not one[3]), default=None)

    def after_crash(self) -> Group:
        """Return the group as it was before: torch calls a collective that failed done."""
        return self._replace(operations=tuple((*one[:3], False) for one in self.operations[-1:]))

    def operation(self, number: int) -> tuple[str, str] | None:
        """Return name and input sizes of the collective with this sequence number."""
        found = [(name, sizes) for one, name, sizes, _ in self.operations if one == number]
        return found[-1] if found else None


class Statement(NamedTuple):
    """What is known of one rank."""

    rank: int
    end: str = ""  # how its process ended; empty while it runs
    silence: str = ""  # why there are no stacks
    stacks: tuple[Stack, ...] = ()  # of its threads, the main one first
    groups: tuple[Group, ...] | None = None  # None: it could not be asked
    progress: Progress | None = None  # None: its script has no Accelerator

    @property
    def place(self) -> Frame | None:
        """The script's own line that the main thread is in."""
        return users_frame(self.stacks[0]) if self.stacks else None

    def group(self, name: str) -> Group | None:
        return next((one for one in self.groups or () if one.name == name), None)


class Divergence(NamedTuple):
    """Where the ranks' ways part; each sentence goes on with the place of its ranks."""

    odd: tuple[int, ...]  # those that keep the others waiting; empty where none does
    words: str
    others: tuple[int, ...]
    others_words: str


class Hang(NamedTuple):
    """No rank made progress for a while: a failure like those of `failures.py`."""

    statements: tuple[Statement, ...]
    after_s: int

    @property
    def cause(self) -> str:
        return f"no progress for {self.after_s} s: {explain(self.statements)[0]}"

    @property
    def aftermath(self) -> str:
        return ""

    @property
    def fix(self) -> str:
        what = (
            "mend the script where the ranks part" if blame(self.statements) else "see the stacks"
        )
        return f"{what}; if it is only slow, raise --hang-timeout"

    @property
    def exit_code(self) -> int:
        return EXIT_CODE

    @property
    def details(self) -> str:
        return "\n".join(explain(self.statements)[1:])

    def as_json(self) -> Mapping[str, object]:
        """Return the report for programs."""
        ranks = [
            {
                "rank": one.rank,
                "end": one.end,
                "place": one.place and str(one.place),
                "stacks": [[str(frame) for frame in stack] for stack in one.stacks],
                "progress": one.progress and one.progress._asdict(),
                "groups": [group._asdict() for group in one.groups or ()],
            }
            for one in self.statements
        ]
        return {
            "cause": self.cause,
            "explanation": explain(self.statements),
            "ranks": ranks,
            "exit_code": self.exit_code,
            "fix": self.fix,
        }

    def is_repeat_of(self, earlier: object) -> bool:
        """True when the run hung in the same way before."""
        return isinstance(earlier, Hang) and earlier.cause == self.cause


def describe(statements: Sequence[Statement]) -> str:
    """Return all that is known for a person: who is behind, then the stacks, folded."""
    explained = [f"  {line}" for line in explain(statements)]
    return "\n".join([*explained, describe_stacks(statements)])


def describe_stacks(statements: Sequence[Statement]) -> str:
    """Return the stacks of all running ranks for a person, equal ones once."""
    alike: dict[tuple[tuple[Stack, ...], str], list[int]] = {}
    for one in statements:
        if not one.end:
            alike.setdefault((one.stacks, one.silence), []).append(one.rank)
    lines = []
    for (stacks, silence), ranks in alike.items():
        lines += ["", f"{named(ranks)}, most recent call last:"]
        lines += (
            lines_of(stacks[0]) if stacks else [f"  no stack: {silence or 'it did not answer'}"]
        )
        for stack, count in Counter(stacks[1:]).items():
            lines.append("  another thread:" if count == 1 else f"  another {count} threads:")
            lines += lines_of(stack)
    return "\n".join(lines)


def explain(statements: Sequence[Statement]) -> list[str]:
    """Return who keeps whom waiting, and where each rank is: a line for each group of ranks."""
    found = find_divergences(statements)
    lines = [one.words + _places(statements, one.odd) for one in found if one.odd]
    lines = lines or ["no rank is known to be behind the others"]
    lines += [one.others_words + _places(statements, one.others) for one in found]
    told = {rank for one in found for rank in one.odd + one.others}
    by_place: dict[str, list[int]] = {}
    for one in statements:
        if one.rank not in told and one.place is not None:
            by_place.setdefault(_place(one), []).append(one.rank)
    return lines + [f"{_are(ranks)} {place}" for place, ranks in by_place.items()]


def blame(statements: Sequence[Statement]) -> list[str]:
    """Return what `explain` does where a rank is to blame, else nothing."""
    is_known = any(one.odd for one in find_divergences(statements))
    return explain(statements) if is_known else []


def find_divergences(statements: Sequence[Statement]) -> list[Divergence]:
    """Return where the ranks' ways part, those first whose odd ranks wait for nobody themselves."""
    names = dict.fromkeys(group.name for one in statements for group in one.groups or ())
    found = [one for name in names if (one := _divergence_in(name, statements)) is not None]
    waiting = {rank for one in found for rank in one.others}
    found.sort(key=lambda one: (not one.odd, bool(waiting & {*one.odd})))
    return found or _not_in_the_group_yet(statements) or _behind_in_steps(statements)


def _divergence_in(name: str, statements: Sequence[Statement]) -> Divergence | None:
    views = {one.rank: group for one in statements if (group := one.group(name)) is not None}
    members = next((group.ranks for group in views.values() if group.ranks), tuple(views))
    ends = {one.rank: one.end for one in statements if one.end and one.rank in members}
    for rank in ends:
        views.setdefault(rank, Group(name, None, ()))  # it left without a word
    suffix = "" if name == "0" else f" of group {name} (ranks {ranges(members)})"
    return _different_collectives(views, suffix) or _missing_ranks(views, ends, suffix)


def _different_collectives(views: Mapping[int, Group], suffix: str) -> Divergence | None:
    """Compare what the ranks entered under the same number: one of them is in another place."""
    for number in sorted({one[0] for view in views.values() for one in view.operations}):
        by_operation: dict[str, list[int]] = {}
        for rank, view in sorted(views.items()):
            operation = view.operation(number)
            if operation is not None:
                name, sizes = operation
                size = f" of {sizes}" if name in _SAME_SIZE else ""
                by_operation.setdefault(f"{name} #{number}{suffix}{size}", []).append(rank)
        if len(by_operation) > 1:
            (odd, ranks), *rest = sorted(by_operation.items(), key=lambda item: len(item[1]))
            others = [rank for _, those in rest for rank in those]
            return Divergence(
                tuple(ranks),
                f"the ranks entered different collectives: {named(ranks)} {odd}",
                tuple(others),
                f"{named(others)} entered {' or '.join(operation for operation, _ in rest)}",
            )
    return None


def _missing_ranks(
    views: Mapping[int, Group], ends: Mapping[int, str], suffix: str
) -> Divergence | None:
    """Find who has not entered the collective that others wait in."""
    numbers = {rank: view.waits_for for rank, view in views.items() if rank not in ends}
    number = min((one for one in numbers.values() if one is not None), default=None)
    if number is None:
        return None
    waiting = tuple(rank for rank, one in sorted(numbers.items()) if one == number)
    name, _ = views[waiting[0]].operation(number) or ("a collective", None)
    collective = f"{name} #{number}{suffix}"
    missing = [rank for rank, view in sorted(views.items()) if view.last < number]
    gone = [rank for rank in missing if rank in ends]
    if gone:
        words = f"{named(gone)} left ({ends[gone[0]]}) before {collective}"
    else:
        words = f"{_are(missing)} behind, and did not enter {collective}"
    others = f"{named(waiting)} {'wait' if len(waiting) > 1 else 'waits'} in {collective}"
    return Divergence(tuple(gone or missing), words, waiting, others)


def _not_in_the_group_yet(statements: Sequence[Statement]) -> list[Divergence]:
    """Compare the stacks while the group forms: torch records nothing yet."""
    inside = tuple(one.rank for one in statements if _is_in(one, "init_process_group"))
    ends = {one.rank: one.end for one in statements if one.end}
    known = [one for one in statements if one.silence or one.place]  # no rank on its way out
    absent = tuple(ends) or tuple(one.rank for one in known if one.rank not in inside)
    if not inside or not absent:
        return []
    words = f"{named(absent)} did not enter init_process_group"
    if ends:
        words = f"{named(absent)} left ({ends[absent[0]]}) before init_process_group"
    return [Divergence(absent, words, inside, f"{_are(inside)} in it")]


def _is_in(statement: Statement, function: str) -> bool:
    return any(frame.function == function for stack in statement.stacks[:1] for frame in stack)


def _behind_in_steps(statements: Sequence[Statement]) -> list[Divergence]:
    """Compare the optimizer steps where the runtime counts them."""
    steps = {one.rank: one.progress.step for one in statements if one.progress is not None}
    least, most = min(steps.values(), default=0), max(steps.values(), default=0)
    if least == most:
        return []
    behind = tuple(rank for rank, step in steps.items() if step == least)
    ahead = tuple(rank for rank in steps if rank not in behind)
    words = f"{_are(behind)} behind, after {least} optimizer steps"
    return [Divergence(behind, words, ahead, f"{_are(ahead)} ahead, after up to {most}")]


def _places(statements: Sequence[Statement], ranks: Sequence[int]) -> str:
    those = [one for one in statements if one.rank in ranks and one.place is not None]
    return "".join(f", {place}" for place in dict.fromkeys(map(_place, those)))


def _place(statement: Statement) -> str:
    progress = statement.progress
    doing = "" if progress is None else f"in step {progress.step + 1} ({progress.phase}), "
    return f"{doing}at {statement.place}"


def _are(ranks: Sequence[int]) -> str:
    return f"{named(ranks)} {'is' if len(ranks) == 1 else 'are'}"
