"""Which address each worker's collectives use: the interfaces that the agents have, and which reach one another."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spark_elastic.errors import UnknownInterfaceError
from spark_elastic.membership.topology import AgentId
from spark_elastic.wire.messages import AgentHello

PROBES_PER_NEWCOMER = 3
"""Agents on other hosts that a newcomer is checked against; one bad route shows with any of them."""


@dataclass(frozen=True)
class _Known:
    host: str
    candidates: tuple[str, ...]
    """Addresses it may use, best first."""
    probe_port: int


class AddressBook:
    """Addresses of the agents, best first, minus those that an actual connection attempt did not reach."""

    def __init__(self, nics: Sequence[str] | None = None) -> None:
        self._nics = tuple(nics) if nics else None
        self._agents: dict[AgentId, _Known] = {}
        self._reached: set[str] = set()
        self._unreached: set[str] = set()
        self._asked: dict[AgentId, tuple[str, ...]] = {}

    def joined(self, agent: AgentId, hello: AgentHello, channel_address: str) -> None:
        """Note an agent's interfaces.

        Args:
            channel_address: the address by which its connection came in; tried first, since it provably works.
        Raises:
            UnknownInterfaceError: none of `nics` exists there.
        """
        allowed = check_interfaces(hello.place.host, hello.addresses, self._nics)
        candidates = sorted(allowed.values(), key=lambda a: (a != channel_address, _is_loopback(a), a))
        self._agents[agent] = _Known(hello.place.host, tuple(dict.fromkeys(candidates)), hello.probe_port)

    def gone(self, agent: AgentId) -> None:
        self._agents.pop(agent, None)
        self._asked.pop(agent, None)

    def probes_for(self, agent: AgentId) -> list[tuple[AgentId, tuple[str, ...]]]:
        """Who should try which "address:port" now that `agent` is here: it some others, one other it."""
        mine = self._agents[agent]
        others = [a for a, known in self._agents.items() if a != agent and known.host != mine.host]
        others = others[:PROBES_PER_NEWCOMER]
        if not others:
            return []
        asked = [(agent, tuple(t for other in others for t in self._targets(other))), (others[0], self._targets(agent))]
        asked = [(prober, targets) for prober, targets in asked if targets]
        for prober, targets in asked:
            self._asked[prober] = self._asked.get(prober, ()) + targets
        return asked

    def answered(self, prober: AgentId, reachable: Iterable[str]) -> None:
        """An agent's answer to everything it was asked so far and has not answered."""
        reached = {target.rpartition(":")[0] for target in reachable}
        asked = {target.rpartition(":")[0] for target in self._asked.pop(prober, ())}
        self._reached |= reached
        self._unreached |= asked - reached

    def choose(self, agents: Sequence[AgentId]) -> dict[AgentId, str]:
        """One address for each agent of a world.

        Loopback only if all are on one host, or where it is all a host has.
        """
        one_host = len({self._agents[agent].host for agent in agents}) <= 1
        return {agent: self._best(self._agents[agent], one_host) for agent in agents}

    def _best(self, known: _Known, one_host: bool) -> str:
        if one_host:
            return known.candidates[0]
        usable = [a for a in known.candidates if a not in self._unreached] or list(known.candidates)
        return min(usable, key=lambda a: (a not in self._reached, usable.index(a)))

    def _targets(self, agent: AgentId) -> tuple[str, ...]:
        known = self._agents[agent]
        return tuple(f"{address}:{known.probe_port}" for address in known.candidates) if known.probe_port else ()


def check_interfaces(host: str, addresses: dict[str, str], nics: Sequence[str] | None) -> dict[str, str]:
    """The addresses that may carry collectives, by interface.

    Raises:
        UnknownInterfaceError: none of `nics` exists there; says which do. Or the host has no IPv4 address at all.
    """
    if not addresses:
        raise UnknownInterfaceError(
            f"host {host} has no interface with an IPv4 address; spark_elastic needs IPv4", host=host, nics=()
        )
    if nics is None:
        return addresses
    allowed = {name: address for name, address in addresses.items() if name in nics}
    if not allowed:
        raise UnknownInterfaceError(
            f"host {host} has no interface {' or '.join(map(repr, nics))} that is up; "
            f"it has {', '.join(f'{n} ({a})' for n, a in sorted(addresses.items()))}",
            host=host,
            nics=tuple(nics),
        )
    return allowed


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
