"""Masks the values of variables whose names mean secrets; used wherever settings are printed.

Imported only where something is printed: the launch path does not need it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

MASK = "***"
_SHORTEST = 8  # characters of a value that is looked for in output

_WORDS = ("key", "pat", "pass", "pwd", "auth", "authorization", "cookie", "webhook", "dsn")
"""Mean a secret as a whole word of a name: API_KEY, DB_PASS, but not KEYBOARD or MONKEY."""

_ENDS = (
    *("token", "secret", "secrets", "password", "passwords", "passwd", "passphrase"),
    *("credential", "credentials", "apikey", "privatekey", "accesskey"),
)
"""Mean a secret at the end of a word too: HFTOKEN, PGPASSWORD, but not TOKENIZERS_PARALLELISM."""

_NOT_SECRET = ("PWD", "OLDPWD")  # the shell's working folders

_USER_OF_URL = r"(?<=://)[^/@\s]+(?=@)"
"""The part of a URL in which a password or a token may stand: https://user:password@host."""


_ASSIGNED = (
    r"""(?<![\w.])([A-Za-z_][\w.-]{0,80})(["']?\s?[:=]\s?)"""
    r"""(?:(["'])[^"'\n]{8,}(?=["'])|(?<=[A-Z]=)()[^\s"'(]{8,})"""
)
"""A name and the text that it is given, in code or as for a shell: key = "...", API_KEY=..."""


def is_secret(name: str) -> bool:
    """Return whether the value of a variable or flag of this name is likely to be a secret."""
    if name in _NOT_SECRET:
        return False
    apart = re.sub(r"([a-z])([A-Z])", r"\1_\2", name)
    words = re.split(r"[^a-z]+", apart.lower())
    return any(word in _WORDS or word.endswith(_ENDS) for word in words)


def masked(name: str, value: str) -> str:
    """Return `value`, or MASK in place of a secret (by `name`) or of a URL's user."""
    if value and is_secret(name):
        return MASK
    return re.sub(_USER_OF_URL, MASK, value) if "://" in value else value


def masked_map(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: masked(name, value) for name, value in variables.items()}


def masked_pairs(words: Iterable[str]) -> list[str]:
    """Return NAME=VALUE words with the secrets among them masked.

    A word without a name may be the rest of the value before it, and is masked with it.
    """
    shown: list[str] = []
    name = ""
    for word in words:
        if "=" not in word:
            shown.append(masked(name, word))
            name = name or word
            continue
        name, _, value = word.partition("=")
        shown.append(f"{name}={masked(name, value)}")
    return shown


def masked_command(words: Iterable[str]) -> list[str]:
    """Return the words of a command with the values of secret flags masked, also --env=A_KEY=1."""
    shown: list[str] = []
    flag = ""  # whose value the next word may be
    for word in words:
        name, equals, value = word.partition("=")
        if equals and not is_secret(name):
            shown.append(f"{name}={masked_pairs([value])[0]}")
        elif equals:
            shown.append(f"{name}={MASK}")
        else:
            shown.append(masked("" if word.startswith("-") else flag, word))
        flag = word if word.startswith("-") and not equals else ""
    return shown


def masked_line(pairs: str) -> str:
    """Return NAME=VALUE words, quoted as in a shell, with the secrets masked."""
    import shlex

    try:
        words = shlex.split(pairs)
    except ValueError:  # a quote is not closed
        return MASK
    shown = masked_pairs(words)
    return pairs if shown == words else shlex.join(shown)


def masked_text(text: str) -> str:
    """Return code or lines of output with the values of secret names masked."""

    def mask(found: re.Match[str]) -> str:
        return f"{found[1]}{found[2]}{found[3] or ''}{MASK}" if is_secret(found[1]) else found[0]

    return re.sub(_USER_OF_URL, MASK, re.sub(_ASSIGNED, mask, text))


def secrets_among(variables: Mapping[str, str], words: Sequence[str]) -> list[str]:
    """Return the secrets in variables and in the words of a command, the longest first."""
    found = [value for name, value in variables.items() if is_secret(name)]
    for word, shown in zip(words, masked_command(words), strict=True):
        before, mask, after = shown.partition(MASK)
        if mask:
            found.append(word[len(before) : len(word) - len(after)])
    return sorted((secret for secret in found if len(secret) >= _SHORTEST), key=len, reverse=True)


def masked_output(text: str, secrets: Iterable[str]) -> str:
    """Return `text` as `masked_text` does, with these secrets masked everywhere."""
    for secret in secrets:
        text = text.replace(secret, MASK)
    return masked_text(text)


def masked_value(
    name: str, raw: str | Sequence[str] | Mapping[str, str]
) -> str | Sequence[str] | Mapping[str, str]:
    """Return the raw value of a setting or variable `env.NAME`, with secrets masked."""
    setting, _, variable = name.partition(".")
    if setting != "env":
        return raw
    if isinstance(raw, Mapping):
        return masked_map(raw)
    if not isinstance(raw, str):
        return masked_pairs(raw)
    return masked(variable, raw) if variable else masked_line(raw)
