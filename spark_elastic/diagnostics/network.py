"""Which machines reach which, and on which interface: real connections, tried both ways."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spark_elastic.diagnostics.conversation import Conversation, Probe
from spark_elastic.diagnostics.findings import OK, PROBLEM, WARNING, Finding, counted
from spark_elastic.diagnostics.probe import CONNECT_TIMEOUT_S, connect

MOST_TARGETS = 8
"""Other executors that each one tries: all where there are few, its next ones in a ring where there are many."""
_PORTS = "open the ports above 1024 between them (security group, NetworkPolicy, iptables)"

Look = Mapping[str, Any]


@dataclass(frozen=True)
class Try:
    """A connection that was tried. source, target: what people call the two. error: empty if it worked."""

    source: str
    target: str
    interface: str
    address: str
    ms: float = 0.0
    error: str = ""

    @property
    def named(self) -> str:
        return f"{self.interface} ({self.address})"


# --- trying ---------------------------------------------------------------------------------------------


def try_between(conversation: Conversation, probes: Sequence[Probe], timeout_s: float) -> list[Try]:
    """Each executor tries the interfaces of others. probes: one of each executor."""
    wait_s = min(CONNECT_TIMEOUT_S, timeout_s)
    plans = {probe: _doors(probe, _others(probe, probes)) for probe in probes}
    questions = {
        probe: ("connect", {"targets": [door[2:] for door in doors], "timeout_s": wait_s})
        for probe, doors in plans.items()
        if doors
    }
    tries = []
    for probe, answer in conversation.ask(questions, wait_s + 4.0).items():
        tries += _tries(probe.name, plans[probe], answer)
    return tries


def try_from_driver(probes: Sequence[Probe], local: bool, timeout_s: float) -> list[Try]:
    """local: whether the executors run on the driver's machine."""
    doors = [door for probe in probes for door in _addresses(probe, same_host=local)]
    answer = connect([list(door[2:]) for door in doors], min(CONNECT_TIMEOUT_S, timeout_s))
    return _tries("the driver", doors, answer)


def _others(probe: Probe, probes: Sequence[Probe]) -> list[Probe]:
    at = probes.index(probe)
    around = [*probes[at + 1 :], *probes[:at]]
    return around[:MOST_TARGETS]


_Door = tuple[str, str, str, int, str]
"""Name of the target, interface, address, port, identity."""


def _doors(probe: Probe, others: Sequence[Probe]) -> list[_Door]:
    here = probe.report["hostname"], probe.report["host"]
    return [
        door
        for other in others
        for door in _addresses(other, same_host=here == (other.report["hostname"], other.report["host"]))
    ]


def _addresses(probe: Probe, same_host: bool) -> list[_Door]:
    report = probe.report
    found = dict(report["addresses"])
    outward = {name: address for name, address in found.items() if not ipaddress.ip_address(address).is_loopback}
    chosen = found if same_host else outward or found
    return [(probe.name, name, address, report["port"], report["identity"]) for name, address in chosen.items()]


def _tries(source: str, doors: Sequence[_Door], answer: Any) -> list[Try]:
    results = [{"error": str(answer)}] * len(doors) if isinstance(answer, Exception) else answer
    return [
        Try(source, door[0], door[1], door[2], result.get("ms", 0.0), result.get("error", ""))
        for door, result in zip(doors, results, strict=True)
    ]


# --- judging --------------------------------------------------------------------------------------------


def reached_driver(looks: Sequence[Look]) -> list[Finding]:
    """looks: of all probes, those that could not reach the driver included."""
    first = {look["attempts"][0]["to"] for look in looks if look["attempts"]}
    failed = [look for look in looks if look["attempts"] and "error" in look["attempts"][0]]
    facts = {f"{look['executor']}/{look['number']}": look["attempts"] for look in looks}
    if not looks:
        return []
    if not failed:
        slowest = max(attempt["ms"] for look in looks for attempt in look["attempts"] if "ms" in attempt)
        where = ", ".join(sorted(first))
        says = f"{counted(len(looks), 'task')} can reach the driver at {where} in at most {slowest:.0f} ms"
        return [Finding("executors → driver", OK, says, facts=facts)]
    look = failed[0]
    tried = look["attempts"][0]
    says = f"executor {look['executor']} on {look['host']} does not reach the driver at {tried['to']}: {tried['error']}"
    worked = [attempt["to"] for attempt in look["attempts"] if "ms" in attempt]
    fix = "set spark.driver.host to an address of the driver that executors reach, or open the driver's ports to them"
    if worked:
        says += f"; it does at {worked[0]}"
        fix = f"set spark.driver.host={worked[0].rpartition(':')[0]}"
    return [Finding("executors → driver", PROBLEM, says, fix, facts)]


def reached_from_driver(tries: Sequence[Try]) -> Finding | None:
    if not tries:
        return None
    facts = {"tries": [vars(one) for one in tries]}
    cut = [target for target, of in _by_target(tries).items() if all(one.error for one in of)]
    if not cut:
        targets = len({one.target for one in tries})
        return Finding("driver → executors", OK, f"the driver reaches {counted(targets, 'executor')}", facts=facts)
    one = next(one for one in tries if one.target == cut[0])
    says = f"the driver reaches {_some(cut)} on no interface; {one.named}: {one.error}"
    fix = f"large task results are fetched that way by Spark itself; {_PORTS}"
    return Finding("driver → executors", WARNING, says, fix, facts)


def reached_each_other(tries: Sequence[Try]) -> list[Finding]:
    """One finding for each interface or pair that does not work, or one that says that all do."""
    findings: list[Finding] = []
    facts = {"tries": [vars(one) for one in tries]}
    pairs: dict[tuple[str, str], list[Try]] = {}
    for one in tries:
        pairs.setdefault((one.source, one.target), []).append(one)
    cut = {pair: of for pair, of in pairs.items() if all(one.error for one in of)}
    for (source, target), of in list(cut.items())[:5]:
        said = "; ".join(f"{one.named}: {one.error}" for one in of)
        says = f"{source} reaches {target} on no interface: {said}"
        findings.append(Finding("executors ↔ executors", PROBLEM, says, f"{_PORTS}, in both directions", facts))
    if len(cut) > 5:
        says = f"and {len(cut) - 5} more pairs of executors do not reach one another"
        findings.append(Finding("executors ↔ executors", PROBLEM, says, _PORTS, facts))
    filtered = _filtered(tries, cut)
    worked = sorted({one.interface for one in tries if not one.error})
    for target, of in filtered.items():
        also = ", ".join(sorted({one.named for one in tries if one.target == target and not one.error}))
        said = "; ".join(sorted({f"{one.named}: {one.error}" for one in of}))
        says = f"{target} is reached on {also}, but not on {said}"
        fix = f"nothing, the one that works is taken; nics={worked!r} spares the attempt"
        findings.append(Finding("executors ↔ executors", WARNING, says, fix, facts))
    if tries and not findings:
        slowest = max(one.ms for one in tries)
        says = f"{len(pairs)} pairs reach each other on {', '.join(worked)}, in at most {slowest:.0f} ms"
        findings.append(Finding("executors ↔ executors", OK, says, facts=facts))
    return findings


def _filtered(tries: Sequence[Try], cut: Mapping[tuple[str, str], Any]) -> dict[str, list[Try]]:
    """By target, the connections that failed between two that reach each other otherwise."""
    return _by_target([one for one in tries if one.error and (one.source, one.target) not in cut])


def _by_target(tries: Sequence[Try]) -> dict[str, list[Try]]:
    found: dict[str, list[Try]] = {}
    for one in tries:
        found.setdefault(one.target, []).append(one)
    return found


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
