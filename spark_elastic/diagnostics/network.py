"""Check which machines reach each other, and on which interfaces, by real connections in both directions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spark_elastic.diagnostics.findings import OK, PROBLEM, WARNING, Finding, counted, first_of
from spark_elastic.diagnostics.probe import CONNECT_TIMEOUT_S, ProbeReport, try_connections
from spark_elastic.diagnostics.probe_server import ConnectedProbe, ProbeServer
from spark_elastic.wire.interfaces import is_loopback

MOST_TARGETS = 8
"""Other executors that each executor tries: the next ones in a ring, which are all where there are few."""
_PORTS = "open the ports above 1024 between them (security group, NetworkPolicy, iptables)"


@dataclass(frozen=True)
class Attempt:
    """An attempt to connect from one machine to an interface of another."""

    source: str
    target: str
    interface: str
    address: str
    ms: float = 0.0
    error: str = ""
    """Empty if the connection was made."""

    @property
    def named(self) -> str:
        return f"{self.interface} ({self.address})"


@dataclass(frozen=True)
class _Target:
    """An interface of a probe to connect to."""

    name: str
    interface: str
    address: str
    port: int
    identity: str

    @property
    def question(self) -> list[Any]:
        """As `probe.try_connections` takes it."""
        return [self.address, self.port, self.identity]


# --- connections ----------------------------------------------------------------------------------------


def connect_executors(server: ProbeServer, probes: Sequence[ConnectedProbe], timeout_s: float) -> list[Attempt]:
    """Have each executor connect to the interfaces of others; `probes` holds one of each executor."""
    wait_s = min(CONNECT_TIMEOUT_S, timeout_s)
    plans = {
        probe: [
            target
            for other in [*probes[index + 1 :], *probes[:index]][:MOST_TARGETS]
            for target in _targets(other, same_host=probe.machine == other.machine)
        ]
        for index, probe in enumerate(probes)
    }
    questions = {
        probe: ("connect", {"targets": [target.question for target in targets], "timeout_s": wait_s})
        for probe, targets in plans.items()
        if targets
    }
    answers = server.ask(questions, wait_s + 4.0)
    return [attempt for probe, answer in answers.items() for attempt in _attempts(probe.name, plans[probe], answer)]


def connect_from_driver(probes: Sequence[ConnectedProbe], same_host: bool, timeout_s: float) -> list[Attempt]:
    """Connect from the driver to the interfaces of each executor."""
    targets = [target for probe in probes for target in _targets(probe, same_host)]
    answer = try_connections([target.question for target in targets], min(CONNECT_TIMEOUT_S, timeout_s))
    return _attempts("the driver", targets, answer)


def _targets(probe: ConnectedProbe, same_host: bool) -> list[_Target]:
    report = probe.report
    found = dict(report["addresses"])
    outward = {name: address for name, address in found.items() if not is_loopback(address)}
    chosen = found if same_host else outward or found
    return [_Target(probe.name, name, address, report["port"], report["identity"]) for name, address in chosen.items()]


def _attempts(source: str, targets: Sequence[_Target], answer: Any) -> list[Attempt]:
    results = [{"error": str(answer)}] * len(targets) if isinstance(answer, Exception) else answer
    return [
        Attempt(source, target.name, target.interface, target.address, result.get("ms", 0.0), result.get("error", ""))
        for target, result in zip(targets, results, strict=True)
    ]


# --- findings -------------------------------------------------------------------------------------------


def judge_executors_to_driver(reports: Sequence[ProbeReport]) -> list[Finding]:
    """Judge the first attempt of each probe, including the probes that never reached the driver."""
    if not reports:
        return []
    facts = {f"{report['executor']}/{report['number']}": report["attempts"] for report in reports}
    failed = [report for report in reports if report["attempts"] and "error" in report["attempts"][0]]
    if not failed:
        slowest = max(attempt["ms"] for report in reports for attempt in report["attempts"] if "ms" in attempt)
        addresses = ", ".join(sorted({report["attempts"][0]["to"] for report in reports if report["attempts"]}))
        says = f"{counted(len(reports), 'task')} can reach the driver at {addresses} in at most {slowest:.0f} ms"
        return [Finding("executors → driver", OK, says, facts=facts)]
    one = failed[0]
    first = one["attempts"][0]
    says = f"executor {one['executor']} on {one['host']} does not reach the driver at {first['to']}: {first['error']}"
    reached = [attempt["to"] for attempt in one["attempts"] if "ms" in attempt]
    fix = "set spark.driver.host to an address of the driver that executors reach, or open the driver's ports to them"
    if reached:
        says += f"; it does at {reached[0]}"
        fix = f"set spark.driver.host={reached[0].rpartition(':')[0]}"
    return [Finding("executors → driver", PROBLEM, says, fix, facts)]


def judge_driver_to_executors(attempts: Sequence[Attempt]) -> Finding | None:
    """Name the executors that the driver reaches on no interface."""
    if not attempts:
        return None
    facts = {"tries": [vars(attempt) for attempt in attempts]}
    by_target = _by_target(attempts)
    unreached = [target for target, of in by_target.items() if all(attempt.error for attempt in of)]
    if not unreached:
        says = f"the driver reaches {counted(len(by_target), 'executor')}"
        return Finding("driver → executors", OK, says, facts=facts)
    one = by_target[unreached[0]][0]
    says = f"the driver reaches {first_of(unreached)} on no interface; {one.named}: {one.error}"
    fix = f"large task results are fetched that way by Spark itself; {_PORTS}"
    return Finding("driver → executors", WARNING, says, fix, facts)


def judge_between_executors(attempts: Sequence[Attempt]) -> list[Finding]:
    """Return a finding for each interface or pair that fails, or one finding that says that all work."""
    check = "executors ↔ executors"
    findings: list[Finding] = []
    facts = {"tries": [vars(attempt) for attempt in attempts]}
    pairs: dict[tuple[str, str], list[Attempt]] = {}
    for attempt in attempts:
        pairs.setdefault((attempt.source, attempt.target), []).append(attempt)
    cut = {pair: of for pair, of in pairs.items() if all(attempt.error for attempt in of)}
    for (source, target), of in list(cut.items())[:5]:
        errors = "; ".join(f"{attempt.named}: {attempt.error}" for attempt in of)
        says = f"{source} reaches {target} on no interface: {errors}"
        findings.append(Finding(check, PROBLEM, says, f"{_PORTS}, in both directions", facts))
    if len(cut) > 5:
        says = f"and {len(cut) - 5} more pairs of executors do not reach one another"
        findings.append(Finding(check, PROBLEM, says, _PORTS, facts))
    working = [attempt for attempt in attempts if not attempt.error]
    interfaces = sorted({attempt.interface for attempt in working})
    filtered = [attempt for attempt in attempts if attempt.error and (attempt.source, attempt.target) not in cut]
    for target, of in _by_target(filtered).items():
        reached = ", ".join(sorted({attempt.named for attempt in working if attempt.target == target}))
        errors = "; ".join(sorted({f"{attempt.named}: {attempt.error}" for attempt in of}))
        says = f"{target} is reached on {reached}, but not on {errors}"
        fix = f"nothing, the one that works is taken; nics={interfaces!r} spares the attempt"
        findings.append(Finding(check, WARNING, says, fix, facts))
    if attempts and not findings:
        slowest = max(attempt.ms for attempt in attempts)
        says = f"{len(pairs)} pairs reach each other on {', '.join(interfaces)}, in at most {slowest:.0f} ms"
        findings.append(Finding(check, OK, says, facts=facts))
    return findings


def _by_target(attempts: Sequence[Attempt]) -> dict[str, list[Attempt]]:
    found: dict[str, list[Attempt]] = {}
    for attempt in attempts:
        found.setdefault(attempt.target, []).append(attempt)
    return found
