"""The network interfaces of this machine, and which address a host's name stands for."""

from __future__ import annotations

import ipaddress
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


def address_of(name: str) -> str:
    """The address that stands for a host, the same wherever it is asked: people write names, agents report addresses.

    An address stands for itself. So does a name that cannot be resolved.
    """
    if is_address(name):
        return name
    try:
        resolved = socket.gethostbyname(name)
    except OSError:
        return name
    if not is_loopback(resolved) or name.partition(".")[0] == "localhost":
        return resolved
    # Debian's /etc/hosts gives 127.0.1.1 to the machine's own name: taken as it is, all such machines would be one
    return _outward_address() or name


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """Raises: ValueError: it is no address."""
    return ipaddress.ip_address(address).is_loopback


def _outward_address() -> str | None:
    """This machine's address towards others: that of the default route, or of the first interface; None: none."""
    default = _route_address()
    candidates = ([default] if default else []) + list(interface_addresses().values())
    return next((address for address in candidates if not is_loopback(address)), None)


def _without_ioctl() -> dict[str, str]:
    found = {"lo": "127.0.0.1"}
    default = _route_address()
    if default is not None:
        found["default"] = default
    return found


def _route_address() -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; only asks for the route
            return str(probe.getsockname()[0])
        except OSError:
            return None
