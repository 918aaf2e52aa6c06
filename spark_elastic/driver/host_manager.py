"""Keeps what a host discovery says current, and reports it when it changes."""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Callable, Mapping

from spark_elastic.core.events import HostsObserved
from spark_elastic.driver.host_discovery import HostDiscovery, HostDiscoveryScript

log = logging.getLogger(__name__)


class HostUpdate(enum.Flag):
    """How one answer of a discovery differs from the one before."""

    NONE = 0
    ADDED = 1
    """A host came, or one has more slots."""
    REMOVED = 2
    """A host went, or one has fewer slots."""
    MIXED = 3


def in_stable_order(before: Mapping[str, int], found: Mapping[str, int]) -> dict[str, int]:
    """`found` with the hosts that were there before in their old order, newcomers behind them."""
    kept = {host: found[host] for host in before if host in found}
    return {**kept, **{host: slots for host, slots in found.items() if host not in kept}}


def difference(before: Mapping[str, int], after: Mapping[str, int]) -> HostUpdate:
    update = HostUpdate.NONE
    for host in {*before, *after}:
        if after.get(host, 0) > before.get(host, 0):
            update |= HostUpdate.ADDED
        elif after.get(host, 0) < before.get(host, 0):
            update |= HostUpdate.REMOVED
    return update


class HostManager:
    """Polls a discovery on its own thread, so that a slow script delays nobody.

    The first answer is taken in the constructor: a discovery that cannot work fails the call of `run`. Later failures
    are logged when they begin and change nothing; the last good answer stands.

    Args:
        on_observed: called with the first answer from the constructor, then from the manager's thread, each time the
            answer differs from the one before.

    Raises:
        DiscoveryScriptError: the first answer could not be had.
    """

    def __init__(
        self, discovery: HostDiscovery, on_observed: Callable[[HostsObserved], None], *, interval_s: float = 1.0
    ) -> None:
        self._discovery = discovery
        self._on_observed = on_observed
        self._interval_s = interval_s
        self._hosts: dict[str, int] = dict(discovery.find_available_hosts_and_slots())
        self._failure: str | None = None
        self._stopping = threading.Event()
        on_observed(HostsObserved(dict(self._hosts)))
        self._thread = threading.Thread(target=self._run, name="spark_elastic hosts", daemon=True)
        self._thread.start()

    def current_hosts(self) -> dict[str, int]:
        """The last good answer: slots by host, in an order that survivors keep."""
        return dict(self._hosts)

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
            found = self._discovery.find_available_hosts_and_slots()
        except Exception as error:
            if self._stopping.is_set():
                return HostUpdate.NONE
            if str(error) != self._failure:
                log.warning("host discovery failed; keeping its last answer and asking again: %s", error)
            self._failure = str(error)
            return HostUpdate.NONE
        if self._failure is not None:
            log.info("host discovery works again")
            self._failure = None
        after = in_stable_order(self._hosts, found)
        update = difference(self._hosts, after)
        if update and not self._stopping.is_set():
            log.info(
                "hosts %s: %s", update.name, ", ".join(f"{host}:{slots}" for host, slots in after.items()) or "none"
            )
            self._hosts = after
            self._on_observed(HostsObserved(dict(after)))
        return update

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            self.poll()
