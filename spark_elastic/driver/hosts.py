"""Which hosts may be used, and with how many slots each: asked of a script, a fixed list, or Spark."""

from __future__ import annotations

import logging
import os
import re
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from spark_elastic.errors import DiscoveryScriptError, InvalidSettingsError
from spark_elastic.membership.events import HostsObserved
from spark_elastic.membership.topology import HostSet, HostUpdate
from spark_elastic.wire.interfaces import address_of, is_address

_HOST_LINE = re.compile(r"^([A-Za-z0-9._\-]+|\[[0-9A-Fa-f:.%]+\])(?::(\d+))?$")


class HostDiscovery(Protocol):
    """Answers, each time it is asked, what may be used now. Called from one thread; may take seconds."""

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Slots by host, preferred hosts first.

        Raises:
            DiscoveryScriptError: it could not find out. Before any good answer the job fails with it; afterwards the
                last good answer stands and the question is repeated.
        """
        ...


class FixedHosts:
    """Always the same hosts.

    Args:
        hosts: `{"h1": 2, "h2": 4}` or `"h1:2,h2:4"`; a host without a number has `default_slots`.

    Raises:
        InvalidSettingsError: naming the part that is no host or has no slots.
    """

    def __init__(self, hosts: Mapping[str, int] | str, *, default_slots: int = 1) -> None:
        if isinstance(hosts, str):
            parts = [part.strip() for part in hosts.split(",") if part.strip()]
            try:
                self._hosts = parse_hosts(parts, default_slots)
            except ValueError as error:
                raise InvalidSettingsError(f"hosts={hosts!r}: {error}") from None
        else:
            self._hosts = dict(hosts)
            for host, slots in self._hosts.items():
                if not isinstance(slots, int) or slots < 1:
                    raise InvalidSettingsError(f"host {host!r} has {slots!r} slots; it needs at least 1")
        if not self._hosts:
            raise InvalidSettingsError("no hosts were given")

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        return dict(self._hosts)


class HostDiscoveryScript:
    """Runs a script that prints one `host` or `host:slots` a line.

    Args:
        script: path of an executable; it is run without a shell and without arguments.
        default_slots: for lines that name no number.
        timeout_s: a run that takes longer is killed, with everything it started.

    Raises:
        DiscoveryScriptError: the script is missing or not executable.
    """

    def __init__(self, script: str, *, default_slots: int = 1, timeout_s: float = 10.0) -> None:
        self._script = os.path.abspath(os.path.expanduser(script))
        self._default_slots = default_slots
        self._timeout_s = timeout_s
        self._running: subprocess.Popen[str] | None = None
        if not os.path.isfile(self._script):
            raise DiscoveryScriptError(f"the host discovery script {script} does not exist")
        if not os.access(self._script, os.X_OK):
            quoted = shlex.quote(self._script)
            raise DiscoveryScriptError(f"the host discovery script {script} is not executable; chmod +x {quoted}")

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        out = self._run()
        try:
            return parse_hosts(out.splitlines(), self._default_slots)
        except ValueError as error:
            raise DiscoveryScriptError(f"the host discovery script {self._script} printed {error}") from None

    def interrupt(self) -> None:
        """Kill the run that another thread waits for, if there is one."""
        process = self._running
        if process is not None:
            _signal_group(process)

    def _run(self) -> str:
        try:
            process = subprocess.Popen(
                [self._script],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # so that what it started can be killed with it
            )
        except OSError as error:  # no interpreter line, or a binary for another machine
            raise DiscoveryScriptError(
                f"the host discovery script {self._script} cannot be run: {error.strerror or error} (does its first "
                "line name an interpreter, as in #!/bin/sh?)"
            ) from None
        self._running = process
        try:
            out, complaint = process.communicate(timeout=self._timeout_s)
        except subprocess.TimeoutExpired:
            raise DiscoveryScriptError(
                f"the host discovery script {self._script} took longer than {self._timeout_s:g} s"
            ) from None
        finally:
            self._running = None
            _signal_group(process)
            _reap(process)
        if process.returncode != 0:
            said = complaint.strip().splitlines()
            raise DiscoveryScriptError(
                f"the host discovery script {self._script} exited with {process.returncode}"
                + (f": {said[-1][:300]}" if said else "")
            )
        return out


def parse_hosts(lines: list[str], default_slots: int) -> dict[str, int]:
    """Slots by host from `host` or `host:slots` lines, in their order; a host named twice has the sum.

    Empty lines and what follows a `#` are skipped.

    Raises:
        ValueError: quoting the line that is neither.
    """
    found: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _HOST_LINE.match(text)
        if match is None:
            raise ValueError(f"{text[:100]!r} (line {number}), which is neither `host` nor `host:slots`")
        slots = int(match.group(2)) if match.group(2) is not None else default_slots
        if slots < 1:
            raise ValueError(f"{text[:100]!r} (line {number}), which has no slots; leave the host out instead")
        host = match.group(1).strip("[]")
        found[host] = found.get(host, 0) + slots
    return found


def _signal_group(process: subprocess.Popen[str]) -> None:
    """Kill what is left of the script and its children."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def _reap(process: subprocess.Popen[str]) -> None:
    process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


# Keeps what a host discovery says current, and reports it when it changes.

log = logging.getLogger(__name__)


class HostAddresses:
    """Turns what a discovery says, in whatever names, into the addresses that agents report.

    Args:
        standing_for: the address that a name or an address stands for among the agents; the name itself if unknown.
    """

    def __init__(self, standing_for: Callable[[str], str] = address_of) -> None:
        self._standing_for = standing_for
        self._resolved: dict[str, str] = {}

    def __call__(self, found: Mapping[str, int]) -> dict[str, int]:
        """Slots by address, in the same order; names of one address add up.

        A name that cannot be resolved at the moment keeps its last address: nobody leaves because of a name server.

        Raises:
            InvalidSettingsError: `found` is not a mapping of names to numbers of slots.
        """
        valid = isinstance(found, Mapping) and all(isinstance(host, str) for host in found)
        if not valid or not all(isinstance(slots, int) and slots >= 0 for slots in found.values()):
            raise InvalidSettingsError(f"a host discovery has to answer with slots by host, {{'h1': 2}}, not {found!r}")
        by_address: dict[str, int] = {}
        for host, slots in found.items():
            address = self._standing_for(host)
            if is_address(address):
                self._resolved[host] = address
            else:
                address = self._resolved.get(host, address)
            by_address[address] = by_address.get(address, 0) + slots
        return by_address


class HostManager:
    """Polls a discovery on its own thread, so that a slow script delays nobody.

    Failures are logged when they begin and change nothing; the last good answer stands.

    Args:
        on_observed: called from the manager's thread, each time the answer differs from the one before.
        first: the answer that is known already.
        addresses: applied to each later answer, in the same thread.
    """

    def __init__(
        self,
        discovery: HostDiscovery,
        on_observed: Callable[[HostsObserved], None],
        *,
        first: HostsObserved,
        interval_s: float = 1.0,
        addresses: Callable[[Mapping[str, int]], dict[str, int]] = dict,
    ) -> None:
        self._discovery = discovery
        self._on_observed = on_observed
        self._interval_s = interval_s
        self._addresses = addresses
        self._hosts, _ = HostSet().updated(first.hosts or {})
        self._failure: str | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spark_elastic hosts", daemon=True)
        self._thread.start()

    def current_hosts(self) -> dict[str, int]:
        """The last good answer: slots by host, in an order that survivors keep."""
        return dict(self._hosts.slots)

    def close(self, deadline_s: float = 5.0) -> None:
        """Stop asking, and end a script that is running. Repeats are harmless."""
        self._stopping.set()
        if self._thread is threading.current_thread():
            return
        until = time.monotonic() + deadline_s
        while self._thread.is_alive() and time.monotonic() < until:
            if isinstance(self._discovery, HostDiscoveryScript):
                self._discovery.interrupt()  # again, in case it had not begun yet
            self._thread.join(0.05)

    def poll(self) -> HostUpdate:
        """Ask once and report a change. The thread does this; tests do it without one."""
        try:
            found = self._addresses(self._discovery.find_available_hosts_and_slots())
        except Exception as error:
            if self._stopping.is_set():
                return HostUpdate.NO_UPDATE
            if str(error) != self._failure:
                log.warning("host discovery failed; keeping its last answer and asking again: %s", error)
            self._failure = str(error)
            return HostUpdate.NO_UPDATE
        if self._failure is not None:
            log.info("host discovery works again")
            self._failure = None
        after, update = self._hosts.updated(found)
        if update and not self._stopping.is_set():
            names = ", ".join(f"{host}:{slots}" for host, slots in after.slots) or "none"
            log.info("hosts %s: %s", update.name, names)
            self._hosts = after
            self._on_observed(HostsObserved(dict(after.slots)))
        return update

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            self.poll()
