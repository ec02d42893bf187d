"""Parsing of host addresses and host lists."""

from __future__ import annotations

import re
from typing import NamedTuple

from headway.settings.setting import Count, Raw, read_text

_HOST = r"(\[(?P<bracketed>[^\s\[\]]+)\]|(?P<name>[^\s:\[\],]+))(:(?P<count>[^:\s]+))?$"
_NAME = r"[^\s:/@,\[\]]+"
_NONE = "none"


class Host(NamedTuple):
    """An ssh host and its number of processes; if the number is None, the host detects it."""

    name: str
    num_processes: int | None = None

    def __str__(self) -> str:
        name = f"[{self.name}]" if ":" in self.name else self.name
        return name if self.num_processes is None else f"{name}:{self.num_processes}"


class Hosts(tuple[Host, ...]):
    """The hosts of a run, ordered by machine rank; if empty, the run uses only this machine."""

    __slots__ = ()

    def __str__(self) -> str:
        return ",".join(map(str, self)) or _NONE


def read_host(raw: Raw) -> str:
    """Parse a host name or IP address; brackets are removed, so [::1] becomes ::1."""
    text = read_text(raw).strip()
    host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    is_name = host == text and re.fullmatch(_NAME, host) is not None and host.isprintable()
    if not (is_name or _is_ip_address(host)):
        more = "; set its port with main_port" if re.search(r":\d+$", text) else ""
        raise ValueError(f"not a host name or IP address{more}")
    if host in ("0.0.0.0", "::", "255.255.255.255"):
        raise ValueError("a wildcard address: use an address that other machines can connect to")
    labels = host.removesuffix(".").split(".")
    if ":" not in host and (len(host) > 253 or not all(0 < len(label) < 64 for label in labels)):
        raise ValueError("not a host name: it is too long, or has an empty or overlong part")
    if host.lower().startswith("fe80:") and "%" not in host:
        raise ValueError("a link-local address: add this machine's interface, as in fe80::1%eth0")
    return host


def _is_ip_address(host: str) -> bool:
    from ipaddress import ip_address

    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def read_hosts(raw: Raw) -> Hosts:
    """Parse `a,b:2`, a YAML list of these, `[::1]:2`, or `none`."""
    if isinstance(raw, str) and raw.strip().lower() == _NONE:
        return Hosts()
    words = raw.split(",") if isinstance(raw, str) else raw
    hosts = [_read_host(word.strip()) for word in words]
    if not hosts:
        raise ValueError("contains no host")
    names = [host.name for host in hosts]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ValueError(f"lists {', '.join(twice)} twice")
    return Hosts(hosts)


def _read_host(word: str) -> Host:
    match = re.match(_HOST, word)
    name = (match["bracketed"] or match["name"]) if match else ""
    # ssh parses a word that starts with a dash as an option
    if match is None or name.startswith("-") or not name.isprintable():
        raise ValueError(f"{word!r} is not HOST or HOST:PROCESSES, such as node1 or node1:2")
    if match["count"] is None:
        return Host(name)
    try:
        return Host(name, Count(1)(match["count"]))
    except ValueError as error:
        what = f"invalid process count {match['count']!r} in {word!r}: {error}"
        raise ValueError(what) from None
