"""The network interfaces of this machine."""

from __future__ import annotations

import socket
import struct
import sys

_SIOCGIFADDR = 0x8915
_SIOCGIFFLAGS = 0x8913
_IFF_UP = 0x1


def interface_addresses() -> dict[str, str]:
    """IPv4 address by name of each interface that is up and has one; loopback included.

    Without Linux's ioctl only loopback and the interface of the default route are known, as "lo" and "default".
    """
    if not sys.platform.startswith("linux"):
        return _without_ioctl()
    import fcntl

    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                flags = struct.unpack_from("<H", fcntl.ioctl(probe, _SIOCGIFFLAGS, request), 16)[0]
                if flags & _IFF_UP:
                    found[name] = socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
            except OSError:  # it has no IPv4 address, or went away
                continue
    return found


def _without_ioctl() -> dict[str, str]:
    found = {"lo": "127.0.0.1"}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; only asks for the route
            found["default"] = probe.getsockname()[0]
        except OSError:
            pass
    return found
