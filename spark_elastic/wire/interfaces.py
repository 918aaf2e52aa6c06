"""The network interfaces of this machine, and the address of a host's name.

Standard library only: the doctor sends this source to executors that may lack the package.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys

_SIOCGIFADDR = 0x8915
_SIOCGIFFLAGS = 0x8913
_IFF_UP = 0x1


def interface_addresses() -> dict[str, str]:
    """Return the IPv4 address of each interface that is up, by interface name, including loopback.

    On other systems than Linux: loopback as "lo" and the interface of the default route as "default".
    """
    if not sys.platform.startswith("linux"):
        default = _route_address()
        return {"lo": "127.0.0.1", **({"default": default} if default is not None else {})}
    import fcntl

    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                flags = struct.unpack_from("<H", fcntl.ioctl(probe, _SIOCGIFFLAGS, request), 16)[0]
                if flags & _IFF_UP:
                    found[name] = socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
            except OSError:  # it has no IPv4 address, or has disappeared
                continue
    return found


def address_of(name: str) -> str:
    """Return the address of a host, the same wherever it is asked: users write names, agents report addresses.

    An address, and a name that cannot be resolved, is returned unchanged.
    """
    if is_address(name):
        return name
    try:
        resolved = socket.gethostbyname(name)
    except OSError:
        return name
    if not is_loopback(resolved) or name.partition(".")[0] == "localhost":
        return resolved
    # Debian's /etc/hosts gives 127.0.1.1 to the machine's own name. With that, all such machines would look like one.
    outward = (address for address in (_route_address(), *interface_addresses().values()) if address)
    return next((address for address in outward if not is_loopback(address)), name)


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """Return True for a loopback address.

    Raises:
        ValueError: it is not an address.
    """
    return ipaddress.ip_address(address).is_loopback


def _route_address() -> str | None:
    """Return this machine's address on the default route; None without one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: a UDP connect only looks up the route
            return str(probe.getsockname()[0])
        except OSError:
            return None
