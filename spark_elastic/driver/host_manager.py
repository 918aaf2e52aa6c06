"""Keeps what a host discovery says current, and reports it when it changes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from spark_elastic.core.events import HostsObserved
from spark_elastic.core.hosts import HostSet, HostUpdate
from spark_elastic.driver.host_discovery import HostDiscovery, HostDiscoveryScript
from spark_elastic.errors import InvalidSettingsError
from spark_elastic.wire.interfaces import address_of, is_address

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
