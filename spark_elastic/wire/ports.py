"""Ports to listen at: one, a range, or any free one; and addresses with ports as text."""

from __future__ import annotations

import errno
import random
import re
import socket
from typing import NamedTuple

from spark_elastic.errors import InvalidSettingsError, PortsTakenError

_RANGE = re.compile(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?")


class Ports(NamedTuple):
    """The ports from `first` to `last`; (0, 0): any free one of the system's choice."""

    first: int
    last: int

    @classmethod
    def parse(cls, value: int | str) -> Ports:
        """Return the ports of a number or of a text such as "40000-40015".

        Raises:
            ValueError: it is neither, or a port is not between 1 and 65535; the text says which.
        """
        match = _RANGE.fullmatch(str(value))
        if match is None:
            raise ValueError("it is neither a port nor a range such as '40000-40015'")
        first = int(match[1])
        last = first if match[2] is None else int(match[2])
        if (first, last) != (0, 0) and not 1 <= first <= last <= 65535:
            raise ValueError("ports are between 1 and 65535, the smaller one first; 0 is any free port")
        return cls(first, last)

    @property
    def size(self) -> int:
        return self.last - self.first + 1

    @property
    def are_any(self) -> bool:
        return self.first == 0

    def in_search_order(self) -> list[int]:
        """Return the ports in the order to try: from a random one on, so that many searches at once rarely meet."""
        start = random.randrange(self.size)
        return [self.first + (start + index) % self.size for index in range(self.size)]

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


ANY = Ports(0, 0)


def valid_ports(name: str, value: object) -> Ports:
    """Return the ports that a setting gives. Raise InvalidSettingsError unless it is a port or a range."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        kind = type(value).__name__
        raise InvalidSettingsError(f"{name} must be a port or a range such as '40000-40015', not {value!r} ({kind})")
    try:
        return Ports.parse(value)
    except ValueError as error:
        raise InvalidSettingsError(f"{name}={value!r}: {error}") from None


def listen(host: str, ports: Ports, setting: str, backlog: int) -> socket.socket:
    """Return a socket that listens at the first free port.

    The host is an address or name of this machine; an IPv6 address may be in brackets, and "::" also takes IPv4.
    `setting` is the name of the setting that gave the ports, for the error.

    Raises:
        PortsTakenError: all the ports are in use.
        OSError: the address cannot be used, or a port may not (those below 1024 need a right).
    """
    found = socket.getaddrinfo(without_brackets(host), None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    both = family == socket.AF_INET6 and address[0] == "::" and socket.has_dualstack_ipv6()
    for port in ports.in_search_order():
        at = (address[0], port, *address[2:])
        try:
            return socket.create_server(at, family=family, backlog=backlog, dualstack_ipv6=both)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise PortsTakenError(taken_in_words(ports, setting, f"at {address[0]}"), setting=setting, ports=str(ports))


def taken_in_words(ports: Ports, setting: str, where: str) -> str:
    """Say that none of the ports is free, and what to do."""
    if ports.size == 1:
        return (
            f"port {ports} of {setting} is taken {where}; give a range, such as "
            f"{setting}='{ports.first}-{min(ports.first + 15, 65535)}', in which each listener takes a free port"
        )
    return f"all {ports.size} ports of {setting}='{ports}' are taken {where}; give a wider range"


def with_port(host: str, port: int) -> str:
    """Return `host:port`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_port(text: str) -> tuple[str, int]:
    """Return the host, without brackets, and the port of `host:port`. Raise ValueError if there is no port."""
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdecimal() and len(port) <= 5):
        raise ValueError(f"{text!r:.80} is not an address with a port")
    return without_brackets(host), int(port)


def without_brackets(host: str) -> str:
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host
