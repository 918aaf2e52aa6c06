"""Hosts as network namespaces on one bridge: each with its own address, and a link that can be taken down."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import threading
from functools import lru_cache
from pathlib import Path

_ETC = Path("/etc/netns")
_ETHERNET_ALL = 3
_IP = shutil.which("ip") or "/usr/sbin/ip"
_TC = shutil.which("tc") or "/usr/sbin/tc"


def _ip(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run([_IP, *arguments], check=check, capture_output=True, text=True)


@lru_cache(maxsize=1)
def why_unavailable() -> str | None:
    """Why namespaces cannot be used here; None: they can."""
    if not os.path.exists(_IP):
        return "there is no `ip` command (install iproute2)"
    name = f"se-probe-{os.getpid()}"
    made = _ip("netns", "add", name, check=False)
    if made.returncode != 0:
        return f"network namespaces are not permitted here: {made.stderr.strip()}"
    _ip("netns", "del", name, check=False)
    bridge = f"sep{os.getpid() % 100000}"
    made = _ip("link", "add", bridge, "type", "bridge", check=False)
    if made.returncode != 0:
        return f"no bridges here: {made.stderr.strip()}"
    _ip("link", "del", bridge, check=False)
    return None


class Network:
    """A bridge with an address of this machine (`gateway`) and one namespace per host, all with names of this test run.

    `ipv6`: the namespaces have no IPv4 at all. `local_ports`: their `net.ipv4.ip_local_port_range`.
    """

    _count = 0

    def __init__(self, *, ipv6: bool = False, local_ports: tuple[int, int] | None = None) -> None:
        Network._count += 1
        self.ipv6 = ipv6
        self._local_ports = local_ports
        self._tag = f"{os.getpid() % 100000}x{Network._count}"
        self._bridge = f"seb{self._tag}"
        second, third = 100 + os.getpid() % 100, (os.getpid() // 100 + Network._count * 16) % 256
        self._prefix = f"fd00:{second:x}:{third:x}::" if ipv6 else f"10.{second}.{third}."
        self._bits = 64 if ipv6 else 24
        self.gateway = f"{self._prefix}1"
        self.hosts: list[str] = []
        # An address of its own: otherwise the bridge takes the lowest one of its ports, and when a host is added with a
        # lower one, all others send to the old address for some seconds.
        own = f"02:00:{':'.join(f'{byte:02x}' for byte in (os.getpid() & 0xFFFFFF).to_bytes(3, 'big'))}:01"
        _ip("link", "add", self._bridge, "address", own, "type", "bridge")
        self._add_address([], self.gateway, self._bridge)
        _ip("link", "set", self._bridge, "up")

    def add_host(self) -> str:
        """A new host; returns its address."""
        number = len(self.hosts) + 2
        address = f"{self._prefix}{number}"
        namespace, outer, inner = self._names(address)
        _ip("netns", "add", namespace)
        self._answer_names_from_files(namespace, address)
        _ip("link", "add", outer, "type", "veth", "peer", "name", inner)
        _ip("link", "set", inner, "netns", namespace)
        _ip("link", "set", outer, "master", self._bridge)
        _ip("link", "set", outer, "up")
        self._add_address(["-n", namespace], address, inner)
        _ip("-n", namespace, "link", "set", "lo", "up")
        _ip("-n", namespace, "link", "set", inner, "up")
        _ip("-n", namespace, *(["-6"] if self.ipv6 else []), "route", "add", "default", "via", self.gateway)
        if self.ipv6:
            _ip("-n", namespace, "addr", "del", "127.0.0.1/8", "dev", "lo")
        if self._local_ports is not None:
            first, last = self._local_ports
            write = f"echo {first} {last} > /proc/sys/net/ipv4/ip_local_port_range"
            _ip("netns", "exec", namespace, "sh", "-c", write)
        self.hosts.append(address)
        return address

    def _add_address(self, where: list[str], address: str, device: str) -> None:
        # nodad: without it the address cannot be used for a second, while the system looks for another owner
        no_check = ["nodad"] if self.ipv6 else []
        _ip(*where, "addr", "add", f"{address}/{self._bits}", "dev", device, *no_check)

    def command_on(self, address: str) -> list[str]:
        """What to put before a command so that it runs on the host; it becomes the command (same pid)."""
        return [_IP, "netns", "exec", self._names(address)[0]]

    def link_down(self, address: str) -> None:
        """Nothing goes in or out any more, and nobody is told."""
        _ip("link", "set", self._names(address)[1], "down")

    def link_up(self, address: str) -> None:
        _ip("link", "set", self._names(address)[1], "up")

    def limit_bandwidth(self, address: str, mbit_per_s: int) -> None:
        """Send no faster than this to the host and from it."""
        namespace, outer, inner = self._names(address)
        # 50 ms of queue, and tokens for 2 ms: more than a tick of the kernel's timer
        bucket = max(16_384, mbit_per_s * 1_000_000 // 8 * 2 // 1000)
        shape = ["root", "tbf", "rate", f"{mbit_per_s}mbit", "burst", str(bucket), "latency", "50ms"]
        for where, device in (([], outer), ([_IP, "netns", "exec", namespace], inner)):
            subprocess.run([*where, _TC, "qdisc", "replace", "dev", device, *shape], check=True)

    def close(self) -> None:
        for address in self.hosts:
            namespace, outer, _ = self._names(address)
            _ip("link", "del", outer, check=False)
            _ip("netns", "del", namespace, check=False)
            shutil.rmtree(_ETC / namespace, ignore_errors=True)
        _ip("link", "del", self._bridge, check=False)

    @staticmethod
    def _answer_names_from_files(namespace: str, address: str) -> None:
        """A JVM looks up its own host name; without a name server each look-up would cost it 10 s.

        `ip netns exec` lays these files over /etc.
        """
        directory = _ETC / namespace
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "nsswitch.conf").write_text("hosts: files\n")
        loopback = "::1" if ":" in address else "127.0.0.1"
        (directory / "hosts").write_text(f"{loopback} localhost\n{address} {socket.gethostname()}\n")

    def _names(self, address: str) -> tuple[str, str, str]:
        """Namespace, the link's end on the bridge, its end on the host. Linux allows 15 characters."""
        number = address.rpartition(":" if self.ipv6 else ".")[2]
        return f"se-{self._tag}-{number}", f"sev{self._tag}{number}"[:15], f"sei{self._tag}{number}"[:15]


class Eavesdropper:
    """Counts the packets on a network interface (`packets`), and those in which a pattern is (`read`). Needs root."""

    def __init__(self, device: str, pattern: bytes) -> None:
        self._pattern = pattern
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETHERNET_ALL))
        self._socket.bind((device, 0))
        self._socket.settimeout(0.2)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="eavesdropper")
        self.packets = self.read = 0

    def __enter__(self) -> Eavesdropper:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(10)
        self._socket.close()

    def _listen(self) -> None:
        while not self._over.is_set():
            with contextlib.suppress(TimeoutError):
                packet = self._socket.recv(65535)
                self.packets += 1
                self.read += self._pattern in packet
