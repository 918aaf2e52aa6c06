"""What an agent knows of the place it runs in."""

from __future__ import annotations

import array
import fcntl
import os
import socket
import struct
from dataclasses import dataclass, field

_SIOCGIFADDR = 0x8915
_SIOCGIFFLAGS = 0x8913
_IFF_UP = 0x1


@dataclass(frozen=True)
class TaskPlace:
    """Where a task runs and what it may use there."""

    host: str
    executor: str
    cores: int = 1
    accelerators: tuple[str, ...] = field(default=())
    """Indices or ids of the GPUs that are this task's own."""


def interface_addresses() -> dict[str, str]:
    """IPv4 address of each network interface that is up, by name; loopback included.

    Linux answers per interface; elsewhere the address that the host name resolves to stands for all.
    """
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                flags = fcntl.ioctl(sock.fileno(), _SIOCGIFFLAGS, request)
                if not array.array("H", flags[16:18])[0] & _IFF_UP:
                    continue
                answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # no IPv4 address on it
            addresses[name] = socket.inet_ntoa(answer[20:24])
    if not addresses:
        addresses["default"] = socket.gethostbyname(socket.gethostname())
    return addresses


def available_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
