"""The prompters: menus on a terminal, and numbered lines for pipes and dumb terminals."""

from __future__ import annotations

import os
import sys
import textwrap
from typing import TYPE_CHECKING, Any

from headway.config_wizard.interview import BACK_KEY, HELP_KEY
from headway.config_wizard.questions import Question

if TYPE_CHECKING:
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from questionary import Question as Shown

_ANSWERED = "fg:ansicyan"
_POINTER = "❯"
_WHOLE_WORDS: Any = {"break_long_words": False, "break_on_hyphens": False}  # paths stay copyable
_ESCAPE_S = 0.05  # time after Esc for the other bytes of an arrow key to arrive


class PlainPrompter:
    """Prints each question with numbered answers, and reads a line from stdin."""

    def show(self, text: str) -> None:
        print(text)

    def ask(self, question: Question) -> str:
        print(question.text + (f" ({question.reason})" if question.reason else ""))
        width = max((len(choice.value) for choice in question.choices), default=0)
        for number, choice in enumerate(question.choices, 1):
            print(f"  {number}) {choice.value:<{width}}  {choice.reason}".rstrip())
        print(f"{question.offer} ".lstrip(), end="", flush=True)
        line = sys.stdin.readline()
        if not line or not sys.stdin.isatty():  # no newline was echoed
            print(question.shown(line.strip()))
        if not line and sys.stdin.isatty():  # Ctrl-D cancels, as in the menus
            raise KeyboardInterrupt
        if not line:
            raise EOFError
        return line


class TerminalPrompter:
    """Shows menus (arrow keys or numbers) and text fields."""

    def show(self, text: str) -> None:
        for line in text.split("\n"):
            print("\n".join(textwrap.wrap(line, _columns(), **_WHOLE_WORDS)))

    def ask(self, question: Question) -> str:
        import questionary
        from prompt_toolkit.output.vt100 import Vt100_Output

        shown = self._menu(question) if question.choices else self._line(question)
        shown.application.ttimeoutlen = _ESCAPE_S
        shown.application.erase_when_done = True
        if isinstance(shown.application.output, Vt100_Output):
            # not all terminals report the cursor position, and waiting for it can lose a key
            shown.application.output.enable_cpr = False
        try:
            reply: str = shown.application.run()
        except EOFError:  # Ctrl-D
            raise KeyboardInterrupt from None
        if reply not in (HELP_KEY, BACK_KEY):
            questionary.print(f"{_wrapped(question.text)} ", "bold", end="")
            questionary.print(question.shown(reply or question.default), _ANSWERED)
        return reply

    def _menu(self, question: Question) -> Shown:
        import questionary
        from prompt_toolkit.key_binding import KeyBindings, merge_key_bindings

        width = max(len(choice.value) for choice in question.choices)
        choices = [
            questionary.Choice(
                [("bold", f"{choice.value:<{width}}"), ("", _wrapped_reason(width, choice.reason))],
                value=choice.value,
            )
            for choice in question.choices
        ]
        whole = _wrapped(f"{question.text} (Enter accepts, ? explains, < goes back)")
        shown = questionary.select(
            whole[: len(question.text)],
            choices,
            default=question.default,
            instruction=whole[len(question.text) :].lstrip(" "),
            qmark="",
            pointer=_POINTER,
            style=questionary.Style([("question", "bold"), ("highlighted", _ANSWERED)]),
            use_shortcuts=True,
            use_jk_keys=False,
            use_emacs_keys=False,
        )
        keys = _reply_keys()
        keys.add("c-d")(lambda event: event.app.exit(exception=EOFError()))
        keys.add("<sigint>")(lambda event: event.app.exit(exception=KeyboardInterrupt()))
        bindings = shown.application.key_bindings or KeyBindings()
        shown.application.key_bindings = merge_key_bindings([bindings, keys])
        return shown

    def _line(self, question: Question) -> Shown:
        import questionary
        from prompt_toolkit.application import get_app
        from prompt_toolkit.filters import Condition

        is_empty = Condition(lambda: not get_app().current_buffer.text)
        hint = f"({question.reason}) " if question.reason else ""
        text = _wrapped(f"{question.text} {hint}{question.offer}")
        return questionary.text(text, qmark="", key_bindings=_reply_keys(is_empty))


def _wrapped(text: str) -> str:
    return textwrap.fill(text, max(8, _columns() - 2), **_WHOLE_WORDS)  # questionary adds spaces


def _wrapped_reason(width: int, reason: str) -> str:
    if not reason:
        return ""
    margin = " " * (len(f" {_POINTER} ") + width + 2)
    columns = max(8, _columns() - len(margin) - 1)
    return "  " + f"\n{margin}".join(textwrap.wrap(reason, columns))


def _columns() -> int:
    return os.get_terminal_size().columns or 80


def _reply_keys(when: Any = True) -> KeyBindings:
    """Return the bindings of the keys that are not answers; they take effect immediately."""
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()
    keys.add("c-z")(lambda event: event.app.suspend_to_background())
    for key, reply in ((HELP_KEY, HELP_KEY), (BACK_KEY, BACK_KEY), ("escape", BACK_KEY)):

        @keys.add(key, filter=when, eager=True)
        def leave(event: KeyPressEvent, reply: str = reply) -> None:
            event.app.exit(result=reply)

    return keys
