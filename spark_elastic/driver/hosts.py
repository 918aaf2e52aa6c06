"""Host discovery: the hosts that a job may use, and the slots of each.

A discovery is any object with the method of `HostDiscovery`. To add one, write its class here (or in a program that
passes it to `run`): `HostManager`, which polls it, needs nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from typing import Protocol

from spark_elastic import clock
from spark_elastic.errors import DiscoveryScriptError, InvalidSettingsError
from spark_elastic.membership.events import HostsObserved
from spark_elastic.membership.reasons import hosts_in_words
from spark_elastic.wire.interfaces import address_of, is_address

log = logging.getLogger(__name__)

_HOST_LINE = re.compile(r"^([A-Za-z0-9._\-]+|\[[0-9A-Fa-f:.%]+\])(?::(\d+))?$")


class HostDiscovery(Protocol):
    """Finds the hosts that may be used now.

    It is called again and again, from one thread at a time, and may take seconds. It may have a method `interrupt()`,
    which makes a call that runs in another thread end early; it is called when the job ends.
    """

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the slots of each host.

        Raises:
            DiscoveryScriptError: The hosts could not be found. The first call of a job fails the job; after a later
                one the last good answer remains valid and the call is repeated.
        """


class FixedHosts:
    """A discovery that always returns the same hosts.

    Args:
        hosts: `{"h1": 2, "h2": 4}` or `"h1:2,h2:4"`.
        default_slots: The slots of a host without a number.

    Raises:
        InvalidSettingsError: A part of `hosts` is not a host, or has no slots.
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
    """A discovery that runs a script, which prints one `host` or `host:slots` per line.

    Args:
        script: Path of an executable. It is run without a shell and without arguments.
        default_slots: The slots of a host without a number.
        timeout_s: A run that takes longer is killed, with all processes that it started.

    Raises:
        DiscoveryScriptError: The script is missing or not executable.
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
            raise self._error(f"printed {error}") from None

    def interrupt(self) -> None:
        """Kill the script if it is running."""
        if (process := self._running) is not None:
            _kill_group(process)

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
        except OSError as error:  # without an interpreter line, or a binary of another architecture
            hint = "does its first line name an interpreter, as in #!/bin/sh?"
            raise self._error(f"cannot be run: {error.strerror or error} ({hint})") from None
        self._running = process
        try:
            out, complaint = process.communicate(timeout=self._timeout_s)
        except subprocess.TimeoutExpired:
            raise self._error(f"took longer than {self._timeout_s:g} s") from None
        finally:
            self._running = None
            with process:  # closes its pipes and waits for its end
                _kill_group(process)
        if process.returncode != 0:
            lines = complaint.strip().splitlines()
            raise self._error(f"exited with {process.returncode}" + (f": {lines[-1][:300]}" if lines else ""))
        return out

    def _error(self, problem: str) -> DiscoveryScriptError:
        return DiscoveryScriptError(f"the host discovery script {self._script} {problem}")


def parse_hosts(lines: list[str], default_slots: int) -> dict[str, int]:
    """Return the slots of each host from lines `host` or `host:slots`, in their order.

    The slots of a host that is named twice are added. Empty lines and comments (`# ...`) are skipped.

    Raises:
        ValueError: A line is neither `host` nor `host:slots`, or has no slots.
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


def _kill_group(process: subprocess.Popen[str]) -> None:
    """Kill the script and the processes that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


class HostManager:
    """Polls a discovery in its own thread, so that a slow script blocks nothing, and reports changed answers.

    A discovery that fails is logged once; its last good answer remains valid. It is called for the first time at once.
    `address_of_host` returns the address that the agents on a host report; the name itself if it is unknown.

    Raises:
        DiscoveryScriptError: The first call failed.
        InvalidSettingsError: The first answer is not a mapping of hosts to slots.
    """

    def __init__(
        self, discovery: HostDiscovery, address_of_host: Callable[[str], str] = address_of, *, interval_s: float = 1.0
    ) -> None:
        self._discovery = discovery
        self._address_of_host = address_of_host
        self._resolved: dict[str, str] = {}
        self._interval_s = interval_s
        self._hosts = self._find()
        self._failure: str | None = None
        self._post: Callable[[HostsObserved], None]
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, post: Callable[[HostsObserved], None]) -> None:
        """Call `post` with the first answer, then from the manager's thread with each answer that differs."""
        self._post = post
        post(HostsObserved(self._hosts))
        self._thread = threading.Thread(target=self._run, name="spark_elastic hosts", daemon=True)
        self._thread.start()

    def close(self, deadline_s: float = 5.0) -> None:
        """Stop polling, and interrupt a call that is running. May be called again."""
        self._stopping.set()
        if self._thread is None or self._thread is threading.current_thread():
            return
        interrupt = getattr(self._discovery, "interrupt", None)
        until = clock.monotonic() + deadline_s
        while self._thread.is_alive() and clock.monotonic() < until:
            if interrupt is not None:
                interrupt()  # repeated, because the script may not have been started yet
            self._thread.join(0.05)

    def poll(self) -> bool:
        """Call the discovery once; report a change, and return True if there is one. Called by the manager's thread."""
        try:
            found = self._find()
        except Exception as error:
            if self._stopping.is_set():
                return False
            if str(error) != self._failure:
                log.warning("host discovery failed; keeping its last answer and asking again: %s", error)
            self._failure = str(error)
            return False
        if self._failure is not None:
            log.info("host discovery works again")
            self._failure = None
        if found == self._hosts or self._stopping.is_set():
            return False
        log.info("the hosts to use have changed: %s", hosts_in_words(found))
        self._hosts = found
        self._post(HostsObserved(found))
        return True

    def _find(self) -> dict[str, int]:
        """Call the discovery. Returns the slots of each address; those of two names of one address are added.

        A name that cannot be resolved at the moment keeps its last address, so a failing name server removes no host.
        """
        found = self._discovery.find_available_hosts_and_slots()
        valid = isinstance(found, Mapping) and all(isinstance(host, str) for host in found)
        if not valid or not all(isinstance(slots, int) and slots >= 0 for slots in found.values()):
            example = "such as {'h1': 2}"
            raise InvalidSettingsError(f"a host discovery must return the slots by host, {example}, not {found!r}")
        by_address: dict[str, int] = {}
        for host, slots in found.items():
            address = self._address_of_host(host)
            if is_address(address):
                self._resolved[host] = address
            else:
                address = self._resolved.get(host, address)
            by_address[address] = by_address.get(address, 0) + slots
        return {address: slots for address, slots in by_address.items() if slots}

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            self.poll()
