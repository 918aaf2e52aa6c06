"""Check what machines have to share: storage, the time and, on the same host, memory.

The storage check asks probes that already run. `data.sharing.check_shared` is a Spark job, which could not start while
the probes occupy all slots, and it needs the package on the executors.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spark_elastic.diagnostics.findings import OK, PROBLEM, WARNING, Finding, counted
from spark_elastic.diagnostics.machine import LITTLE_SPACE
from spark_elastic.diagnostics.probe import read_files, remove_folder, write_file
from spark_elastic.diagnostics.probe_server import ConnectedProbe, ProbeServer

SKEW_WARNING_S = 1.0
SKEW_PROBLEM_S = 60.0
_CLOCK_ROUNDS = 5
_MOST_FILES = 8
"""Files of others that each executor reads."""
DRIVER = "the driver"


# --- storage --------------------------------------------------------------------------------------------


def check_storage(
    server: ProbeServer | None,
    probes: Sequence[ConnectedProbe],
    url: str,
    options: Mapping[str, Any] | None,
    timeout_s: float,
) -> list[Finding]:
    """Have the driver and every probe write a file and read those of the others; delete the files afterwards.

    Args:
        server: of the probes; None if there are none and the driver alone is checked.
        probes: one of each executor.
        url: the store, or a plain folder.
        options: for the store.
        timeout_s: seconds for all of it.
    """
    folder = f"spark-elastic-doctor-{uuid.uuid4().hex[:12]}"
    text = uuid.uuid4().hex
    where: dict[str, Any] = {"url": url, "options": dict(options) if options else None}
    files = {probe: f"{folder}/{probe.number}" for probe in probes}

    def ask(name: str, arguments: Mapping[ConnectedProbe, dict[str, Any]], wait_s: float) -> dict[ConnectedProbe, Any]:
        if server is None:
            return {}
        return server.ask({probe: (name, {**where, **own}) for probe, own in arguments.items()}, wait_s)

    written: dict[str, Any] = {DRIVER: _result_of(write_file, **where, name=f"{folder}/driver", text=text)}
    try:
        answers = ask("write", {probe: {"name": name, "text": text} for probe, name in files.items()}, timeout_s / 2)
        written |= {probe.name: answer for probe, answer in answers.items()}
        there = [name for probe, name in files.items() if not isinstance(answers[probe], Exception)]
        if not isinstance(written[DRIVER], Exception):
            there.insert(0, f"{folder}/driver")
        to_read: dict[ConnectedProbe, dict[str, Any]] = {}
        for index, (probe, name) in enumerate(files.items()):
            others = [other for other in [*there[index:], *there[:index]] if other != name]
            to_read[probe] = {"names": others[:_MOST_FILES], "text": text}
        seen: dict[str, Any] = {DRIVER: _result_of(read_files, **where, names=there[:_MOST_FILES], text=text)}
        seen |= {probe.name: answer for probe, answer in ask("read", to_read, timeout_s / 2).items()}
    finally:
        _result_of(remove_folder, **where, folder=folder)
        ask("remove", {probe: {"folder": folder} for probe in probes}, 2.0)
    writers = {name: probe.name for probe, name in files.items()} | {f"{folder}/driver": DRIVER}
    return judge_storage(url, written, seen, writers)


def _result_of(function: Callable[..., Any], **arguments: Any) -> Any:
    """Return what the function returns, or the exception that it raises."""
    try:
        return function(**arguments)
    except Exception as error:
        return error


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
    facts = {
        "store": url,
        "written": {name: str(each) if isinstance(each, Exception) else each for name, each in written.items()},
        "seen": {name: str(each) if isinstance(each, Exception) else each for name, each in seen.items()},
    }
    refused = {name: answer for name, answer in written.items() if isinstance(answer, Exception)}
    if refused:
        name, error = next(iter(refused.items()))
        says = f"{url} cannot be written from {len(refused)} of {len(written)} places; {name}: {error}"
        fix = "give the user of the executors the right to write there, or name another store"
        return [Finding("storage", PROBLEM, says, fix, facts)]
    for name, answer in seen.items():
        if isinstance(answer, Exception):
            says = f"{url} cannot be read from {name}: {answer}"
            return [Finding("storage", PROBLEM, says, "check what the lines above say of that place", facts)]
        for file, problem in answer["missing"].items():
            says = f"{name} does not see in {url} what {writers[file]} has written: {problem}"
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
    findings = []
    for name, (ahead, bound) in measured.items():
        certain = abs(ahead) - bound
        if certain > SKEW_WARNING_S:
            side = "ahead of" if ahead > 0 else "behind"
            says = f"the clock of {name} is {abs(ahead):.1f} s ± {bound * 1000:.0f} ms {side} the driver's"
            level = PROBLEM if certain > SKEW_PROBLEM_S else WARNING
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


def check_shared_memory(probes: Sequence[ConnectedProbe], timeout_s: float) -> Finding | None:
    """Have one probe of each host open memory of another; None if no host has two probes.

    Of different executors where possible: those may be in different containers.
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
    failed = {host: reason for host, reason in results.items() if reason}
    other = sorted(system for system in systems if system != "Linux x86_64")
    if other:
        says = f"reductions through memory need Linux on x86-64, and there is {', '.join(other)}: Gloo is used"
        return Finding("shared memory", OK, says, facts=facts)
    if failed:
        host, reason = next(iter(failed.items()))
        says = f"workers on {host} cannot share memory ({reason}); they reduce through the network interface, slower"
        fix = "run the executors of a host as one user who sees their processes (one container or PID namespace)"
        return Finding("shared memory", WARNING, says, fix, facts)
    says = f"workers of one host can reduce through memory ({counted(len(results), 'host')} tried)"
    return Finding("shared memory", OK, says, facts=facts)
