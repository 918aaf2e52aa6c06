"""AddressBook: chooses the address at which each worker's collectives listen, among its host's interfaces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spark_elastic.errors import UnknownInterfaceError
from spark_elastic.membership.topology import AgentId
from spark_elastic.wire.interfaces import is_loopback
from spark_elastic.wire.messages import AgentHello

PROBES_PER_NEWCOMER = 3
"""The most agents on other hosts with which a new agent tries connections. A bad route shows with any of them."""


@dataclass(frozen=True)
class _AgentAddresses:
    host: str
    candidates: tuple[str, ...]
    """Addresses that the agent's workers may use, best first."""
    probe_port: int
    """The port at which the agent answers probes; 0 if it does not."""


class AddressBook:
    """The addresses of the agents, and which of them other agents could connect to.

    Args:
        nics: Names of the interfaces that may be used. Default: all.
    """

    def __init__(self, nics: Sequence[str] | None = None) -> None:
        self._nics = tuple(nics) if nics else None
        self._agents: dict[AgentId, _AgentAddresses] = {}
        self._reached: set[str] = set()
        """Addresses to which another agent could connect."""
        self._unreached: set[str] = set()
        """Addresses to which another agent could not connect."""
        self._asked: dict[AgentId, tuple[str, ...]] = {}
        """Targets ("address:port") that each agent was asked to try and has not answered."""

    def joined(self, agent: AgentId, hello: AgentHello, channel_address: str) -> None:
        """Add an agent. Its address on the connection to the driver is preferred, because it is known to work.

        Raises:
            UnknownInterfaceError: Its host has none of the interfaces in `nics`.
        """
        allowed = check_interfaces(hello.place.host, hello.addresses, self._nics)
        candidates = sorted(allowed.values(), key=lambda a: (a != channel_address, is_loopback(a), a))
        self._agents[agent] = _AgentAddresses(hello.place.host, tuple(dict.fromkeys(candidates)), hello.probe_port)

    def gone(self, agent: AgentId) -> None:
        self._agents.pop(agent, None)
        self._asked.pop(agent, None)

    def probes_for(self, agent: AgentId) -> list[tuple[AgentId, tuple[str, ...]]]:
        """Return the agents that have to try connections for a new agent, each with its targets ("address:port").

        The new agent tries some agents of other hosts, and one of them tries the new agent.
        """
        mine = self._agents[agent]
        others = [other for other, known in self._agents.items() if known.host != mine.host][:PROBES_PER_NEWCOMER]
        if not others:
            return []
        asked = [(agent, tuple(t for other in others for t in self._targets(other))), (others[0], self._targets(agent))]
        asked = [(prober, targets) for prober, targets in asked if targets]
        for prober, targets in asked:
            self._asked[prober] = self._asked.get(prober, ()) + targets
        return asked

    def answered(self, prober: AgentId, reachable: Iterable[str]) -> None:
        """Record the targets to which an agent could connect, of those that it was asked to try."""
        reached = {target.rpartition(":")[0] for target in reachable}
        asked = {target.rpartition(":")[0] for target in self._asked.pop(prober, ())}
        self._reached |= reached
        self._unreached |= asked - reached

    def choose(self, agents: Sequence[AgentId]) -> dict[AgentId, str]:
        """Return one address for each agent of a world.

        A loopback address is chosen only if all agents are on one host, or if a host has no other.
        """
        one_host = len({self._agents[agent].host for agent in agents}) <= 1
        return {agent: self._best(self._agents[agent], one_host) for agent in agents}

    def _best(self, known: _AgentAddresses, one_host: bool) -> str:
        if one_host:
            return known.candidates[0]
        usable = [a for a in known.candidates if a not in self._unreached] or list(known.candidates)
        return min(usable, key=lambda a: (a not in self._reached, usable.index(a)))

    def _targets(self, agent: AgentId) -> tuple[str, ...]:
        known = self._agents[agent]
        return tuple(f"{address}:{known.probe_port}" for address in known.candidates) if known.probe_port else ()


def check_interfaces(host: str, addresses: dict[str, str], nics: Sequence[str] | None) -> dict[str, str]:
    """Return the addresses of a host that collectives may use, by the name of their interface.

    Args:
        host: The host, for the error.
        addresses: The addresses of all its interfaces, by name.
        nics: Names of the interfaces that may be used. None: all.

    Raises:
        UnknownInterfaceError: The host has none of `nics`, or no IPv4 address at all.
    """
    if not addresses:
        problem = f"host {host} has no interface with an IPv4 address; spark_elastic needs IPv4"
        raise UnknownInterfaceError(problem, host=host, nics=())
    if nics is None:
        return addresses
    allowed = {name: address for name, address in addresses.items() if name in nics}
    if not allowed:
        problem = f"host {host} has no interface {' or '.join(map(repr, nics))} that is up"
        found = ", ".join(f"{name} ({address})" for name, address in sorted(addresses.items()))
        raise UnknownInterfaceError(f"{problem}; it has {found}", host=host, nics=tuple(nics))
    return allowed
