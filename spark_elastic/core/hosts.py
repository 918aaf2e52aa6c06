"""The set of hosts that may be used, in the order in which they were first seen."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class HostUpdate(enum.IntFlag):
    """What an observation changed. MIXED is ADDED and REMOVED at once."""

    NO_UPDATE = 0
    REMOVED = 1
    ADDED = 2
    MIXED = 3


@dataclass(frozen=True, slots=True)
class HostSet:
    """Hosts with their slots. The order is kept over updates, so that rank 0 stays where it is."""

    slots: tuple[tuple[str, int], ...] = ()

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(host for host, _ in self.slots)

    @property
    def total(self) -> int:
        return sum(count for _, count in self.slots)

    def __str__(self) -> str:
        shown = [f"{host}:{count}" for host, count in self.slots[:8]]
        return ", ".join(shown + (["..."] if len(self.slots) > 8 else [])) or "none"

    def __contains__(self, host: str) -> bool:
        return any(name == host for name, _ in self.slots)

    def slots_of(self, host: str) -> int:
        """Slots of the host; 0 if it is not in the set."""
        return next((count for name, count in self.slots if name == host), 0)

    def updated(self, observed: Mapping[str, int]) -> tuple[HostSet, HostUpdate]:
        """The set after an observation, and what it changed. Hosts with 0 slots count as absent.

        Known hosts stay in their order, new ones follow in the order of `observed`.

        Raises: ValueError: if a number of slots is negative.
        """
        for host, count in observed.items():
            if count < 0:
                raise ValueError(f"host {host} was observed with {count} slots")
        kept = [(host, observed[host]) for host in self.hosts if observed.get(host, 0) > 0]
        new = [(host, count) for host, count in observed.items() if count > 0 and host not in self]
        result = HostUpdate.NO_UPDATE
        for host, before in self.slots:
            after = observed.get(host, 0)
            if after < before:
                result |= HostUpdate.REMOVED
            if after > before:
                result |= HostUpdate.ADDED
        if new:
            result |= HostUpdate.ADDED
        return HostSet((*kept, *new)), result
