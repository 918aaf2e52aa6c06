"""Hosts as network namespaces on one bridge: each with its own address, and a link that can be taken down."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from functools import lru_cache
from pathlib import Path

_ETC = Path("/etc/netns")
_IP = shutil.which("ip") or "/usr/sbin/ip"


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
    """A bridge with an address of this machine (`gateway`) and one namespace per host.

    Names carry the process id and a number, so that several test runs can share a machine.
    """

    _count = 0

    def __init__(self) -> None:
        Network._count += 1
        self._tag = f"{os.getpid() % 100000}x{Network._count}"
        self._bridge = f"seb{self._tag}"
        second, third = 100 + os.getpid() % 100, (os.getpid() // 100 + Network._count * 16) % 256
        self._prefix = f"10.{second}.{third}"
        self.gateway = f"{self._prefix}.1"
        self.hosts: list[str] = []
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self.gateway}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")

    def add_host(self) -> str:
        """A new host; returns its address."""
        number = len(self.hosts) + 2
        address = f"{self._prefix}.{number}"
        namespace, outer, inner = self._names(address)
        _ip("netns", "add", namespace)
        self._answer_names_from_files(namespace, address)
        _ip("link", "add", outer, "type", "veth", "peer", "name", inner)
        _ip("link", "set", inner, "netns", namespace)
        _ip("link", "set", outer, "master", self._bridge)
        _ip("link", "set", outer, "up")
        _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", inner)
        _ip("-n", namespace, "link", "set", "lo", "up")
        _ip("-n", namespace, "link", "set", inner, "up")
        _ip("-n", namespace, "route", "add", "default", "via", self.gateway)
        self.hosts.append(address)
        return address

    def command_on(self, address: str) -> list[str]:
        """What to put before a command so that it runs on the host; it becomes the command (same pid)."""
        return [_IP, "netns", "exec", self._names(address)[0]]

    def link_down(self, address: str) -> None:
        """Nothing goes in or out any more, and nobody is told."""
        _ip("link", "set", self._names(address)[1], "down")

    def link_up(self, address: str) -> None:
        _ip("link", "set", self._names(address)[1], "up")

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
        (directory / "hosts").write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")

    def _names(self, address: str) -> tuple[str, str, str]:
        """Namespace, the link's end on the bridge, its end on the host. Linux allows 15 characters."""
        number = address.rpartition(".")[2]
        return f"se-{self._tag}-{number}", f"sev{self._tag}{number}"[:15], f"sei{self._tag}{number}"[:15]
