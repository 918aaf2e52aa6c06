"""The addresses that Gloo's members exchange before they connect, read and written here.

Gloo leaves the exchange to a store: each member sets a value and reads those of all others. A value has the number of
bytes of a host's name (8 bytes), the name, the number of bytes of an address (8 bytes), the address, and for each
member the number of the connection (8 bytes) that the listener expects of it. The address is a `sockaddr_storage` and
a number that is -1 here. Connections are numbered over the life of a device, in the order in which groups make them.

So a member whose listener and next number are known can be connected to without such an exchange. `read` checks that a
value has this layout, so that with another version of Gloo the exchange takes place as before.
"""

from __future__ import annotations

import base64
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

_SIZE = struct.Struct("<Q")
_FAMILY = struct.Struct("=H")
_PORT = struct.Struct(">H")
_IP_AT: dict[int, int] = {socket.AF_INET: 4, socket.AF_INET6: 8}
_ADDRESS_BYTES = 136
_NO_NUMBER = struct.pack("=q", -1)


class UnknownLayoutError(ValueError):
    """A value does not have the layout that is described above."""


@dataclass(frozen=True)
class GlooListener:
    """Where a device listens.

    Attributes:
        host: The host's name, as Gloo has it.
        port: The port.
        numbers: The numbers of the connections that it expects, by rank.
    """

    host: bytes
    port: int
    numbers: tuple[int, ...]


def read(value: bytes, address: str) -> GlooListener:
    """Return what a member has set.

    Args:
        value: The value.
        address: The address that its device was made for.

    Raises:
        UnknownLayoutError: The value has another layout.
    """
    try:
        (length,) = _SIZE.unpack_from(value, 0)
        host = value[_SIZE.size : _SIZE.size + length]
        at = _SIZE.size + length
        (length,) = _SIZE.unpack_from(value, at)
        raw = value[at + _SIZE.size : at + _SIZE.size + length]
        numbers = value[at + _SIZE.size + length :]
        (port,) = _PORT.unpack_from(raw, 2)
        expected = _write_address(address, port)
        count, rest = divmod(len(numbers), _SIZE.size)
    except (struct.error, OverflowError) as error:
        raise UnknownLayoutError(str(error)) from None
    start = len(_ip(address)) + _IP_AT[_family(address)]
    same = raw[:4] == expected[:4] and raw[_IP_AT[_family(address)] : start] == _ip(address)
    if len(raw) != _ADDRESS_BYTES or raw[-8:] != _NO_NUMBER or not same or rest or not count:
        raise UnknownLayoutError(f"{len(value)} bytes that are not an address at {address}")
    return GlooListener(host, port, struct.unpack(f"<{count}Q", numbers))


def write(host: bytes, address: str, port: int, numbers: Sequence[int]) -> bytes:
    """Return the value of a member that listens there."""
    raw = _write_address(address, port)
    return _SIZE.pack(len(host)) + host + _SIZE.pack(len(raw)) + raw + struct.pack(f"<{len(numbers)}Q", *numbers)


def describe(value: bytes, address: str) -> list[str | int]:
    """Return what others need to know of a member's value: as plain values, whose size does not depend on the group's.

    A value of another layout is returned whole, in base 64.
    """
    try:
        found = read(value, address)
    except UnknownLayoutError:
        return [base64.b64encode(value).decode()]
    first, count = found.numbers[0], len(found.numbers)
    if found.numbers != tuple(range(first, first + count)):
        return [base64.b64encode(value).decode()]
    return [found.host.decode("latin-1"), address, found.port, first]


def restore(described: Sequence[str | int], size: int) -> bytes:
    """Return the value that `describe` has described, in a group of that size."""
    if len(described) == 1:
        return base64.b64decode(str(described[0]))
    host, address, port, first = described
    return write(str(host).encode("latin-1"), str(address), int(port), range(int(first), int(first) + size))


def _write_address(address: str, port: int) -> bytes:
    family = _family(address)
    raw = bytearray(_ADDRESS_BYTES)
    _FAMILY.pack_into(raw, 0, family)
    _PORT.pack_into(raw, 2, port)
    ip = _ip(address)
    raw[_IP_AT[family] : _IP_AT[family] + len(ip)] = ip
    raw[-8:] = _NO_NUMBER
    return bytes(raw)


def _family(address: str) -> int:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _ip(address: str) -> bytes:
    try:
        return socket.inet_pton(_family(address), address)
    except OSError:
        raise UnknownLayoutError(f"{address} is a name, not an address") from None
