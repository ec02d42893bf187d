"""What stands in for functions of torch and others takes the arguments that these take."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from headway.estimate.child import patching  # noqa: E402
from headway.estimate.planner import Trial  # noqa: E402  they need torch

KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
FEWEST = 50


@pytest.fixture
def replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[list[tuple[Any, str, Any]]]:
    """The owner, the name and the stand-in of all that is replaced; here it stays as it is."""
    from headway.estimate.child.trials import TrialRunner  # takes a second to import

    found: list[tuple[Any, str, Any]] = []
    monkeypatch.setattr(patching, "setattr", lambda *what: found.append(what), raising=False)
    attempt = Trial("script.py", (), device="cuda", world_size=2)
    TrialRunner(attempt, str(tmp_path)).apply_patches()
    yield found
    torch.backends.mha.set_fastpath_enabled(True)


def differences(of_class: bool, stand_in: Callable[..., Any], original: Any) -> list[str]:
    """Return how a stand-in could not be called as the original can."""
    new, old = inspect.signature(stand_in), inspect.signature(original)
    parameters = list(old.parameters.values())
    first = parameters[:1] if of_class else []  # self, which nobody passes by its name
    others = parameters[len(first) :]
    calls: list[tuple[list[None], dict[str, None]]] = [
        ([None] * sum(p.kind in POSITIONAL for p in parameters), {}),
        ([None] * len(first), {other.name: None for other in others if other.kind in KEYWORD}),
    ]
    calls[0][1].update({other.name: None for other in others if other.kind is KEYWORD[1]})
    found = []
    for args, kwargs in calls:
        try:
            new.bind(*args, **kwargs)
        except TypeError as error:
            found.append(str(error))
    named = [p.name for p in new.parameters.values() if p.kind in KEYWORD][len(first) :]
    old_names = [other.name for other in others]
    found += [
        f"{mine} stands for {its}"
        for mine, its in zip(named, old_names, strict=False)
        if mine != its and mine not in old_names
    ]
    return found


def test_stand_ins_are_called_as_what_they_stand_for(replaced: list[tuple[Any, str, Any]]) -> None:
    wrong, compared = {}, 0
    for owner, name, stand_in in replaced:
        original = getattr(owner, name)
        try:
            inspect.signature(original)
        except (TypeError, ValueError):
            continue  # native code has none, and a value is no function
        compared += 1
        found = differences(inspect.isclass(owner), stand_in, original)
        if found:
            wrong[f"{owner.__name__}.{name}"] = found
    assert not wrong, "\n".join(map(str, wrong.items()))
    assert compared >= FEWEST, [name for _, name, _ in replaced]
