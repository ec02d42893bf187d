"""Asks the questions in order. Only the prompter, such as a terminal or pipe, has side effects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from headway.config_wizard.questions import (
    BACK,
    CANCEL,
    FINISH,
    NONE,
    Answers,
    Question,
    WizardFacts,
    is_optional,
    next_question,
    problems_so_far,
)
from headway.errors import Code, ConfigError, Problem
from headway.settings.table import NO, TABLE, YES

HELP_KEY, BACK_KEY = "?", "<"
"""Replies that are not answers: they explain the question, or return to the previous one."""

_AGAIN = f"answer again; {HELP_KEY} explains, {BACK_KEY} goes back"

_ENDED = Problem(
    "the input ended before the last question was answered; nothing was written",
    "standard input",
    "`headway config --yes` writes the recommended answers without asking; piped input must "
    "answer every question, ending with `write`",
    code=Code.COMMAND_LINE,
)


class Prompter(Protocol):
    """Shows questions to the user and returns the replies."""

    def show(self, text: str) -> None:
        """Show text to the user."""

    def ask(self, question: Question) -> str:
        """Return an answer, HELP_KEY, BACK_KEY, or an empty string for the default.

        Raises:
            EOFError: the end of the input was reached.
            KeyboardInterrupt: the user canceled.
        """


class Defaults:
    """A prompter that answers every question with the default."""

    def show(self, text: str) -> None:
        pass

    def ask(self, question: Question) -> str:
        return question.default


def interview(
    facts: WizardFacts, prompter: Prompter, summary: Callable[[Answers], str]
) -> dict[str, str]:
    """Ask all questions and return the answers; FINISH comes last and shows the summary.

    Raises ConfigError if a given answer is invalid, or if the input ends before the last question.
    """
    answers: dict[str, str] = {}
    problems = problems_so_far(facts, answers)
    if problems:
        raise ConfigError.of(problems)
    while FINISH not in answers:
        question = next_question(facts, answers)
        if question.name == FINISH:
            prompter.show(summary(answers))
        reply = _reply(question, facts, answers, prompter)
        if reply == BACK_KEY or (question.name, reply) == (FINISH, BACK):
            facts = _previous(facts, answers, prompter)
        else:
            answers[question.name] = reply
    return answers


def _reply(question: Question, facts: WizardFacts, answers: Answers, prompter: Prompter) -> str:
    """Ask until the reply is BACK_KEY or a valid answer."""
    refused: Problem | None = None
    while True:
        try:
            reply = prompter.ask(question).strip() or question.default
        except EOFError:
            raise ConfigError.of([refused or _ENDED]) from None
        if reply == BACK_KEY:
            return reply
        if reply == HELP_KEY:
            prompter.show(question.help)
            continue
        answer, refused = _checked(question, reply, facts, answers)
        if refused is None:
            return answer
        if isinstance(prompter, Defaults):
            raise ConfigError.of([refused])
        prompter.show(f"{refused.what}.\n{_AGAIN.capitalize()}.")


def _checked(
    question: Question, reply: str, facts: WizardFacts, answers: Answers
) -> tuple[str, Problem | None]:
    name = question.name
    answer = _chosen(question, reply) if question.choices else reply
    if (name, answer) in ((FINISH, BACK), (FINISH, CANCEL)):
        return answer, None
    what = _invalid(question, answer)
    problem = Problem(what, "your answer", _AGAIN, code=Code.BAD_VALUE) if what else None
    # report why a choice is unsupported, instead of listing the supported ones
    if problem is None or (name in TABLE and answer in TABLE[name].choices):
        refused = problems_so_far(facts, {**answers, name: answer})
        problem = refused[0] if refused else problem
    return answer, problem


def _invalid(question: Question, answer: str) -> str:
    """Return why `answer` is invalid independently of the other answers; empty if it is valid."""
    name = question.name
    values = [choice.value for choice in question.choices]
    if answer in values or (answer == NONE and is_optional(name)):
        return ""
    if values:
        return f"{answer!r} is not one of {', '.join(values)} or a number from 1 to {len(values)}"
    if any("\ud800" <= char <= "\udfff" for char in answer):  # undecodable bytes
        return f"{answer!r} is not UTF-8"
    try:
        TABLE[name].parse(answer)
    except ValueError as error:
        return f"invalid value {question.shown(answer)!r} for {name}: {error}"
    return ""


def _chosen(question: Question, reply: str) -> str:
    """Return the choice that `reply` names by value, number, y or n; `reply` if there is none."""
    values = [choice.value for choice in question.choices]
    if reply.isdecimal() and len(reply) < 4 and 0 < int(reply) <= len(values):
        return values[int(reply) - 1]
    word = reply.lower()
    return {"y": YES, "n": NO}.get(word, word) if {YES, NO} <= set(values) else word


def _previous(facts: WizardFacts, answers: dict[str, str], prompter: Prompter) -> WizardFacts:
    """Remove the last answer; it becomes the default when its question is asked again."""
    if not answers:
        prompter.show("This is the first question.")
        return facts
    name, answer = answers.popitem()
    return facts._replace(removed={**facts.removed, name: answer})
