"""The checks that take two machines: connections, storage, clocks and, on the same host, shared memory.

Each `check_...` asks probes, and a `judge_...` makes findings of their answers. The storage check asks
probes that already run: `Store.check_shared` is a Spark job, which could not start while the probes occupy all slots,
and it needs the package on the executors.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from spark_elastic.diagnostics.findings import LITTLE_SPACE, OK, PROBLEM, WARNING, Finding, first_of
from spark_elastic.diagnostics.probe import ANSWERS, CONNECT_TIMEOUT_S, ProbeReport, try_connections
from spark_elastic.diagnostics.probe_server import ConnectedProbe, ProbeServer
from spark_elastic.membership.reasons import counted
from spark_elastic.redaction import redacted
from spark_elastic.wire.interfaces import is_loopback
from spark_elastic.wire.ports import Ports

DRIVER = "the driver"
MOST_TARGETS = 8
"""The most executors to which each executor connects: those that follow it in a ring of all executors."""
SKEW_WARNING_S = 1.0
SKEW_PROBLEM_S = 60.0
_CLOCK_ROUNDS = 5
_MOST_FILES = 8
"""The most files of others that each executor reads."""
_SYSTEMS_THAT_SHARE = ("Linux x86_64", "Linux aarch64")
"""See `collective.shared_memory.FUTEX_AVAILABLE`."""
_WALLS = "(security group, NetworkPolicy, iptables)"
_NARROWER = "net.ipv4.ip_local_port_range narrows that"


# --- connections ----------------------------------------------------------------------------------------


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


_Plan = list[tuple[Attempt, list[Any]]]
"""Attempts to make, each with its target as `probe.try_connections` takes it: address, port and identity."""


def check_executors(server: ProbeServer, probes: Sequence[ConnectedProbe], timeout_s: float) -> list[Finding]:
    """Have each executor connect to the interfaces of others; `probes` holds one of each executor.

    At first to a port of the system's choice, as Gloo's are, then to one of `agent_ports` if these are set.
    """
    found = judge_between_executors(_attempts(server, probes, "port", timeout_s), _ranges(probes))
    if any("agent_port" in probe.report for probe in probes):
        found += judge_agent_ports(_attempts(server, probes, "agent_port", timeout_s))
    return found


def judge_ports(reports: Sequence[ProbeReport], driver_port: Ports, agent_ports: Ports) -> Finding:
    """Say which ports have to be open, and report agents that find none free."""
    theirs = _ranges_of(reports)
    facts = {"driver_port": str(driver_port), "agent_ports": str(agent_ports), "ephemeral_ports": theirs}
    taken = [report for report in reports if report.get("agent_ports_error")]
    if taken:
        one = taken[0]
        says = f"executor {one['executor']} on {one['host']} cannot listen: {one['agent_ports_error']}"
        return Finding("ports", PROBLEM, says, "give agent_ports at least as many ports as a host has tasks", facts)
    to_driver = "any port" if driver_port.are_any else f"port {driver_port}"
    says = f"executors → driver: {to_driver}; executors ↔ executors: ports {theirs} (Gloo)"
    says += "" if agent_ports.are_any else f" and {agent_ports} (agents)"
    return Finding("ports", OK, says, facts=facts)


def _ranges_of(reports: Sequence[ProbeReport]) -> str:
    return ", ".join(sorted({str(report.get("ephemeral_ports", "unknown")) for report in reports})) or "unknown"


def _ranges(probes: Sequence[ConnectedProbe]) -> str:
    return _ranges_of([probe.report for probe in probes])


def _attempts(server: ProbeServer, probes: Sequence[ConnectedProbe], port: str, timeout_s: float) -> list[Attempt]:
    """Have each executor connect to a port of the others, by its name in the report."""
    wait_s = min(CONNECT_TIMEOUT_S, timeout_s)
    plans: dict[ConnectedProbe, _Plan] = {}
    for index, probe in enumerate(probes):
        others = [*probes[index + 1 :], *probes[:index]][:MOST_TARGETS]
        plans[probe] = [
            each
            for other in others
            if port in other.report
            for each in _plan(probe.name, other, probe.machine == other.machine, port)
        ]
    questions = {
        probe: ("connect", {"targets": [target for _, target in plan], "timeout_s": wait_s})
        for probe, plan in plans.items()
        if plan
    }
    answers = server.ask(questions, wait_s + 4.0)
    return [attempt for probe, answer in answers.items() for attempt in _made(plans[probe], answer)]


def check_from_driver(probes: Sequence[ConnectedProbe], same_host: bool, timeout_s: float) -> Finding | None:
    """Connect from the driver to the interfaces of each executor."""
    plan = [each for probe in probes for each in _plan(DRIVER, probe, same_host)]
    answer = try_connections([target for _, target in plan], min(CONNECT_TIMEOUT_S, timeout_s))
    return judge_driver_to_executors(_made(plan, answer), _ranges(probes))


def _plan(source: str, probe: ConnectedProbe, same_host: bool, port: str = "port") -> _Plan:
    report = probe.report
    found = [(name, address) for name, of in report["addresses"].items() for address in of]
    outward = [(name, address) for name, address in found if not is_loopback(address)]
    return [
        (Attempt(source, probe.name, name, address), [address, report[port], report["identity"]])
        for name, address in (found if same_host else outward or found)
    ]


def _made(plan: _Plan, answer: Any) -> list[Attempt]:
    """Return the attempts with their results; `answer` is one of `probe.try_connections`, or an exception."""
    results = [{"error": str(answer)}] * len(plan) if isinstance(answer, Exception) else answer
    return [replace(attempt, **result) for (attempt, _), result in zip(plan, results, strict=True)]


class Driver(Protocol):
    """How jobs choose the driver's address, and what to do where executors do not reach it."""

    tries_every_address: bool
    """True if jobs use any address that executors reach; False if they use the first one."""
    advice_on_address: str
    advice_on_one: str
    """What to do if another address was reached, with a place for it."""


def judge_executors_to_driver(reports: Sequence[ProbeReport], driver: Driver) -> list[Finding]:
    """Judge the attempts of each probe to reach the driver, including the probes that never did."""
    if not reports:
        return []
    facts = {f"{report['executor']}/{report['number']}": report["attempts"] for report in reports}
    found = functools.partial(Finding, "executors → driver", facts=facts)
    attempts = {id(report): report["attempts"] for report in reports if report["attempts"]}
    tries_all = driver.tries_every_address
    failed = [
        report
        for report in reports
        if (tried := attempts.get(id(report), []))
        and "error" in tried[0]
        and not (tries_all and any("ms" in attempt for attempt in tried))
    ]
    if not failed:
        slowest = max(attempt["ms"] for report in reports for attempt in report["attempts"] if "ms" in attempt)
        addresses = ", ".join(sorted({tried["to"] for each in attempts.values() for tried in each if "ms" in tried}))
        says = f"{counted(len(reports), 'task')} can reach the driver at {addresses} in at most {slowest:.0f} ms"
        return [found(OK, says)]
    one = failed[0]
    first = one["attempts"][0]
    says = f"executor {one['executor']} on {one['host']} does not reach the driver at {first['to']}: {first['error']}"
    reached = [attempt["to"] for attempt in one["attempts"] if "ms" in attempt]
    fix = f"{driver.advice_on_address} to them"
    if reached:
        says += f"; it does at {reached[0]}"
        fix = driver.advice_on_one.format(reached[0].rpartition(":")[0])
    elif len(one["attempts"]) > 1:
        says += f", nor at {first_of([attempt['to'] for attempt in one['attempts'][1:]], 8)}"
    return [found(PROBLEM, says, fix)]


def judge_driver_to_executors(attempts: Sequence[Attempt], ports: str) -> Finding | None:
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
    fix = f"large task results are fetched that way by Spark itself; open ports {ports} of the executors {_WALLS}"
    return Finding("driver → executors", WARNING, says, fix, facts)


def judge_between_executors(attempts: Sequence[Attempt], ports: str) -> list[Finding]:
    """Return a finding for each interface or pair that fails, or one finding that says that all work.

    Args:
        attempts: connections to a port of the system's choice.
        ports: the ranges that the systems choose from.
    """
    open_them = f"open TCP ports {ports} between the executors {_WALLS}: Gloo listens there; {_NARROWER}"
    findings: list[Finding] = []
    found = functools.partial(Finding, "executors ↔ executors", facts={"tries": [vars(each) for each in attempts]})
    pairs: dict[tuple[str, str], list[Attempt]] = {}
    for attempt in attempts:
        pairs.setdefault((attempt.source, attempt.target), []).append(attempt)
    cut = {pair: of for pair, of in pairs.items() if all(attempt.error for attempt in of)}
    for (source, target), of in list(cut.items())[:5]:
        errors = "; ".join(f"{attempt.named}: {attempt.error}" for attempt in of)
        says = f"{source} reaches {target} on no interface: {errors}"
        findings.append(found(PROBLEM, says, open_them))
    if len(cut) > 5:
        says = f"and {len(cut) - 5} more pairs of executors do not reach one another"
        findings.append(found(PROBLEM, says, open_them))
    working = [attempt for attempt in attempts if not attempt.error]
    interfaces = sorted({attempt.interface for attempt in working})
    filtered = [attempt for attempt in attempts if attempt.error and (attempt.source, attempt.target) not in cut]
    for target, of in _by_target(filtered).items():
        reached = ", ".join(sorted({attempt.named for attempt in working if attempt.target == target}))
        errors = "; ".join(sorted({f"{attempt.named}: {attempt.error}" for attempt in of}))
        says = f"{target} is reached on {reached}, but not on {errors}"
        fix = f"nothing, the one that works is taken; nics={interfaces!r} spares the attempt"
        findings.append(found(WARNING, says, fix))
    if attempts and not findings:
        slowest = max(attempt.ms for attempt in attempts)
        says = f"{len(pairs)} pairs reach each other on {', '.join(interfaces)}, in at most {slowest:.0f} ms"
        findings.append(found(OK, says))
    return findings


def judge_agent_ports(attempts: Sequence[Attempt]) -> list[Finding]:
    """Report the pairs of executors that do not reach each other on `agent_ports`."""
    pairs: dict[tuple[str, str], list[Attempt]] = {}
    for attempt in attempts:
        pairs.setdefault((attempt.source, attempt.target), []).append(attempt)
    cut = {pair: of for pair, of in pairs.items() if all(attempt.error for attempt in of)}
    facts = {"tries": [vars(each) for each in attempts]}
    for (source, target), of in list(cut.items())[:1]:
        more = f" (and {counted(len(cut) - 1, 'more pair')})" if len(cut) > 1 else ""
        says = f"{source} does not reach {target} at a port of agent_ports{more}: {of[0].named}: {of[0].error}"
        fix = f"open agent_ports between the executors {_WALLS}: without them, interfaces are chosen blindly"
        return [Finding("agent ports", WARNING, says, fix, facts)]
    return []


def _by_target(attempts: Sequence[Attempt]) -> dict[str, list[Attempt]]:
    found: dict[str, list[Attempt]] = {}
    for attempt in attempts:
        found.setdefault(attempt.target, []).append(attempt)
    return found


# --- storage --------------------------------------------------------------------------------------------


def check_storage(
    server: ProbeServer | None,
    probes: Sequence[ConnectedProbe],
    url: str,
    options: Mapping[str, Any] | None,
    timeout_s: float,
) -> list[Finding]:
    """Have the driver and every probe write a file and read the files of the others; delete the files afterwards.

    Args:
        server: the server of the probes; None if there are none and the driver alone is checked.
        probes: one of each executor.
        url: the store, or a plain folder.
        options: for the store.
        timeout_s: seconds for all of it.
    """
    folder = f"spark-elastic-doctor-{uuid.uuid4().hex[:12]}"
    text = uuid.uuid4().hex
    where: dict[str, Any] = {"url": url, "options": dict(options) if options else None}
    files = {DRIVER: f"{folder}/driver"} | {probe.name: f"{folder}/{probe.number}" for probe in probes}

    def everywhere(name: str, arguments: Mapping[str, dict[str, Any]], wait_s: float) -> dict[str, Any]:
        """Put a question to the driver and the probes; return their answers, or exceptions in place of answers."""
        answers: dict[str, Any] = {}
        try:
            answers[DRIVER] = ANSWERS[name](**where, **arguments[DRIVER])
        except Exception as error:
            answers[DRIVER] = error
        if server is not None:
            questions = {probe: (name, {**where, **arguments[probe.name]}) for probe in probes}
            answers |= {probe.name: answer for probe, answer in server.ask(questions, wait_s).items()}
        return answers

    try:
        to_write = {place: {"name": file, "text": text} for place, file in files.items()}
        written = everywhere("write", to_write, timeout_s / 2)
        there = [file for place, file in files.items() if not isinstance(written[place], Exception)]
        to_read = {}
        for index, (place, own) in enumerate(files.items()):
            ring = [*there[index:], *there[:index]]
            names = [file for file in ring if file != own or place == DRIVER]
            to_read[place] = {"names": names[:_MOST_FILES], "text": text}
        seen = everywhere("read", to_read, timeout_s / 2)
    finally:
        everywhere("remove", {place: {"folder": folder} for place in files}, 2.0)
    return judge_storage(redacted(url), written, seen, {file: place for place, file in files.items()})


def judge_storage(
    url: str, written: Mapping[str, Any], seen: Mapping[str, Any], writers: Mapping[str, str]
) -> list[Finding]:
    """Judge what the driver and the executors could write and read.

    Args:
        url: the store.
        written: by executor, the answer of `probe.write_file` or an exception.
        seen: by executor, the answer of `probe.read_files` or an exception.
        writers: the executor that wrote each file.
    """
    facts: dict[str, Any] = {"store": url}
    for phase, answers in (("written", written), ("seen", seen)):
        facts[phase] = {name: redacted(each) if isinstance(each, Exception) else each for name, each in answers.items()}
    found = functools.partial(Finding, "storage", facts=facts)
    refused = {name: answer for name, answer in written.items() if isinstance(answer, Exception)}
    if refused:
        name, error = next(iter(refused.items()))
        says = f"{url} cannot be written from {len(refused)} of {len(written)} places; {name}: {error}"
        fix = "give the user of the executors the right to write there, or name another store"
        return [found(PROBLEM, says, fix)]
    for name, answer in seen.items():
        if isinstance(answer, Exception):
            says = f"{url} cannot be read from {name}: {answer}"
            return [found(PROBLEM, says, "check what the lines above say of that place")]
        for file, problem in answer["missing"].items():
            says = f"{name} does not see in {url} what {writers[file]} has written: {problem}"
            fix = "name a store that all machines share: a mounted folder, s3://, gs://, abfss://, hdfs://, dbfs:"
            return [found(PROBLEM, says, fix)]
    free = [answer["free"] for answer in written.values() if answer["free"] is not None]
    slowest = max(answer["ms"] for answer in written.values())
    says = (
        f"{url} is written from {len(written)} places in at most {slowest:.0f} ms each, and all see the others' files"
    )
    if free and min(free) < LITTLE_SPACE:
        says += f"; only {min(free) / 2**20:.0f} MiB are free"
        return [found(WARNING, says, "free some, or name a store with more room")]
    says += f"; {min(free) / 2**30:.1f} GiB free" if free else ""
    return [found(OK, says)]


# --- time -----------------------------------------------------------------------------------------------


def check_clocks(probes: Sequence[ConnectedProbe], wall: Callable[[], float], timeout_s: float) -> list[Finding]:
    """Compare the clocks of the executors with the driver's, which `wall` reads in seconds since the epoch."""
    return judge_clocks({probe.name: _skew(probe, wall, timeout_s) for probe in probes if not probe.lost})


def _skew(probe: ConnectedProbe, wall: Callable[[], float], timeout_s: float) -> tuple[float, float]:
    """Return by how much the probe's clock is ahead, and the error bound: half of the quickest round trip."""
    best = (0.0, float("inf"))
    for _ in range(_CLOCK_ROUNDS):
        asked = wall()
        theirs = float(probe.ask("clock", {}, timeout_s))
        bound = (wall() - asked) / 2
        if bound < best[1]:
            best = (theirs - (asked + bound), bound)
    return best


def judge_clocks(measured: Mapping[str, tuple[float, float]]) -> list[Finding]:
    """Judge the clocks by (seconds ahead of the driver, error bound) of each executor."""
    facts = {name: {"ahead_s": ahead, "bound_s": bound} for name, (ahead, bound) in measured.items()}
    found = functools.partial(Finding, "clocks", facts=facts)
    findings = []
    for name, (ahead, bound) in measured.items():
        certain = abs(ahead) - bound
        if certain > SKEW_WARNING_S:
            side = "ahead of" if ahead > 0 else "behind"
            says = f"the clock of {name} is {abs(ahead):.1f} s ± {bound * 1000:.0f} ms {side} the driver's"
            level = PROBLEM if certain > SKEW_PROBLEM_S else WARNING
            fix = "let chrony or systemd-timesyncd set the clocks: ages of files and signed requests depend on them"
            findings.append(found(level, says, fix))
    if measured and not findings:
        furthest, bound = max(measured.values(), key=lambda one: abs(one[0]))
        off = f"at most {abs(furthest) * 1000:.1f} ms ± {bound * 1000:.1f} ms off"
        findings.append(found(OK, f"{counted(len(measured), 'executor')}: {off}"))
    return findings


# --- memory ---------------------------------------------------------------------------------------------


def check_shared_memory(probes: Sequence[ConnectedProbe], timeout_s: float) -> Finding | None:
    """Have one probe of each host open memory of another; None if no host has two probes.

    The two are on different executors where possible, because executors may be in different containers.
    """
    by_host: dict[tuple[str, str], list[ConnectedProbe]] = {}
    for probe in probes:
        by_host.setdefault(probe.machine, []).append(probe)
    results: dict[str, str] = {}
    for first, *others in by_host.values():
        if not others:
            continue
        host, executor = first.report["host"], first.report["executor"]
        second = next((probe for probe in others if probe.report["executor"] != executor), others[0])
        try:
            text = uuid.uuid4().hex
            offered = first.ask("offer memory", {"text": text}, timeout_s)
            second.ask("open memory", {**offered, "text": text}, timeout_s)
            results[host] = ""
        except Exception as error:
            results[host] = str(error)
    return judge_shared_memory(results, {probe.report["system"] for probe in probes}) if results else None


def judge_shared_memory(results: Mapping[str, str], systems: set[str]) -> Finding:
    """Judge why memory cannot be shared on each host; an empty reason means that it can."""
    facts = {"hosts": dict(results), "systems": sorted(systems)}
    found = functools.partial(Finding, "shared memory", facts=facts)
    failed = {host: reason for host, reason in results.items() if reason}
    other = sorted(systems.difference(_SYSTEMS_THAT_SHARE))
    if other:
        says = (
            f"reductions through memory need Linux on x86-64 or aarch64, and there is {', '.join(other)}: Gloo is used"
        )
        return found(OK, says)
    if failed:
        host, reason = next(iter(failed.items()))
        says = f"workers on {host} cannot share memory ({reason}); they reduce through the network interface, slower"
        fix = "run the executors of a host as one user who sees their processes (one container or PID namespace)"
        return found(WARNING, says, fix)
    return found(OK, f"workers of one host can reduce through memory ({counted(len(results), 'host')} tried)")
