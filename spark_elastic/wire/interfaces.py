"""The network interfaces of this machine, and the address of a host's name."""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct
import sys

THIS_MACHINE = "127.0.0.1"  # the host that agents report if all of them run on the driver's machine
_SIOCGIFADDR = 0x8915
_SIOCGIFFLAGS = 0x8913
_IFF_UP = 0x1
_IF_INET6 = "/proc/net/if_inet6"
_LINK_SCOPE = 0x20
_TEMPORARY, _DEPRECATED = 0x01, 0x20
_UNUSABLE = 0x08 | 0x40  # flags of an IPv6 address that another machine has too, or may have


def interface_addresses() -> dict[str, tuple[str, ...]]:
    """Return the addresses of each interface that is up, by interface name, including loopback.

    At most one IPv4 address, which is the first, and one IPv6 address. IPv6 addresses that are valid on one link only
    (fe80::...) are left out: they say nothing without the name of the other machine's interface.

    On other systems than Linux: loopback as "lo" and the interface of the default route as "default".
    """
    if not sys.platform.startswith("linux"):
        default = _default_address()
        return {"lo": ("127.0.0.1",), **({"default": (default,)} if default is not None else {})}
    with_ipv4, with_ipv6 = _ipv4_addresses(), _ipv6_addresses()
    names = dict.fromkeys([*with_ipv4, *with_ipv6])
    return {name: tuple(family[name] for family in (with_ipv4, with_ipv6) if name in family) for name in names}


def own_addresses() -> list[str]:
    """Return all addresses of `interface_addresses`, without the names."""
    return [address for own in interface_addresses().values() for address in own]


def every_address() -> str:
    """Return the address to bind to all interfaces of this machine: of IPv6 and IPv4 where the system has both."""
    return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"


def _ipv6_addresses() -> dict[str, str]:
    """Return one address of each interface that is up and has one: rather a lasting than a temporary one."""
    try:
        with open(_IF_INET6) as stream:
            lines = [line.split() for line in stream]
    except OSError:  # the kernel has no IPv6
        return {}
    best: dict[str, tuple[int, str]] = {}
    for digits, _, _, scope, flags, name in lines:
        if int(scope, 16) == _LINK_SCOPE or int(flags, 16) & _UNUSABLE:
            continue
        rank = int(flags, 16) & (_TEMPORARY | _DEPRECATED)
        if name not in best or rank < best[name][0]:
            best[name] = rank, str(ipaddress.IPv6Address(int(digits, 16)))
    return {name: address for name, (_, address) in best.items()}


def _ipv4_addresses() -> dict[str, str]:
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

    A name with addresses of both kinds gives the IPv4 address. An address is returned in its usual form, without
    brackets; a name that cannot be resolved is returned unchanged.
    """
    plain = plain_address(name)
    if is_address(plain):
        return plain
    resolved = _resolved(name)
    if resolved is None:
        return name
    if not is_loopback(resolved) or name.partition(".")[0] == "localhost":
        return resolved
    # Debian's /etc/hosts gives 127.0.1.1 to the machine's own name. With that, all such machines would look like one.
    outward = (address for address in (_default_address(), *own_addresses()) if address)
    return next((address for address in outward if not is_loopback(address)), name)


def plain_address(text: str) -> str:
    """Return an address without brackets, IPv6 shortened, an embedded IPv4 one as such; other texts unchanged."""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        return text
    return str(getattr(address, "ipv4_mapped", None) or address)


def is_ipv6(address: str) -> bool:
    return ":" in address


def _resolved(name: str) -> str | None:
    try:
        return socket.gethostbyname(name)
    except OSError:
        pass
    try:
        found = socket.getaddrinfo(name, None, socket.AF_INET6, socket.SOCK_STREAM)
    except OSError:
        return None
    usable = (str(at[0]) for *_, at in found)
    return next((plain_address(address) for address in usable if "%" not in address), None)


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def on_this_machine(address: str) -> str:
    """Return `THIS_MACHINE` for any address of this machine, listed or not, and others as they are."""
    if not is_address(address):
        return address
    elsewhere = "2001:db8::1" if is_ipv6(address) else "192.0.2.1"  # can be bound with net.ipv4.ip_nonlocal_bind only
    own = is_loopback(address) or address in own_addresses() or (_can_bind(address) and not _can_bind(elsewhere))
    return THIS_MACHINE if own else address


def _can_bind(address: str) -> bool:
    """Return True if a socket can have this address. Raise OSError if the process has no descriptor left."""
    with socket.socket(socket.AF_INET6 if is_ipv6(address) else socket.AF_INET) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return True


def is_loopback(address: str) -> bool:
    """Return True for a loopback address. Raise ValueError for what is not an address."""
    return ipaddress.ip_address(address).is_loopback


def _default_address() -> str | None:
    """Return this machine's address on the default route, rather IPv4 than IPv6; None without one."""
    return address_toward("192.0.2.1") or address_toward("2001:db8::1")


def address_toward(address: str) -> str | None:
    """Return this machine's address on the route to another one; None without a route."""
    try:
        with socket.socket(socket.AF_INET6 if is_ipv6(address) else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing: a UDP connect only looks up the route
            return str(probe.getsockname()[0])
    except OSError:
        return None
