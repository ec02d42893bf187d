"""A profile's text with the secrets in its `env` masked, to be shown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from headway.contract.origin import Layer
from headway.contract.secrets import MASK, masked, masked_value
from headway.settings.profile import Entry, Mark, parse_layer


def masked_profile(text: str) -> str:
    """Return a profile's `text` with every secret in it masked, line by line.

    Raises:
        ConfigError: it is not a profile.
    """
    env = parse_layer(text, "the profile", Layer.PROFILE).get("env") if text else None
    for mark in reversed(list(_secrets(env))):
        breaks = "\n" * text.count("\n", mark.value, mark.end)
        text = f'{text[: mark.value]}"{MASK}"{breaks}{text[mark.end :]}'
    return text


def _secrets(env: Entry | None) -> Iterator[Mark]:
    """Yield where the secrets are, in the order of the text; a line or list of words as a whole."""
    if env is None or env.mark is None:
        return
    if not isinstance(env.raw, Mapping):
        if masked_value("env", env.raw) != env.raw:
            yield env.mark
        return
    for name, mark in env.mark.items.items():
        if masked(name, env.raw[name]) != env.raw[name]:
            yield mark
