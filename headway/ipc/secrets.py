"""Masking of secrets, which are recognized by name, in all printed settings.

This module is not imported on the launch path.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

MASK = "***"
_MIN_LENGTH = 8  # shorter values are not masked in output

_WORDS = ("key", "pat", "pass", "pwd", "auth", "authorization", "cookie", "webhook", "dsn")
"""Words that mark a name as secret, as in API_KEY and DB_PASS, but not in KEYBOARD or MONKEY."""

_SUFFIXES = (
    *("token", "secret", "secrets", "password", "passwords", "passwd", "passphrase"),
    *("credential", "credentials", "apikey", "privatekey", "accesskey"),
)
"""Endings of words that mark a name as secret, as in HFTOKEN, but not TOKENIZERS_PARALLELISM."""

_NOT_SECRET = r"(OLD)?PWD|\w*(Error|Exception)"  # the shell's working folders, and KeyError

_URL_CREDENTIALS = r"(?<=://)[^/@\s]+(?=@)"
"""The part of a URL that may contain a password or token: https://user:password@host."""

_ASSIGNMENT = (
    r"""(?<![\w.])([A-Za-z_][\w.-]{0,80})(["']?\s?[:=]\s?)"""
    r"""(?:(["'])[^"'\n]{8,}(?=["'])|(?<=[A-Z]=)()[^\s"'(]{8,})"""
)
"""A name and its value, in code or in a shell: key = "...", API_KEY=..."""


def is_secret(name: str) -> bool:
    """Return whether a variable or flag of this name probably contains a secret."""
    if re.fullmatch(_NOT_SECRET, name):
        return False
    snake_case = re.sub(r"([a-z])([A-Z])", r"\1_\2", name)
    words = re.split(r"[^a-z]+", snake_case.lower())
    return any(word in _WORDS or word.endswith(_SUFFIXES) for word in words)


def masked(name: str, value: str) -> str:
    """Return MASK if `name` is secret; otherwise `value`, with the user part of a URL masked."""
    if value and is_secret(name):
        return MASK
    return re.sub(_URL_CREDENTIALS, MASK, value) if "://" in value else value


def masked_map(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: masked(name, value) for name, value in variables.items()}


def masked_pairs(words: Iterable[str]) -> list[str]:
    """Return NAME=VALUE words with secrets masked.

    A word without a name may continue the previous value, and is masked if that value is masked.
    """
    masked_words: list[str] = []
    name = ""
    for word in words:
        if "=" not in word:
            masked_words.append(masked(name, word))
            name = name or word
            continue
        name, _, value = word.partition("=")
        masked_words.append(f"{name}={masked(name, value)}")
    return masked_words


def masked_command(words: Iterable[str]) -> list[str]:
    """Return the words of a command with secret values masked, even in words like --env=A_KEY=1."""
    masked_words: list[str] = []
    flag = ""  # the flag whose value may be the next word
    for word in words:
        name, equals, value = word.partition("=")
        if equals:
            shown = MASK if is_secret(name) else masked_pairs([value])[0]
            masked_words.append(f"{name}={shown}")
        else:
            masked_words.append(masked("" if word.startswith("-") else flag, word))
        flag = word if word.startswith("-") and not equals else ""
    return masked_words


def masked_line(pairs: str) -> str:
    """Return shell-quoted NAME=VALUE words with secrets masked."""
    import shlex

    try:
        words = shlex.split(pairs)
    except ValueError:  # unclosed quote
        return MASK
    masked_words = masked_pairs(words)
    return pairs if masked_words == words else shlex.join(masked_words)


def masked_text(text: str, secrets: Iterable[str] = ()) -> str:
    """Return `text`, which is code or output, with `secrets` and values of secret names masked."""

    def mask(found: re.Match[str]) -> str:
        return f"{found[1]}{found[2]}{found[3] or ''}{MASK}" if is_secret(found[1]) else found[0]

    for secret in secrets:
        text = text.replace(secret, MASK)
    return re.sub(_URL_CREDENTIALS, MASK, re.sub(_ASSIGNMENT, mask, text))


def secrets_among(variables: Mapping[str, str], words: Sequence[str]) -> list[str]:
    """Return the secrets in variables and in the words of a command, longest first."""
    found = [value for name, value in variables.items() if is_secret(name)]
    for word, masked_word in zip(words, masked_command(words), strict=True):
        before, mask, after = masked_word.partition(MASK)
        if mask:
            found.append(word[len(before) : len(word) - len(after)])
    return sorted((secret for secret in found if len(secret) >= _MIN_LENGTH), key=len, reverse=True)


def masked_value(
    name: str, raw: str | Sequence[str] | Mapping[str, str]
) -> str | Sequence[str] | Mapping[str, str]:
    """Return the raw value of a setting or of `env.NAME` with secrets masked."""
    setting, _, variable = name.partition(".")
    if setting != "env":
        return raw
    if isinstance(raw, Mapping):
        return masked_map(raw)
    if not isinstance(raw, str):
        return masked_pairs(raw)
    return masked(variable, raw) if variable else masked_line(raw)
