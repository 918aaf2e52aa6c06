"""What several machines have to share: a place for files, the time, and, on one host, memory."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spark_elastic.diagnostics import probe as here
from spark_elastic.diagnostics.conversation import Conversation, Probe
from spark_elastic.diagnostics.findings import OK, PROBLEM, WARNING, Finding, counted
from spark_elastic.diagnostics.machine import LITTLE_SPACE

SKEW_TO_NOTE_S = 1.0
SKEW_TOO_FAR_S = 60.0
_CLOCK_ROUNDS = 5
_READ_EACH = 8
"""Files of others that each executor reads."""
DRIVER = "the driver"


# --- storage --------------------------------------------------------------------------------------------


def storage(
    conversation: Conversation, probes: Sequence[Probe], url: str, options: Mapping[str, Any] | None, timeout_s: float
) -> list[Finding]:
    """Everybody writes a file, then reads those of the others. Leaves nothing behind."""
    folder = f"spark-elastic-doctor-{uuid.uuid4().hex[:12]}"
    text = uuid.uuid4().hex
    where: dict[str, Any] = {"url": url, "options": dict(options) if options else None}
    names = {probe: f"{folder}/{probe.number}" for probe in probes}
    written: dict[str, Any] = {DRIVER: _here(here.write, **where, name=f"{folder}/driver", text=text)}
    try:
        wait_s = timeout_s / 2
        asked = {probe: ("write", {**where, "name": name, "text": text}) for probe, name in names.items()}
        answers = conversation.ask(asked, wait_s)
        written |= {probe.name: answer for probe, answer in answers.items()}
        there = [name for probe, name in names.items() if not isinstance(answers[probe], Exception)]
        if not isinstance(written[DRIVER], Exception):
            there.insert(0, f"{folder}/driver")
        asked = {}
        for at, probe in enumerate(probes):
            others = [name for name in [*there[at:], *there[:at]] if name != names[probe]]
            asked[probe] = ("read", {**where, "names": others[:_READ_EACH], "text": text})
        seen: dict[str, Any] = {DRIVER: _here(here.read, **where, names=there[:_READ_EACH], text=text)}
        seen |= {probe.name: answer for probe, answer in conversation.ask(asked, wait_s).items()}
    finally:
        _here(here.remove, **where, folder=folder)
        conversation.ask_all(probes, "remove", 2.0, **where, folder=folder)
    owners = {name: probe.name for probe, name in names.items()} | {f"{folder}/driver": DRIVER}
    return judged_storage(url, written, seen, owners)


def judged_storage(
    url: str, written: Mapping[str, Any], seen: Mapping[str, Any], owners: Mapping[str, str]
) -> list[Finding]:
    """written, seen: by place, the answers to "write" and "read", or exceptions. owners: who wrote each file."""
    facts = {
        "store": url,
        "written": {place: str(a) if isinstance(a, Exception) else a for place, a in written.items()},
        "seen": {place: str(a) if isinstance(a, Exception) else a for place, a in seen.items()},
    }
    refused = {place: answer for place, answer in written.items() if isinstance(answer, Exception)}
    if refused:
        place, error = next(iter(refused.items()))
        says = f"{url} cannot be written from {len(refused)} of {len(written)} places; {place}: {error}"
        fix = "give the user of the executors the right to write there, or name another store"
        return [Finding("storage", PROBLEM, says, fix, facts)]
    for place, answer in seen.items():
        if isinstance(answer, Exception):
            says = f"{url} cannot be read from {place}: {answer}"
            return [Finding("storage", PROBLEM, says, "check what the lines above say of that place", facts)]
        for name, why in answer["missing"].items():
            says = f"{place} does not see in {url} what {owners[name]} has written: {why}"
            fix = "name a store that all machines share: a mounted folder, s3://, gs://, abfss://, hdfs://, dbfs:"
            return [Finding("storage", PROBLEM, says, fix, facts)]
    free = [answer["free"] for answer in written.values() if answer["free"] is not None]
    slowest = max(answer["ms"] for answer in written.values())
    says = (
        f"{url} is written from {len(written)} places in at most {slowest:.0f} ms each, and all see the others' files"
    )
    if free and min(free) < LITTLE_SPACE:
        says += f"; only {min(free) / 2**20:.0f} MiB are free"
        return [Finding("storage", WARNING, says, "free some, or name a store with more room", facts)]
    says += f"; {min(free) / 2**30:.1f} GiB free" if free else ""
    return [Finding("storage", OK, says, facts=facts)]


def _here(what: Callable[..., Any], **arguments: Any) -> Any:
    try:
        return what(**arguments)
    except Exception as error:
        return error


# --- time -----------------------------------------------------------------------------------------------


def clocks(probes: Sequence[Probe], wall: Callable[[], float], timeout_s: float) -> list[Finding]:
    """wall: this machine's clock, in seconds since the epoch."""
    measured: dict[str, tuple[float, float]] = {}
    for probe in probes:
        if not probe.lost:
            measured[probe.name] = _skew(probe, wall, timeout_s)
    return judged_clocks(measured)


def _skew(probe: Probe, wall: Callable[[], float], timeout_s: float) -> tuple[float, float]:
    """How far the other clock is ahead, and by how much that may be wrong: half of the quickest round trip."""
    best = (0.0, float("inf"))
    for _ in range(_CLOCK_ROUNDS):
        asked = wall()
        theirs = float(probe.ask("clock", {}, timeout_s))
        answered = wall()
        bound = (answered - asked) / 2
        if bound < best[1]:
            best = (theirs - (asked + bound), bound)
    return best


def judged_clocks(measured: Mapping[str, tuple[float, float]]) -> list[Finding]:
    """measured: by place, (seconds ahead of the driver, ± bound)."""
    facts = {name: {"ahead_s": ahead, "bound_s": bound} for name, (ahead, bound) in measured.items()}
    findings = []
    for name, (ahead, bound) in measured.items():
        surely = abs(ahead) - bound
        if surely > SKEW_TO_NOTE_S:
            side = "ahead of" if ahead > 0 else "behind"
            says = f"the clock of {name} is {abs(ahead):.1f} s ± {bound * 1000:.0f} ms {side} the driver's"
            level = PROBLEM if surely > SKEW_TOO_FAR_S else WARNING
            fix = "let chrony or systemd-timesyncd set the clocks: ages of files and signed requests depend on them"
            findings.append(Finding("clocks", level, says, fix, facts))
    if measured and not findings:
        furthest, bound = max(measured.values(), key=lambda one: abs(one[0]))
        says = (
            f"{counted(len(measured), 'executor')}: at most {abs(furthest) * 1000:.1f} ms ± {bound * 1000:.1f} ms off"
        )
        findings.append(Finding("clocks", OK, says, facts=facts))
    return findings


# --- memory ---------------------------------------------------------------------------------------------


def memory(conversation: Conversation, probes: Sequence[Probe], timeout_s: float) -> Finding | None:
    """Whether two tasks of a host can reduce through memory. probes: all. None: no host has two."""
    hosts: dict[tuple[str, str], list[Probe]] = {}
    for probe in probes:
        hosts.setdefault((probe.report["hostname"], probe.report["host"]), []).append(probe)
    # of different executors where there are some: those may be in containers of their own
    pairs = [(of[0], _furthest(of)) for of in hosts.values() if len(of) > 1]
    if not pairs:
        return None
    results: dict[str, str] = {}
    for first, second in pairs:
        try:
            text = uuid.uuid4().hex
            offered = first.ask("offer memory", {"text": text}, timeout_s)
            second.ask("open memory", {**offered, "text": text}, timeout_s)
            results[first.report["host"]] = ""
        except Exception as error:
            results[first.report["host"]] = str(error)
    return judged_memory(results, {probe.report["system"] for probe in probes})


def judged_memory(results: Mapping[str, str], systems: set[str]) -> Finding:
    """results: by host, why memory cannot be shared; empty: it can."""
    facts = {"hosts": dict(results), "systems": sorted(systems)}
    failed = {host: why for host, why in results.items() if why}
    other = sorted(system for system in systems if system != "Linux x86_64")
    if other:
        says = f"reductions through memory need Linux on x86-64, and there is {', '.join(other)}: Gloo is used"
        return Finding("shared memory", OK, says, facts=facts)
    if failed:
        host, why = next(iter(failed.items()))
        says = f"workers on {host} cannot share memory ({why}); they reduce through the network interface, slower"
        fix = "run the executors of a host as one user who sees their processes (one container or PID namespace)"
        return Finding("shared memory", WARNING, says, fix, facts)
    says = f"workers of one host can reduce through memory ({counted(len(results), 'host')} tried)"
    return Finding("shared memory", OK, says, facts=facts)


def _furthest(probes: Sequence[Probe]) -> Probe:
    first = probes[0]
    return next((probe for probe in probes if probe.report["executor"] != first.report["executor"]), probes[1])
