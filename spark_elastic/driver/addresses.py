"""AddressBook: chooses the address at which each worker's collectives listen, among its host's interfaces."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spark_elastic.errors import PortsTakenError, UnknownInterfaceError
from spark_elastic.membership.topology import AgentId
from spark_elastic.wire.interfaces import is_ipv6, is_loopback
from spark_elastic.wire.messages import AgentHello
from spark_elastic.wire.ports import split_port, with_port

PROBES_PER_NEWCOMER = 3  # agents on other hosts with which a new agent tries connections, at most


@dataclass(frozen=True)
class _AgentAddresses:
    host: str
    channel_address: str  # its address on the connection to the driver
    candidates: tuple[str, ...]  # addresses that the agent's workers may use, best first
    probe_port: int  # the port at which the agent answers probes; 0 if it does not


class AddressBook:
    """The agents' addresses, on the interfaces `nics` or on all, and which of them other agents could connect to."""

    def __init__(self, nics: Sequence[str] | None = None) -> None:
        self._nics = tuple(nics) if nics else None
        self._agents: dict[AgentId, _AgentAddresses] = {}
        self._reached: set[str] = set()  # addresses to which another agent could connect
        self._unreached: set[str] = set()  # addresses to which another agent could not connect
        self._tried: set[str] = set()  # since `probe_again`: what was found before counts until they are

    def joined(self, agent: AgentId, hello: AgentHello, channel_address: str) -> None:
        """Add an agent. Its address on the connection to the driver is preferred, because it is known to work.

        Raises:
            UnknownInterfaceError: Its host has none of the interfaces in `nics`.
            PortsTakenError: It found no free port among those of `agent_ports`.
        """
        if hello.ports_taken:
            raise PortsTakenError(hello.ports_taken, setting="agent_ports", host=hello.place.host)
        self._set(agent, hello.place.host, hello.addresses, hello.probe_port, channel_address)

    def changed(self, agent: AgentId, addresses: dict[str, tuple[str, ...]], probe_port: int) -> None:
        """Replace the addresses of an agent, whose host has other interfaces now.

        If the host has none of the interfaces in `nics` any more, UnknownInterfaceError is raised and nothing replaced.
        """
        known = self._agents[agent]
        self._set(agent, known.host, addresses, probe_port, known.channel_address)
        others = set(known.candidates).symmetric_difference(self._agents[agent].candidates)
        self._reached -= others
        self._unreached -= others

    def _set(
        self, agent: AgentId, host: str, addresses: dict[str, tuple[str, ...]], probe_port: int, channel_address: str
    ) -> None:
        allowed = check_interfaces(host, addresses, self._nics)
        found = [address for each in allowed.values() for address in each]
        candidates = sorted(found, key=lambda a: (a != channel_address, is_loopback(a), is_ipv6(a), a))
        self._agents[agent] = _AgentAddresses(host, channel_address, tuple(dict.fromkeys(candidates)), probe_port)

    def __contains__(self, agent: AgentId) -> bool:
        return agent in self._agents

    def has(self, agent: AgentId, address: str) -> bool:
        """Return True if the agent's host has the address, and collectives may use it."""
        return address in self._agents[agent].candidates

    def remove(self, agent: AgentId) -> None:
        self._agents.pop(agent, None)

    def probes_for(self, agent: AgentId) -> list[tuple[AgentId, tuple[str, ...]]]:
        """Return the agents that have to test connections for a new agent, each with its "address:port"s.

        The new agent tries some agents of other hosts, and one of them tries the new agent.
        """
        others = self._first_elsewhere(agent, self._agents)
        if not others:
            return []
        asked = [
            (agent, tuple(target for other in others for target in self._targets(other, agent))),
            (others[0], self._targets(agent, others[0])),
        ]
        return [(prober, targets) for prober, targets in asked if targets]

    def probe_again(self) -> list[tuple[AgentId, tuple[str, ...]]]:
        """Return the connections to test because worlds break, as `probes_for` does.

        Each agent tries those on other hosts that come next in a ring, so that none gets many connections at once.
        """
        self._tried.clear()
        asked: list[tuple[AgentId, tuple[str, ...]]] = []
        ring = list(self._agents)
        for index, agent in enumerate(ring):
            nearest = self._first_elsewhere(agent, itertools.chain(ring[index + 1 :], ring[:index]))
            if targets := tuple(target for other in nearest for target in self._targets(other, agent)):
                asked.append((agent, targets))
        return asked

    def _first_elsewhere(self, agent: AgentId, among: Iterable[AgentId]) -> list[AgentId]:
        """Return the first of these agents that are on other hosts, `PROBES_PER_NEWCOMER` at most."""
        host = self._agents[agent].host
        elsewhere = (other for other in among if self._agents[other].host != host)
        return list(itertools.islice(elsewhere, PROBES_PER_NEWCOMER))

    def answered(self, tried: Iterable[str], reachable: Iterable[str]) -> None:
        """Record which targets an agent has tried, and to which of them it could connect."""
        reached = {split_port(target)[0] for target in reachable}
        addresses = {split_port(target)[0] for target in tried} | reached
        outdated = addresses - self._tried
        self._reached -= outdated  # in place: every agent answers, and the sets have the addresses of all
        self._reached |= reached
        self._unreached -= outdated
        self._unreached |= addresses - reached
        self._tried |= addresses

    def choose(self, agents: Sequence[AgentId]) -> dict[AgentId, str]:
        """Return one address for each agent of a world.

        All get IPv4 addresses or all get IPv6 addresses where that is possible: the protocol that most of them prefer.
        A loopback address is chosen only if all agents are on one host, or if a host has no other.
        """
        known = [self._agents[agent] for agent in agents]
        one_host = len({each.host for each in known}) <= 1
        best = [self._best_first(each, one_host)[0] for each in known]
        mostly_ipv6 = sum(map(is_ipv6, best)) > len(best) / 2
        for ipv6 in (mostly_ipv6, not mostly_ipv6):
            same = [self._best_first(each, one_host, ipv6) for each in known]
            if all(same):
                best = [addresses[0] for addresses in same]
                break
        return dict(zip(agents, best, strict=True))

    def _best_first(self, known: _AgentAddresses, one_host: bool, ipv6: bool | None = None) -> list[str]:
        """Return the addresses of an agent, the best first: all, or those of one protocol that are likely to work."""
        if one_host:
            return [a for a in known.candidates if ipv6 in (None, is_ipv6(a))]
        usable = [a for a in known.candidates if a not in self._unreached]
        if ipv6 is None:
            usable = usable or list(known.candidates)
        else:
            usable = [a for a in usable if is_ipv6(a) == ipv6 and not is_loopback(a)]
        return sorted(usable, key=lambda a: a not in self._reached)

    def _targets(self, agent: AgentId, prober: AgentId) -> tuple[str, ...]:
        """Return the targets at which the prober tries to reach the agent.

        Addresses that the prober's host has too (loopback, a container bridge) are left out: others may answer there.
        """
        known, own = self._agents[agent], self._agents[prober].candidates
        if not known.probe_port:
            return ()
        return tuple(with_port(address, known.probe_port) for address in known.candidates if address not in own)


def check_interfaces(
    host: str, addresses: dict[str, tuple[str, ...]], nics: Sequence[str] | None
) -> dict[str, tuple[str, ...]]:
    """Return a host's addresses on `nics` (None: all), by interface; UnknownInterfaceError if it has none."""
    if not addresses:
        problem = f"host {host} has no interface that is up and has an IPv4 address or a global IPv6 address"
        raise UnknownInterfaceError(problem, host=host, nics=())
    if nics is None:
        return addresses
    allowed = {name: own for name, own in addresses.items() if name in nics}
    if not allowed:
        problem = f"host {host} has no interface {' or '.join(map(repr, nics))} that is up"
        found = ", ".join(f"{name} ({', '.join(own)})" for name, own in sorted(addresses.items()))
        raise UnknownInterfaceError(f"{problem}; it has {found}", host=host, nics=tuple(nics))
    return allowed
